"""The filter, run by a small interpreter of its own instructions."""

from __future__ import annotations

import errno
import struct

import pytest

from stapsdtd.sandbox import seccomp

ALLOW, KILL, EPERM = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM
X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003


def run(machine: str, arch: int, number: int, *arguments: int) -> int:
    program = seccomp.program(machine)
    assert program is not None
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        code, if_true, if_false, value = instructions[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return int(value)
        else:
            test = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += if_true if test else if_false


@pytest.mark.parametrize(
    ("machine", "arch", "allowed", "refused", "mapping"),
    [
        # read, recvmsg, exit_group | write, open, ioctl, socket, clone, execve, ptrace, prctl, openat, io_uring_setup
        ("x86_64", X86_64, (0, 47, 231), (1, 2, 16, 41, 56, 59, 101, 157, 257, 425), (9, 10)),
        ("aarch64", AARCH64, (63, 212, 94), (64, 29, 198, 220, 221, 117, 167, 56, 425), (222, 226)),
    ],
)
def test_filter(
    machine: str, arch: int, allowed: tuple[int, ...], refused: tuple[int, ...], mapping: tuple[int, ...]
) -> None:
    assert {run(machine, arch, number) for number in allowed} == {ALLOW}
    assert {run(machine, arch, number) for number in refused} == {EPERM}
    for number in mapping:
        assert run(machine, arch, number, 0, 4096, 3) == ALLOW
        assert run(machine, arch, number, 0, 4096, 5) == EPERM
    assert run(machine, I386, allowed[0]) == KILL
    assert run(machine, arch, 0x40000000) == KILL


def test_unknown_machine() -> None:
    assert seccomp.program("pdp11") is None
