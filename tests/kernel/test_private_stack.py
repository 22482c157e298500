"""The program keeps to the task's stack, in the machine code that the kernel made of it.

Since Linux 6.13 a program may get a stack of the CPU's instead, which another hit on that CPU would overwrite. Where
the code is x86-64's, such a stack's address is in r9, which is used for nothing else (arch/x86/net/bpf_jit_comp.c).
"""

from __future__ import annotations

import ctypes
import platform
import struct
import subprocess
from pathlib import Path

import pytest

from bpf.build import SOURCE, build
from stapsdtd.capture.bpf.kernel import Loaded
from tests.support import require

pytestmark = pytest.mark.kernel

SYSCALL_BPF = 321
GET_INFO_BY_FD = 15
CALLS = (
    "KEEP_TO_THE_STACK_OF_THE_TASK(registers, no_programs);",
    "KEEP_TO_THE_STACK_OF_THE_TASK(registers, no_linked_programs);",
)


def machine_code(program: int) -> bytes:
    """What struct bpf_prog_info has of it: jited_prog_len at 16, jited_prog_insns at 32."""
    library = ctypes.CDLL(None, use_errno=True)

    def info(room: ctypes.Array[ctypes.c_char] | None) -> int:
        found = ctypes.create_string_buffer(256)
        if room is not None:
            struct.pack_into("<I", found, 16, len(room))
            struct.pack_into("<Q", found, 24, ctypes.addressof(room))
        attributes = ctypes.create_string_buffer(struct.pack("<IIQ", program, len(found), ctypes.addressof(found)))
        assert not library.syscall(SYSCALL_BPF, GET_INFO_BY_FD, attributes, 16), ctypes.get_errno()
        return int(struct.unpack_from("<I", found, 16)[0])

    code = ctypes.create_string_buffer(info(None))
    assert info(code) == len(code)
    return code.raw


def uses_of_r9(object_path: Path, tmp_path: Path) -> list[int]:
    """What each of the programs that run at hits has."""
    loaded = Loaded(str(object_path))
    try:
        codes = [machine_code(program) for program in (loaded.program, loaded.linked_program) if program is not None]
    finally:
        loaded.close()
    return [_uses_of_r9(code, tmp_path) for code in codes]


def _uses_of_r9(code: bytes, tmp_path: Path) -> int:
    (tmp_path / "code").write_bytes(code)
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", str(tmp_path / "code")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "%rbp" in listing
    return sum("%r9" in line for line in listing.splitlines())


def test_hits_run_on_the_stack_of_the_task(tmp_path: Path) -> None:
    require(platform.machine() == "x86_64", "machine code that this test reads")
    built, without = tmp_path / "built.o", tmp_path / "without.c"
    build(built)
    assert not any(uses_of_r9(built, tmp_path))
    source = SOURCE.read_text()
    for call in CALLS:
        assert source.count(call) == 1
        source = source.replace(call, "")
    without.write_text(source)
    build(tmp_path / "without.o", without)
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    # that there is something to be seen where the kernel gives private stacks
    assert all((uses > 0) == (release >= (6, 13)) for uses in uses_of_r9(tmp_path / "without.o", tmp_path))
