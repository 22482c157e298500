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
	value <<= op->left & 63;
	*out = op->is_signed ? (__u64)((__s64)value >> (op->right & 63)) : value >> (op->right & 63);
	return true;
}

#endif
