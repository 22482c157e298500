// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/*
 * One program for all sites. It runs at every hit of every group and decides, before it writes anything, for which
 * subscriptions the hit is; it then writes one record for all of them.
 *
 *     (cookie, ip) ─► index ─► slot ─► plan ─┬─► tests, for each filter ─► matched
 *                                            └─► operands ─► values ─► the ring of the record's size
 *
 * It never waits. Whoever owns a page that is not resident, or the file system it comes from, decides how long a fault
 * takes, and while a hit waits nobody on the host can detach an uprobe program. So what is not resident is missing from
 * the record, which names its address; the daemon fills in what it can (capture/bpf/unread.py).
 *
 * Where the kernel preempts, another hit may come on the same CPU in the middle of this one. Hence atomic counters,
 * scratch space that is claimed, and no private stack (see on_hit).
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "stapsdt.h"

/* pt_regs as an array of words, as far as a probe's operands can name it; one more reads as zero. */
#if defined(__TARGET_ARCH_x86)
#define REG_IP 16
#define REG_COUNT 20
#elif defined(__TARGET_ARCH_arm64)
#define REG_IP 32
#define REG_COUNT 33
#elif defined(__TARGET_ARCH_riscv)
#define REG_IP 0
#define REG_COUNT 32
#elif defined(__TARGET_ARCH_s390)
#define REG_IP 2
#define REG_COUNT 19
#elif defined(__TARGET_ARCH_powerpc)
#define REG_IP 32
#define REG_COUNT 33
#elif defined(__TARGET_ARCH_loongarch)
#define REG_IP 33
#define REG_COUNT 34
#else
#error "which of pt_regs' words is the instruction pointer on this architecture?"
#endif
#define REG_ZERO REG_COUNT

/* include/linux/sched/coredump.h */
#define MMF_DUMPABLE_MASK 3
#define SUID_DUMP_USER 1

#define MAX_NAMESPACES 8 /* of users, in each other; the kernel allows 32 */

#define NS_PER_SECOND 1000000000ULL

#define PAGE_BYTES 4096 /* where pages are larger, a byte too many is touched, which does no harm */

/* Tables, written by the daemon through mmap. */
__u32 site_index[INDEX_ENTRIES] SEC(".bss.index");
struct slot slots[MAX_SLOTS] SEC(".bss.slots");
struct plan plans[MAX_PLANS] SEC(".bss.plans");
struct operand operands[MAX_OPERANDS] SEC(".bss.operands");
struct test tests[MAX_TESTS] SEC(".bss.tests");

/* The daemon, whose own hits would make events without end. */
volatile const __s32 daemon_pid = 0;
volatile const __u32 cpus = 1;
volatile const __u32 never = 0; /* on all architectures, since the daemon sets these three at once */

/* 1 while the reader waits to be woken; the hit that wakes it takes it back. */
__u32 reader_waits SEC(".bss.reader");

struct cpu_counters {
	__u64 cells[MAX_COUNTERS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1); /* cpus, set when it is loaded */
	__type(key, __u32);
	__type(value, struct cpu_counters);
} counters SEC(".maps");

struct scratch {
	__u32 busy;
	__u32 used; /* of bytes */
	union {
		struct record record;
		char bytes[CLASS_7];
	};
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2); /* 2 * cpus, set when it is loaded */
	__type(key, __u32);
	__type(value, struct scratch);
} scratches SEC(".maps");

struct ring {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, PAGE_BYTES);
};

