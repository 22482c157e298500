/*
 * stapsdtd-opener: opens perf events for the daemon, on kernels that give them to CAP_SYS_ADMIN alone.
 *
 *	request  u32 version, kind | s32 pid, cpu | u64 tracepoint		stapsdtd/kernel/perf_opener.py
 *	reply    u32 version | s32 errno, or 0 and one descriptor; then a second 0, when it is closed here
 *
 * systemd starts one for each connection, a SOCK_SEQPACKET socket that is standard input here, and gives it that one
 * capability. Before it reads anything it forbids itself all system calls but those of serve(). What is opened is
 * decided here: a request has no struct perf_event_attr.
 *
 * Exit status: 0 the client has closed the connection, 1 it may not be served, 2 it has broken the protocol.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/perf_event.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define NATIVE_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE_ARCH AUDIT_ARCH_AARCH64
#elif defined(__riscv) && __riscv_xlen == 64
#define NATIVE_ARCH AUDIT_ARCH_RISCV64
#elif defined(__s390x__)
#define NATIVE_ARCH AUDIT_ARCH_S390X
#elif defined(__powerpc64__) && defined(__LITTLE_ENDIAN__)
#define NATIVE_ARCH AUDIT_ARCH_PPC64LE
#elif defined(__loongarch64)
#define NATIVE_ARCH AUDIT_ARCH_LOONGARCH64
#else
#error "unknown machine"
#endif

#define VERSION 1
#define CONNECTION STDIN_FILENO
#define ANY (-1)

/* PID_MAX_LIMIT (include/linux/threads.h) and TRACE_EVENT_TYPE_MAX (kernel/trace/trace_output.c) */
#define MAX_PID (4 << 20)
#define MAX_TRACEPOINT 0xffff
/* ftrace's own record types come first (enum trace_type in kernel/trace/trace.h): 1 would be every function */
#define MIN_TRACEPOINT 32
#define MAX_CPU 0xffff

#define KPROBE_TYPE "/sys/bus/event_source/devices/kprobe/type"
#define TRIAL_FUNCTION "bpf_fentry_test1"

enum kind {
	/* a tracefs event: of one thread's process, or of all on one CPU, which arms it everywhere */
	TRACEPOINT = 1,
	/* a ring of one CPU for all new executable mappings */
	MAPPINGS = 2,
	/* a kprobe on a function that the kernel has for such trials */
	KPROBE_TRIAL = 3,
};

struct request {
	uint32_t version, kind;
	int32_t pid, cpu;
	uint64_t tracepoint;
};

struct reply {
	uint32_t version;
	int32_t error;
};

static long kprobe_type = -ENODEV;

static void refuse(const char *reason)
{
	(void)!write(STDERR_FILENO, reason, strlen(reason));
	_exit(1);
}

static void require_root_peer(void)
{
	struct ucred peer;
	socklen_t size = sizeof(peer);

	if (getsockopt(CONNECTION, SOL_SOCKET, SO_PEERCRED, &peer, &size))
		refuse("stapsdtd-opener: standard input is no socket; stapsdtd-opener.socket starts this program\n");
	if (peer.uid != 0)
		refuse("stapsdtd-opener: the client is not root\n");
}

static void find_kprobe_type(void)
{
	char text[16];
	int fd = open(KPROBE_TYPE, O_RDONLY | O_CLOEXEC);
	ssize_t size;

	if (fd < 0)
		return;
	size = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (size > 0) {
		text[size] = 0;
		kprobe_type = strtol(text, NULL, 10);
	}
}

#define ALLOW(name) \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static void forbid_the_rest(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCH, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		ALLOW(recvmsg),
		ALLOW(perf_event_open),
		ALLOW(sendmsg),
		ALLOW(close),
		ALLOW(exit_group),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = { sizeof(filter) / sizeof(filter[0]), filter };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		refuse("stapsdtd-opener: the kernel refuses its seccomp filter\n");
#ifdef STRAY_CALL
	syscall(STRAY_CALL, 0, 0, 0);
#endif
}

/* Return whether a request came; without one, the client has closed the connection. */
static int receive(struct request *request)
{
	struct iovec part = { request, sizeof(*request) };
	/* without room for control data, the kernel drops descriptors that came along, and says so */
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
	ssize_t size = recvmsg(CONNECTION, &message, 0);

	/* ECONNRESET if there are answers that it has not read */
	if (size < 0 || (size == 0 && !message.msg_flags))
		return 0;
	if (size != sizeof(*request) || message.msg_flags & (MSG_TRUNC | MSG_CTRUNC) || request->version != VERSION)
		_exit(2);
	return 1;
}

static int is_cpu(int32_t cpu)
{
	return cpu >= 0 && cpu <= MAX_CPU;
}

/* Return the event's descriptor, or -errno. */
static int open_event(const struct request *request)
{
	struct perf_event_attr attributes = { .size = PERF_ATTR_SIZE_VER5 };
	int is_of_all = request->pid == ANY && is_cpu(request->cpu);
	int is_of_one = request->pid > 0 && request->pid <= MAX_PID && request->cpu == ANY;
	int fd;

	switch (request->kind) {
	case TRACEPOINT:
		if (!(is_of_all || is_of_one) || request->tracepoint < MIN_TRACEPOINT ||
		    request->tracepoint > MAX_TRACEPOINT)
			return -EINVAL;
		attributes.type = PERF_TYPE_TRACEPOINT;
		attributes.config = request->tracepoint;
		attributes.sample_period = 1;
		break;
	case MAPPINGS:
		if (!is_of_all || request->tracepoint)
			return -EINVAL;
		attributes.type = PERF_TYPE_SOFTWARE;
		attributes.config = PERF_COUNT_SW_DUMMY;
		attributes.mmap = 1;
		attributes.mmap2 = 1;
		attributes.watermark = 1;
		attributes.wakeup_watermark = 1;
		break;
	case KPROBE_TRIAL:
		if (!is_of_all || request->tracepoint)
			return -EINVAL;
		if (kprobe_type < 0)
			return kprobe_type;
		attributes.type = kprobe_type;
		attributes.kprobe_func = (uintptr_t)TRIAL_FUNCTION;
		break;
	default:
		return -EINVAL;
	}
	fd = syscall(__NR_perf_event_open, &attributes, request->pid, request->cpu, -1, PERF_FLAG_FD_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

/* A client that is gone is noticed by receive(). descriptor: goes with it, or is negative. */
static void send_reply(int error, int descriptor)
{
	struct reply reply = { VERSION, error };
	struct iovec part = { &reply, sizeof(reply) };
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr aligned;
	} control = { { 0 } };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };

	if (descriptor >= 0) {
		struct cmsghdr *header;

		message.msg_control = control.bytes;
		message.msg_controllen = sizeof(control.bytes);
		header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof(descriptor));
		memcpy(CMSG_DATA(header), &descriptor, sizeof(descriptor));
	}
	(void)sendmsg(CONNECTION, &message, MSG_NOSIGNAL);
}

static void answer(int result)
{
	if (result < 0) {
		send_reply(-result, -1);
		return;
	}
	send_reply(0, result);
	/* from then on the client's is the only one: when it is closed, the sites are unpatched at once */
	close(result);
	send_reply(0, -1);
}

int main(void)
{
	struct request request;

	require_root_peer();
	find_kprobe_type();
	forbid_the_rest();
	while (receive(&request))
		answer(open_event(&request));
	_exit(0);
}
