/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_SPAN_H
#define STAPSDT_SPAN_H

/*
 * Spans: a start is kept, in a table of the subscription's own, for the next end that has its key. That end takes it out,
 * and what becomes of other hits becomes of the pair: it is written as a record, or added to a row.
 *
 *     start ─► key ─► entry: its time, words of it         (the first one stays, or the last one; others are nested)
 *     end ───► key ─► entry, which one hit takes out ─► struct hit_space ─► operands: words of both
 *
 * The key is the thread by default, known by its task. What a thread began ends with it, and when it executes another
 * program: two programs see to that, which are attached while there are such spans. Calls of kernel functions have keys of
 * their own; see start.h for that, and for what is kept of them.
 */

#include "aggregate.h"
#include "emit.h"

/* include/uapi/asm-generic/errno-base.h */
#define ENOENT 2
#define EEXIST 17

struct open_spans {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__uint(key_size, PAIR_KEY_WORDS * sizeof(__u64));
	__uint(value_size, sizeof(struct span_entry));
};

/* The number of an entry in either of these names a span. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_SPANS);
	__type(key, __u32);
	__array(values, struct open_spans);
} spans SEC(".maps");

/* Of threads, by their tasks, of which nothing is kept but the time and their number. */
struct small_spans {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__uint(value_size, sizeof(struct small_entry));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_SPANS);
	__type(key, __u32);
	__array(values, struct small_spans);
} spans_small SEC(".maps");

/* A bit for each span whose key is the thread. */
__u64 spans_of_threads SEC(".bss.threads");

/* By span: starts whose threads ended. */
__u64 died[THREAD_SPANS] SEC(".bss.died");

static __always_inline void count_span(const struct hit *hit, const struct pairing *pairing, enum span_counter counter)
{
	count(hit, pairing->cells + counter);
}

/* Return whether all of the key could be read. */
static __always_inline bool make_pair_key(const struct hit *hit, const struct pairing *pairing, __u64 *key)
{
	if (pairing->is_of_call) {
		make_call_key(hit, pairing, key);
		return true;
	}
	key[0] = pairing->is_of_thread ? (__u64)hit->task : 0;
	key[1] = 0;
	key[2] = 0;
	for (__u32 part = 0; part < PAIR_KEY_WORDS && part < pairing->parts; part++)
		if (!fetch_part(hit, &operands[(pairing->operands + part) & (MAX_OPERANDS - 1)], &key[part]))
			return false;
	return true;
}

static __always_inline bool is_late(const struct pairing *pairing, __u64 begin_ns, __u64 now_ns)
{
	return pairing->timeout_ns && (__s64)(now_ns - begin_ns) > (__s64)pairing->timeout_ns;
}

/* Take out a start that has waited for too long. Return whether there was one. */
static __always_inline bool expire(const struct hit *hit, const struct pairing *pairing, void *entries, const __u64 *key,
				   __u64 now_ns)
{
	const __u64 *begin_ns = bpf_map_lookup_elem(entries, key);

	if (!begin_ns || !is_late(pairing, *begin_ns & ~UNWANTED_START, now_ns) || bpf_map_delete_elem(entries, key))
		return false;
	count_span(hit, pairing, SPAN_TIMED_OUT);
	return true;
}

static __always_inline bool is_unwanted(const struct hit *hit, const struct pairing *pairing)
{
	return pairing->start_filter && !(hit->matched >> ((pairing->start_filter - 1) & 63) & 1);
}

static __always_inline __u64 thread_of(const struct hit *hit)
{
	return (__u64)hit->task->tgid << 32 | (__u32)hit->task->pid;
}

/* start: begins with its time. */
static __always_inline void begin_span(const struct hit *hit, const struct pairing *pairing, void *entries,
				       const __u64 *key, __u64 *start, bool unwanted)
{
	__u64 now_ns = bpf_ktime_get_ns();
	long error;

	count_span(hit, pairing, SPAN_STARTS);
	*start = unwanted ? now_ns | UNWANTED_START : now_ns;
	error = bpf_map_update_elem(entries, key, start, BPF_NOEXIST);
	if (error == -EEXIST && expire(hit, pairing, entries, key, now_ns))
		error = bpf_map_update_elem(entries, key, start, BPF_NOEXIST);
	if (error == -EEXIST && pairing->takes_latest && bpf_map_update_elem(entries, key, start, BPF_EXIST))
		/* another hit took it out in between */
		error = bpf_map_update_elem(entries, key, start, BPF_NOEXIST);
	if (error)
		count_span(hit, pairing, error == -EEXIST ? SPAN_NESTED : SPAN_TABLE_FULL);
}

/*
 * Return whether a start waited for this hit that makes a pair which is wanted. The hit has it now: the first word of the
 * pair is the time elapsed.
 */
