"""What a probe description means here: the program's beginning or end, a timer, or static probes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.nodes import Description

_TICK = re.compile(r"tick-(\d{1,9})(ns|nsec|us|usec|ms|msec|s|sec|m|min|h|hour|d|day|hz)?")
_LETTER = re.compile(r"([A-Za-z0-9])")
_GLOB = re.compile(r"[*?[]")
_NANOSECONDS = {
    "ns": 1, "nsec": 1, "us": 1_000, "usec": 1_000, "ms": 1_000_000, "msec": 1_000_000, "s": 10**9, "sec": 10**9,
    "m": 60 * 10**9, "min": 60 * 10**9, "h": 3600 * 10**9, "hour": 3600 * 10**9,
    "d": 86400 * 10**9, "day": 86400 * 10**9,
}  # fmt: skip
_SHORTEST_NS = 1_000_000
_OF_KERNEL = "stapsdt has static probes of programs, and kernel functions as fbt"
_REFUSED = {
    "syscall": f"{_OF_KERNEL}; for system calls use bpftrace, or strace for one process",
    "pid": f"{_OF_KERNEL}; for any function of a program use bpftrace's uprobe",
    "proc": f"{_OF_KERNEL}; 'stapsdt watch' tells of programs that start",
    "profile": "samples are not taken; tick-N is there, and perf for profiles",
    **dict.fromkeys(
        (
            "rawfbt",
            "rawtp",
            "sdt",
            "io",
            "sched",
            "vminfo",
            "sysinfo",
            "ip",
            "tcp",
            "udp",
            "lockstat",
            "cpc",
            "mib",
        ),
        f"{_OF_KERNEL}; for the kernel use bpftrace or perf",
    ),
}


class Moment(Enum):
    """When a program's own clauses run."""

    BEGIN = "BEGIN"
    END = "END"


@dataclass(frozen=True, slots=True)
class Tick:
    """name: as it is printed."""

    name: str
    period_ns: int


def meaning(description: Description) -> Moment | Tick | None:
    """Return what a description means, None for static probes. Raises DError for providers that there are not."""
    provider, name = description.provider, description.name
    is_bare = not (description.module or description.function)
    if provider in {"", "dtrace"} and is_bare and name in {"BEGIN", "END"}:
        return Moment(name)
    if provider == "dtrace" or (not provider and is_bare and name == "ERROR"):
        raise DError(
            f"probe description {description} does not match any probes; there are BEGIN and END", description.at
        )
    if provider in {"", "profile", "tick"} and is_bare and name.startswith("tick-"):
        return _tick(description)
    if provider in {"", "profile"} and is_bare and name.startswith("profile-"):
        provider = "profile"
    kind = re.sub(r"\d+$", "", provider)
    if reason := _REFUSED.get("pid" if kind == "pid" and provider != "pid" else provider):
        raise DError(f"provider {provider}: {reason}", description.at)
    return None


def _tick(description: Description) -> Tick:
    match = _TICK.fullmatch(description.name)
    if match is None or not int(match[1]):
        raise DError(f"{description.name} is no timer; write tick-1s or tick-100ms", description.at)
    # without a unit it is a rate
    number, unit = int(match[1]), match[2] or "hz"
    period_ns = 10**9 // number if unit == "hz" else number * _NANOSECONDS[unit]
    if period_ns < _SHORTEST_NS:
        raise DError(f"{description.name}: the shortest timer is tick-1ms", description.at)
    return Tick(description.name, period_ns)


def probe_name(name: str) -> str:
    """Return the name of a probe as DTrace has it: query-start of query__start."""
    return name.replace("__", "-")


def selector_of(description: Description) -> str:
    """Return a description of static probes as the selector that means the same."""
    # the short form, provider:name, has no process in its provider
    return f"{description.provider}:{description.module}:{description.function}:{description.name or '*'}"


def lenient_selector(selector: str) -> str:
    """Return a selector that matches the same, and captures at each site the arguments that there are, as globs do."""
    probe, _, name = selector.rpartition(":")
    if not _GLOB.search(name):
        name = _LETTER.sub(r"[\1]", name, count=1)
    return f"{probe}:{name}"
