/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_MOVE_H
#define STAPSDT_MOVE_H

/*
 * Decide which program of a hit handles it, while its site moves from one group to another.
 *
 *     slot: newest group << 40 | oldest group << 16 | plan
 *
 *     newest == oldest   this group's hits count, and no others
 *     else               a hit runs the program once for each group that is attached: the newest one handles it,
 *                        and leaves a mark; the older ones find the mark and skip the hit
 *
 * This rests on the order in which the kernel runs them: the one attached last comes first (consumer_add() in
 * kernel/events/uprobes.c; add_ftrace_ops() in ftrace.c and, since Linux 6.14, insert_fprobe_node() in fprobe.c). A hit
 * that began before the newer one was attached runs the older one alone, finds no mark, and is handled there.
 */
#include "hit.h"

/*
 * Of a hit that has been handled: group << 40 | slot << 25 | thread << 2 | depth. The oldest group takes it away. One hit
 * may come in the middle of another one of the same thread, in an interrupt: depth says how many more there are. What
 * is left behind in the moment in which a move ends belongs to no move, and its place is free.
 */
__u64 marks[MAX_MARKS] SEC(".bss.marks");

#define MARK_WAYS 8
#define DEPTH_BITS 2
#define THREAD_BITS 23
#define IDLE (1U << 22) /* PID_MAX_LIMIT: the idle threads of all CPUs have pid 0 */
#define MOST_DEPTH ((1ULL << DEPTH_BITS) - 1)
#define GROUP_SHIFT (64 - GROUP_BITS)
#define GROUP_MASK ((1U << GROUP_BITS) - 1)

static __always_inline __u32 newest_of(__u64 word)
{
	return word >> GROUP_SHIFT;
}

static __always_inline __u32 oldest_of(__u64 word)
{
	return word >> PLAN_BITS & GROUP_MASK;
}

/* Whether a group is newer than one, and no newer than another. Their numbers begin anew at some time. */
static __always_inline bool is_newer(__u32 group, __u32 than, __u32 last)
{
	return group != than && ((group - than) & GROUP_MASK) <= ((last - than) & GROUP_MASK);
}

static __always_inline bool is_free(__u64 mark)
{
	__u64 word = *(volatile __u64 *)&slots[mark >> (THREAD_BITS + DEPTH_BITS) & (MAX_SLOTS - 1)].word;

	return !is_newer(mark >> GROUP_SHIFT, oldest_of(word), newest_of(word));
}

static __always_inline volatile __u64 *way(__u64 first, __u32 number)
{
	return &marks[(first + number) & (MAX_MARKS - 1)];
}

static __always_inline void leave_mark(__u64 first, __u64 mark)
{
	for (__u32 number = 0; number < MARK_WAYS; number++) {
		volatile __u64 *place = way(first, number);
		__u64 found = *place;

		if (found >> DEPTH_BITS == mark >> DEPTH_BITS) {
			if ((found & MOST_DEPTH) != MOST_DEPTH)
				__sync_val_compare_and_swap(place, found, found + 1);
			return;
		}
	}
	for (__u32 number = 0; number < MARK_WAYS; number++) {
		volatile __u64 *place = way(first, number);
		__u64 found = *place;

		if (is_free(found) && __sync_val_compare_and_swap(place, found, mark) == found)
			return;
	}
	/* in place of another thread's, whose hit may then be handled twice */
	*way(first, 0) = mark;
}

/* Whether a newer group handled the hit. */
static __always_inline bool find_mark(__u64 first, __u64 hit, __u32 group, __u64 word)
{
	for (__u32 number = 0; number < MARK_WAYS; number++) {
		volatile __u64 *place = way(first, number);
		__u64 found = *place;

		if ((found ^ hit) << GROUP_BITS >> (GROUP_BITS + DEPTH_BITS))
			continue;
		if (!is_newer(found >> GROUP_SHIFT, group, newest_of(word)))
			continue;
		if (group == oldest_of(word))
			__sync_val_compare_and_swap(place, found, found & MOST_DEPTH ? found - 1 : 0);
		return true;
	}
	return false;
}

/* Return whether this group's program is to handle the hit, for a site that has others beside it. */
static __noinline bool handles_alone(__u64 word, __u32 group, __u32 slot, const struct task_struct *task)
{
	__u32 oldest = oldest_of(word), newest = newest_of(word);
	__u64 thread = task->pid ? (__u32)task->pid : IDLE | bpf_get_smp_processor_id();
	__u64 hit = (__u64)(slot & (MAX_SLOTS - 1)) << THREAD_BITS | (thread & ((1 << THREAD_BITS) - 1));
	__u64 first = hit * 0x9e3779b97f4a7c15ULL >> 32 & ~(MARK_WAYS - 1ULL);

	hit <<= DEPTH_BITS;
	if (group != oldest && !is_newer(group, oldest, newest))
		return false;
	if (group != newest && find_mark(first, hit, group, word))
		return false;
	if (group != oldest)
		leave_mark(first, (__u64)group << GROUP_SHIFT | hit);
	return true;
}

/* Return whether this group's program is to handle the hit. */
static __always_inline bool handles(__u64 word, __u32 group, __u32 slot, const struct task_struct *task)
{
	return word >> PLAN_BITS == ((__u64)group << GROUP_BITS | group) || handles_alone(word, group, slot, task);
}

#endif
