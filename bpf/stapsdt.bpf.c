// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/*
 * One program for all sites. It runs at every hit of every group and decides, before it does anything, whether the hit is
 * this group's (move.h) and for which subscriptions it is (filter.h); it then writes one record for all of them that want events (emit.h), and adds
 * the hit to rows of those that want sums (aggregate.h). Small ones keep the sets of processes that scopes follow
 * (follow.h), and take away what ended threads have left (span.h, chain.h).
 *
 *     (cookie, ip) ─► index ─► slot ─► plan ─┬─► tests, for each filter ─► matched
 *                                            ├─► operands ─► values ─► the ring of the record's size
 *                                            └─► recipes ─► keys ─► the rows of a table (aggregate.h)
 *
 * It never waits. Whoever owns a page that is not resident, or the file system it comes from, decides how long a fault
 * takes, and while a hit waits nobody on the host can detach an uprobe program. So what is not resident is missing from
 * the record, which names its address; the daemon fills in what it can (capture/bpf/unread.py).
 *
 * Where the kernel preempts, another hit may come on the same CPU in the middle of this one. Hence atomic counters,
 * scratch space that is claimed, and no private stack (see on_hit).
 */
#include "aggregate.h"
#include "emit.h"
#include "filter.h"
#include "move.h"
#include "span.h"

/*
 * No hit looks here. A change of an array of maps returns when all programs that were running have ended
 * (maybe_wait_bpf_programs in kernel/bpf/syscall.c), which is how the daemon waits for hits.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct ring);
} hits_to_wait_for SEC(".maps");

/* Of what the daemon knew of stapsdt.h when this was compiled; one that knows something else refuses the object. */
const __u64 fingerprint SEC(".rodata.fingerprint") = FINGERPRINT;

/* Never used: it has the object's BTF describe what else is shared. */
struct {
	struct text text;
	enum limit limit;
	enum operand_kind operand_kind;
	enum operand_take operand_take;
	enum test_source test_source;
	enum test_relation test_relation;
	enum test_operation test_operation;
	enum test_jump test_jump;
	enum counter counter;
	enum record_class record_class;
	enum bucket_kind bucket_kind;
	enum span_counter span_counter;
	struct span_entry span_entry;
	enum membership membership;
	enum link_kind link_kind;
	struct chain chain;
	struct record record;
} layout SEC(".bss.layout");

#if defined(__TARGET_ARCH_x86) || defined(__TARGET_ARCH_arm64)
/*
 * Since Linux 6.13 a program whose stack is not small gets one per CPU in place of the task's, unless it has a tail
 * call (kernel/bpf/verifier.c, check_max_stack_depth). Nothing keeps uprobe programs from interrupting each other, so a
 * hit that is preempted would find its variables overwritten by the next one's. Hence a tail call that never is. The
 * kernel takes no map for two kinds of programs.
 */
struct no_programs {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} no_programs SEC(".maps"), no_linked_programs SEC(".maps");

#define KEEP_TO_THE_STACK_OF_THE_TASK(context, programs)        \
	do {                                                     \
		if (never)                                       \
			bpf_tail_call((void *)context, &programs, 0); \
	} while (0)
#else
/* The kernel has private stacks on those two alone, and may refuse tail calls beside callbacks on others. */
#define KEEP_TO_THE_STACK_OF_THE_TASK(context, programs)
#endif

#if defined(DELAY_STEPS) || defined(GAP_STEPS)
static long idle(__u32 number __attribute__((unused)), void *context __attribute__((unused)))
{
	return 0;
}
#endif

/* What a program is given. */
enum context {
	CONTEXT_REGISTERS,	/* struct pt_regs */
	CONTEXT_ENTRY,		/* the arguments of a kernel function, which only helpers tell */
	CONTEXT_RETURN,		/* the same, and its result */
};

static __always_inline void take_registers(struct hit *hit, const __u64 *registers)
{
	/* volatile, or clang reads several first and needs stack for them */
#pragma unroll
	for (int number = 0; number < REG_COUNT; number++)
		hit->registers.words[number] = *(const volatile __u64 *)&registers[number];
	hit->registers.words[REG_ZERO] = 0;
}

#ifdef ARGUMENT_REGISTERS
static __always_inline void take_arguments(struct hit *hit, void *call, bool has_result)
{
	static const __u32 places[] = ARGUMENT_REGISTERS;

	__builtin_memset(&hit->registers, 0, sizeof(hit->registers));
	/* one that the function does not have is an error, and stays 0 */
#pragma unroll
	for (__u32 number = 0; number < sizeof(places) / sizeof(*places); number++)
		bpf_get_func_arg(call, number, &hit->registers.words[places[number]]);
	if (has_result)
		bpf_get_func_ret(call, &hit->registers.words[REG_RESULT]);
	/* a call has the same place for its arguments at both ends; as if that were where its frame is */
	hit->registers.words[REG_SP] = (__u64)call + (has_result ? RETURN_POPS : 0);
}
#else
#define take_arguments(hit, call, has_result)
#endif

