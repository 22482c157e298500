"""Names of arguments in expressions: `timeout > 0` becomes `arg4 > 0`, and the key `query` becomes `arg0:str`.

A name means the same argument of all selected probes, since there is one expression for them. What the language of
expressions calls by that name comes first.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

import click

from stapsdtd.signatures import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stapsdtd.signatures import Declared, Signature

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
        "module_path",
        "function",
        "name",
        "elapsed",
    ]
)


_ONE_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*((?::.*)?)", re.DOTALL)
"""A key that is an argument or a field, with what a capture list says of it."""
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
    """Report whether an expression may name arguments."""
    return any(name and name not in RESERVED and not _BY_POSITION.fullmatch(name) for _, name in _TOKEN.findall(text))


def key_has_names(key: str) -> bool:
    """Report whether a key may name arguments."""
    match = _ONE_NAME.fullmatch(key)
    return has_names(match[1] if match else key)


def key_by_position(key: str, signatures: Signatures, option: str = "--by") -> str:
    """Replace names of arguments in a key: `query` becomes `arg0:str`, `size / 10` `arg1 / 10`.

    A string that comes with its length becomes `str(arg0, arg1)`.
    """
    match = _ONE_NAME.fullmatch(key)
    if match is None:
        return by_position(key, signatures, option)
    name, how = match.groups()
    index = _index(name, signatures, option)
    if index is None:
        return key
    declared = [(each, each.arguments[index]) for some in signatures for each in some if each.arguments]
    if how in {"", ":str"} and any(argument.length for _, argument in declared):
        return _cut_string(name, index, {_position(each, argument.length) for each, argument in declared}, option)
    is_string = all(argument.kind is Kind.STRING for _, argument in declared)
    return f"arg{index}{how}" if how or not is_string else f"arg{index}:str"


def field_by_position(field: str, signatures: Signatures) -> str:
    """Replace names of arguments in a field of an event: `query` becomes `str(arg0)`, `size / 10` `arg1 / 10`."""
    if _ONE_NAME.fullmatch(field) is None:
        return by_position(field, signatures, "--fields")
    argument, _, how = key_by_position(field, signatures, "--fields").partition(":")
    return f"str({argument})" if how == "str" else argument


def key_meaning(key: str, signatures: Signatures) -> Declared | None:
    """Return what a key's values mean: the argument that it names, if that means the same wherever it is."""
    match = _ONE_NAME.fullmatch(key)
    if match is None or match[2] or (index := _index(match[1], signatures, "--by")) is None:
        return None
    meanings = [each.arguments[index] for some in signatures for each in some if each.arguments]
    same = all((each.kind, each.labels) == (meanings[0].kind, meanings[0].labels) for each in meanings)
    return meanings[0] if same else None


def _cut_string(name: str, index: int, lengths: set[int | None], option: str) -> str:
    """lengths: the positions of its length in each signature, None where it has none."""
    if len(lengths) > 1 or None in lengths:
        raise click.UsageError(f"{option}: the length of {name} is not the same argument of all selected probes")
    return f"str(arg{index}, arg{lengths.pop()})"


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
