/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_CHAIN_H
#define STAPSDT_CHAIN_H

/*
 * Kernel functions that lead to each other: a chain a, b, c is of hits in calls of a that led to b, and in those to c,
 * directly or not. A thread's calls are on the chain by where their frames are:
 *
 *     a enters       a                     a recursive call of a is not on it, nor is its return
 *     b enters       a b
 *     c enters       a b c
 *     c returns      a b
 *     a returns      -                     takes what is deeper with it, whose returns were missed
 *
 * So nothing depends on how deep calls are nested, nor on seeing every return: a frame that is not above that of a later
 * call has been left.
 */

#include "hit.h"

#define STACK_BITS 14 /* a power of two that stacks are aligned to, or larger ones: x86-64 and arm64 have 16 KiB */

/* Or more: it has twice as much with KASAN, and behind a smaller one there is nothing of its task's. */
#define TASK_STACK_BYTES (1 << (STACK_BITS + 1))

struct chain {
	__u64 frames[MAX_LINKS];
	__u32 length;
	__u32 unused;
};

struct chained {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_CHAINED);
	/* No types: Linux 6.1 takes no map that was made without them for one that has them. */
	__uint(key_size, sizeof(__u64)); /* the task */
	__uint(value_size, sizeof(struct chain));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_CHAINS);
	__type(key, __u32);
	__array(values, struct chained);
} chains SEC(".maps");

struct chain no_chain SEC(".bss.chain");

#ifdef REG_SP
static __always_inline bool is_within_stack(__u64 frame, __u64 stack)
{
	return frame - stack < TASK_STACK_BYTES;
}

/*
 * Report whether a call that is on the chain has been left by the time of one whose frame is `frame`. One in the same
 * place has, unless it is another function's, which was called instead of a return (a tail call). Interrupts have
 * stacks of their own, and are over when their task goes on.
 */
static __always_inline bool is_left(__u64 on_chain, __u64 frame, __u64 stack, bool is_same_function)
{
	if (on_chain == frame)
		return is_same_function;
	if (is_within_stack(frame, stack))
		return on_chain < frame || !is_within_stack(on_chain, stack);
	return on_chain < frame && on_chain >> STACK_BITS == frame >> STACK_BITS;
}

/* Return how many calls are on the chain at a frame. position: of its function, or MAX_LINKS. */
static __always_inline __u32 length_at(const struct chain *chain, __u64 frame, __u32 position)
{
	__u64 stack = (__u64)bpf_get_current_task_btf()->stack;
	__u32 length = chain->length;

#pragma unroll
	for (__u32 number = 0; number < MAX_LINKS; number++)
		if (number < length && is_left(chain->frames[number], frame, stack, number == position))
			length = number;
	return length;
}

static __always_inline __u32 enter(void *threads, const struct test *test, __u64 *task, struct chain *chain, __u64 frame)
{
	__u32 position = test->link & (MAX_LINKS - 1);

	if (chain)
		chain->length = length_at(chain, frame, position);
	if ((chain ? chain->length : 0) != position)
		return test->on_false;
	if (!chain) {
		if (bpf_map_update_elem(threads, task, &no_chain, BPF_ANY))
			return JUMP_LOST;
		chain = bpf_map_lookup_elem(threads, task);
		if (!chain)
			return JUMP_LOST;
	}
	chain->frames[position] = frame;
	chain->length = position + 1;
	return test->on_true;
}

static __always_inline __u32 leave(void *threads, const struct test *test, __u64 *task, struct chain *chain, __u64 frame)
{
	__u32 position = test->link & (MAX_LINKS - 1);

	if (!chain || position >= chain->length || chain->frames[position] != frame)
		return test->on_false;
	chain->length = position;
	if (!position)
		bpf_map_delete_elem(threads, task);
	return test->on_true;
}

static __always_inline bool is_within(const struct test *test, const struct chain *chain, __u64 frame)
{
	return chain && length_at(chain, frame, MAX_LINKS) > (test->link & (MAX_LINKS - 1));
}

/* Run a test of SOURCE_LINK; return where to go on. Global, as in fetch.h. */
__noinline __u32 pass_link(const struct registers *registers, const struct test *test)
{
	__u64 task = bpf_get_current_task(), frame;
	struct chain *chain;
	void *threads;
	__u32 number;

	if (!registers || !test)
		return JUMP_LOST;
	number = test->index;
	threads = bpf_map_lookup_elem(&chains, &number);
	if (!threads)
		return JUMP_LOST;
	frame = registers->words[REG_SP];
	chain = bpf_map_lookup_elem(threads, &task);
	switch (test->link >> LINK_BITS) {
	case LINK_ENTERED: return enter(threads, test, &task, chain, frame);
	case LINK_RETURNED: return leave(threads, test, &task, chain, frame - RETURN_POPS);
	default: return is_within(test, chain, frame) ? test->on_true : test->on_false;
	}
}
#else
#define pass_link(registers, test) JUMP_LOST
#endif

static long forget_task(__u32 chain, __u64 *task)
{
	void *threads = bpf_map_lookup_elem(&chains, &chain);

	if (threads)
		bpf_map_delete_elem(threads, task);
	return 0;
}

/*
 * args: a task whose memory may be another's from now on. Some calls do not return, and do_exit() goes on calling others
 * when sched_process_exit has been.
 */
SEC("tp_btf/sched_process_free")
int on_task_free(const __u64 *args)
{
	__u64 task = args[0];

	bpf_loop(MAX_CHAINS, forget_task, &task, 0);
	return 0;
}

#endif