/* A ring is put in where a site needs it, and may be replaced by a larger one. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, RECORD_CLASSES);
	__type(key, __u32);
	__array(values, struct ring);
} rings SEC(".maps");

/*
 * Where records go that a full ring has no room for, of processes that do not write many: one that floods the rings is
 * not to cost others their few events.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, RECORD_CLASSES);
	__type(key, __u32);
	__array(values, struct ring);
} spares SEC(".maps");

/*
 * No hit looks here. A change of an array of maps returns when all programs that were running have ended
 * (maybe_wait_bpf_programs in kernel/bpf/syscall.c), which is how the daemon waits for hits.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct ring);
} hits_to_wait_for SEC(".maps");

struct share {
	__u64 since_ns;
	__u64 used;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SHARES);
	__type(key, __u32);
	__type(value, struct share);
} shares SEC(".maps");

/* Never used: it has the object's BTF describe what else is shared. */
struct {
	struct text text;
	enum limit limit;
	enum operand_kind operand_kind;
	enum operand_take operand_take;
	enum test_source test_source;
	enum test_relation test_relation;
	enum test_jump test_jump;
	enum counter counter;
	enum record_class record_class;
	struct record record;
} layout SEC(".bss.layout");

/* As much of the kernel's as is needed; libbpf finds where it is. */
typedef struct {
	__u32 val;
} kuid_t, kgid_t;

struct user_namespace {
	const struct user_namespace *parent;
	int level;
	kuid_t owner;
} __attribute__((preserve_access_index));

typedef struct {
	__u64 val; /* before Linux 6.3 two halves */
} kernel_cap_t;

struct cred {
	kuid_t uid, suid, euid;
	kgid_t gid, sgid, egid;
	kernel_cap_t cap_permitted;
	const struct user_namespace *user_ns;
} __attribute__((preserve_access_index));

struct mm_struct {
	unsigned long flags;
} __attribute__((preserve_access_index));

/* Since Linux 6.18. */
typedef struct {
	unsigned long __mm_flags[1];
} mm_flags_t;

struct mm_struct___bitmap {
	mm_flags_t flags;
} __attribute__((preserve_access_index));

struct task_struct {
	int pid;
	int tgid;
	char comm[COMM_BYTES];
	const struct cred *real_cred;
	const struct mm_struct *mm;
} __attribute__((preserve_access_index));

struct hit {
	__u64 registers[REG_COUNT + 1];
	__u64 matched;
	__u64 generation;
	const struct task_struct *task;
	struct cpu_counters *counters;
	const struct plan *plan;
	struct scratch *scratch;
	__u32 next_test;
};

static __always_inline __u64 register_of(const struct hit *hit, __u32 number)
{
	return hit->registers[number < REG_ZERO ? number : REG_ZERO];
}

static __always_inline __u64 address_of(const struct hit *hit, const struct operand *op)
{
	__u64 address = op->constant + register_of(hit, op->base) + register_of(hit, op->index) * op->scale;

	return op->is_narrow ? (__u32)address : address;
}

/* Return whether the operand could be had; where not, out is what could not be read. */
static __always_inline bool fetch(const struct hit *hit, const struct operand *op, __u64 *out)
{
	__u64 value = op->constant;

	if (op->kind == OPERAND_REGISTER) {
		value = register_of(hit, op->base);
	} else if (op->kind != OPERAND_CONSTANT) {
		__u64 address = address_of(hit, op);
		__u32 width = op->width;

		value = address;
		if (op->kind == OPERAND_MEMORY) {
			value = 0;
			if (width > sizeof(value) || bpf_probe_read_user(&value, width, (void *)address)) {
				*out = (address & ADDRESS_MASK) | UNREAD_OPERAND;
				return false;
			}
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
			value >>= 8 * (sizeof(value) - width) & 63;
#endif
		}
	}
	value <<= op->left & 63;
	*out = op->is_signed ? (__u64)((__s64)value >> (op->right & 63)) : value >> (op->right & 63);
	return true;
}

static __always_inline void count(const struct hit *hit, __u32 cell)
{
	__sync_fetch_and_add(&hit->counters->cells[(hit->plan->counters + cell) & (MAX_COUNTERS - 1)], 1);
}

static __always_inline void count_of(const struct hit *hit, __u32 filter, enum counter counter)
{
	count(hit, filter * COUNTERS_OF_FILTER + counter);
}

