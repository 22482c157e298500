/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_FOLLOW_H
#define STAPSDT_FOLLOW_H

/*
 * Scopes that follow processes: each has a set of process ids, to which the daemon adds those that its client named. A
 * child is added before it first runs, and a process is removed before its id can become another's. The programs are
 * attached while there is such a scope.
 */

#include "hit.h"

#define CLONE_THREAD 0x00010000 /* include/uapi/linux/sched.h */

struct followed {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_FOLLOWED);
	__type(key, __u32);
	__type(value, __u32); /* enum membership */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_FOLLOWING);
	__type(key, __u32);
	__array(values, struct followed);
} following SEC(".maps");

/* By scope: processes for which its set had no room. */
__u64 unfollowed[MAX_FOLLOWING] SEC(".bss.unfollowed");

static __always_inline bool is_followed(__u32 scope, __u32 process)
{
	void *set = bpf_map_lookup_elem(&following, &scope);

	return set && bpf_map_lookup_elem(set, &process);
}

struct birth {
	__u32 parent;
	__u32 child;
};

static long add_child(__u32 scope, struct birth *birth)
{
	void *set = bpf_map_lookup_elem(&following, &scope);
	__u32 membership = MEMBER_BORN, parent = birth->parent, child = birth->child;

	if (set && bpf_map_lookup_elem(set, &parent) && bpf_map_update_elem(set, &child, &membership, BPF_ANY))
		__sync_fetch_and_add(&unfollowed[scope & (MAX_FOLLOWING - 1)], 1);
	return 0;
}

/* args: the new task, and the flags of clone(2). */
SEC("tp_btf/task_newtask")
int on_fork(const __u64 *args)
{
	const struct task_struct *child = (const void *)args[0];
	struct birth birth = {};

	if (args[1] & CLONE_THREAD)
		return 0;
	birth.parent = bpf_get_current_pid_tgid() >> 32;
	birth.child = child->tgid;
	bpf_loop(MAX_FOLLOWING, add_child, &birth, 0);
	return 0;
}

static long remove_process(__u32 scope, __u32 *process)
{
	void *set = bpf_map_lookup_elem(&following, &scope);

	if (set)
		bpf_map_delete_elem(set, process);
	return 0;
}

/* args: the task. The process ends with the last of its threads (do_exit in kernel/exit.c). */
SEC("tp_btf/sched_process_exit")
int on_exit(const __u64 *args)
{
	const struct task_struct *task = (const void *)args[0];
	__u32 process = task->tgid;

	if (!task->signal->live.counter)
		bpf_loop(MAX_FOLLOWING, remove_process, &process, 0);
	return 0;
}

#endif
