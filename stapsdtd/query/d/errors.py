"""What is wrong with a D program."""

from __future__ import annotations

from stapsdtd.errors import StapsdtdError
from stapsdtd.query.d.nodes import Position


class DError(StapsdtdError):
    """reason: in the terms of D programmers. at: where in the program."""

    grpc_code = "INVALID_ARGUMENT"

    def __init__(self, reason: str, at: Position) -> None:
        super().__init__(f"line {at.line}, column {at.column}: {reason}")
        self.reason = reason
        self.at = at


class DSyntaxError(DError):
    """The text is no program."""