static __always_inline void count_lost(const struct hit *hit)
{
	for (__u32 filter = 0; filter < MAX_FILTERS; filter++)
		if (hit->matched >> filter & 1)
			count_of(hit, filter, COUNTER_LOST);
}

static __always_inline bool holds(__u32 relation, __u64 left, __u64 right)
{
	switch (relation) {
	case RELATION_EQ: return left == right;
	case RELATION_NE: return left != right;
	case RELATION_LT: return left < right;
	case RELATION_LE: return left <= right;
	case RELATION_GT: return left > right;
	case RELATION_GE: return left >= right;
	case RELATION_SIGNED_LT: return (__s64)left < (__s64)right;
	case RELATION_SIGNED_LE: return (__s64)left <= (__s64)right;
	case RELATION_SIGNED_GT: return (__s64)left > (__s64)right;
	default: return (__s64)left >= (__s64)right;
	}
}

static __always_inline bool has_name(const struct test *test)
{
	__u64 comm[COMM_BYTES / 8] = {};

	bpf_get_current_comm(comm, sizeof(comm));
	return comm[0] == test->comm[0] && comm[1] == test->comm[1];
}

/* What prctl(2) calls dumpable: no program that has other rights than its user, nor one that asked to be left alone. */
static __always_inline bool is_dumpable(const struct mm_struct *mm)
{
	const struct mm_struct___bitmap *newer = (const void *)mm;
	unsigned long flags;

	if (bpf_core_field_exists(newer->flags))
		flags = newer->flags.__mm_flags[0];
	else
		flags = mm->flags;
	return (flags & MMF_DUMPABLE_MASK) == SUID_DUMP_USER;
}

/*
 * Whether root made a namespace, or one around it, as for a service with PrivateUsers=. Its users may not trace what is
 * in it. An ordinary user's namespace holds that user's processes, and those of subordinate ids, who are nobody else.
 */
static __always_inline bool is_made_by_root(const struct user_namespace *namespace)
{
	if (namespace->level == 0)
		return false;
#pragma unroll
	for (int depth = 1; depth < MAX_NAMESPACES; depth++)
		if (namespace->level > 1)
			namespace = namespace->parent;
	return namespace->level != 1 || namespace->owner.val == 0;
}

/* Whose process it is wholly, by the rules of ptrace(2) for who has no capabilities. */
static __always_inline __u32 owner_of(const struct task_struct *task)
{
	const struct cred *cred = task->real_cred;
	__u32 uid = cred->uid.val, gid = cred->gid.val;
	__u64 capabilities = 0;

	/* those that it has in a user namespace of its own are over that alone */
	if (uid && cred->user_ns->level == 0 &&
	    (bpf_probe_read_kernel(&capabilities, sizeof(capabilities), &cred->cap_permitted) || capabilities))
		return NOBODY;
	if (cred->euid.val != uid || cred->suid.val != uid || cred->egid.val != gid || cred->sgid.val != gid)
		return NOBODY;
	if (uid && is_made_by_root(cred->user_ns))
		return NOBODY;
	return is_dumpable(task->mm) ? uid : NOBODY;
}

/* Run one test; answer where to go on. */
static __always_inline __u32 decide(const struct hit *hit, const struct test *test)
{
	__u64 value = 0;
	bool result;

	switch (test->source) {
	case SOURCE_ARGUMENT:
		if (!fetch(hit, &operands[(hit->plan->operands + test->index) & (MAX_OPERANDS - 1)], &value))
			return JUMP_REJECT;
		break;
	case SOURCE_PID: value = hit->task->tgid; break;
	case SOURCE_TID: value = hit->task->pid; break;
	case SOURCE_UID: value = (__u32)bpf_get_current_uid_gid(); break;
	case SOURCE_GID: value = bpf_get_current_uid_gid() >> 32; break;
	case SOURCE_EXECNAME: value = !has_name(test); break;
	case SOURCE_OWNER: value = owner_of(hit->task); break;
	default: value = bpf_get_current_ancestor_cgroup_id(test->index); break;
	}
	result = holds(test->relation, value & test->mask, test->value);
	return result ? test->on_true : test->on_false;
}

