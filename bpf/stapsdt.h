/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * What the program and the daemon share: tables that the daemon writes, and records that it reads.
 * stapsdtd/capture/bpf/layout.py says the same in numpy; tests/unit/test_bpf_layout.py holds it against this
 * object's BTF.
 */
#pragma once

#include <linux/types.h>

enum limit {
	INDEX_ENTRIES = 1 << 19,
	MAX_SLOTS = 1 << 15,
	MAX_PLANS = 1 << 15,
	PLAN_BITS = 16,		/* of a generation */
	GROUP_BITS = 24,	/* of a group's number: those of a slot and its plan make a word */
	MAX_MARKS = 1 << 14,	/* hits at a time of sites that move between groups, and of which a program still runs */
	MAX_OPERANDS = 1 << 17,
	MAX_TESTS = 1 << 15,
	MAX_COUNTERS = 1 << 17,

	MAX_VALUES = 32,	/* of one record */
	MAX_FILTERS = 64,	/* of one plan, a bit of record.matched each */
	MAX_STEPS = 1024,	/* tests run for one hit, over all filters of its plan */
	MAX_THEN = 4,		/* further pointers that lead to a value of the kernel */
	MAX_TEXT = 4097,	/* bytes of one string, without the NUL: one more than is shown, to tell a cut one */
	COMM_BYTES = 16,

	MAX_FOLLOWING = 64,	/* scopes that follow processes */
	MAX_FOLLOWED = 1 << 16,	/* processes at a time, of each */

	MAX_CHAINS = 64,	/* of kernel functions that lead to each other */
	MAX_LINKS = 16,		/* functions of each */
	MAX_CHAINED = 1 << 13,	/* threads that are in one at a time */

	MAX_RECIPES = 1 << 14,
	MAX_EDGES = 1 << 16,
	MAX_TABLES = 128,	/* of rows, each with two banks */
	MAX_PARTS = 15,		/* of a key */
	KEY_WORDS = 64,		/* a power of two that no key reaches */
	KEY_CLASSES = 6,	/* sizes of keys: 2, 4, 8, 10, 16, 34 words; 10 for a string of 64 bytes, 34 for D's of 255 */
	WORKSPACES = 16,	/* of a CPU, where keys are made */

	MAX_SPANS = 320,	/* tables of starts */
	THREAD_SPANS = 64,	/* the first of them, which alone may be of threads */
	MAX_PAIRING_ROWS = 1 << 13,
	MAX_PAIRINGS = 4,	/* of one plan */
	PAIR_KEY_WORDS = 3,
	PAIR_WORDS = 5,		/* the time, and what is kept of a start; one less than a power of two */
	START_1 = 512,		/* sizes of starts that are kept as records */
	START_2 = 2048,
	START_3 = 8192,
	START_4 = 32768,
	HIT_SPACES = 16,	/* of a CPU, where pairs and words are made */
	MAX_WORDS = 128,	/* of a hit, where numbers are calculated */
	MAX_CELLS = 256,	/* of pairs and words of a hit */

	SHARES = 4096,		/* processes that met a full ring lately */
	SHARE_PER_SECOND = 256,	/* records of a process for which there is room even then */
};

/* Where an operand is, before it is narrowed to its value. */
enum operand_kind {
	OPERAND_CONSTANT = 0,
	OPERAND_REGISTER = 1,
	OPERAND_ADDRESS = 2,	/* base + index * scale + constant */
	OPERAND_MEMORY = 3,	/* width bytes there */
	OPERAND_UID_GID = 4,	/* of the thread, as bpf_get_current_uid_gid() */
	OPERAND_CGROUP = 5,	/* its id in the unified hierarchy */
	OPERAND_PID = 6,	/* this and what follows: in keys alone */
	OPERAND_TID = 7,
	OPERAND_CPU = 8,
	OPERAND_MADE = 9,	/* cell `index` of the hit's space, missing if bit `scale` of cell `base` is set; the time */
				/* elapsed where the hit has none */
};

enum operand_take {
	TAKE_NUMBER = 0,
	TAKE_STRING = 1,	/* the operand points to it */
	TAKE_BYTES = 2,		/* the same, `limit` bytes with NULs and all */
	TAKE_COMM = 3,		/* the thread's name, in keys alone */
	TAKE_START = 4,		/* the record of the start that pairing `index` of the plan has kept, in records alone */
};

