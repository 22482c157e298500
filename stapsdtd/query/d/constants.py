"""What expressions come to without a hit."""

from __future__ import annotations

from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.evaluate import Compiler
from stapsdtd.query.d.machine import Fault, Frame, Hit, Variables
from stapsdtd.query.d.nodes import Binary, Cast, Conditional, Expression, Integer, Unary, walk


def constant(expression: Expression, checked: Checked) -> int | None:
    """Return the number that an expression of constants is, such as `(7 - 7) * 999`; None of others.

    checked: has the types of its parts.
    """
    if not all(isinstance(node, Integer | Unary | Binary | Conditional | Cast) for node, _ in walk(expression)):
        return None
    frame = Frame(Hit(0, "", "", "", ""), Variables(), {})
    try:
        value = Compiler(checked).compiled(expression)(frame)
    except Fault:
        return None
    return value if isinstance(value, int) else None