static long step(__u32 number __attribute__((unused)), struct hit *hit)
{
	const struct test *test = &tests[(hit->plan->tests + hit->next_test) & (MAX_TESTS - 1)];
	__u32 next = decide(hit, test);
	__u32 filter = test->filter & (MAX_FILTERS - 1);

	if (next == JUMP_ACCEPT)
		hit->matched |= 1ULL << filter;
	else if (next == JUMP_REJECT)
		count_of(hit, filter, COUNTER_FILTERED);
	else if (next == JUMP_EXCLUDE)
		count_of(hit, filter, COUNTER_EXCLUDED);
	hit->next_test = next < JUMP_END ? next : test->next_filter;
	return hit->next_test == JUMP_END;
}

static __always_inline struct scratch *claim(void)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct scratch *scratch;
	__u32 other = cpu + cpus;

	scratch = bpf_map_lookup_elem(&scratches, &cpu);
	if (scratch && !__sync_val_compare_and_swap(&scratch->busy, 0, 1))
		return scratch;
	scratch = bpf_map_lookup_elem(&scratches, &other);
	if (scratch && !__sync_val_compare_and_swap(&scratch->busy, 0, 1))
		return scratch;
	return NULL;
}

static __always_inline void release(struct scratch *scratch)
{
	/* nobody but this CPU claims it */
	*(volatile __u32 *)&scratch->busy = 0;
}

/* Put one value into the record; return whether it could be had, as fetch() does. */
static __always_inline bool take(const struct hit *hit, const struct operand *op, __u64 *out)
{
	struct scratch *scratch = hit->scratch;
	__u32 used = scratch->used, limit = op->limit;
	__u64 value = 0;
	long length;

	if (!fetch(hit, op, &value)) {
		*out = value;
		return false;
	}
	if (op->take != TAKE_NUMBER) {
		*out = value & ADDRESS_MASK;
		if (limit > MAX_TEXT + 1 || used > CLASS_7 - (MAX_TEXT + 1))
			return false;
		if (op->take == TAKE_STRING) {
			length = bpf_probe_read_user_str(scratch->bytes + used, limit, (void *)value);
			/* of an empty string some kernels do not count the NUL: 6.1, 6.12 (mm/maccess.c) */
			length -= length > 0;
		} else {
			length = bpf_probe_read_user(scratch->bytes + used, limit, (void *)value) ?: (long)limit;
		}
		if (length < 0)
			return false;
		scratch->used = used + length;
		value = (__u64)length << 32 | used;
	}
	*out = value;
	return true;
}

/*
 * What the values add up to is kept in the scratch space, whose content the verifier does not follow: in registers it
 * would tell apart every combination of values that could be read.
 */
static long take_next(__u32 number, struct hit *hit)
{
	const struct operand *op = &operands[(hit->plan->operands + number) & (MAX_OPERANDS - 1)];
	struct record *record = &hit->scratch->record;

	if (number >= MAX_VALUES)
		return 1;
	if (!take(hit, op, &record->values[number]))
		record->missing |= 1U << number;
	return 0;
}

/* Fetch all values. */
static __always_inline void fill(struct hit *hit)
{
	__u32 values = hit->plan->values;

	hit->scratch->used = sizeof(struct record) + values * sizeof(__u64);
	bpf_loop(values, take_next, hit, 0);
}

static __always_inline void describe(const struct hit *hit, struct record *record)
{
	record->time_ns = bpf_ktime_get_ns();
	record->tid = hit->task->pid;
	record->pid = hit->task->tgid;
	record->matched = hit->matched;
	record->generation = hit->generation;
	record->missing = 0;
	record->cpu = bpf_get_smp_processor_id();
	/* the helper for this costs as much as all the rest */
#pragma unroll
	for (int number = 0; number < COMM_BYTES; number++)
		record->comm[number] = hit->task->comm[number];
}

