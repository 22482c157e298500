"""Check that there is a `nop` at a note's location, and determine its length.

A uprobe overwrites the instruction at its address. In the middle of another instruction that would corrupt the traced
program, so a note is accepted only if the file has a `nop` there. What the kernel does to an armed nop may depend on
its length (`kernel.nops`).
"""

from __future__ import annotations

from typing import NamedTuple

from stapsdtd.arch import ARCHITECTURES
from stapsdtd.elf.notes import UnusableNoteError


class Nop(NamedTuple):
    """A nop's length in bytes, and why no kernel can patch it, if so."""

    length: int
    refused: str | None = None


def nop_at(architecture: str, code: bytes) -> Nop:
    """Return the nop that code begins with. Raises UnusableNoteError if there is none.

    code: LONGEST_NOP_BYTES of the file at the location, or fewer at the segment's end.
    """
    known = ARCHITECTURES.get(architecture)
    if known is None:
        raise UnusableNoteError(f"the nop of {architecture} is unknown, so a probe could corrupt the program")
    if 0 < (length := known.nop_length(code)) <= len(code):
        return Nop(length)
    if known.unpatchable_nop_length and (length := known.unpatchable_nop_length(code)):
        return Nop(length, known.why_unpatchable)
    raise UnusableNoteError(f"no nop at the location: bytes {code[:8].hex(' ') or 'missing'}")
