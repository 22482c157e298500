/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_HIT_H
#define STAPSDT_HIT_H

/* A hit of a site, and the tables that say what is to be done at it. */

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "stapsdt.h"

/* pt_regs as an array of words, as far as a probe's operands can name it; one more reads as zero. */
#if defined(__TARGET_ARCH_x86)
#define REG_IP 16
#define REG_COUNT 20
#elif defined(__TARGET_ARCH_arm64)
#define REG_IP 32
#define REG_COUNT 33
#elif defined(__TARGET_ARCH_riscv)
#define REG_IP 0
#define REG_COUNT 32
#elif defined(__TARGET_ARCH_s390)
#define REG_IP 2
#define REG_COUNT 19
#elif defined(__TARGET_ARCH_powerpc)
#define REG_IP 32
#define REG_COUNT 33
#elif defined(__TARGET_ARCH_loongarch)
#define REG_IP 33
#define REG_COUNT 34
#else
#error "which of pt_regs' words is the instruction pointer on this architecture?"
#endif
#define REG_ZERO REG_COUNT

/*
 * Where the kernel's own functions have their arguments, in order, and their result; and what a return takes off the stack
 * (CallingConvention in stapsdtd/arch).
 */
#if defined(__TARGET_ARCH_x86)
#define ARGUMENT_REGISTERS { 14, 13, 12, 11, 9, 8 }
#define REG_RESULT 10
#define REG_SP 19
#define RETURN_POPS 8
#elif defined(__TARGET_ARCH_arm64)
#define ARGUMENT_REGISTERS { 0, 1, 2, 3, 4, 5, 6, 7 }
#define REG_RESULT 0
#define REG_SP 31
#define RETURN_POPS 0
#endif

/* Tables, written by the daemon through mmap. */
__u32 site_index[INDEX_ENTRIES] SEC(".bss.index");
struct slot slots[MAX_SLOTS] SEC(".bss.slots");
struct plan plans[MAX_PLANS] SEC(".bss.plans");
struct operand operands[MAX_OPERANDS] SEC(".bss.operands");
struct test tests[MAX_TESTS] SEC(".bss.tests");
struct recipe recipes[MAX_RECIPES] SEC(".bss.recipes");
__s64 edges[MAX_EDGES] SEC(".bss.edges");

/* The daemon, whose own hits would make events without end. */
volatile const __s32 daemon_pid = 0;
volatile const __u32 cpus = 1;
volatile const __u32 never = 0; /* on all architectures, since the daemon sets these three at once */

struct cpu_counters {
	__u64 cells[MAX_COUNTERS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1); /* cpus, set when it is loaded */
	__type(key, __u32);
	__type(value, struct cpu_counters);
} counters SEC(".maps");

struct cred;
struct mm_struct;

struct signal_struct {
	struct {
		int counter;
	} live; /* threads */
} __attribute__((preserve_access_index));

/* As much of the kernel's as is needed; libbpf finds where it is. */
struct task_struct {
	int pid;
	int tgid;
	char comm[COMM_BYTES];
	const struct cred *real_cred;
	const struct mm_struct *mm;
	const struct signal_struct *signal;
	void *stack;
} __attribute__((preserve_access_index));

/* Apart, since nothing else of a hit can be handed to a global function: see fetch.h. */
struct registers {
	__u64 words[REG_COUNT + 1];
};

struct hit {
	struct registers registers;
	__u64 matched;
	__u64 generation;
	const struct task_struct *task;
	struct cpu_counters *counters;
	const struct plan *plan;
	union {
		struct scratch *scratch;
		struct workspace *workspace;
	};
	struct hit_space *space; /* or NULL, where there is at most one pair, of which there is no more than: */
	__u64 elapsed_ns;
	__u32 next_test;
	union {
		__u32 bank;
		__u32 first_operand; /* of what is recorded */
	};
};

static __always_inline __u64 register_of(const struct registers *registers, __u32 number)
{
	return registers->words[number < REG_ZERO ? number : REG_ZERO];
}

static __always_inline void count(const struct hit *hit, __u32 cell)
{
	__sync_fetch_and_add(&hit->counters->cells[(hit->plan->counters + cell) & (MAX_COUNTERS - 1)], 1);
}

static __always_inline void count_of(const struct hit *hit, __u32 filter, enum counter counter)
{
	count(hit, filter * hit->plan->filter_counters + counter);
}

#endif