static __always_inline bool end_span(const struct hit *hit, const struct pairing *pairing, void *entries,
				     const __u64 *key, __u64 *pair, bool is_small)
{
	const void *entry = bpf_map_lookup_elem(entries, key);
	__u64 now_ns, begin_ns;

	if (!entry) {
		count_span(hit, pairing, SPAN_UNMATCHED);
		return false;
	}
	now_ns = bpf_ktime_get_ns();
	/* first, since what is deleted may be another's at once */
	if (is_small)
		*pair = *(const __u64 *)entry;
	else
		*(struct span_entry *)pair = *(const struct span_entry *)entry;
	if (bpf_map_delete_elem(entries, key)) {
		count_span(hit, pairing, SPAN_UNMATCHED);
		return false;
	}
	begin_ns = *pair & ~UNWANTED_START;
	if (is_late(pairing, begin_ns, now_ns)) {
		count_span(hit, pairing, SPAN_TIMED_OUT);
		count_span(hit, pairing, SPAN_UNMATCHED);
		return false;
	}
	count_span(hit, pairing, SPAN_PAIRED);
	if (*pair != begin_ns) {
		count_of(hit, pairing->filter & 63, COUNTER_FILTERED);
		return false;
	}
	*pair = now_ns - begin_ns;
	return true;
}

static __always_inline void keep_words(const struct hit *hit, const struct pairing *pairing, struct span_entry *start)
{
	start->missing = 0;
	start->thread = thread_of(hit);
	for (__u32 word = 1; word < PAIR_WORDS && word <= pairing->words; word++)
		if (!fetch(hit, &operands[(pairing->operands + pairing->parts + word - 1) & (MAX_OPERANDS - 1)],
			   &start->words[word])) {
			start->words[word] = 0;
			start->missing |= 1ULL << word;
		}
}

/* No other consumer has the filter of an end. */
static __always_inline void reject(struct hit *hit, const struct pairing *pairing)
{
	if (pairing->is_end)
		hit->matched &= ~(1ULL << (pairing->filter & 63));
}

static __always_inline void carry_out_small(struct hit *hit, const struct pairing *pairing, __u64 *pair)
{
	__u32 span = pairing->span;
	void *entries = bpf_map_lookup_elem(&spans_small, &span);
	__u64 key = (__u64)hit->task;
	struct small_entry start;

	if (!entries) {
		count_span(hit, pairing, SPAN_LOST);
		reject(hit, pairing);
	} else if (!pairing->is_end) {
		start.thread = thread_of(hit);
		begin_span(hit, pairing, entries, &key, &start.time_ns, is_unwanted(hit, pairing));
	} else if (!end_span(hit, pairing, entries, &key, pair, true)) {
		reject(hit, pairing);
	}
}

static __always_inline void carry_out_any(struct hit *hit, const struct pairing *pairing, struct span_entry *pair)
{
	struct hit_space *space = hit->space;
	__u32 span = pairing->span;
	void *entries = bpf_map_lookup_elem(&spans, &span);

	if (!entries || !space || !make_pair_key(hit, pairing, space->key)) {
		count_span(hit, pairing, SPAN_LOST);
		reject(hit, pairing);
	} else if (!pairing->is_end) {
		keep_words(hit, pairing, &space->start);
		begin_span(hit, pairing, entries, space->key, space->start.words, is_unwanted(hit, pairing));
	} else if (!end_span(hit, pairing, entries, space->key, pair->words, false)) {
		reject(hit, pairing);
	}
}

/* What an entry keeps of itself is seen to later, by keep_start(). */
static __always_inline void carry_out_recorded(struct hit *hit, const struct pairing *pairing, __u32 number, __u64 *elapsed)
{
	struct hit_space *space = hit->space;
	const struct record *start;
	bool is_timely = true;
	__u64 begin_ns;

	if (!pairing->is_end)
		return;
	make_call_key(hit, pairing, space->key);
	start = find_start(pairing, space->key);
	if (start) {
		begin_ns = start->time_ns;
		*elapsed = bpf_ktime_get_ns() - begin_ns;
		space->found |= 1U << (number & (MAX_PAIRINGS - 1));
		is_timely = !is_late(pairing, begin_ns, begin_ns + *elapsed);
		count_span(hit, pairing, is_timely ? SPAN_PAIRED : SPAN_TIMED_OUT);
	}
	if (!start || !is_timely) {
		count_span(hit, pairing, SPAN_UNMATCHED);
		reject(hit, pairing);
	}
}

