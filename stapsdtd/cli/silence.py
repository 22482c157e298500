"""Say why armed probes may not have fired, where that can be known."""

from __future__ import annotations

from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from stapsdtd.client import ClientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stapsdtd.client import AsyncClient, SiteStatus

_SWITCHES = (
    ("hotspot:method__*", "the JVM fires these only with -XX:+DTraceMethodProbes"),
    ("hotspot:object__alloc", "the JVM fires it only with -XX:+DTraceAllocProbes"),
    ("hotspot:monitor__*", "the JVM fires these only with -XX:+DTraceMonitorProbes"),
    (
        "python:function__entry",
        "CPython 3.11 fires it only in threads with a trace function, or while python:line is traced, too",
    ),
)
"""Probes that a program fires only if it was told to."""


async def why_silent(
    client: AsyncClient, selectors: Sequence[str], sites: Iterable[SiteStatus], *, has_ended: bool = False
) -> tuple[str, ...]:
    """Return why sites that were armed may not have fired. has_ended: whether the traced program is known to have."""
    names = {f"{site.provider}:{site.name}" for site in sites}
    reasons = [f"{pattern}: {note}" for pattern, note in _SWITCHES if any(fnmatchcase(name, pattern) for name in names)]
    # the server may be gone, or the role may not list, which is told otherwise
    with suppress(ClientError):
        if not has_ended and not any(probe.pids for probe in await client.list_probes(selectors)):
            reasons.append("no running program has these probes now")
    return tuple(reasons)
