"""Instruction sets: what their operands, registers and nops are, and which hosts run them.

Each has a file with its operands' syntax and its record (`record.Architecture`). `grammar` parses the argument string
of a note, `-4@%esi 8@-16(%rbp)`, into `model.Argument`s: it handles sizes and signs, which all share. An operand that
cannot be parsed becomes `Unavailable` with a reason and does not affect the others.
"""

from stapsdtd.arch.grammar import parse_arguments
from stapsdtd.arch.registry import ARCHITECTURES, why_foreign, word_bytes
from stapsdtd.arch.symbols import GLOBAL_OFFSET_TABLE, symbols_of, with_addresses

__all__ = [
    "ARCHITECTURES",
    "GLOBAL_OFFSET_TABLE",
    "parse_arguments",
    "symbols_of",
    "why_foreign",
    "with_addresses",
    "word_bytes",
]
