"""The argument string of a note, `-4@%esi 8@-16(%rbp)`, becomes `model.Argument`s.

`grammar` splits the string and knows sizes and signs, which all architectures share; one module per
architecture knows its registers and addressing. What none of them understands becomes `Unavailable` with a
reason, so that it costs only itself.
"""

from stapsdtd.arch.grammar import parse_arguments
from stapsdtd.arch.symbols import GLOBAL_OFFSET_TABLE, symbols_of, with_addresses

__all__ = ["GLOBAL_OFFSET_TABLE", "parse_arguments", "symbols_of", "with_addresses"]
