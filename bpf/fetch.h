/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_FETCH_H
#define STAPSDT_FETCH_H

/* Values of operands. */

#include "pair.h"

static __always_inline __u64 address_of(const struct registers *registers, const struct operand *op)
{
	__u64 address = op->constant + register_of(registers, op->base) + register_of(registers, op->index) * op->scale;

	return op->is_narrow ? (__u32)address : address;
}

/*
 * Memory of a kernel function's operands is the kernel's, unless the address is of user space's half, the lower one on the
 * machines whose calling convention is known (stapsdtd/arch).
 *
 * What reads it has a stack of its own, as has_share() (emit.h). So have sizes: Linux 6.1 forgets what was known of one
 * that clang keeps on the stack.
 */
static __always_inline bool is_of_kernel(__u64 address)
{
	return (__s64)address < 0;
}

/* Read the string, or the bytes, that an operand points to; return the length, or an error. */
static __noinline long read_text(const struct operand *op, void *to, __u32 most, __u64 address)
{
	bool in_kernel = op->is_kernel && is_of_kernel(address);
	__u32 size = op->limit;

	if (size > most)
		return -1;
	if (op->take == TAKE_STRING)
		return in_kernel ? bpf_probe_read_kernel_str(to, size, (void *)address) :
				   bpf_probe_read_user_str(to, size, (void *)address);
	if (in_kernel ? bpf_probe_read_kernel(to, size, (void *)address) : bpf_probe_read_user(to, size, (void *)address))
		return -1;
	return size;
}

/* Fetch an operand, where the pointers at an address lead: that address, or the number there. */
static __noinline bool fetch_of_kernel(const struct operand *op, __u64 address, __u64 *out)
{
	__u32 width;

	for (int number = 0; number < MAX_THEN && number < op->then_count; number++) {
		if (is_of_kernel(address) ? bpf_probe_read_kernel(out, sizeof(*out), (void *)address) :
					    bpf_probe_read_user(out, sizeof(*out), (void *)address))
			goto unread;
		address = *out + op->then[number];
	}
	*out = address;
	if (op->kind == OPERAND_ADDRESS)
		return true;
	*out = 0;
	width = op->width;
	if (width > sizeof(*out))
		return false;
	if (is_of_kernel(address) ? !bpf_probe_read_kernel(out, width, (void *)address) :
				    !bpf_probe_read_user(out, width, (void *)address))
		return true;
unread:
	*out = (address & ADDRESS_MASK) | UNREAD_OPERAND;
	return false;
}

/*
 * Fetch an operand, unless the hit has made it. Return whether it could be had; where not, out is what could not be read.
 *
 * It is global, rather than static, for the verifier, which then goes through it once, and not from each place that calls
 * it, in each state. The price is that it knows nothing of what it is given, nor the caller of what it returns.
 */
__noinline int fetch_operand(const struct registers *registers, const struct operand *op, __u64 *out)
{
	__u64 value;

	if (!registers || !op || !out)
		return false;
	value = op->constant;
	if (op->kind == OPERAND_REGISTER) {
		value = register_of(registers, op->base);
	} else if (op->kind == OPERAND_UID_GID) {
		value = bpf_get_current_uid_gid();
	} else if (op->kind == OPERAND_CGROUP) {
		value = bpf_get_current_cgroup_id();
	} else if (op->kind != OPERAND_CONSTANT) {
		value = address_of(registers, op);
		if (op->is_kernel) {
			if (!fetch_of_kernel(op, value, out))
				return false;
			value = *out;
		} else if (op->kind == OPERAND_MEMORY) {
			__u32 width = op->width;

			*out = 0;
			if (width > sizeof(*out) || bpf_probe_read_user(out, width, (void *)value)) {
				*out = (value & ADDRESS_MASK) | UNREAD_OPERAND;
				return false;
			}
			value = *out;
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
			value >>= 8 * (sizeof(value) - width) & 63;
#endif
		}
	}
	value <<= op->left & 63;
	*out = op->is_signed ? (__u64)((__s64)value >> (op->right & 63)) : value >> (op->right & 63);
	return true;
}

/* The same, of any operand. out: may be on the stack if something was written there before. */
static __always_inline bool fetch(const struct hit *hit, const struct operand *op, __u64 *out)
{
	return op->kind >= OPERAND_MADE ? fetch_made(hit, op, out) : fetch_operand(&hit->registers, op, out);
}

#endif
