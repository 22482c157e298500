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
 * Read memory of the process or, for a kernel function, what an address of the kernel's half points to. User space is the
 * lower half on the machines whose calling convention is known (stapsdtd/arch).
 */
static __always_inline long read_memory(const struct operand *op, void *to, __u32 size, __u64 address)
{
	return op->is_kernel && (__s64)address < 0 ? bpf_probe_read_kernel(to, size, (void *)address) :
						     bpf_probe_read_user(to, size, (void *)address);
}

static __always_inline long read_string(const struct operand *op, void *to, __u32 size, __u64 address)
{
	return op->is_kernel && (__s64)address < 0 ? bpf_probe_read_kernel_str(to, size, (void *)address) :
						     bpf_probe_read_user_str(to, size, (void *)address);
}

/* Go where the pointers at an address lead; return whether all of them could be read. */
static __always_inline bool follow(const struct operand *op, __u64 *address)
{
	for (int number = 0; number < MAX_THEN; number++) {
		__u64 pointer;

		if (number >= op->then_count)
			break;
		if (read_memory(op, &pointer, sizeof(pointer), *address))
			return false;
		*address = pointer + op->then[number];
	}
	return true;
}

/* Return whether the operand could be had; where not, out is what could not be read. */
static __always_inline bool fetch(const struct hit *hit, const struct operand *op, __u64 *out)
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

		if (op->then_count && !follow(op, &address)) {
			*out = (address & ADDRESS_MASK) | UNREAD_OPERAND;
			return false;
		}
		value = address;
		if (op->kind == OPERAND_MEMORY) {
			value = 0;
			if (width > sizeof(value) || read_memory(op, &value, width, address)) {
				*out = (address & ADDRESS_MASK) | UNREAD_OPERAND;
				return false;
			}
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
			value >>= 8 * (sizeof(value) - width) & 63;
#endif
		}
	}
	value <<= op->left & 63;
	*out = op->is_signed ? (__u64)((__s64)value >> (op->right & 63)) : value >> (op->right & 63);
	return true;
}

#endif
