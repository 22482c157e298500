/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_PAIR_H
#define STAPSDT_PAIR_H

/* What is known of a span: of its start, and once a hit ends it of both. See span.h. */

#include "hit.h"

/* What is kept of a start. Of a pair, the time elapsed stands in the place of the start's. */
struct span_entry {
	__u64 words[PAIR_WORDS]; /* the time in nanoseconds, then what was wanted of the start */
	__u64 missing; /* a bit for each word that could not be read */
	__u64 thread; /* process << 32 | thread, for those who ask what is open */
};

/* The same, where nothing is wanted of starts. */
struct small_entry {
	__u64 time_ns;
	__u64 thread;
};

/*
 * Where a hit makes keys and entries, and where the pairs and the numbers are that it makes. More than a CPU needs unless
 * many hits on it are preempted while they have one. Those that find none are lost.
 */
struct hit_space {
	__u32 busy;
	__u32 found; /* a bit for each of the plan's pairings whose start was kept as a record, and is to be let go */
	__u64 key[PAIR_KEY_WORDS];
	struct span_entry start;
	union {
		struct {
			struct span_entry pairs[MAX_PAIRINGS]; /* by the plan's pairings */
			__u64 words[MAX_WORDS];
			__u64 missing[MAX_WORDS / 64]; /* a bit for each word that there is not */
		};
		__u64 cells[MAX_CELLS]; /* as operands name these */
	};
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, HIT_SPACES); /* HIT_SPACES * cpus, set when it is loaded */
	__type(key, __u32);
	__type(value, struct hit_space);
} hit_spaces SEC(".maps");

static __always_inline struct hit_space *claim_space(void)
{
	__u32 first = bpf_get_smp_processor_id() * HIT_SPACES;

	for (__u32 number = 0; number < HIT_SPACES; number++) {
		__u32 index = first + number;
		struct hit_space *space = bpf_map_lookup_elem(&hit_spaces, &index);

		if (space && !__sync_val_compare_and_swap(&space->busy, 0, 1))
			return space;
	}
	return NULL;
}

static __always_inline void release_space(const struct hit *hit)
{
	if (hit->space)
		*(volatile __u32 *)&hit->space->busy = 0;
}

static __always_inline __u64 elapsed_of(const struct hit *hit, __u32 pairing)
{
	return hit->space ? hit->space->pairs[pairing & (MAX_PAIRINGS - 1)].words[0] : hit->elapsed_ns;
}

/* Return whether the operand could be had, as fetch() does. */
static __always_inline bool fetch_made(const struct hit *hit, const struct operand *op, __u64 *out)
{
	const struct hit_space *space = hit->space;

	if (!space) {
		*out = hit->elapsed_ns;
		return true;
	}
	*out = space->cells[op->index];
	return !(space->cells[op->base] >> (op->scale & 63) & 1);
}

#endif
