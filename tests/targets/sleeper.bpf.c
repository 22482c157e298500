/* Another tracer's program, which reads what argument 0 points to, and sleeps until that is there. */
#include <linux/bpf.h>
#include <linux/ptrace.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

SEC("uprobe.s")
int on_hit(struct pt_regs *registers)
{
	char byte;

	bpf_copy_from_user(&byte, 1, (void *)PT_REGS_PARM1(registers));
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
