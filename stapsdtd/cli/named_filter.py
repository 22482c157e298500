"""Names of arguments in filters and keys: `timeout > 0` becomes `arg4 > 0`, `query` becomes `arg0:str`.

A name means the same argument of all selected probes, since there is one filter for them. What the language of filters
calls by that name comes first.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

import click

from stapsdtd.signatures import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stapsdtd.signatures import Signature

_TOKEN = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[0-9]\w*)|([A-Za-z_]\w*)(?!\w*\s*\()""", re.DOTALL)
"""A string or a number, or a name, which is not that of a function."""
RESERVED = frozenset(
    [
        "pid",
        "tid",
        "uid",
        "gid",
        "execname",
        "comm",
        "cgroup",
        "container",
        "cpu",
        "timestamp",
        "provider",
        "module",
        "function",
        "name",
        "elapsed",
    ]
)


_BY_POSITION = re.compile(r"arg\d+")

Signatures: TypeAlias = "Sequence[Sequence[Signature]]"
"""Those that each selector's probe may have; none for a selector whose probe's arguments are not known."""


def by_position(text: str, signatures: Signatures, option: str = "--where") -> str:
    """Replace names of arguments in an expression, which is the option's value."""

    def replaced(match: re.Match[str]) -> str:
        index = _index(match[2], signatures, option) if match[2] else None
        return match[0] if index is None else f"arg{index}"

    return _TOKEN.sub(replaced, text)


def has_names(text: str) -> bool:
    """Report whether a filter, or a key without its type, may name arguments."""
    return any(name and name not in RESERVED and not _BY_POSITION.fullmatch(name) for _, name in _TOKEN.findall(text))


def key_by_position(key: str, signatures: Signatures) -> str:
    """Replace the name of an argument that is a key: `query` becomes `arg0:str`."""
    name, colon, how = key.partition(":")
    index = _index(name.strip(), signatures, "--by")
    if index is None:
        return key
    declared = [each.arguments[index] for some in signatures for each in some if each.arguments]
    if any(each.length for each in declared):
        raise click.UsageError(
            f"--by: {name} is not terminated; its length is another argument, so that it cannot be a key"
        )
    is_string = all(each.kind is Kind.STRING for each in declared)
    return f"arg{index}{colon}{how}" if colon or not is_string else f"arg{index}:str"


def _index(name: str, signatures: Signatures, option: str) -> int | None:
    """Return which argument a name means, None if it means none."""
    if name in RESERVED:
        return None
    indexes = {_position(each, name) for some in signatures for each in some} | {
        None for some in signatures if not some
    }
    if len(indexes) > 1:
        raise click.UsageError(
            f"{option}: {name} is not the same argument of all selected probes; take them apart, or write arg0"
        )
    return indexes.pop()


def _position(signature: Signature, name: str) -> int | None:
    arguments = signature.arguments or ()
    return next((index for index, declared in enumerate(arguments) if declared.name == name), None)
