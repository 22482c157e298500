/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_ROWS_H
#define STAPSDT_ROWS_H

/* The tables of rows, by the size of their keys, and how a hit is added to a row. */

#include "hit.h"

#define RAISE_STEPS (1 << 16)

/* By bank: its rows. */
__u64 filled[2 * MAX_TABLES] SEC(".bss.filled");

#define TABLES_OF(words)                                   \
	struct rows_##words {                              \
		__uint(type, BPF_MAP_TYPE_HASH);           \
		__uint(max_entries, 1);                    \
		__uint(key_size, words * sizeof(__u64));   \
		__uint(value_size, sizeof(struct row));    \
	};                                                 \
	struct {                                           \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);  \
		__uint(max_entries, 2 * MAX_TABLES);       \
		__type(key, __u32);                        \
		__array(values, struct rows_##words);      \
	} tables_##words SEC(".maps")

TABLES_OF(2);
TABLES_OF(4);
TABLES_OF(8);
TABLES_OF(10);
TABLES_OF(16);
TABLES_OF(34);

const struct row nothing SEC(".rodata.rows");

/* Return the row of a key, where there is one or room for it. */
static __always_inline struct row *find(void *rows, const __u64 *key, __u32 bank)
{
	struct row *row;

	if (!rows)
		return NULL;
	row = bpf_map_lookup_elem(rows, key);
	if (row)
		return row;
	if (!bpf_map_update_elem(rows, key, &nothing, BPF_NOEXIST))
		__sync_fetch_and_add(&filled[bank & (2 * MAX_TABLES - 1)], 1);
	return bpf_map_lookup_elem(rows, key);
}

#define FIND_IN(words) find(bpf_map_lookup_elem(&tables_##words, &bank), key, bank)

static __always_inline struct row *row_of(const struct recipe *recipe, const __u64 *key, __u32 bank)
{
	switch (recipe->key_class) {
	case 0: return FIND_IN(2);
	case 1: return FIND_IN(4);
	case 2: return FIND_IN(8);
	case 3: return FIND_IN(10);
	case 4: return FIND_IN(16);
	default: return FIND_IN(34);
	}
}

struct raising {
	__u64 *cell;
	__u64 value;
};

static long try_to_raise(__u32 number __attribute__((unused)), struct raising *raising)
{
	__u64 found = *(volatile __u64 *)raising->cell;

	return found >= raising->value ||
	       __sync_val_compare_and_swap(raising->cell, found, raising->value) == found;
}

/* Each step that fails is another hit that has raised it, so that there are steps enough for all. */
static __always_inline void raise(__u64 *cell, __u64 value)
{
	struct raising raising = { cell, value };

	if (*(volatile __u64 *)cell < value)
		bpf_loop(RAISE_STEPS, try_to_raise, &raising, 0);
}

/* Global, as in fetch.h. */
__noinline int add_value(struct row *row, const struct recipe *recipe, __u64 value)
{
	bool is_negative;

	if (!row || !recipe)
		return 0;
	is_negative = recipe->is_signed && (__s64)value < 0;
	if (recipe->adds) {
		__u64 before = __sync_fetch_and_add(&row->total, value);
		__s64 carry = (__s64)(before + value < before) - is_negative;

		if (carry)
			__sync_fetch_and_add(&row->carry, carry);
	}
	if (recipe->compares) {
		if (recipe->is_signed)
			value ^= 1ULL << 63;
		raise(&row->low, ~value);
		raise(&row->high, value);
	}
	return 0;
}

static __always_inline void add_to(struct row *row, const struct hit *hit, const struct recipe *recipe, bool has_value,
				   __u64 value)
{
	if (!row) {
		count(hit, recipe->lost);
		return;
	}
	if (has_value)
		add_value(row, recipe, value);
	__sync_fetch_and_add(&row->count, 1);
}

#endif
