"""A sandbox like the daemon's, but of a parser that does what a file asks for: see COMMANDS. Other files it parses.

sandboxed.py SOCKET USER GROUP
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, NoReturn

from stapsdtd.elf import parse_object
from stapsdtd.model import ParsedObject, Problem
from stapsdtd.sandbox import worker

_libc = ctypes.CDLL(None, use_errno=True)


def _failing(function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), function)


def attempts() -> dict[str, Callable[[], object]]:
    return {
        "read a file": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "read itself": lambda: os.open("/proc/self/maps", os.O_RDONLY),
        "create a file": lambda: os.open("/tmp/sandboxed", os.O_CREAT | os.O_WRONLY),
        "remove a file": lambda: os.unlink("/tmp/sandboxed"),
        "make a directory": lambda: os.mkdir("/tmp/sandboxed"),
        "list a directory": lambda: os.listdir("/"),
        "stat": lambda: os.stat("/"),
        "write": lambda: os.write(0, b"x"),
        "make a socket": lambda: socket.socket(socket.AF_INET),
        "make a unix socket": lambda: socket.socket(socket.AF_UNIX),
        "make a pipe": os.pipe,
        "fork": os.fork,
        "start a thread": lambda: threading.Thread(target=int).start(),
        "execute": lambda: os.execv("/bin/true", ["true"]),
        "kill its parent": lambda: os.kill(os.getppid(), 9),
        "signal itself": lambda: os.kill(os.getpid(), 0),
        "trace": lambda: _failing("ptrace", 0, 0, 0, 0),
        "become root": lambda: os.setuid(0),
        "raise a limit": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16)),
        "map code": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
        "be dumpable": lambda: _failing("prctl", 4, 1, 0, 0, 0),
        "make a namespace": lambda: _failing("unshare", 0x10000000),
        "load bpf": lambda: _failing("syscall", 321, 0, 0, 0),
        "mount": lambda: _failing("mount", b"none", b"/", b"tmpfs", 0, None),
    }


def _try_all(_file: BinaryIO) -> ParsedObject:
    return ParsedObject("x86-64", None, (), tuple(Problem("", what, _outcome(do)) for what, do in attempts().items()))


def _outcome(do: Callable[[], object]) -> str:
    try:
        do()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except RuntimeError:
        return "RuntimeError"  # a thread that cannot be started
    except ValueError:
        return "EPERM"  # as setrlimit() has it
    return "done"


def _hang(_file: BinaryIO) -> NoReturn:
    while True:
        pass


def _eat(_file: BinaryIO) -> NoReturn:
    eaten = []
    while True:
        eaten.append(bytearray(b"x" * (1 << 20)))


def _eat_small(_file: BinaryIO) -> NoReturn:
    eaten: list[object] = []
    while True:
        eaten.append([eaten])


def _crash(_file: BinaryIO) -> NoReturn:
    ctypes.string_at(0)
    raise AssertionError


def _say(data: bytes) -> Callable[[BinaryIO], ParsedObject]:
    def say(file: BinaryIO) -> ParsedObject:
        _failing("send", 3, data, len(data), 0)
        _hang(file)

    return say


def _raise(_file: BinaryIO) -> NoReturn:
    raise KeyError("defect")


COMMANDS: dict[bytes, Callable[[BinaryIO], ParsedObject]] = {
    b"try": _try_all,
    b"hang": _hang,
    b"eat": _eat,
    b"eat small": _eat_small,
    b"crash": _crash,
    b"leave": lambda _: os._exit(3),
    b"garbage": _say(b"\xff" * 100_000),
    b"wrong": _say((5).to_bytes(8, "little") + b"\1abcd"),
    b"drip": _say((1 << 26).to_bytes(8, "little") + b"\1"),
    b"raise": _raise,
}


def parse(file: BinaryIO, _debug_file: BinaryIO | None) -> ParsedObject:
    # the position is shared with whoever read it before
    file.seek(0)
    command = COMMANDS.get(file.read(16))
    return parse_object(file) if command is None else command(file)


if __name__ == "__main__":
    worker.serve(sys.argv[1:], parse)
