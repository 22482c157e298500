/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_START_H
#define STAPSDT_START_H

/*
 * Starts of which a record is kept: entries of kernel functions, of which more is wanted than a few numbers. See span.h
 * for all others.
 *
 *     entry ──► record ──► table of the span ──► return ──► its time, for tests ──► the pair's record, which has it
 *                                                     └───► let go
 *
 * The key is the call: the thread, where the function's frame is, and the function. So what an entry keeps is its return's
 * alone, however calls are nested, and nothing takes it away before that one lets it go.
 */

#include "fetch.h"

struct pairing pairings[MAX_PAIRING_ROWS] SEC(".bss.pairings");

#define STARTS_OF(class)                                            \
	struct starts_##class {                                     \
		__uint(type, BPF_MAP_TYPE_HASH);                    \
		__uint(max_entries, 1);                             \
		__uint(key_size, PAIR_KEY_WORDS * sizeof(__u64));   \
		__uint(value_size, START_##class);                  \
	};                                                          \
	/* The number of an entry names a span. */                  \
	struct {                                                    \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);           \
		__uint(max_entries, MAX_SPANS);                     \
		__type(key, __u32);                                 \
		__array(values, struct starts_##class);             \
	} starts_##class SEC(".maps")

STARTS_OF(1);
STARTS_OF(2);
STARTS_OF(3);
STARTS_OF(4);

static __always_inline const struct pairing *pairing_of(const struct hit *hit, __u32 number)
{
	return &pairings[(hit->plan->pairings + number) & (MAX_PAIRING_ROWS - 1)];
}

/* The thread's id is there for the daemon, which looks for what threads have left behind. */
static __always_inline void make_call_key(const struct hit *hit, const struct pairing *pairing, __u64 *key)
{
	key[0] = (__u64)hit->task;
	key[1] = address_of(&hit->registers, &operands[pairing->operands & (MAX_OPERANDS - 1)]);
	key[2] = operands[(pairing->operands + 1) & (MAX_OPERANDS - 1)].constant | (__u64)hit->task->pid << 32;
}

#define FIND_START_IN(class)                                              \
	do {                                                              \
		void *starts = bpf_map_lookup_elem(&starts_##class, &span); \
		return starts ? bpf_map_lookup_elem(starts, key) : NULL;  \
	} while (0)

static __always_inline const struct record *find_start(const struct pairing *pairing, const __u64 *key)
{
	__u32 span = pairing->span;

	switch (pairing->start_class) {
	case 1: FIND_START_IN(1);
	case 2: FIND_START_IN(2);
	case 3: FIND_START_IN(3);
	default: FIND_START_IN(4);
	}
}

#define DELETE_START_IN(class)                                            \
	do {                                                              \
		void *starts = bpf_map_lookup_elem(&starts_##class, &span); \
		if (starts)                                               \
			bpf_map_delete_elem(starts, key);                 \
		return;                                                   \
	} while (0)

static __always_inline void delete_start(const struct pairing *pairing, const __u64 *key)
{
	__u32 span = pairing->span;

	switch (pairing->start_class) {
	case 1: DELETE_START_IN(1);
	case 2: DELETE_START_IN(2);
	case 3: DELETE_START_IN(3);
	default: DELETE_START_IN(4);
	}
}

/* Copy the record that was kept of a start; return how many bytes there are, or an error. */
static __noinline long copy_start(const struct hit *hit, const struct operand *op, char *to)
{
	const struct pairing *pairing = pairing_of(hit, op->index);
	const struct record *start;
	__u32 bytes;

	if (!hit->space)
		return -1;
	make_call_key(hit, pairing, hit->space->key);
	start = find_start(pairing, hit->space->key);
	if (!start)
		return -1;
	bytes = start->matched;
	if (bytes > START_4 || bpf_probe_read_kernel(to, bytes, start))
		return -1;
	return bytes;
}

#endif
