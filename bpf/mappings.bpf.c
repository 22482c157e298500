// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/*
 * Report executable mappings of files as perf's MMAP2 records do, where the kernel does not give these to the daemon
 * (stapsdtd/kernel/mapping_programs.py). Runs at the function that makes those records, by fentry or, where the kernel
 * has none, by kprobe.multi.
 *
 * The kernel never runs one of these programs in the middle of the same one on a CPU, so each CPU has one record; runs
 * that it skips for that reason, it counts (recursion_misses).
 */
#include <linux/bpf.h>
#include <linux/ptrace.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#define VM_EXEC 0x4
/* of a superblock that the kernel itself mounted, such as that of memfds (include/linux/fs.h) */
#define SB_KERNMOUNT (1UL << 22)
#define MAX_ERRNO 4095

enum {
	RING_BYTES = 1 << 20,
	NAMES_BYTES = 1 << 10,
	MAX_NAME = 1 << 8,
	MAX_DEPTH = 48,
};

/* What is needed of the kernel's types; offsets are the running kernel's. */
#define OF_KERNEL __attribute__((preserve_access_index))

struct super_block {
	__u32 s_dev;
	unsigned long s_flags;
} OF_KERNEL;

struct inode {
	unsigned long i_ino;
	struct super_block *i_sb;
} OF_KERNEL;

struct qstr {
	const unsigned char *name;
} OF_KERNEL;

struct dentry {
	struct dentry *d_parent;
	struct qstr d_name;
	struct inode *d_inode;
} OF_KERNEL;

struct vfsmount {
	struct dentry *mnt_root;
} OF_KERNEL;

struct mount {
	struct mount *mnt_parent;
	struct dentry *mnt_mountpoint;
	struct vfsmount mnt;
	void *mnt_ns;
} OF_KERNEL;

struct path {
	struct vfsmount *mnt;
	struct dentry *dentry;
} OF_KERNEL;

struct file {
	struct path f_path;
	struct inode *f_inode;
} OF_KERNEL;

/* Since Linux 6.8 (fs/file_table.c); before, f_path is that of the overlay. */
struct backing_file {
	struct file file;
	struct path user_path;
} OF_KERNEL;

struct vm_area_struct {
	unsigned long vm_start;
	unsigned long vm_end;
	unsigned long vm_flags;
	unsigned long vm_pgoff;
	struct file *vm_file;
} OF_KERNEL;

/* names: of the path, the last one first, each with a NUL; none if the path is not known. page_offset: in pages. */
struct mapping {
	__u64 start;
	__u64 length;
	__u64 page_offset;
	__u64 inode;
	__u32 device;
	__u32 pid;
	char names[NAMES_BYTES + MAX_NAME];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mapping);
} scratch SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, RING_BYTES);
} mappings SEC(".maps");

/* How many found no room in the ring. */
__u64 lost SEC(".bss.lost");

static __always_inline struct mount *mount_of(struct vfsmount *mnt)
{
	return (void *)mnt - bpf_core_field_offset(struct mount, mnt);
}

/* Whether a mount is in a namespace; those of memfds and of an overlay's layers are not (MNT_NS_INTERNAL). */
static __always_inline bool has_namespace(struct mount *mount)
{
	unsigned long namespace = (unsigned long)BPF_CORE_READ(mount, mnt_ns);

	return namespace && namespace < -(unsigned long)MAX_ERRNO;
}

/*
 * Whether a file is one of a layer, in place of an overlay's: it is in a mount that the overlay has for itself. The
 * file's own sign of that, FMODE_BACKING, is another bit on each kernel.
 */
static __always_inline bool is_of_layer(struct vfsmount *mount, struct inode *inode)
{
	return !has_namespace(mount_of(mount)) && !(BPF_CORE_READ(inode, i_sb, s_flags) & SB_KERNMOUNT);
}

/* Fill in the names of a path, up to the root of its mount namespace. Return their size; 0 if not known. */
static __always_inline __u64 put_names(struct mapping *mapping, struct dentry *dentry, struct vfsmount *in)
{
	struct mount *mount = mount_of(in);
	__u64 size = 0;

	for (int depth = 0; depth < MAX_DEPTH; depth++) {
		struct dentry *parent = BPF_CORE_READ(dentry, d_parent);

		if (dentry == BPF_CORE_READ(mount, mnt.mnt_root) || dentry == parent) {
			struct mount *below = BPF_CORE_READ(mount, mnt_parent);

			if (below == mount)
				return has_namespace(mount) ? size : 0;
			dentry = BPF_CORE_READ(mount, mnt_mountpoint);
			mount = below;
			continue;
		}
		if (size >= NAMES_BYTES)
			return 0;

		const unsigned char *name = BPF_CORE_READ(dentry, d_name.name);
		long taken = bpf_probe_read_kernel_str(&mapping->names[size & (NAMES_BYTES - 1)], MAX_NAME, name);

		if (taken <= 0)
			return 0;
		size += taken;
		dentry = parent;
	}
	return 0;
}

static __always_inline void report(struct vm_area_struct *vma)
{
	__u32 zero = 0;
	struct mapping *mapping;
	struct dentry *dentry;
	struct vfsmount *mount;
	struct inode *inode;
	struct file *file;
	__u64 names;

	if (!(BPF_CORE_READ(vma, vm_flags) & VM_EXEC))
		return;
	file = BPF_CORE_READ(vma, vm_file);
	if (!file)
		return;
	mapping = bpf_map_lookup_elem(&scratch, &zero);
	if (!mapping)
		return;
	dentry = BPF_CORE_READ(file, f_path.dentry);
	mount = BPF_CORE_READ(file, f_path.mnt);
	inode = BPF_CORE_READ(file, f_inode);
	/* the inode and path that /proc/PID/maps shows */
	if (bpf_core_field_exists(struct backing_file, user_path) && is_of_layer(mount, inode)) {
		struct backing_file *backing = (void *)file - bpf_core_field_offset(struct backing_file, file);

		dentry = BPF_CORE_READ(backing, user_path.dentry);
		mount = BPF_CORE_READ(backing, user_path.mnt);
		inode = BPF_CORE_READ(dentry, d_inode);
	}
	mapping->start = BPF_CORE_READ(vma, vm_start);
	mapping->length = BPF_CORE_READ(vma, vm_end) - mapping->start;
	mapping->page_offset = BPF_CORE_READ(vma, vm_pgoff);
	mapping->inode = BPF_CORE_READ(inode, i_ino);
	mapping->device = BPF_CORE_READ(inode, i_sb, s_dev);
	mapping->pid = bpf_get_current_pid_tgid() >> 32;
	names = put_names(mapping, dentry, mount);
	if (names > NAMES_BYTES)
		names = 0;
	if (bpf_ringbuf_output(&mappings, mapping, __builtin_offsetof(struct mapping, names) + names, 0))
		__sync_fetch_and_add(&lost, 1);
}

/* arguments: of the kernel's function */
SEC("fentry/perf_event_mmap")
int on_mapping(unsigned long long *arguments)
{
	report((struct vm_area_struct *)arguments[0]);
	return 0;
}

SEC("kprobe.multi/perf_event_mmap")
int on_mapping_by_kprobe(struct pt_regs *registers)
{
	report((struct vm_area_struct *)PT_REGS_PARM1(registers));
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
