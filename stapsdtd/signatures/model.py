"""Signatures as data, and whether a site's note contradicts one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

_ADDRESS_BYTES = {"arm": 4, "i386": 4, "x32": 4}
"""Of the architectures where it is not 8."""
_INTEGER_BYTES = frozenset({1, 2, 4, 8})
_CONSTANT = "$-0123456789"


class Kind(Enum):
    """What a value is, as files spell it. INTEGER: of any size, or of the one that a Declared says."""

    STRING = "string"
    POINTER = "pointer"
    INTEGER = "integer"
    BOOL = "bool"
    FLOAT = "float"
    ENUM = "enum"
    FLAGS = "flags"
    DURATION = "duration"


@dataclass(frozen=True, slots=True)
class Declared:
    """A declared argument. text: as in the file, `string(length) class_name`.

    length: the name of the argument that says how many bytes a string has; empty if it ends with a NUL. size: of an
    integer in bytes, None for any. labels: the names of an enum's values or of flags' bits. unit_ns: of a duration.
    """

    name: str
    kind: Kind
    text: str
    length: str = ""
    size: int | None = None
    labels: Mapping[int, str] = field(default_factory=dict)
    unit_ns: int = 0


@dataclass(frozen=True, slots=True)
class Signature:
    """What is known of one probe, or of all probes that a glob matches.

    arguments: None if they differ, or are not known. notes: when it fires, each with the glob of the probes that it is
    about. ends_with: the probe that fires when what this one begins is over, in the same thread. versions: of the
    provider, for which that was checked. frequent: it fires at each line, call or object of a program.
    latest: what it begins is over, also without an end, when it fires again in the same thread.
    """

    provider: str
    name: str
    text: str
    arguments: tuple[Declared, ...] | None
    notes: tuple[tuple[str, str], ...]
    ends_with: str
    source: str
    versions: str
    frequent: bool = False
    latest: bool = False


class NoteArgument(Protocol):
    """An argument as a note declares it: `8@%rdi` is text, and size is in bytes."""

    @property
    def text(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def is_float(self) -> bool: ...


def contradiction(signature: Signature, arguments: Sequence[NoteArgument], architecture: str) -> str | None:
    """Return how a site's arguments contradict a signature; None if they do not."""
    if signature.arguments is None:
        return None
    expected, found = len(signature.arguments), len(arguments)
    if expected != found:
        return f"the probe has {found} argument{'' if found == 1 else 's'}, and the signature {expected}"
    for index, (declared, argument) in enumerate(zip(signature.arguments, arguments, strict=True)):
        if not _is_of_kind(declared, argument, _ADDRESS_BYTES.get(architecture, 8)):
            return f"arg{index} is {argument.text}, which cannot be {declared.text}"
    return None


def _is_of_kind(declared: Declared, argument: NoteArgument, address_bytes: int) -> bool:
    if declared.kind is Kind.FLOAT:
        return argument.is_float
    if argument.is_float:
        return False
    if declared.kind in {Kind.STRING, Kind.POINTER}:
        return argument.size == address_bytes
    # a literal in the program's text has the size of an int, whatever the probe declares
    is_constant = argument.text.partition("@")[2][:1] in _CONSTANT
    if declared.size is not None and not is_constant:
        return argument.size == declared.size
    return argument.size in _INTEGER_BYTES
