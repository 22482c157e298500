"""Who a process is, for people to read: psutil's view."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """started_ns is Unix time; user is a name, or the number of one without."""

    pid: int
    comm: str
    command_line: tuple[str, ...]
    user: str
    started_ns: int


def identify(pid: int) -> ProcessIdentity | None:
    """Answer None where the process is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return ProcessIdentity(
                pid,
                _printable(process.name()),
                tuple(_printable(argument) for argument in process.cmdline()),
                _printable(process.username()),
                int(process.create_time() * 1e9),
            )
    except psutil.Error:
        return None


def _printable(text: str) -> str:
    """Psutil keeps what is not UTF-8 as surrogates, which no message can carry."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