struct operand {
	__u64 constant;
	__u32 limit;		/* of a string, its NUL included */
	__u8 take;
	__u8 kind;
	__u8 base;		/* registers by their place in pt_regs; REG_ZERO reads as 0 */
	__u8 index;
	__u8 scale;
	__u8 width;
	__u8 left;		/* shifts that cut the value out and extend it */
	__u8 right;
	__u8 is_signed;
	__u8 is_narrow;		/* addresses have 32 bits, as in an i386 process */
	__u8 is_kernel;		/* of a kernel function: memory is the kernel's, unless the address is user space's */
	__u8 then_count;	/* how many pointers lead on from the address, and where behind each the next one is */
	__s32 then[MAX_THEN];
};

enum test_source {
	SOURCE_ARGUMENT = 0,	/* index: an operand of the plan */
	SOURCE_PID = 1,
	SOURCE_TID = 2,
	SOURCE_UID = 3,
	SOURCE_GID = 4,
	SOURCE_EXECNAME = 5,
	SOURCE_CGROUP = 6,	/* index: the level of the ancestor whose id is compared */
	SOURCE_OWNER = 7,	/* the user whom the kernel lets trace the process, or NOBODY */
	SOURCE_FOLLOWED = 8,	/* index: a scope; whether it follows the process */
	SOURCE_WORD = 9,	/* index: of a number that was calculated */
	SOURCE_ZERO = 10,
	SOURCE_CPU = 11,
	SOURCE_TIMESTAMP = 12,
	SOURCE_ELAPSED = 13,	/* index: a pairing of the plan */
	SOURCE_MATCHED = 14,	/* index: a filter; whether it accepted the hit */
	SOURCE_LINK = 15,	/* index: a chain; whether the hit is what `link` says */
};

/* What a hit is to a chain: the upper half of test.link. The lower half is the position of the function. */
enum link_kind {
	LINK_ENTERED = 0,	/* a call that those of all functions before it led to, which goes on the chain now */
	LINK_RETURNED = 1,	/* the return of a call that is on it, which is taken off */
	LINK_WITHIN = 2,	/* something while all calls up to that of the position are on it */
};

#define LINK_BITS 4

#define NOBODY 0xffffffffU /* as (uid_t)-1 */

/* How a process came into a scope that follows processes. */
enum membership {
	MEMBER_NAMED = 1,
	MEMBER_BORN = 2,
};

enum test_relation {
	RELATION_EQ = 0,
	RELATION_NE = 1,
	RELATION_LT = 2,
	RELATION_LE = 3,
	RELATION_GT = 4,
	RELATION_GE = 5,
	RELATION_SIGNED_LT = 6,
	RELATION_SIGNED_LE = 7,
	RELATION_SIGNED_GT = 8,
	RELATION_SIGNED_GE = 9,
};

/* In place of a relation: a number that is calculated. */
enum test_operation {
	OPERATION_ADD = 16,
	OPERATION_SUBTRACT = 17,
	OPERATION_MULTIPLY = 18,
	OPERATION_DIVIDE = 19,
	OPERATION_REMAINDER = 20,
	OPERATION_AND = 21,
	OPERATION_OR = 22,
	OPERATION_XOR = 23,
	OPERATION_LEFT = 24,
	OPERATION_RIGHT = 25,
	OPERATION_SIGNED_DIVIDE = 26,
	OPERATION_SIGNED_REMAINDER = 27,
	OPERATION_SIGNED_RIGHT = 28,
	OPERATION_MISS = 29,	/* there is none */
	OPERATION_SWAP = 30,	/* the bytes in reverse order, then to the right */
};

#define NO_WORD 0xff

enum test_jump {
	JUMP_ACCEPT = 0xffff,
	JUMP_REJECT = 0xfffe,
	JUMP_EXCLUDE = 0xfffd,	/* as if it had never fired */
	JUMP_END = 0xfffc,
	JUMP_LOST = 0xfffb,	/* there is no space to calculate in */
	JUMP_UNDECIDED = 0xfffa, /* JUMP_REJECT for want of an argument, or after a division by 0 */
};

