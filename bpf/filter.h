/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_FILTER_H
#define STAPSDT_FILTER_H

/* For which subscriptions a hit is. */

#include "calculate.h"
#include "chain.h"
#include "follow.h"

/* include/linux/sched/coredump.h */
#define MMF_DUMPABLE_MASK 3
#define SUID_DUMP_USER 1

#define MAX_NAMESPACES 8 /* of users, in each other; the kernel allows 32 */

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

/*
 * Return the user who owns the current process outright, by the rules of ptrace(2) for users without capabilities.
 *
 * Global, as in fetch.h: Linux 6.18 goes through all names of the kernel's BTF for each pointer that is
 * read here.
 */
__noinline __u32 owner(void)
{
	const struct task_struct *task = bpf_get_current_task_btf();
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

/* Run one test; return where to go on. */
static __always_inline __u32 decide(const struct hit *hit, const struct test *test)
{
	__u64 value = 0;
	bool result;

	switch (test->source) {
	case SOURCE_ARGUMENT:
		if (!fetch(hit, &operands[(hit->plan->operands + test->index) & (MAX_OPERANDS - 1)], &value))
			return test->on_missing;
		break;
	case SOURCE_PID: value = hit->task->tgid; break;
	case SOURCE_TID: value = hit->task->pid; break;
	case SOURCE_UID: value = (__u32)bpf_get_current_uid_gid(); break;
	case SOURCE_GID: value = bpf_get_current_uid_gid() >> 32; break;
	case SOURCE_EXECNAME: value = !has_name(test); break;
	case SOURCE_OWNER: value = owner(); break;
	case SOURCE_FOLLOWED: value = is_followed(test->index, hit->task->tgid); break;
	case SOURCE_CGROUP: value = bpf_get_current_ancestor_cgroup_id(test->index); break;
	case SOURCE_CPU: value = bpf_get_smp_processor_id(); break;
	case SOURCE_TIMESTAMP: value = bpf_ktime_get_ns(); break;
	case SOURCE_ELAPSED: value = elapsed_of(hit, test->index); break;
	case SOURCE_MATCHED: value = hit->matched >> (test->index & 63) & 1; break;
	case SOURCE_LINK: return pass_link(&hit->registers, test);
	default: break;
	}
	if (test->uses_words)
		return calculate(hit, test, value);
	result = holds(test->relation, value & test->mask, test->value);
	return result ? test->on_true : test->on_false;
}

/* Go where a test leads, and note what becomes of the hit if that decides on its filter. */
static __always_inline void go_on(struct hit *hit, const struct test *test, __u32 next)
{
	__u32 filter = test->filter & (MAX_FILTERS - 1);

	if (next == JUMP_ACCEPT)
		hit->matched |= 1ULL << filter;
	else if (next == JUMP_REJECT || next == JUMP_UNDECIDED) {
		if (next == JUMP_UNDECIDED)
			count_of(hit, filter, COUNTER_UNDECIDED);
		count_of(hit, filter, COUNTER_FILTERED);
		hit->matched &= ~(1ULL << filter); /* of a pair */
	} else if (next == JUMP_EXCLUDE)
		count_of(hit, filter, COUNTER_EXCLUDED);
	else if (next == JUMP_LOST) {
		count_of(hit, filter, COUNTER_LOST);
		hit->matched &= ~(1ULL << filter); /* of calculations for a recipe */
	}
	hit->next_test = next < JUMP_UNDECIDED ? next : test->next_filter;
}

static long step(__u32 number __attribute__((unused)), struct hit *hit)
{
	const struct test *test = &tests[(hit->plan->tests + hit->next_test) & (MAX_TESTS - 1)];

	go_on(hit, test, decide(hit, test));
	return hit->next_test == JUMP_END;
}

/* Run tests behind those of the filters. first: the first one, or JUMP_END. */
static __always_inline void run_behind(struct hit *hit, __u32 first)
{
	if (first == JUMP_END)
		return;
	hit->next_test = first;
	bpf_loop(MAX_STEPS, step, hit, 0);
}

/* Most filters begin with the process, and many end there: that test costs less here than as a step. */
static __always_inline void run_filters(struct hit *hit)
{
	const struct test *first = &tests[hit->plan->tests & (MAX_TESTS - 1)];

	if (!hit->plan->has_tests)
		return;
	if (first->source == SOURCE_PID && first->relation == RELATION_EQ) {
		go_on(hit, first, (hit->task->tgid & first->mask) == first->value ? first->on_true : first->on_false);
		if (hit->next_test == JUMP_END)
			return;
	}
	if (!step(0, hit))
		bpf_loop(MAX_STEPS - 1, step, hit, 0);
}

#endif
