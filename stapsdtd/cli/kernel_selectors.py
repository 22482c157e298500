"""What `stapsdt kernel trace` is asked for: functions, values of them, and conditions on values.

vfs_read                                  all arguments, and the result
vfs_read(count > 4096, file->f_pos)       at the entry, of calls whose count is larger
openat2(str(filename), return < 0)        arguments of calls that failed
f(ntohs(sk->__sk_common.skc_dport) == 443)  a number in network byte order
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import click

from stapsdtd.query.byte_order import SIZES

RESULT = "return"

_PATH = r"[A-Za-z_]\w*+(?:\s*+(?:(?:->|\.)\s*[A-Za-z_]\w*+|\[\s*\w+\s*\]))*+"
_FUNCTIONS = "|".join(["str", *SIZES])
_VALUE = re.compile(
    rf"\s*(?:(?P<function>{_FUNCTIONS})\(\s*(?P<inner>{_PATH})\s*\)|(?P<path>{_PATH}))\s*"
    r"(?P<test>(?:[=!<>]=|[<>~&]).*)?"
)
_HEAD = re.compile(r"(?P<function>[^\s()]+)\s*+(?:\((?P<values>.*)\))?", re.DOTALL)
_QUOTE, _OPEN, _CLOSE = '"', "([", ")]"


@dataclass(frozen=True, slots=True)
class TracedValue:
    """path: an argument or `return`, and members of it. is_string: it points to a string. test: an operator with what
    the value is compared to, such as `< 0`; empty to show all. turned: the function of `query.byte_order` that is made
    of it, or empty.
    """

    path: str
    is_string: bool = False
    test: str = ""
    turned: str = ""

    @property
    def name(self) -> str:
        """What it is called where it is shown."""
        return f"{self.turned}({self.path})" if self.turned else self.path

    @property
    def is_of_return(self) -> bool:
        return re.match(r"\w+", self.path)[0] == RESULT  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """name: NAME or MODULE:NAME, which may be globs without values. values: None for all arguments, and the result."""

    text: str
    name: str
    values: tuple[TracedValue, ...] | None = None

    @property
    def is_glob(self) -> bool:
        return any(mark in self.name for mark in "*?[")


def parse(text: str) -> TracedFunction:
    """Raises click.UsageError."""
    head = _HEAD.fullmatch(text.strip())
    if head is None:
        _refuse(text, "write FUNCTION or FUNCTION(VALUE, ...)")
    if head["values"] is None:
        return TracedFunction(text, head["function"])
    return TracedFunction(text, head["function"], tuple(_value(text, part) for part in _split(head["values"])))


def _value(text: str, part: str) -> TracedValue:
    found = _VALUE.fullmatch(part)
    if found is None:
        _refuse(text, f"{part.strip()!r} is no value: write an argument or return, members of it, and a comparison")
    function = found["function"] or ""
    path = re.sub(r"\s+", "", found["inner"] or found["path"])
    is_string = function == "str"
    return TracedValue(path, is_string, (found["test"] or "").strip(), "" if is_string else function)


def _split(values: str) -> Iterator[str]:
    """Divide at the commas that are outside of quotes and parentheses."""
    depth, is_quoted, begin = 0, False, 0
    for at, character in enumerate(values):
        if character == _QUOTE:
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (character in _OPEN) - (character in _CLOSE)
            if character == "," and not depth:
                yield values[begin:at]
                begin = at + 1
    yield values[begin:]


def _refuse(text: str, reason: str) -> NoReturn:
    raise click.UsageError(f"{text}: {reason}")