/*
 * One step of a filter: a test of `source & mask` and `value`, or a calculation with both, whose result is a word, and
 * behind which on_true is next. Jumps lead to later tests, counted from the plan's first.
 */
struct test {
	__u64 mask;
	__u64 value;
	__u64 comm[COMM_BYTES / 8];
	__u8 source;
	__u8 index;
	__u8 relation;
	__u8 filter;		/* the bit that it decides on */
	__u16 on_true;
	__u16 on_false;
	__u16 on_missing;	/* the argument is not in memory, or a divisor is 0 */
	__u16 next_filter;	/* where the filter behind this one begins, or JUMP_END */
	__u8 right;		/* the word that stands for `value`, or NO_WORD */
	__u8 result;
	__u8 uses_words;
	__u8 link;		/* of a chain: enum link_kind << LINK_BITS | position */
};

/*
 * What to do at a site. A plan never changes while it is in use: the daemon writes another one and swaps the slot's
 * number, so that every record can be read by the plan that it names.
 */
struct plan {
	__u64 always;		/* filters that accept every hit */
	__u64 emitted;		/* filters whose hits are written as records, if only those that a recipe hands over */
	__u64 generation;	/* never used twice; its lowest PLAN_BITS are the plan's number */
	__u32 operands;		/* first of `values`, and of further ones that only tests read */
	__u32 tests;
	__u32 counters;		/* enum counter, all but the first for each filter; behind them, one for each recipe, */
				/* and enum span_counter for each pairing */
	__u32 recipes;		/* first */
	__u32 recipe_count;
	__u32 pairings;		/* first */
	__u8 pairing_count;
	__u8 values;
	__u8 has_tests;
	__u8 has_texts;		/* or values in the kernel's memory */
	__u8 is_counted;	/* no recipes, pairings or records, and no test but one for a process's id */
	__u8 is_begun;		/* the same, but for one pairing, whose start it is, and whose table is small */
	__u8 is_paired;		/* for one consumer, whose hits the pairing counts but for those that are filtered */
	__u8 uses_words;	/* some of its tests do */
	__u32 pair_tests;	/* the test where those of pairs begin, or JUMP_END */
	__u32 calculations;	/* the same of what its recipes calculate */
	__u8 is_single;		/* one filter, for which there is always space: what it rejects is not counted twice */
	__u8 keeps_records;	/* of starts, for some of its pairings */
	__u8 filter_counters;	/* of each filter */
	__u8 unused[5];
};

enum bucket_kind {
	BUCKETS_NONE = 0,
	BUCKETS_LOG_LINEAR = 1,	/* 1 << sub_bits for each power of two; negative numbers for negative values */
	BUCKETS_EDGES = 2,	/* numbered by how many edges are not above the value */
};

/* How one consumer's hits are added up: which key a hit has, and what becomes of the value in the key's row. */
struct recipe {
	__u32 table;
	__u32 variant;		/* tells apart keys whose parts mean different things */
	__u32 operands;		/* of the key's parts; behind them, of the value */
	__u32 edges;		/* first */
	__u16 edge_count;
	__u16 lost;		/* the counter of hits for whose key there was no room, from plan.counters on */
	__u8 filter;		/* the bit that chooses the hits */
	__u8 key_class;
	__u8 parts;
	__u8 has_value;
	__u8 is_signed;		/* the value */
	__u8 adds;		/* the value to a sum */
	__u8 compares;		/* the value to the least and the greatest */
	__u8 buckets;
	__u8 sub_bits;
	__u8 hands_over;	/* a hit is recorded if a part of its key, or the value, is not in memory */
	__u8 is_small;		/* a key of one number or none, made on the stack, and no edges */
	__u8 unused;
};

/*
 * A key begins with variant | missing << 32 | bucket << 48. A bit of missing stands for a part that could not be read, or
 * for the value. Then come the parts: numbers, and texts that are padded with zeros, as the key is as a whole.
 */
#define VALUE_MISSING 0x8000

