/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_PAIR_H
#define STAPSDT_PAIR_H

/* What is known of a span: of its start, and once a hit ends it of both. See span.h. */

#include "hit.h"

/* What is kept of a start. Of a pair, the time elapsed stands in the place of the start's. */
struct span_entry {
	__u64 words[PAIR_WORDS]; /* the time in nanoseconds, then what was wanted of the start */
	__u64 missing; /* a bit for each word that could not be read */
};

/*
 * Where a hit makes keys and entries, and where the pairs are that it makes. More than a CPU needs unless many hits on it
 * are preempted while they have one. Those that find none are lost.
 */
struct pair_space {
	__u32 busy;
	__u32 unused;
	__u64 key[PAIR_KEY_WORDS];
	struct span_entry start;
	struct span_entry pairs[MAX_PAIRINGS]; /* by the plan's pairings */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PAIR_SPACES); /* PAIR_SPACES * cpus, set when it is loaded */
	__type(key, __u32);
	__type(value, struct pair_space);
} pair_spaces SEC(".maps");

static __always_inline struct pair_space *claim_pair_space(void)
{
	__u32 first = bpf_get_smp_processor_id() * PAIR_SPACES;

	for (__u32 number = 0; number < PAIR_SPACES; number++) {
		__u32 index = first + number;
		struct pair_space *space = bpf_map_lookup_elem(&pair_spaces, &index);

		if (space && !__sync_val_compare_and_swap(&space->busy, 0, 1))
			return space;
	}
	return NULL;
}

static __always_inline void release_pair_space(const struct hit *hit)
{
	if (hit->pairs)
		*(volatile __u32 *)&hit->pairs->busy = 0;
}

/* Return whether the operand could be had, as fetch() does. */
static __always_inline bool fetch_of_pair(const struct hit *hit, const struct operand *op, __u64 *out)
{
	__u32 word = op->index;
	const struct span_entry *pair;

	*out = 0;
	if (!hit->pairs || word >= PAIR_WORDS)
		return false;
	pair = &hit->pairs->pairs[op->base & (MAX_PAIRINGS - 1)];
	*out = pair->words[word];
	return !(pair->missing >> word & 1);
}

#endif
