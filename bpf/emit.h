/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_EMIT_H
#define STAPSDT_EMIT_H

/* One record of a hit, for all subscriptions that want it. */

#include "start.h"

#define NS_PER_SECOND 1000000000ULL
#define PAGE_BYTES 4096 /* where pages are larger, a byte too many is touched, which does no harm */

/* 1 while the reader waits to be woken; the hit that wakes it takes it back. */
__u32 reader_waits SEC(".bss.reader");

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

static long count_if_lost(__u32 filter, const struct hit *hit)
{
	if (hit->matched >> (filter & 63) & 1)
		count_of(hit, filter, COUNTER_LOST);
	return 0;
}

static __always_inline void count_lost(struct hit *hit)
{
	bpf_loop(MAX_FILTERS, count_if_lost, hit, 0);
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

/* Put the record of a start into the record, where it ends, as a text; return whether there is one. */
static __always_inline bool take_start(const struct hit *hit, const struct operand *op, __u64 *out)
{
	struct scratch *scratch = hit->scratch;
	__u32 used = (*(const volatile __u32 *)&scratch->used + sizeof(__u64) - 1) & -sizeof(__u64);
	long length;

	*out = 0;
	if (used > CLASS_7 - START_4)
		return false;
	length = copy_start(hit, op, scratch->bytes + used);
	if (length < 0)
		return false;
	scratch->used = used + length;
	*out = (__u64)length << 32 | used;
	return true;
}

/* Put one value into the record; return whether it could be had, as fetch() does. */
static __always_inline bool take(const struct hit *hit, const struct operand *op, __u64 *out)
{
	struct scratch *scratch = hit->scratch;
	__u32 used;
	__u64 value = 0;
	long length;

	if (op->take == TAKE_START)
		return take_start(hit, op, out);
	if (!fetch(hit, op, &value)) {
		*out = value;
		return false;
	}
	if (op->take != TAKE_NUMBER) {
		*out = value & ADDRESS_MASK;
		/* loaded here and not before, see fetch.h */
		used = *(const volatile __u32 *)&scratch->used;
		if (used > CLASS_7 - (MAX_TEXT + 1))
			return false;
		length = read_text(op, scratch->bytes + used, MAX_TEXT + 1, value);
		/* of an empty string some kernels do not count the NUL: 6.1, 6.12 (mm/maccess.c) */
		if (op->take == TAKE_STRING)
			length -= length > 0;
		if (length < 0)
			return false;
		used = scratch->used;
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
	const struct operand *op = &operands[(hit->first_operand + number) & (MAX_OPERANDS - 1)];
	struct record *record = &hit->scratch->record;

	if (number >= MAX_VALUES)
		return 1;
	if (!take(hit, op, &record->values[number]))
		record->missing |= 1U << number;
	return 0;
}

/* Fetch values. first: their operands. */
static __always_inline void fill(struct hit *hit, __u32 first, __u32 values)
{
	hit->first_operand = first;
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

/*
 * Report whether a process that met a full ring may write nevertheless: so many records a second.
 *
 * This and write_any() have stack of their own: on_hit's, where the registers are, and that of add() and take_part()
 * (aggregate.h) may be 512 bytes together, which on arm64 they nearly are.
 */
static __noinline bool has_share(const struct hit *hit)
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
		if (!fetch(hit, &operands[(hit->plan->operands + number) & (MAX_OPERANDS - 1)],
				 &record->values[number]))
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
static __noinline bool write_any(struct hit *hit)
{
	bool is_written = true;

	hit->scratch = claim();
	if (!hit->scratch)
		return false;
	describe(hit, &hit->scratch->record);
	fill(hit, hit->plan->operands, hit->plan->values);
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

static __always_inline void emit(struct hit *hit)
{
	if (!write(hit))
		count_lost(hit);
}

#endif
