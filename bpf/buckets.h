/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_BUCKETS_H
#define STAPSDT_BUCKETS_H

/* The numbers of histograms' buckets, as stapsdtd/aggregate/buckets.py has them. */

#include "fetch.h"

#define MOST_WORDS (2 * KEY_WORDS) /* a text may begin where a key ends */

/* Where a hit's key is made. */
struct workspace {
	__u32 busy;
	__u32 recipe;
	__u32 used; /* words of the key */
	__u32 missing;
	__u32 at; /* a step's result, which the verifier is not to follow: it would go through all combinations */
	__u32 unread; /* something that may have been there */
	__u64 key[MOST_WORDS];
};

/* Global, as in fetch.h, and without branches in the loop, all of whose combinations the verifier would go through. */
__noinline __s64 bucket_by_power(__u64 value, bool is_signed, __u32 sub_bits)
{
	bool is_negative = is_signed && (__s64)value < 0;
	__u64 magnitude = is_negative ? -value : value, rest = magnitude;
	__u32 exponent = 0, shift;
	__s64 number;

#pragma unroll
	for (int bits = 5; bits >= 0; bits--) {
		__u64 above = -(rest >> (1 << bits)) >> 63;
		__u32 step;

		/* else clang makes a branch of it */
		asm volatile("" : "+r"(above));
		step = above << bits;
		rest >>= step;
		exponent += step;
	}
	shift = exponent > sub_bits ? exponent - sub_bits : 0;
	number = (magnitude >> (shift & 63)) + ((__u64)shift << (sub_bits & 31));
	return is_negative ? -number : number;
}

static __always_inline __s64 bucket_by_edges(struct workspace *workspace, const struct recipe *recipe, __u64 value)
{
	volatile __u32 *at = &workspace->at;
	__s64 number = !recipe->is_signed && value >> 63 ? (__s64)(~0ULL >> 1) : (__s64)value;

	*at = 0;
#pragma unroll
	for (int step = 2048; step; step >>= 1) {
		__u32 next = *at + step;

		if (next <= recipe->edge_count && edges[(recipe->edges + next - 1) & (MAX_EDGES - 1)] <= number)
			*at = next;
	}
	return *at;
}

#endif