#define PUT_START_IN(class, flags)                                                                       \
	do {                                                                                             \
		void *starts = bpf_map_lookup_elem(&starts_##class, &span);                              \
		return starts ? bpf_map_update_elem(starts, hit->space->key, start, flags) : -ENOENT;    \
	} while (0)

static __always_inline long put_start(const struct hit *hit, const struct pairing *pairing, const void *start, __u64 flags)
{
	__u32 span = pairing->span;

	switch (pairing->start_class) {
	case 1: PUT_START_IN(1, flags);
	case 2: PUT_START_IN(2, flags);
	case 3: PUT_START_IN(3, flags);
	default: PUT_START_IN(4, flags);
	}
}

/* Keep what one pairing wants of a start. Not where the others are carried out: the stack would not do. */
static long keep_start(__u32 number, struct hit *hit)
{
	const struct pairing *pairing = pairing_of(hit, number);
	struct scratch *scratch;
	long error;

	if (!pairing->start_class || pairing->is_end || !(hit->matched >> (pairing->filter & 63) & 1))
		return 0;
	/* which carry_out() has counted */
	if (!hit->space)
		return 1;
	scratch = claim();
	hit->scratch = scratch;
	if (!scratch) {
		count_span(hit, pairing, SPAN_LOST);
		return 0;
	}
	scratch->record.missing = 0;
	fill(hit, pairing->operands + pairing->parts, pairing->words);
	scratch->record.matched = scratch->used;
	make_call_key(hit, pairing, hit->space->key);
	count_span(hit, pairing, SPAN_STARTS);
	scratch->record.time_ns = bpf_ktime_get_ns();
	error = put_start(hit, pairing, scratch->bytes, BPF_NOEXIST);
	if (error == -EEXIST) {
		/* of another call in this frame, which is over */
		count_span(hit, pairing, SPAN_NESTED);
		error = put_start(hit, pairing, scratch->bytes, BPF_ANY);
	}
	if (error)
		count_span(hit, pairing, SPAN_TABLE_FULL);
	release(scratch);
	return 0;
}

/* Once the pair is recorded. */
static long let_go_of_start(__u32 number, const struct hit *hit)
{
	struct hit_space *space = hit->space;

	if (space && space->found >> (number & (MAX_PAIRINGS - 1)) & 1) {
		make_call_key(hit, pairing_of(hit, number), space->key);
		delete_start(pairing_of(hit, number), space->key);
	}
	return 0;
}

/* The plan's only pairing. */
static __noinline void carry_out_alone(struct hit *hit, const struct pairing *pairing)
{
	if (hit->matched >> (pairing->filter & 63) & 1)
		carry_out_small(hit, pairing, &hit->elapsed_ns);
}

/* A hit that is nothing else, of which only the task, the counters and the plan are known. */
static __noinline void begin_alone(const struct hit *hit)
{
	const struct pairing *pairing = pairing_of(hit, 0);
	__u32 span = pairing->span;
	void *entries = bpf_map_lookup_elem(&spans_small, &span);
	struct small_entry start = { .thread = thread_of(hit) };
	__u64 key = (__u64)hit->task;

	if (entries)
		begin_span(hit, pairing, entries, &key, &start.time_ns, false);
	else
		count_span(hit, pairing, SPAN_LOST);
}

/* Carry out one pairing. An end that ends nothing is over for its subscription. */
static __noinline long carry_out(__u32 number, struct hit *hit)
{
	const struct pairing *pairing = pairing_of(hit, number);
	struct span_entry *pair;

	if (!(hit->matched >> (pairing->filter & 63) & 1))
		return 0;
	if (!hit->space) {
		count_span(hit, pairing, SPAN_LOST);
		reject(hit, pairing);
		return 0;
	}
	pair = &hit->space->pairs[number & (MAX_PAIRINGS - 1)];
	if (pairing->start_class)
		carry_out_recorded(hit, pairing, number, pair->words);
	else if (pairing->is_small)
		carry_out_small(hit, pairing, pair->words);
	else
		carry_out_any(hit, pairing, pair);
	return 0;
}

static __always_inline void pair(struct hit *hit)
{
	const struct pairing *first = pairing_of(hit, 0);

	if (hit->plan->pairing_count == 1 && first->is_small && !hit->plan->uses_words) {
		carry_out_alone(hit, first);
	} else {
		if (!hit->plan->uses_words)
			hit->space = claim_space();
		if (hit->space)
			hit->space->found = 0;
		bpf_loop(hit->plan->pairing_count, carry_out, hit, 0);
	}
	run_behind(hit, hit->plan->pair_tests);
}

static long end_in(__u32 span, __u64 *key)
{
	void *entries, *small;

	if (!(spans_of_threads >> (span & (THREAD_SPANS - 1)) & 1))
		return 0;
	entries = bpf_map_lookup_elem(&spans, &span);
	small = bpf_map_lookup_elem(&spans_small, &span);
	if ((entries && !bpf_map_delete_elem(entries, key)) || (small && !bpf_map_delete_elem(small, key)))
		__sync_fetch_and_add(&died[span & (THREAD_SPANS - 1)], 1);
	return 0;
}

static __always_inline void end_all_of(__u64 task)
{
	__u64 key[PAIR_KEY_WORDS] = { task };

	bpf_loop(THREAD_SPANS, end_in, key, 0);
}

/* args: the task. */
SEC("tp_btf/sched_process_exit")
int on_thread_exit(const __u64 *args)
{
	end_all_of(args[0]);
	return 0;
}

/*
 * args: the task. It may have another thread id than before, the main thread's, and its start time (de_thread() in
 * fs/exec.c). The others of its process have ended.
 */
SEC("tp_btf/sched_process_exec")
int on_exec(const __u64 *args)
{
	end_all_of(args[0]);
	return 0;
}

#endif