static __always_inline void carry_out_plan(void *given, enum context kind, __u32 group, __u32 slot)
{
	const struct task_struct *task = bpf_get_current_task_btf();
	__u32 cpu = bpf_get_smp_processor_id();
	struct hit hit;
	__u64 word;
	__u32 plan;

#ifdef GAP_STEPS
	/* between two groups' programs of one hit: see tests/kernel/test_moving_sites.py */
	bpf_loop(GAP_STEPS, idle, NULL, 0);
#endif
	word = *(volatile __u64 *)&slots[slot & (MAX_SLOTS - 1)].word;
	plan = word & ((1 << PLAN_BITS) - 1);
	if (!plan || task->tgid == daemon_pid)
		return;
	if (!handles(word, group, slot, task))
		return;
	hit.task = task;
	hit.counters = bpf_map_lookup_elem(&counters, &cpu);
	if (!hit.counters)
		return;
	hit.plan = &plans[plan & (MAX_PLANS - 1)];
	if (hit.plan->is_counted || hit.plan->is_begun) {
		bool is_wanted =
			!hit.plan->has_tests || task->tgid == (__s32)tests[hit.plan->tests & (MAX_TESTS - 1)].value;

		if (is_wanted && hit.plan->is_begun) {
			begin_alone(&hit);
			return;
		}
		if (!is_wanted)
			count_of(&hit, 0, COUNTER_FILTERED);
		if (is_wanted || !hit.plan->is_single)
			count(&hit, COUNTER_HITS);
		return;
	}
	hit.generation = hit.plan->generation;
	hit.matched = hit.plan->always;
	hit.next_test = 0;
	hit.space = NULL;
	hit.elapsed_ns = 0;
	if (kind == CONTEXT_REGISTERS)
		take_registers(&hit, given);
	else
		take_arguments(&hit, given, kind == CONTEXT_RETURN);
	if (hit.plan->uses_words)
		hit.space = claim_space();

	run_filters(&hit);
	/* behind those that it was not for, so that these never seem to have fired */
	if (!(hit.matched ? hit.plan->is_paired : hit.plan->is_single))
		count(&hit, COUNTER_HITS);
	if (!hit.matched)
		goto out;

#ifdef DELAY_STEPS
	/* for tests of what becomes of hits that take long: see tests/kernel/test_late_hits.py */
	bpf_loop(DELAY_STEPS, idle, NULL, 0);
#endif
	if (hit.plan->pairing_count)
		pair(&hit);
	if (hit.plan->keeps_records)
		bpf_loop(hit.plan->pairing_count, keep_start, &hit, 0);
	if (hit.plan->recipe_count)
		aggregate(&hit);
	hit.matched &= hit.plan->emitted;
	if (hit.matched)
		emit(&hit);
	if (hit.plan->keeps_records)
		bpf_loop(hit.plan->pairing_count, let_go_of_start, &hit, 0);
out:
	if (hit.plan->pairing_count || hit.plan->uses_words)
		release_space(&hit);
}

/* Of a tracefs event, which has one cookie for all of its sites: the address tells them apart. */
SEC("uprobe")
int on_hit(__u64 *registers)
{
	__u64 cookie = bpf_get_attach_cookie(registers);
	__u32 first = cookie & 0xfffff, mask = cookie >> 20 & 0xfff, shift = cookie >> 32 & 0xf;
	__u32 entry = first + (registers[REG_IP] >> shift & mask);

	KEEP_TO_THE_STACK_OF_THE_TASK(registers, no_programs);
	carry_out_plan(registers, CONTEXT_REGISTERS, cookie >> GROUP_SHIFT, site_index[entry & (INDEX_ENTRIES - 1)]);
	return 0;
}

/* Of a link, which has a cookie for each site. */
SEC("uprobe")
int on_linked_hit(__u64 *registers)
{
	__u64 cookie = bpf_get_attach_cookie(registers);

	KEEP_TO_THE_STACK_OF_THE_TASK(registers, no_linked_programs);
	carry_out_plan(registers, CONTEXT_REGISTERS, cookie >> GROUP_SHIFT, cookie);
	return 0;
}

/*
 * Of kernel functions. The kernel keeps what runs there from being interrupted by itself, so a stack per CPU does no harm,
 * and counts the calls for which it therefore did not run.
 */
SEC("kprobe.multi")
int on_function_entries(__u64 *registers)
{
	__u64 cookie = bpf_get_attach_cookie(registers);

	carry_out_plan(registers, CONTEXT_REGISTERS, cookie >> GROUP_SHIFT, cookie);
	return 0;
}

#ifdef ARGUMENT_REGISTERS
/* Of one function each, for which they are loaded. */
SEC("fentry")
int on_function_entry(void *call)
{
	__u64 cookie = bpf_get_attach_cookie(call);

	carry_out_plan(call, CONTEXT_ENTRY, cookie >> GROUP_SHIFT, cookie);
	return 0;
}

SEC("fexit")
int on_function_return(void *call)
{
	__u64 cookie = bpf_get_attach_cookie(call);

	carry_out_plan(call, CONTEXT_RETURN, cookie >> GROUP_SHIFT, cookie);
	return 0;
}
#endif

char LICENSE[] SEC("license") = "Dual BSD/GPL";
