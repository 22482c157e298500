"""A client that watches: from the registry's changes, in the control thread, to a WatchProbes call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from stapsdtd.api.access import NO_USERS, Caller, Rights, revoked
from stapsdtd.catalog.probe_view import ProbeView
from stapsdtd.catalog.registry import Change, Registry
from stapsdtd.errors import LimitReachedError, StapsdtdError
from stapsdtd.model import Probe

_CHANGES_KEPT = 100_000


class Watch:
    """Carries changes from the control thread, where the registry tells them, to a WatchProbes call."""

    def __init__(self, registry: Registry, view: ProbeView, loop: asyncio.AbstractEventLoop, caller: Caller) -> None:
        self.caller = caller
        self._registry = registry
        self._view = view
        self._loop = loop
        self._changes: deque[tuple[bool, Probe]] = deque()
        self._news = asyncio.Event()
        self._overflowed = False
        self._stopping: StapsdtdError | None = None
        self._stop: Callable[[], None] = lambda: None

    def begin(self) -> list[Probe]:
        self._stop = self._registry.listen(self._on_change)
        among = self._view.among
        return self._view.begin([self._registry.seen_by(among, probe) for probe in self._registry.probes()])

    def end(self) -> None:
        self._stop()
        self._stop = lambda: None

    def stop(self, why: StapsdtdError) -> None:
        """Make `next` raise that."""
        self._stopping = why
        self._news.set()

    def apply(self, rights: Rights | None) -> None:
        """Go on with these rights, None for none; whoever awaits `next` looks at once what they change."""
        if rights is None or rights.list == NO_USERS:
            self.stop(revoked())
        elif rights != self.caller.rights:
            self.caller = replace(self.caller, rights=rights)
            self._news.set()

    def show(self, among: frozenset[int] | None) -> None:
        """Show what these processes map, and no longer what only others do; None for what any does."""
        self._view.among = among
        for found in self._registry.objects():
            self._on_change(Change(found))

    def _on_change(self, change: Change) -> None:
        if self._overflowed:
            return
        seen = self._registry.object_seen_by(self._view.among, change.object)
        found = self._view.changed(seen, self._registry.mappings(change.object.key))
        if found:
            self._overflowed = len(self._changes) + len(found) > _CHANGES_KEPT
            self._changes.extend(found)
            self._loop.call_soon_threadsafe(self._news.set)

    async def next(self, patience: float | None) -> list[tuple[bool, Probe]]:
        """Answer with nothing after so many seconds, if any are given, without changes.

        Raises LimitReachedError where more changes came than are kept.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._news.wait()
        self._news.clear()
        if self._stopping is not None:
            raise self._stopping
        if self._overflowed:
            raise LimitReachedError("more probes came and went than this client read; watch again for a fresh snapshot")
        return [self._changes.popleft() for _ in range(len(self._changes))]
