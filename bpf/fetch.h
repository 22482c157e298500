/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
#ifndef STAPSDT_FETCH_H
#define STAPSDT_FETCH_H

/* Values of operands. */

#include "pair.h"

static __always_inline __u64 address_of(const struct hit *hit, const struct operand *op)
{
	__u64 address = op->constant + register_of(hit, op->base) + register_of(hit, op->index) * op->scale;

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

static __always_inline bool fetch_any(const struct hit *hit, const struct operand *op, __u64 *out, bool with_kernel)
{
	__u64 value = op->constant;

	if (op->kind == OPERAND_REGISTER) {
		value = register_of(hit, op->base);
	} else if (op->kind == OPERAND_UID_GID) {
		value = bpf_get_current_uid_gid();
	} else if (op->kind == OPERAND_CGROUP) {
		value = bpf_get_current_cgroup_id();
	} else if (op->kind >= OPERAND_MADE) { /* the last one; for == clang takes 8 bytes more of stack, see emit.h */
		return fetch_made(hit, op, out);
	} else if (op->kind != OPERAND_CONSTANT) {
		__u64 address = address_of(hit, op);
		__u32 width = op->width;

		if (with_kernel && op->is_kernel) {
			if (!fetch_of_kernel(op, address, out))
				return false;
			value = *out;
			goto narrow;
		}
		value = address;
		if (op->kind == OPERAND_MEMORY) {
			value = 0;
			if (width > sizeof(value) || bpf_probe_read_user(&value, width, (void *)address)) {
				*out = (address & ADDRESS_MASK) | UNREAD_OPERAND;
				return false;
			}
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
			value >>= 8 * (sizeof(value) - width) & 63;
#endif
		}
	}
narrow:
	value <<= op->left & 63;
	*out = op->is_signed ? (__u64)((__s64)value >> (op->right & 63)) : value >> (op->right & 63);
	return true;
}

/* Return whether the operand could be had; where not, out is what could not be read. */
static __always_inline bool fetch(const struct hit *hit, const struct operand *op, __u64 *out)
{
	return fetch_any(hit, op, out, true);
}

/* The same, of an operand that is not in the kernel's memory. on_hit and add() have no stack to spare, see emit.h. */
static __always_inline bool fetch_plain(const struct hit *hit, const struct operand *op, __u64 *out)
{
	return fetch_any(hit, op, out, false);
}

#endif
