"""One WatchProbes call: passes the registry's changes from the control thread to the API's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from stapsdtd.api.access import Caller
from stapsdtd.api.rights import NO_USERS, Rights, revoked
from stapsdtd.catalog.registry import Change, MappedObject, Registry
from stapsdtd.errors import LimitReachedError, StapsdtdError
from stapsdtd.model import Object, ObjectKey
from stapsdtd.runtime.shares import Shares

MAX_WAITING = 10_000
"""Objects that came or went since the client read."""


class Watch:
    """The objects that changed since one client looked.

    Changes are charged to the client. Once it has taken more than its share, they are not followed one by one any more,
    and `show` finds out what is different. is_behind: it is to be called.

    `begin`, `end` and `show` run in the control thread, everything else on the API's event loop.
    """

    def __init__(self, registry: Registry, loop: asyncio.AbstractEventLoop, caller: Caller, shares: Shares) -> None:
        self.caller = caller
        self.is_behind = False
        self._shares = shares
        self._registry = registry
        self._among: frozenset[int] | None = None
        self._present: dict[ObjectKey, Object] = {}
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._latest: dict[ObjectKey, _Waiting] = {}
        self._woken = asyncio.Event()
        self._overflowed = False
        self._stopped: StapsdtdError | None = None
        self._unlisten: Callable[[], None] = lambda: None

    def begin(self, among: frozenset[int] | None) -> list[MappedObject]:
        """Listen to changes from now on, and return the current objects. among: see `show`."""
        self._among = among
        self._unlisten = self._registry.listen(self._on_change)
        objects = self._registry.mapped(among)
        self._present = {mapped.object.key: mapped.object for mapped in objects}
        return objects

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
            self.stop(revoked("list"))
        elif rights != self.caller.rights:
            self.caller = replace(self.caller, rights=rights)
            self._woken.set()

    def show(self, among: frozenset[int] | None) -> None:
        """Restrict the view to what these processes map; None lifts the restriction."""
        if among == self._among and not self.is_behind:
            return
        self._among, self.is_behind = among, False
        with self._charged():
            now = {mapped.object.key: mapped for mapped in self._registry.mapped(among)}
            gone = [MappedObject(obj, ()) for key, obj in self._present.items() if key not in now]
            for mapped in (*gone, *now.values()):
                self._note(mapped)

    def _on_change(self, change: Change) -> None:
        if self.is_behind:
            return
        if self._shares.seconds_to_wait(self.caller.peer.client):
            self.is_behind = True
            self._loop.call_soon_threadsafe(self._woken.set)
            return
        with self._charged():
            self._note(self._registry.as_mapped(change.object, self._among))

    def _charged(self) -> AbstractContextManager[None]:
        return self._shares.charged(self.caller.peer.client, "matching")

    def _note(self, mapped: MappedObject) -> None:
        key = mapped.object.key
        if mapped.pids:
            self._present[key] = mapped.object
        elif key in self._present:
            del self._present[key]
        else:
            return
        with self._lock:
            if self._overflowed:
                return
            latest = self._latest.get(key)
            if latest is not None and bool(latest.mapped.pids) == bool(mapped.pids):
                latest.mapped = mapped
                return
            self._overflowed = len(self._waiting) >= MAX_WAITING
            self._latest[key] = waiting = _Waiting(mapped)
            self._waiting.append(waiting)
            is_woken = len(self._waiting) > 1
        if not is_woken:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def next(self, timeout_seconds: float | None) -> list[MappedObject]:
        """Wait for objects to change, and return them; return an empty list after the timeout.

        An object that came and went is there twice. Raises LimitReachedError if more changed than are kept.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._woken.wait()
        self._woken.clear()
        if self._stopped is not None:
            raise self._stopped
        with self._lock:
            if self._overflowed:
                text = "more probes came and went than this client read; watch again for a fresh snapshot"
                raise LimitReachedError(text, "unread_changes")
            changed = [waiting.mapped for waiting in self._waiting]
            self._waiting.clear()
            self._latest.clear()
        return changed


class _Waiting:
    """An object that nobody has looked at since it changed."""

    __slots__ = ("mapped",)

    def __init__(self, mapped: MappedObject) -> None:
        self.mapped = mapped