/* What the hits of one key add up to. All is 0 at first. */
struct row {
	__u64 count;
	__u64 total;		/* of the values: its lower half, and */
	__s64 carry;		/* its upper half */
	__u64 low;		/* the greatest of ~value, so that 0 is the least */
	__u64 high;		/* the greatest value; signed ones have their sign bit turned over in both */
};

/* How one consumer's starts and ends are paired: a site is either for it. */
struct pairing {
	__u64 timeout_ns;	/* 0: a start waits as long as it takes */
	__u32 span;		/* whose table it is */
	__u32 operands;		/* of the key's parts; behind them, of what is kept of a start */
	__u32 cells;		/* enum span_counter, from plan.counters on */
	__u8 filter;		/* the bit that chooses the hits, and of an end is this consumer's alone */
	__u8 is_end;
	__u8 is_of_thread;	/* the key */
	__u8 parts;
	__u8 words;
	__u8 is_small;		/* its table is for threads, and nothing but times */
	__u8 takes_latest;	/* a start replaces the one that waits */
	__u8 is_of_call;	/* the key, of two parts: where the frame of a kernel function is, and the function's number */
	__u8 start_class;	/* 1 to 4: a record of this size is kept of a start of such a key, rather than words */
	__u8 start_filter;	/* 0, or 1 and the bit that tells which starts make pairs that are wanted */
	__u8 unused[2];
};

/* With the time of a start, its first word: the pair that it makes is not wanted. */
#define UNWANTED_START (1ULL << 63)

/* Cells from plan.counters + pairing.cells on. The last one is for hits whose key could not be read. */
enum span_counter {
	SPAN_STARTS = 0,
	SPAN_PAIRED = 1,
	SPAN_NESTED = 2,
	SPAN_TIMED_OUT = 3,
	SPAN_TABLE_FULL = 4,
	SPAN_UNMATCHED = 5,
	SPAN_LOST = 6,
	COUNTERS_OF_PAIRING = 7,
};

/* The first of all cells: hits that were not what they had been when they began, which have no record. */
#define STRAY_HITS 0

/* Cells from plan.counters on. Of a plan that is single, the first one has what its filter accepts. */
enum counter {
	COUNTER_HITS = 0,
	COUNTER_FILTERED = 1,
	COUNTER_EXCLUDED = 2,
	COUNTER_LOST = 3,
	COUNTER_UNDECIDED = 4,	/* of those in COUNTER_FILTERED; only where filter_counters is one more than */
	COUNTERS_OF_FILTER = 3,
};

/* A site. One number, since it is read and written at once: see move.h. */
struct slot {
	__u64 word;		/* newest group << 40 | oldest group << 16 | plan, which is 0 if nobody wants it */
};

struct text {
	__u32 offset;		/* in the record */
	__u32 length;		/* without the NUL */
};

struct record {
	__u64 time_ns;		/* CLOCK_MONOTONIC */
	__u32 tid;
	__u32 pid;
	__u64 matched;
	__u64 generation;	/* of its plan */
	__u32 missing;		/* values that could not be read, whose addresses stand in their places */
	__u32 cpu;
	char comm[COMM_BYTES];
	__u64 values[];		/* numbers, and struct text; the texts themselves follow */
};

/*
 * With the address of a missing value: what could not be read is the operand itself, not the text that it points to.
 * User space ends below it, tagged pointers (arm64) being stripped of their tags.
 */
#define UNREAD_OPERAND (1ULL << 63)
#define ADDRESS_MASK ((1ULL << 56) - 1)

/* Records come in so many sizes, each with a ring of its own, so that a ring can be read as an array. */
enum record_class {
	RECORD_CLASSES = 8,
	RECORD_HEADER = 8,	/* the kernel's, in front of each record in a ring */
	CLASS_0 = 96 - RECORD_HEADER,
	CLASS_1 = 128 - RECORD_HEADER,
	CLASS_2 = 192 - RECORD_HEADER,
	CLASS_3 = 320 - RECORD_HEADER,
	CLASS_4 = 1024 - RECORD_HEADER,
	CLASS_5 = 4096 - RECORD_HEADER,
	CLASS_6 = 16384 - RECORD_HEADER,
	CLASS_7 = 65536 - RECORD_HEADER,
};

#define VALUES_OF(class) (((class) - sizeof(struct record)) / sizeof(__u64))
