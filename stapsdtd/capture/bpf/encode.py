"""Values and tests as the program in bpf/stapsdt.bpf.c reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stapsdtd.capture.bpf.layout import JUMP_END, JUMP_EXCLUDE, OPERAND, TEST, OperandKind, Take
from stapsdtd.model import Argument, Constant, Memory, Register, Unavailable
from stapsdtd.plan.values import Value
from stapsdtd.predicates.program import ACCEPT, REJECT, Program, Source

Rows = npt.NDArray[np.void]

_X86_64 = {
    "r15": 0, "r14": 1, "r13": 2, "r12": 3, "rbp": 4, "rbx": 5, "r11": 6, "r10": 7, "r9": 8, "r8": 9, "rax": 10,
    "rcx": 11, "rdx": 12, "rsi": 13, "rdi": 14, "rip": 16, "rsp": 19,
}  # fmt: skip
_REGISTERS = {"x86-64": _X86_64}
"""Places in struct pt_regs, in words (arch/x86/include/uapi/asm/ptrace.h)."""

_ZERO = 0xFF
"""Any place beyond the registers reads as 0."""

_BITS = 64


class NotEncodableError(Exception):
    """An operand that the program cannot fetch; its text says why."""


def encode_value(value: Value, architecture: str) -> bytes:
    """Raises NotEncodableError."""
    row = np.zeros(1, OPERAND)
    row["base"] = row["index"] = _ZERO
    if value.is_string:
        row["take"], row["limit"] = Take.STRING, value.limit + 1
    elif value.is_text:
        row["take"], row["limit"] = Take.BYTES, value.limit
    _encode_operand(row, value.argument, architecture, is_address=value.is_text and not value.is_string)
    return row.tobytes()


def _encode_operand(row: Rows, argument: Argument, architecture: str, *, is_address: bool) -> None:
    unused = _BITS - 8 * argument.size
    match argument.operand:
        case Constant(value):
            row["kind"], row["constant"] = OperandKind.CONSTANT, value % (1 << _BITS)
        case Register(name, first_bit):
            row["kind"], row["base"] = OperandKind.REGISTER, _register(name, architecture)
            row["left"], row["right"], row["is_signed"] = unused - first_bit, unused, argument.signed
        case Memory(base, displacement):
            row["kind"] = OperandKind.ADDRESS if is_address else OperandKind.MEMORY
            row["base"], row["constant"] = _register(base, architecture), displacement % (1 << _BITS)
            if not is_address:
                row["width"] = argument.size
                row["left"], row["right"], row["is_signed"] = unused, unused, argument.signed
        case Unavailable(reason):
            raise NotEncodableError(reason)


def _register(name: str, architecture: str) -> int:
    place = _REGISTERS.get(architecture, {}).get(name)
    if place is None:
        raise NotEncodableError(f"%{name} is no register of {architecture} that the kernel saves at a probe")
    return place


@dataclass(frozen=True, slots=True)
class Filter:
    """What a subscription wants of a site's hits, beyond which processes are armed.

    pids: None for all. excluded: processes whose hits are as if they had never been. program: None for all.
    """

    pids: frozenset[int] | None
    excluded: frozenset[int]
    program: Program | None

    @property
    def accepts_all(self) -> bool:
        return self.pids is None and not self.excluded and (self.program is None or self.program.start == ACCEPT)

    @property
    def steps(self) -> int:
        """Answer how many tests it takes at most."""
        return len(self.pids or ()) + len(self.excluded) + (len(self.program.tests) if self.program else 0)


def encode_filters(filters: Sequence[tuple[int, Filter]], places: dict[int, int]) -> bytes:
    """Lay out the tests of several filters, each with its bit, one behind the other.

    places: where an argument's operand is among the plan's.
    """
    rows: list[Rows] = []
    for number, (bit, wanted) in enumerate(filters):
        own = _filter(wanted, len(rows), places)
        end = JUMP_END if number == len(filters) - 1 else len(rows) + len(own)
        for row in own:
            row["filter"], row["next_filter"] = bit, end
        rows += own
    return b"".join(row.tobytes() for row in rows)


def _filter(wanted: Filter, first: int, places: dict[int, int]) -> list[Rows]:
    """Exclusions, then the scope, then the predicate; each stage begins behind the one before."""
    rows = [_pid_test(pid, JUMP_EXCLUDE, first + number + 1) for number, pid in enumerate(sorted(wanted.excluded))]
    program = wanted.program or Program((), ACCEPT)
    if wanted.pids is not None:
        pids = sorted(wanted.pids)
        behind = first + len(rows) + len(pids)
        accepted = _jump(program.start, behind)
        for number, pid in enumerate(pids):
            is_last = number == len(pids) - 1
            rows.append(_pid_test(pid, accepted, REJECT if is_last else first + len(rows) + 1))
    elif rows:
        rows[-1]["on_false"] = _jump(program.start, first + len(rows))
    start = first + len(rows)
    for test in program.tests:
        row = np.zeros(1, TEST)
        row["source"], row["relation"], row["mask"], row["value"] = test.source, test.relation, test.mask, test.value
        row["index"] = places[test.index] if test.source is Source.ARGUMENT else test.index
        row["comm"] = np.frombuffer(test.comm.ljust(16, b"\0"), "u8")
        row["on_true"], row["on_false"] = _jump(test.on_true, start), _jump(test.on_false, start)
        rows.append(row)
    if not rows:
        rows.append(_pid_test(0, program.start, program.start))
    return rows


def _jump(target: int, start: int) -> int:
    return target if target in {ACCEPT, REJECT} else start + target


def _pid_test(pid: int, on_true: int, on_false: int) -> Rows:
    row = np.zeros(1, TEST)
    row["source"], row["mask"], row["value"] = Source.PID, (1 << _BITS) - 1, pid
    row["on_true"], row["on_false"] = on_true, on_false
    return row
