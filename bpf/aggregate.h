/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_AGGREGATE_H
#define STAPSDT_AGGREGATE_H

/*
 * Rows that hits add up to, in place of records. A plan's recipes say how to make a key of a hit; the row of that key is
 * in a table of the subscription's own, so that a full one costs nobody else.
 *
 *     recipe ─► operands ─► key ─┐
 *                     └─► value ─┴─► row: count, total, least, greatest
 *
 * A histogram has a row for each bucket, whose number is part of the key. A hit of which something is not in memory is
 * handed over to the daemon as a record: it knows constants from their files. Each table has two banks. While hits use one,
 * the daemon reads and empties the other (capture/bpf/draining.py).
 */

#include "buckets.h"
#include "filter.h"
#include "rows.h"

/* Whose lowest bit is the bank that hits use. */
__u32 epoch SEC(".bss.epoch");

/*
 * More than a CPU needs unless many hits on it are preempted right here. Those that find none are lost.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, WORKSPACES); /* WORKSPACES * cpus, set when it is loaded */
	__type(key, __u32);
	__type(value, struct workspace);
} workspaces SEC(".maps");

static __always_inline struct workspace *claim_workspace(void)
{
	__u32 first = bpf_get_smp_processor_id() * WORKSPACES;

	for (__u32 number = 0; number < WORKSPACES; number++) {
		__u32 index = first + number;
		struct workspace *workspace = bpf_map_lookup_elem(&workspaces, &index);

		if (workspace && !__sync_val_compare_and_swap(&workspace->busy, 0, 1))
			return workspace;
	}
	return NULL;
}

static __always_inline bool fetch_part(const struct hit *hit, const struct operand *op, __u64 *out)
{
	switch (op->kind) {
	case OPERAND_PID: *out = hit->task->tgid; return true;
	case OPERAND_TID: *out = hit->task->pid; return true;
	case OPERAND_CPU: *out = bpf_get_smp_processor_id(); return true;
	default: return fetch(hit, op, out);
	}
}

/* Append a part to the key. What could not be read is zero, and marked as missing. */
static long take_part(__u32 number, struct hit *hit)
{
	struct workspace *workspace = hit->workspace;
	const struct recipe *recipe = &recipes[workspace->recipe & (MAX_RECIPES - 1)];
	const struct operand *op = &operands[(recipe->operands + number) & (MAX_OPERANDS - 1)];
	__u32 at = workspace->used & (KEY_WORDS - 1), limit = op->limit;
	__u64 value = 0;
	long error;

	if (op->take == TAKE_COMM) {
#pragma unroll
		for (int byte = 0; byte < COMM_BYTES; byte++)
			((char *)&workspace->key[at])[byte] = hit->task->comm[byte];
		workspace->used = at + COMM_BYTES / sizeof(__u64);
		return 0;
	}
	if (!fetch_part(hit, op, &value)) {
		workspace->missing |= 1U << (number & 31);
		workspace->unread = 1;
		value = 0;
	}
	if (op->take == TAKE_NUMBER) {
		workspace->key[at] = value;
		workspace->used = at + 1;
		return 0;
	}
	if (limit > KEY_WORDS * sizeof(__u64))
		return 1;
	/* both read nothing at 0, and leave zeros where they fail */
	if (op->take == TAKE_BYTES)
		error = bpf_probe_read_user(&workspace->key[at], limit, (void *)value);
	else
		error = bpf_probe_read_user_str(&workspace->key[at], limit, (void *)value);
	if (error < 0) {
		workspace->missing |= 1U << (number & 31);
		if (value)
			workspace->unread = 1;
	}
	workspace->used = at + (limit + sizeof(__u64) - 1) / sizeof(__u64);
	return 0;
}

static __always_inline bool take_value(const struct hit *hit, const struct recipe *recipe, __u64 *key, __u64 *value)
{
	if (!recipe->has_value)
		return false;
	if (fetch(hit, &operands[(recipe->operands + recipe->parts) & (MAX_OPERANDS - 1)], value))
		return true;
	key[0] |= (__u64)VALUE_MISSING << 32;
	return false;
}

