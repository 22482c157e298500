"""A program of 555 bytes that arms two of its own nops, executes them, and reports what the kernel made of them.

    0x400000  ELF header, program header
    0x400078  two struct perf_event_attr: uprobes at five and at ten of this same file
    0x400178  /proc/self/exe
    0x400188          sub     $32, %rsp
                      xor     %ebx, %ebx
              open:   mov     %ebx, %edi              # perf_event_open(attributes, 0, -1, -1, PERF_FLAG_FD_CLOEXEC)
                      shl     $7, %edi
                      add     $0x400078, %edi
                      xor     %esi, %esi
                      mov     $-1, %edx
                      mov     $-1, %r10d
                      mov     $8, %r8d
                      mov     $298, %eax
                      syscall
                      mov     %eax, (%rsp,%rbx,4)
                      inc     %ebx
                      cmp     $2, %ebx
                      jb      open
                      mov     $3, %ebx
              five:   .byte   0x0f, 0x1f, 0x44, 0, 0
              ten:    .byte   0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0
                      dec     %ebx
                      jnz     five
                      mov     five, %rax
                      mov     %rax, 8(%rsp)
                      mov     five + 8, %rax
                      mov     %rax, 16(%rsp)
                      mov     $1, %edi                # write(1, both results and the nops' present bytes, 24)
                      mov     %rsp, %rsi
                      mov     $24, %edx
                      mov     $1, %eax
                      syscall
                      mov     $336, %eax              # uprobe(), last: a seccomp filter may kill the program for it
                      syscall
                      mov     %rax, (%rsp)
                      mov     $1, %edi                # write(1, its result, 8)
                      mov     %rsp, %rsi
                      mov     $8, %edx
                      mov     $1, %eax
                      syscall
                      xor     %edi, %edi              # exit(0)
                      mov     $60, %eax
                      syscall

The events use perf's uprobe PMU and are for this process alone: they do not appear in tracefs, no other process maps
the file, and everything goes when the process exits.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import subprocess
from collections.abc import Iterator, Mapping

_log = logging.getLogger(__name__)

LOAD_VADDR = 0x400000
_FILE_HEADER = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_ATTRIBUTES = struct.Struct("<II8xQ32xQQ56x")
"""The first 128 bytes of struct perf_event_attr, with type, size, sample_period, uprobe_path and probe_offset."""
_ATTRIBUTES_AT = _FILE_HEADER.size + _PROGRAM_HEADER.size
_PATH_AT = _ATTRIBUTES_AT + 2 * _ATTRIBUTES.size
_PATH = b"/proc/self/exe".ljust(16, b"\0")
CODE_AT = _PATH_AT + len(_PATH)
CODE = bytes.fromhex(
    "4883ec2031db89dfc1e70781c77800400031f6baffffffff41baffffffff41b808000000b82a0100000f0589049cffc3"
    "83fb0272d1bb030000000f1f440000662e0f1f840000000000ffcb75ed488b0425c20140004889442408488b0425ca01"
    "40004889442410bf010000004889e6ba18000000b8010000000f05b8500100000f0548890424bf010000004889e6ba08"
    "000000b8010000000f0531ffb83c0000000f05"
)
NOPS = {5: bytes.fromhex("0f1f440000"), 10: bytes.fromhex("662e0f1f840000000000")}
_NOPS_AT = CODE_AT + CODE.index(b"".join(NOPS.values()))
_BREAKPOINT = b"\xcc"

REPORT = struct.Struct("<2i5s10sx")
_SYSCALL_RESULT = struct.Struct("<q")

_ENOTSUPP = 524
"""Kernel-internal errno (include/linux/errno.h): uprobes do not support the instruction."""

_MFD_EXEC = 0x10
"""Since Linux 6.3. On older kernels every memfd is executable, and the flag is EINVAL."""

_NO_PMU = 0xFFFFFFFF
_PMU_TYPE = "/sys/bus/event_source/devices/uprobe/type"
_SECONDS = 1.0


def program(pmu_type: int) -> bytes:
    """Return the program as an ELF file. pmu_type: this kernel's type number for perf's uprobe PMU."""
    size = CODE_AT + len(CODE)
    content = _FILE_HEADER.pack(
        *(b"\x7fELF", 2, 1, 1, 0, 0),  # 64 bits, little-endian, ELF version, System V ABI and its version
        *(2, 62, 1, LOAD_VADDR + CODE_AT, _FILE_HEADER.size, 0, 0),  # ET_EXEC, x86-64
        *(_FILE_HEADER.size, _PROGRAM_HEADER.size, 1, 0, 0, 0),
    )
    content += _PROGRAM_HEADER.pack(1, 5, 0, LOAD_VADDR, LOAD_VADDR, size, size, 0x1000)  # PT_LOAD, R X
    offset = _NOPS_AT
    for nop in NOPS.values():
        content += _ATTRIBUTES.pack(pmu_type, _ATTRIBUTES.size, 1, LOAD_VADDR + _PATH_AT, offset)
        offset += len(nop)
    return content + _PATH + CODE


def run(pmu_type_path: str = _PMU_TYPE, seconds: float = _SECONDS) -> tuple[Mapping[int, bool], int | None]:
    """Return whether this kernel rewrites nops, by their length in bytes, and the syscall's errno.

    A length is missing if no probe could be placed there; the errno is None if unknown: security policy may keep the
    program from starting, kill it or block it.
    """
    try:
        with open(pmu_type_path, encoding="ascii") as file:
            pmu_type = int(file.read())
    except (OSError, ValueError):
        # no such PMU before Linux 4.17; the syscall is still worth trying
        pmu_type = _NO_PMU
    return _run(pmu_type, seconds)


def syscall_errno(seconds: float = _SECONDS) -> int | None:
    """Return the syscall's errno as run() does, without arming anything.

    Closing a probe takes event_mutex and a grace period, which another tracer's program can delay for long.
    """
    return _run(_NO_PMU, seconds)[1]


def _run(pmu_type: int, seconds: float) -> tuple[Mapping[int, bool], int | None]:
    try:
        return parse(output_of(program(pmu_type), seconds))
    except OSError as error:
        _log.debug("cannot run the nop trial: %s", error)
        return {}, None


def parse(output: bytes) -> tuple[Mapping[int, bool], int | None]:
    """Parse the program's output, possibly truncated, into the result of `run`."""
    if len(output) < REPORT.size:
        return {}, None
    *results, five, ten = REPORT.unpack_from(output)
    rewritten = {}
    for (length, nop), result, code in zip(NOPS.items(), results, (five, ten), strict=True):
        if result == -_ENOTSUPP:
            rewritten[length] = False
        # still the nop if the probe was not placed there
        elif result >= 0 and code != nop:
            rewritten[length] = code != _BREAKPOINT + nop[1:]
    if len(output) != REPORT.size + _SYSCALL_RESULT.size:
        return rewritten, None
    syscall_result: int = _SYSCALL_RESULT.unpack_from(output, REPORT.size)[0]
    return rewritten, -syscall_result if syscall_result < 0 else None


def output_of(content: bytes, seconds: float) -> bytes:
    """Run a program, given as its ELF file, and kill it after a timeout. Raises OSError if it cannot be executed."""
    with _in_memory(content) as descriptor:
        return _execute(descriptor, seconds)


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """Put content into an executable memfd. Raises OSError if the host forbids that (vm.memfd_noexec)."""
    try:
        descriptor = os.memfd_create("stapsdt-nops", os.MFD_CLOEXEC | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create("stapsdt-nops", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)


def _execute(descriptor: int, seconds: float) -> bytes:
    process = subprocess.Popen(
        ["stapsdt-nops"],
        executable=f"/proc/self/fd/{descriptor}",
        pass_fds=(descriptor,),
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            # a process blocked in the kernel cannot be killed, so do not wait for it
            _log.warning("process %d, the nop trial, is stuck in the kernel and was left behind", process.pid)
            return b""
