"""A program of 235 bytes that executes two nops, and reports what the kernel made of them while they were armed.

    0x400000  ELF header, program header
    0x400078
                      sub     $16, %rsp
                      xor     %ebx, %ebx              # passes
              report: mov     $1, %edi                # write(1, the nops' present bytes, 15)
                      mov     $five, %esi
                      mov     $15, %edx
                      mov     $1, %eax
                      syscall
                      cmp     $3, %ebx
                      je      ask
                      test    %ebx, %ebx
                      jnz     five
                      xor     %edi, %edi              # read(0, a byte): the nops are armed by now
                      mov     %rsp, %rsi
                      mov     $1, %edx
                      xor     %eax, %eax
                      syscall
                      cmp     $1, %eax
                      jne     leave
              five:   .byte   0x0f, 0x1f, 0x44, 0, 0
              ten:    .byte   0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0
                      inc     %ebx
                      jmp     report
              ask:    mov     $336, %eax              # uprobe(), last: a seccomp filter may kill the program for it
                      syscall
                      mov     %rax, (%rsp)
                      mov     $1, %edi                # write(1, its result, 8)
                      mov     %rsp, %rsi
                      mov     $8, %edx
                      mov     $1, %eax
                      syscall
              leave:  xor     %edi, %edi              # exit(0)
                      mov     $60, %eax
                      syscall

It is in a memfd that no other process maps, so whatever is armed there is armed for this process alone. Whoever runs
it arms the nops once it has reported the first time, and closes that afterwards; if he is killed, the program reads the
end of its input and exits. Each pass is reported before the next: a filter may kill the program for the call that a nop
became.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue

from stapsdtd.kernel.host_calls import ARM
from stapsdtd.kernel.places import Place

_log = logging.getLogger(__name__)

LOAD_VADDR = 0x400000
_FILE_HEADER = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
CODE_AT = _FILE_HEADER.size + _PROGRAM_HEADER.size
CODE = bytes.fromhex(
    "4883ec1031dbbf01000000beb0004000ba0f000000b8010000000f0583fb03742a85db751331ff4889e6ba0100000031"
    "c00f0583f80175320f1f440000662e0f1f840000000000ffc3ebbbb8500100000f0548890424bf010000004889e6ba08"
    "000000b8010000000f0531ffb83c0000000f05"
)
NOPS = {5: bytes.fromhex("0f1f440000"), 10: bytes.fromhex("662e0f1f840000000000")}
_NOPS_AT = CODE_AT + CODE.index(b"".join(NOPS.values()))
_BREAKPOINT = b"\xcc"

REPORT = struct.Struct("<5s10s")
PASSES = 3
_SYSCALL_RESULT = struct.Struct("<q")

ENOTSUPP = 524
"""Kernel-internal errno (include/linux/errno.h): uprobes do not support the instruction."""

_MFD_EXEC = 0x10
"""Since Linux 6.3. On older kernels every memfd is executable, and the flag is EINVAL."""

_SECONDS = 5.0
"""Which a process that opens perf events for this one may need to start."""

Arm = Callable[[Place], Callable[[], None]]
"""Arms a place. What it returns disarms it. Raises OSError; ENOTSUPP if the kernel knows no uprobe there."""


def arm_nothing(place: Place) -> Callable[[], None]:
    """Refuse to arm a place."""
    raise ARM.refused(f"{place.path}:{place.offset:#x}", errno.EACCES, "it is not to be")


def program() -> bytes:
    """Return the program as an ELF file."""
    size = CODE_AT + len(CODE)
    content = _FILE_HEADER.pack(
        *(b"\x7fELF", 2, 1, 1, 0, 0),  # 64 bits, little-endian, ELF version, System V ABI and its version
        *(2, 62, 1, LOAD_VADDR + CODE_AT, _FILE_HEADER.size, 0, 0),  # ET_EXEC, x86-64
        *(_FILE_HEADER.size, _PROGRAM_HEADER.size, 1, 0, 0, 0),
    )
    content += _PROGRAM_HEADER.pack(1, 5, 0, LOAD_VADDR, LOAD_VADDR, size, size, 0x1000)  # PT_LOAD, R X
    return content + CODE


def run(arm: Arm, seconds: float = _SECONDS) -> tuple[Mapping[int, bool], int | None]:
    """Return whether this kernel rewrites nops, by their length in bytes, and the syscall's errno.

    A length is missing if no probe could be placed there; the errno is None if unknown: security policy may keep the
    program from starting, kill it or block it.

    Closing a probe takes a grace period, which another tracer's program can delay for long. So the trial has a thread
    of its own, which is left behind if it takes longer than seconds.
    """
    found: SimpleQueue[tuple[Mapping[int, bool], int | None]] = SimpleQueue()

    def try_it() -> None:
        refused: dict[int, int] = {}
        with contextlib.ExitStack() as armed:
            try:
                output = output_of(program(), seconds, lambda path: refused.update(_arm_nops(path, arm, armed)))
            except OSError as error:
                _log.debug("cannot run the nop trial: %s", error)
                output = b""
            found.put(parse(output, refused))

    thread = threading.Thread(target=try_it, name="stapsdtd-nops", daemon=True)
    thread.start()
    # until all is disarmed, since what is in tracefs would outlive this process
    thread.join(2 * seconds)
    try:
        return found.get_nowait()
    except Empty:
        return {}, None


def syscall_errno(seconds: float = _SECONDS) -> int | None:
    """Return the syscall's errno as run() does, without arming anything."""
    return run(arm_nothing, seconds)[1]


