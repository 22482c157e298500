"""Parse the argument string of a note, `-4@%esi 8@-16(%rbp)`, into `model.Argument`s.

`grammar` splits the string and handles sizes and signs, which all architectures share; one module per architecture
handles its registers and addressing. An operand that cannot be parsed becomes `Unavailable` with a reason and does not
affect the others.
"""

from stapsdtd.arch.grammar import parse_arguments
from stapsdtd.arch.symbols import GLOBAL_OFFSET_TABLE, symbols_of, with_addresses

__all__ = ["GLOBAL_OFFSET_TABLE", "parse_arguments", "symbols_of", "with_addresses"]
