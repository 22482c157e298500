"""Which system calls the daemon and its children made, and which were denied.

The kernel counts the former in a histogram (Documentation/trace/histogram.rst), and logs the latter.
"""

from __future__ import annotations

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
_DENIED = re.compile(r"(?:type=1326|SECCOMP) .*")
"""Records of seccomp (AUDIT_SECCOMP in include/uapi/linux/audit.h)."""


def count() -> None:
    """Begin to count."""
    _INSTANCE.mkdir()
    (_EVENT / "trigger").write_text(f"{_KEY} if {_FILTER}")


@contextmanager
def paused() -> Iterator[None]:
    """Do not count meanwhile, since programs with the same names run."""
    (_EVENT / "trigger").write_text(f"{_KEY}:pause if {_FILTER}")
    try:
        yield
    finally:
        (_EVENT / "trigger").write_text(f"{_KEY}:cont if {_FILTER}")


def made() -> set[str]:
    """Return the names of all that were made. Denied ones are not among them: seccomp comes first."""
    names = dict(re.findall(r"#define __NR_(\w+) (\d+)", _NUMBERS.read_text()))
    by_number = {number: name for name, number in names.items()}
    return {by_number[number] for number in _MADE.findall((_EVENT / "hist").read_text())}


def denied(cursor: str = "") -> list[str]:
    """Return the records of denied ones, since a cursor of the journal if there is one."""
    since = ["--after-cursor", cursor] if cursor else []
    lines = machine.run("journalctl", "--no-pager", "--boot", "--output=cat", *since).stdout.splitlines()
    return [found.group() for line in lines if (found := _DENIED.search(line))]