/* Return whether the hit is recorded rather than added up: something that may have been there was not in memory. */
static __always_inline bool hands_over(struct hit *hit, const struct recipe *recipe, bool is_unread)
{
	if (!is_unread || !recipe->hands_over)
		return false;
	hit->matched |= 1ULL << (recipe->filter & 63);
	return true;
}

/* A key of one number or none. */
static __always_inline void add_small(struct hit *hit, const struct recipe *recipe, __u32 bank)
{
	__u64 key[2] = { recipe->variant, 0 }, value = 0;
	bool has_value;

	if (recipe->parts && !fetch_part(hit, &operands[recipe->operands & (MAX_OPERANDS - 1)], &key[1])) {
		key[0] |= 1ULL << 32;
		key[1] = 0;
	}
	has_value = take_value(hit, recipe, key, &value);
	if (hands_over(hit, recipe, key[0] >> 32))
		return;
	if (has_value && recipe->buckets)
		key[0] |= (__u64)bucket_by_power(value, recipe->is_signed, recipe->sub_bits) << 48;
	add_to(FIND_IN(2), hit, recipe, has_value, value);
}

static __always_inline void clear(__u64 *key, __u32 key_class)
{
	__builtin_memset(key, 0, 2 * sizeof(__u64));
	if (key_class > 0)
		__builtin_memset(key + 2, 0, 2 * sizeof(__u64));
	if (key_class > 1)
		__builtin_memset(key + 4, 0, 4 * sizeof(__u64));
	if (key_class > 2)
		__builtin_memset(key + 8, 0, 2 * sizeof(__u64));
	if (key_class > 3)
		__builtin_memset(key + 10, 0, 6 * sizeof(__u64));
	if (key_class > 4)
		__builtin_memset(key + 16, 0, 18 * sizeof(__u64));
}

static __always_inline void add_any(struct hit *hit, const struct recipe *recipe, __u32 index, __u32 bank)
{
	struct workspace *workspace = claim_workspace();
	bool has_value;
	__u64 value = 0;

	if (!workspace) {
		count(hit, recipe->lost);
		return;
	}
	hit->workspace = workspace;
	clear(workspace->key, recipe->key_class);
	workspace->recipe = index;
	workspace->used = 1;
	workspace->missing = 0;
	workspace->unread = 0;
	bpf_loop(recipe->parts, take_part, hit, 0);
	workspace->key[0] = recipe->variant | (__u64)workspace->missing << 32;
	has_value = take_value(hit, recipe, workspace->key, &value);
	if (hands_over(hit, recipe, workspace->unread || (recipe->has_value && !has_value))) {
		*(volatile __u32 *)&workspace->busy = 0;
		return;
	}
	if (has_value && recipe->buckets == BUCKETS_EDGES)
		workspace->key[0] |= (__u64)bucket_by_edges(workspace, recipe, value) << 48;
	else if (has_value && recipe->buckets)
		workspace->key[0] |= (__u64)bucket_by_power(value, recipe->is_signed, recipe->sub_bits) << 48;
	add_to(row_of(recipe, workspace->key, bank), hit, recipe, has_value, value);
	*(volatile __u32 *)&workspace->busy = 0;
}

/* Carry out one recipe. */
static long add(__u32 number, struct hit *hit)
{
	__u32 index = (hit->plan->recipes + number) & (MAX_RECIPES - 1);
	const struct recipe *recipe = &recipes[index];
	__u32 bank = 2 * recipe->table + hit->bank;

	if (!(hit->matched >> (recipe->filter & 63) & 1))
		return 0;
	/* no other recipe has this filter */
	if (recipe->hands_over)
		hit->matched &= ~(1ULL << (recipe->filter & 63));
	if (recipe->is_small)
		add_small(hit, recipe, bank);
	else
		add_any(hit, recipe, index, bank);
	return 0;
}

static __always_inline void aggregate(struct hit *hit)
{
	run_behind(hit, hit->plan->calculations);
	hit->bank = *(volatile __u32 *)&epoch & 1;
	bpf_loop(hit->plan->recipe_count, add, hit, 0);
}

#endif