static __always_inline __u64 wake_up(void)
{
	if (*(volatile __u32 *)&reader_waits && __sync_val_compare_and_swap(&reader_waits, 1, 0))
		return BPF_RB_FORCE_WAKEUP;
	return BPF_RB_NO_WAKEUP;
}

/* Answer whether a process that met a full ring has not used up yet what it may write nevertheless. */
static __always_inline bool has_share(const struct hit *hit)
{
	__u64 now = bpf_ktime_get_ns();
	__u32 process = hit->task->tgid;
	struct share first = { .since_ns = now, .used = 1 };
	struct share *share = bpf_map_lookup_elem(&shares, &process);

	if (!share)
		return !bpf_map_update_elem(&shares, &process, &first, BPF_ANY);
	if (now - share->since_ns > NS_PER_SECOND) {
		share->since_ns = now;
		share->used = 0;
	}
	return __sync_fetch_and_add(&share->used, 1) < SHARE_PER_SECOND;
}

/*
 * Whether what the hit knows of itself is still so: that it is this thread's, and by which plan it goes. It always is, as
 * long as nothing else writes to the program's stack and plans are lent again only when no hit can be using them.
 */
static __always_inline bool is_intact(const struct hit *hit)
{
	if ((__u64)bpf_get_current_task() == (__u64)hit->task && hit->plan->generation == hit->generation)
		return true;
	__sync_fetch_and_add(&hit->counters->cells[STRAY_HITS], 1);
	return false;
}

/* Numbers alone go straight into the ring. Return whether there was room. */
static __always_inline bool write_numbers(const struct hit *hit, __u32 class, const __u32 bytes)
{
	void *ring = bpf_map_lookup_elem(&rings, &class);
	__u32 values = hit->plan->values;
	struct record *record;

	if (!ring)
		return false;
	record = bpf_ringbuf_reserve(ring, bytes, 0);
	if (!record && has_share(hit)) {
		ring = bpf_map_lookup_elem(&spares, &class);
		if (ring)
			record = bpf_ringbuf_reserve(ring, bytes, 0);
	}
	if (!record)
		return false;
	describe(hit, record);
	for (__u32 number = 0; number < VALUES_OF(bytes) && number < values; number++)
		if (!fetch(hit, &operands[(hit->plan->operands + number) & (MAX_OPERANDS - 1)], &record->values[number]))
			record->missing |= 1U << number;
	if (is_intact(hit))
		bpf_ringbuf_submit(record, wake_up());
	else
		bpf_ringbuf_discard(record, BPF_RB_NO_WAKEUP);
	return true;
}

static __always_inline long output(const struct hit *hit, struct scratch *scratch)
{
	__u32 used = scratch->used;
	__u32 class, bytes;
	void *ring;

	if (used <= CLASS_0) { class = 0; bytes = CLASS_0; }
	else if (used <= CLASS_1) { class = 1; bytes = CLASS_1; }
	else if (used <= CLASS_2) { class = 2; bytes = CLASS_2; }
	else if (used <= CLASS_3) { class = 3; bytes = CLASS_3; }
	else if (used <= CLASS_4) { class = 4; bytes = CLASS_4; }
	else if (used <= CLASS_5) { class = 5; bytes = CLASS_5; }
	else if (used <= CLASS_6) { class = 6; bytes = CLASS_6; }
	else { class = 7; bytes = CLASS_7; }

	ring = bpf_map_lookup_elem(&rings, &class);
	if (!ring)
		return -1;
	if (!bpf_ringbuf_output(ring, scratch->bytes, bytes, wake_up()))
		return 0;
	if (!has_share(hit))
		return -1;
	ring = bpf_map_lookup_elem(&spares, &class);
	return ring ? bpf_ringbuf_output(ring, scratch->bytes, bytes, wake_up()) : -1;
}

