"""One WatchProbes call: passes the registry's changes from the control thread to the API's event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from stapsdtd.api.access import Caller
from stapsdtd.api.rights import NO_USERS, Rights, revoked
from stapsdtd.catalog.probe_view import ProbeView
from stapsdtd.catalog.registry import Change, Registry
from stapsdtd.errors import LimitReachedError, StapsdtdError
from stapsdtd.model import Probe

_MAX_CHANGES = 100_000


class Watch:
    """One client's view of the registry.

    `begin`, `end` and `show` run in the control thread, everything else on the API's event loop.
    """

    def __init__(self, registry: Registry, view: ProbeView, loop: asyncio.AbstractEventLoop, caller: Caller) -> None:
        self.caller = caller
        self._registry = registry
        self._view = view
        self._loop = loop
        self._changes: deque[tuple[bool, Probe]] = deque()
        self._woken = asyncio.Event()
        self._overflowed = False
        self._stopped: StapsdtdError | None = None
        self._unlisten: Callable[[], None] = lambda: None

    def begin(self) -> list[Probe]:
        """Listen to changes from now on, and return the current probes."""
        self._unlisten = self._registry.listen(self._on_change)
        among = self._view.among
        return self._view.begin([self._registry.seen_by(among, probe) for probe in self._registry.probes()])

    def end(self) -> None:
        self._unlisten()
        self._unlisten = lambda: None

    def stop(self, error: StapsdtdError) -> None:
        """Make `next` raise error."""
        self._stopped = error
        self._woken.set()

    def apply(self, rights: Rights | None) -> None:
        """Continue with new rights, or stop if there are none. Wakes `next`, so that they take effect at once."""
        if rights is None or rights.list == NO_USERS:
            self.stop(revoked())
        elif rights != self.caller.rights:
            self.caller = replace(self.caller, rights=rights)
            self._woken.set()

    def show(self, among: frozenset[int] | None) -> None:
        """Restrict the view to what these processes map; None lifts the restriction."""
        self._view.among = among
        for obj in self._registry.objects():
            self._on_change(Change(obj))

    def _on_change(self, change: Change) -> None:
        if self._overflowed:
            return
        obj = self._registry.object_seen_by(self._view.among, change.object)
        changes = self._view.changed(obj, self._registry.mappings(change.object.key))
        if changes:
            self._overflowed = len(self._changes) + len(changes) > _MAX_CHANGES
            self._changes.extend(changes)
            self._loop.call_soon_threadsafe(self._woken.set)

    async def next(self, timeout_seconds: float | None) -> list[tuple[bool, Probe]]:
        """Wait for changes and return them, as (added, probe); return an empty list after the timeout.

        Raises LimitReachedError if more changes came than are kept.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._woken.wait()
        self._woken.clear()
        if self._stopped is not None:
            raise self._stopped
        if self._overflowed:
            raise LimitReachedError("more probes came and went than this client read; watch again for a fresh snapshot")
        return [self._changes.popleft() for _ in range(len(self._changes))]
