"""Options of programs: `#pragma D option NAME=VALUE`, or `-x NAME=VALUE`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from stapsdtd.model import MAX_STRING_BYTES
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.nodes import Option
from stapsdtd.query.d.print_aggregations import Sorting
from stapsdtd.query.d.values import STRING_BYTES

_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"(\d{1,15})([kmgt]?)", re.IGNORECASE)
_RATE = re.compile(r"(\d{1,9})(ns|us|ms|s|sec|hz)?")
_FLAGS = frozenset(["quiet", "defaultargs", "aggsortkey", "aggsortrev", "zdefs"])
_NUMBERS = frozenset(["aggsortpos", "aggsortkeypos"])
_IGNORED = frozenset(
    [
        *("bufsize", "aggsize", "dynvarsize", "specsize", "nspec", "bufpolicy", "bufresize"),
        *("switchrate", "aggrate", "statusrate", "cleanrate", "cpu", "amin", "linkmode"),
        *("stackframes", "ustackframes", "jstackframes", "jstackstrsize"),
    ]
)
_PREPROCESSOR = "no preprocessor is run; give what it makes of the program"
_REFUSED = {
    "destructive": "programs that change what is traced are never allowed",
    "flowindent": "hits are not indented by the calls that they are in; print them in order",
    **dict.fromkeys(("cpp", "cppargs", "cpphdrs", "cpppath", "define", "incdir", "stdc", "undef"), _PREPROCESSOR),
    **dict.fromkeys(("libdir", "nolibs", "syslibdir"), "there are no D libraries; put what you need into the program"),
    **dict.fromkeys(("grabanon", "grabanonymous"), "programs run only while the command does"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """string_bytes: of a string, with the NUL."""

    is_quiet: bool = False
    has_default_arguments: bool = False
    allows_no_match: bool = False
    sorting: Sorting = field(default_factory=Sorting)
    string_bytes: int = STRING_BYTES


def options_of(options: Iterable[Option]) -> Options:
    """Raises DError."""
    flags: set[str] = set()
    numbers = dict.fromkeys(_NUMBERS, 0)
    string_bytes = STRING_BYTES
    for option in options:
        name = option.name
        if name in _FLAGS and (not option.value or option.value.isdigit()):
            flags.add(name)
        elif name in _NUMBERS and option.value.isdigit():
            numbers[name] = int(option.value)
        elif name == "strsize":
            string_bytes = _string_bytes(option)
        elif name in _IGNORED:
            # of DTrace's buffers, which the daemon has its own of
            _check_size(option)
        elif reason := _REFUSED.get(name):
            raise DError(f"option {name}: {reason}", option.at)
        else:
            value = f"={option.value}" if option.value else ""
            raise DError(f"invalid option or value: {name}{value}", option.at)
    return Options(
        "quiet" in flags,
        "defaultargs" in flags,
        "zdefs" in flags,
        Sorting("aggsortkey" in flags, "aggsortrev" in flags, numbers["aggsortpos"], numbers["aggsortkeypos"]),
        string_bytes,
    )


def _string_bytes(option: Option) -> int:
    match = _SIZE.fullmatch(option.value)
    size = int(match[1]) << _SHIFTS[match[2].lower()] if match else 0
    if not 0 < size <= MAX_STRING_BYTES:
        raise DError(
            f"invalid value for option strsize: {option.value}; strings have 1 to {MAX_STRING_BYTES} bytes", option.at
        )
    return size


def _check_size(option: Option) -> None:
    value = option.value
    if value and not (_SIZE.fullmatch(value) or _RATE.fullmatch(value) or value.isalpha()):
        raise DError(f"invalid value for option {option.name}: {value}", option.at)
