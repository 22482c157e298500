// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/*
 * List the inodes behind a process's mapped files, which are what uprobes compare (vma_has_uprobes() and
 * build_map_info() in kernel/events/uprobes.c). stat and /proc/PID/maps show others: of an overlay, the overlay's
 * (since Linux 6.8); of btrfs, subvolumes' device numbers.
 *
 *     read(iterator of one task) ──► one struct mapped_inode for each mapping of a file
 *
 * The kernel takes the mmap_lock of the task's memory for reading (kernel/bpf/task_iter.c).
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#define KIND_BYTES 20

/* Read by stapsdtd/kernel/inodes.py. */
struct mapped_inode {
	__u64 start;
	__u64 number;
	/* of struct inode: differs between inodes that are in memory at the same time */
	__u64 address;
	/* s_dev, as the kernel encodes it: 12 bits of major number, 20 of minor */
	__u32 dev;
	/* the file system's type, as in /proc/filesystems */
	char kind[KIND_BYTES];
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct file_system_type {
	const char *name;
};

struct super_block {
	__u32 s_dev;
	struct file_system_type *s_type;
};

struct inode {
	struct super_block *i_sb;
	unsigned long i_ino;
};

struct file {
	struct inode *f_inode;
};

struct vm_area_struct {
	unsigned long vm_start;
	struct file *vm_file;
};

#pragma clang attribute pop

struct seq_file;
struct task_struct;

struct bpf_iter_meta {
	__bpf_md_ptr(struct seq_file *, seq);
} __attribute__((preserve_access_index));

struct bpf_iter__task_vma {
	__bpf_md_ptr(struct bpf_iter_meta *, meta);
	__bpf_md_ptr(struct task_struct *, task);
	__bpf_md_ptr(struct vm_area_struct *, vma);
};

SEC("iter/task_vma")
int list_inodes(struct bpf_iter__task_vma *context)
{
	struct vm_area_struct *vma = context->vma;
	struct mapped_inode mapped = {};
	struct super_block *super;
	struct inode *inode;
	struct file *file;

	if (!vma)
		return 0;
	file = vma->vm_file;
	if (!file)
		return 0;
	inode = file->f_inode;
	super = inode->i_sb;
	mapped.start = vma->vm_start;
	mapped.number = inode->i_ino;
	mapped.address = (__u64)inode;
	mapped.dev = super->s_dev;
	bpf_probe_read_kernel_str(mapped.kind, sizeof(mapped.kind), super->s_type->name);
	bpf_seq_write(context->meta->seq, &mapped, sizeof(mapped));
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
