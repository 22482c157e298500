/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_CALCULATE_H
#define STAPSDT_CALCULATE_H

/*
 * Numbers that are calculated of arguments, one operation with two of them at a time, as stapsdtd/query/numbers.py has
 * it: 64 bits, which wrap around. Each is a word of the hit's own space.
 */

#include "fetch.h"

static __always_inline bool holds(__u32 relation, __u64 left, __u64 right)
{
	switch (relation) {
	case RELATION_EQ: return left == right;
	case RELATION_NE: return left != right;
	case RELATION_LT: return left < right;
	case RELATION_LE: return left <= right;
	case RELATION_GT: return left > right;
	case RELATION_GE: return left >= right;
	case RELATION_SIGNED_LT: return (__s64)left < (__s64)right;
	case RELATION_SIGNED_LE: return (__s64)left <= (__s64)right;
	case RELATION_SIGNED_GT: return (__s64)left > (__s64)right;
	default: return (__s64)left >= (__s64)right;
	}
}

static __always_inline __u64 magnitude(__u64 number)
{
	return (__s64)number < 0 ? -number : number;
}

/* right: not 0 if it divides. */
static __always_inline __u64 result_of(__u32 operation, __u64 left, __u64 right)
{
	__u64 quotient, rest;

	switch (operation) {
	case OPERATION_ADD: return left + right;
	case OPERATION_SUBTRACT: return left - right;
	case OPERATION_MULTIPLY: return left * right;
	case OPERATION_DIVIDE: return left / right;
	case OPERATION_REMAINDER: return left % right;
	case OPERATION_AND: return left & right;
	case OPERATION_OR: return left | right;
	case OPERATION_XOR: return left ^ right;
	case OPERATION_LEFT: return left << (right & 63);
	case OPERATION_RIGHT: return left >> (right & 63);
	case OPERATION_SIGNED_RIGHT: return (__s64)left >> (right & 63);
	case OPERATION_SWAP: return __builtin_bswap64(left) >> (right & 63);
	/* processors' instructions for these came to BPF in Linux 6.6 */
	case OPERATION_SIGNED_DIVIDE:
		quotient = magnitude(left) / magnitude(right);
		return (__s64)(left ^ right) < 0 ? -quotient : quotient;
	default:
		rest = magnitude(left) % magnitude(right);
		return (__s64)left < 0 ? -rest : rest;
	}
}

static __always_inline bool divides(__u32 operation)
{
	return operation == OPERATION_DIVIDE || operation == OPERATION_REMAINDER ||
	       operation == OPERATION_SIGNED_DIVIDE || operation == OPERATION_SIGNED_REMAINDER;
}

/* Test or calculate with words; return where to go on. left: unless it is a word. */
static __noinline __u32 calculate(const struct hit *hit, const struct test *test, __u64 left)
{
	struct hit_space *space = hit->space;
	__u32 result = test->result & (MAX_WORDS - 1);
	__u64 right = test->value;

	if (!space)
		return JUMP_LOST;
	if (test->source == SOURCE_WORD)
		left = space->words[test->index & (MAX_WORDS - 1)];
	left &= test->mask;
	if (test->right != NO_WORD)
		right = space->words[test->right & (MAX_WORDS - 1)];
	if (test->relation < OPERATION_ADD)
		return holds(test->relation, left, right) ? test->on_true : test->on_false;
	if (test->relation == OPERATION_MISS) {
		space->missing[result / 64] |= 1ULL << (result & 63);
		return test->on_true;
	}
	if (divides(test->relation) && !right)
		return test->on_missing;
	space->missing[result / 64] &= ~(1ULL << (result & 63));
	space->words[result] = result_of(test->relation, left, right);
	return test->on_true;
}

#endif
