"""What D programs can call, with what arguments, and what they cannot call, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stapsdtd.query.byte_order import SIZES
from stapsdtd.query.d.values import UINT64, Bytes, Integer, String, Type

INT32 = Integer(32, is_signed=True)
STRING = String()


class Wanted(Enum):
    """What an argument must be. CONSTANT: an integer that is known when the program is compiled."""

    INTEGER = "an integer"
    STRING = "a string"
    SCALAR = "an integer or a string"
    CONSTANT = "an integer constant"
    MEMORY = "what copyin() has copied"
    FORMAT = "a string constant"
    AGGREGATION = "an aggregation"


_LETTERS = {
    "i": Wanted.INTEGER,
    "s": Wanted.STRING,
    "x": Wanted.SCALAR,
    "c": Wanted.CONSTANT,
    "m": Wanted.MEMORY,
    "f": Wanted.FORMAT,
    "@": Wanted.AGGREGATION,
}


@dataclass(frozen=True, slots=True)
class Callable:
    """result: None of actions, and of functions of aggregations. least: how many arguments are needed. rest: what
    further ones must be, None if there are none.
    """

    wanted: tuple[Wanted, ...]
    least: int
    result: Type | None = None
    rest: Wanted | None = None

    @property
    def most(self) -> int | None:
        return len(self.wanted) if self.rest is None else None


def _callable(arguments: str, result: Type | None = None, rest: str = "") -> Callable:
    """arguments: a letter for each; those behind a blank may be left out."""
    needed, _, optional = arguments.partition(" ")
    wanted = tuple(_LETTERS[letter] for letter in needed + optional)
    return Callable(wanted, len(needed), result, _LETTERS[rest] if rest else None)


FUNCTIONS = {
    "copyinstr": _callable("i i", STRING),
    "copyin": _callable("ic", Bytes()),
    "stringof": _callable("x", STRING),
    "strlen": _callable("s", UINT64),
    "strjoin": _callable("ss", STRING),
    "substr": _callable("si i", STRING),
    "index": _callable("ss i", INT32),
    "strstr": _callable("ss", STRING),
    "basename": _callable("s", STRING),
    "dirname": _callable("s", STRING),
    **{name: _callable("i", Integer(8 * size, is_signed=False)) for name, size in SIZES.items()},
}
ACTIONS = {
    "trace": _callable("x"),
    "printf": _callable("f", rest="x"),
    "printa": _callable("", rest="@"),
    "exit": _callable("i"),
    "tracemem": _callable("mc i"),
    "clear": _callable("@"),
    "trunc": _callable("@ i"),
    "normalize": _callable("@i"),
    "denormalize": _callable("@"),
}
AGGREGATING = {
    "count": _callable(""),
    **{name: _callable("i") for name in ("sum", "avg", "min", "max", "stddev")},
    "quantize": _callable("i i"),
    "lquantize": _callable("icc ci"),
    "llquantize": _callable("icccc i"),
}
_STACKS = "stacks are not captured yet"
_DESTRUCTIVE = "actions that change what is traced are never allowed"
_NOT_THERE = "it is not supported"
REFUSED = {
    **dict.fromkeys(("stack", "ustack", "jstack", "uaddr", "usym", "umod", "ufunc"), _STACKS),
    **dict.fromkeys(
        ("stop", "raise", "system", "copyout", "copyoutstr", "freopen", "breakpoint", "panic", "chill", "pcap"),
        _DESTRUCTIVE,
    ),
    **dict.fromkeys(
        ("speculation", "speculate", "commit", "discard", "print", "ftruncate", "setopt", "progenyof",
         "alloca", "bcopy", "rand", "mutex_owned", "getmajor", "getminor", "ddi_pathname", "msgsize"),
        _NOT_THERE,
    ),
}  # fmt: skip
BUILT_INS: dict[str, Type] = {
    **dict.fromkeys(("pid", "tid", "cpu"), INT32),
    **dict.fromkeys(("uid", "gid", "id"), Integer(32, is_signed=False)),
    **dict.fromkeys(("execname", "probeprov", "probemod", "probefunc", "probename"), STRING),
    "timestamp": UINT64,
    "walltimestamp": Integer(64, is_signed=True),
    **{f"arg{number}": Integer(64, is_signed=True) for number in range(10)},
}
REFUSED_VARIABLES = {
    "ppid": "the kernel's record of a hit does not tell it",
    "vtimestamp": "the kernel's record of a hit does not tell it",
    **dict.fromkeys(("stackdepth", "ustackdepth", "ucaller", "caller"), _STACKS),
    **dict.fromkeys(("curthread", "curproc", "curpsinfo", "curlwpsinfo", "curcpu", "uregs"),
                    "kernel memory and registers are not read; execname, pid, tid, uid, gid and cpu are known"),
    **dict.fromkeys(("errno", "ipl", "epid", "zonename", "cwd", "root", "uthread"), _NOT_THERE),
}  # fmt: skip
