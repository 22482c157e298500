// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/* Count hits, for the daemon to see what the kernel runs a program for (stapsdtd/kernel/uprobe_links.py). */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

__u64 hits;

SEC("kprobe")
int count(void *context __attribute__((unused)))
{
	__sync_fetch_and_add(&hits, 1);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