def _arm_nops(path: str, arm: Arm, armed: contextlib.ExitStack) -> Iterator[tuple[int, int]]:
    """Yield the lengths of the nops that cannot be armed, with an errno. armed: disarms the others when closed."""
    offset = _NOPS_AT
    for length in NOPS:
        try:
            armed.callback(arm(Place(path, offset)))
        except OSError as error:
            _log.debug("a nop of %d bytes cannot be armed: %s", length, error)
            yield length, error.errno or 0
        offset += length


def parse(output: bytes, refused: Mapping[int, int]) -> tuple[Mapping[int, bool], int | None]:
    """Parse the program's output, possibly truncated, into the result of `run`.

    refused: errno by length of the nops that could not be armed.
    """
    reports_bytes = (1 + PASSES) * REPORT.size
    whole = min(len(output), reports_bytes) // REPORT.size * REPORT.size
    passes = list(REPORT.iter_unpack(output[:whole]))[1:]
    rewritten = {}
    for position, (length, nop) in enumerate(NOPS.items()):
        codes = [codes[position] for codes in passes]
        if refused.get(length) == ENOTSUPP or codes == [_BREAKPOINT + nop[1:]] * PASSES:
            rewritten[length] = False
        # still the nop if the probe was not placed there
        elif any(code not in {nop, _BREAKPOINT + nop[1:]} for code in codes):
            rewritten[length] = True
    if len(output) != reports_bytes + _SYSCALL_RESULT.size:
        return rewritten, None
    syscall_result: int = _SYSCALL_RESULT.unpack_from(output, reports_bytes)[0]
    return rewritten, -syscall_result if syscall_result < 0 else None


def output_of(content: bytes, seconds: float, on_begin: Callable[[str], None]) -> bytes:
    """Run a program, given as its ELF file, and kill it after a timeout. Raises OSError if it cannot be executed.

    on_begin: called with a path of its file once it has written something, after which it is given a byte.
    """
    with _in_memory(content) as descriptor:
        return _execute(descriptor, seconds, on_begin)


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


def _execute(descriptor: int, seconds: float, on_begin: Callable[[str], None]) -> bytes:
    path = f"/proc/self/fd/{descriptor}"
    process = subprocess.Popen(
        ["stapsdt-nops"],
        executable=path,
        pass_fds=(descriptor,),
        env={},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    begun = b""
    try:
        if process.stdin and process.stdout and select.select([process.stdout], [], [], seconds)[0]:
            begun = process.stdout.read(REPORT.size) or b""
            if begun:
                on_begin(path)
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(b"\n")
        return begun + process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            return begun + process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            # a process blocked in the kernel cannot be killed, so do not wait for it
            _log.warning("process %d, the nop trial, is stuck in the kernel and was left behind", process.pid)
            return b""
