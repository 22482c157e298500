"""Which system calls the daemon and its children made, and which were denied.

The kernel counts the former in a histogram (Documentation/trace/histogram.rst), and logs the latter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.installed import machine

_INSTANCE = machine.TRACING / "instances" / "installed-tests"
_EVENT = _INSTANCE / "events" / "raw_syscalls" / "sys_enter"
_KEY = "hist:keys=id.syscall:size=1024"
_NAMES = ("stapsdtd", "lifeguard", "event_engine", "grpc_global_tim", "python")
"""Of the daemon's threads, and the parsing processes. The tests themselves are `python3`, and clients `stapsdt`."""
_FILTER = " || ".join(f'comm == "{name}"' for name in _NAMES)
_MADE = re.compile(r"\{ id: \S+ +\[ *(\d+)\] \}")
_NUMBERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
_DENIED = re.compile(r'(?:type=1326|SECCOMP) .*exe="?([^" ]+)"? .*syscall=(\d+)')
"""Records of seccomp (AUDIT_SECCOMP in include/uapi/linux/audit.h)."""


def count() -> None:
    """Begin to count."""
    _INSTANCE.mkdir()
    _trigger(_KEY)


@contextmanager
def paused() -> Iterator[None]:
    """Do not count meanwhile, since programs with the same names run."""
    _trigger(f"{_KEY}:pause")
    try:
        yield
    finally:
        _trigger(f"{_KEY}:cont")


def _trigger(command: str) -> None:
    # O_TRUNC would remove the histogram (event_trigger_regex_open in kernel/trace/trace_events_trigger.c)
    descriptor = os.open(_EVENT / "trigger", os.O_WRONLY)
    try:
        os.write(descriptor, f"{command} if {_FILTER}".encode())
    finally:
        os.close(descriptor)


def made() -> set[str]:
    """Return the names of all that were made. Denied ones are not among them: seccomp comes first."""
    names = _names()
    return {names[number] for number in _MADE.findall((_EVENT / "hist").read_text())}


def denied(cursor: str = "") -> set[tuple[str, str]]:
    """Return the programs whose calls were denied, each with the call's name or else its number, since a cursor of the
    journal, if any.

    A program whose path holds a space, such as a memfd, is in hexadecimal digits.
    """
    since = ["--after-cursor", cursor] if cursor else []
    names = _names()
    lines = machine.run("journalctl", "--no-pager", "--boot", "--output=cat", *since).stdout
    return {(program, names.get(number, number)) for program, number in _DENIED.findall(lines)}


def _names() -> dict[str, str]:
    return {number: name for name, number in re.findall(r"#define __NR_(\w+) (\d+)", _NUMBERS.read_text())}