/* A record whose size is known only when it is written. Return whether there was room. */
static __always_inline bool write_any(struct hit *hit)
{
	bool is_written = true;

	hit->scratch = claim();
	if (!hit->scratch)
		return false;
	describe(hit, &hit->scratch->record);
	fill(hit);
	if (is_intact(hit))
		is_written = !output(hit, hit->scratch);
	release(hit->scratch);
	return is_written;
}

static __always_inline bool write(struct hit *hit)
{
	if (!hit->plan->has_texts) {
		if (hit->plan->values <= VALUES_OF(CLASS_0))
			return write_numbers(hit, 0, CLASS_0);
		if (hit->plan->values <= VALUES_OF(CLASS_1))
			return write_numbers(hit, 1, CLASS_1);
		if (hit->plan->values <= VALUES_OF(CLASS_2))
			return write_numbers(hit, 2, CLASS_2);
	}
	return write_any(hit);
}

#if defined(__TARGET_ARCH_x86) || defined(__TARGET_ARCH_arm64)
/*
 * Since Linux 6.13 a program whose stack is not small gets one per CPU in place of the task's, unless it has a tail
 * call (kernel/bpf/verifier.c, check_max_stack_depth). Nothing keeps uprobe programs from interrupting each other, so a
 * hit that is preempted would find its variables overwritten by the next one's. Hence a tail call that never is.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} no_programs SEC(".maps");

static __always_inline void keep_to_the_stack_of_the_task(void *context)
{
	if (never)
		bpf_tail_call(context, &no_programs, 0);
}
#else
/* The kernel has private stacks on those two alone, and may refuse tail calls beside callbacks on others. */
static __always_inline void keep_to_the_stack_of_the_task(void *context __attribute__((unused)))
{
}
#endif

#ifdef DELAY_STEPS
static long idle(__u32 number __attribute__((unused)), void *context __attribute__((unused)))
{
	return 0;
}
#endif

SEC("uprobe")
int on_hit(const __u64 *registers)
{
	const struct task_struct *task = bpf_get_current_task_btf();
	__u64 cookie = bpf_get_attach_cookie((void *)registers);
	__u32 group = cookie, mask = cookie >> 32 & 0xfff, shift = cookie >> 48 & 0xf;
	__u32 entry = group + (registers[REG_IP] >> shift & mask);
	__u32 slot = site_index[entry & (INDEX_ENTRIES - 1)];
	__u64 state = *(volatile __u64 *)&slots[slot & (MAX_SLOTS - 1)];
	__u32 plan = state;
	__u32 cpu = bpf_get_smp_processor_id();
	struct hit hit;

	keep_to_the_stack_of_the_task((void *)registers);
	if (!plan || state >> 32 != group)
		return 0;
	if (task->tgid == daemon_pid)
		return 0;
	hit.task = task;
	hit.counters = bpf_map_lookup_elem(&counters, &cpu);
	if (!hit.counters)
		return 0;
	hit.plan = &plans[plan & (MAX_PLANS - 1)];
	hit.generation = hit.plan->generation;
	hit.matched = hit.plan->always;
	hit.next_test = 0;
#pragma unroll
	for (int number = 0; number < REG_COUNT; number++)
		hit.registers[number] = registers[number];
	hit.registers[REG_ZERO] = 0;

	if (hit.plan->has_tests)
		bpf_loop(MAX_STEPS, step, &hit, 0);
	/* behind those that it was not for, so that these never seem to have fired */
	count(&hit, COUNTER_HITS);
	if (!hit.matched)
		return 0;

#ifdef DELAY_STEPS
	/* for tests of what becomes of hits that take long: see tests/kernel/test_late_hits.py */
	bpf_loop(DELAY_STEPS, idle, NULL, 0);
#endif
	if (!write(&hit))
		count_lost(&hit);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
