"""Find members of structs and unions, those of anonymous ones within them included, as C does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stapsdtd.btf.types import Int, Member, Record, Types, stripped


def members_of(types: Types, record: Record) -> Iterator[Member]:
    """Yield every member that has a name, with its offset in the record."""
    for member in record.members:
        inner = None if member.name else stripped(types, member.type)
        if isinstance(inner, Record):
            for nested in members_of(types, inner):
                yield replace(nested, bit_offset=nested.bit_offset + member.bit_offset)
        elif member.name:
            yield with_bits(types, member)


def find_member(types: Types, record: Record, name: str) -> Member | None:
    return next((member for member in members_of(types, record) if member.name == name), None)


def with_bits(types: Types, member: Member) -> Member:
    """Return a bit field of an old compiler, whose width is its type's, as those of others are."""
    found = None if member.bits else stripped(types, member.type)
    if isinstance(found, Int) and found.bits != 8 * found.size:
        return replace(member, bit_offset=member.bit_offset + found.bit_offset, bits=found.bits)
    return member
