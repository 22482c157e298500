"""From a process's maps to the registry: the objects that it maps, each resolved once."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from stapsdtd.catalog.registry import Change, Registry
from stapsdtd.errors import ObjectGoneError, ObjectPendingError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.kernel.perf import Mapped
from stapsdtd.kernel.procfs import ProcessStat, Region
from stapsdtd.model import Mapping, Object, ObjectKey, ProcessKey
from stapsdtd.procs.budgets import MemoryBudget
from stapsdtd.procs.moved_text import moved
from stapsdtd.procs.objects import ObjectStore
from stapsdtd.runtime.fair_thread import finish
from stapsdtd.runtime.logs import fields

_log = logging.getLogger(__name__)

MANY_MAPPINGS = 2000
"""Of one file, by one process. The kernel takes 60 ms to attach to a probe with a semaphore in so many, 5 s in 30,000,
and no process on the host can fork meanwhile: for each mapping it looks for the semaphore's (`find_ref_ctr_vma` in
kernel/events/uprobes.c; measured on Linux 6.18).
"""

_MAPS_BYTES = 128 << 10
"""That are looked through for text that was moved; some 1,000 mappings."""


class Proc(Protocol):
    """/proc, as `kernel.procfs` reads it."""

    def pids(self) -> list[int]:
        """Return all processes."""

    def stat(self, pid: int) -> ProcessStat | None:
        """Return a process's status, or None if it is gone."""

    def executable_mappings(self, pid: int) -> list[Mapping]:
        """Return a process's executable mappings of files."""

    def regions(self, pid: int, most_bytes: int) -> list[Region]:
        """Return all mappings of a process, as far as so many bytes of text tell."""


@dataclass(frozen=True, slots=True)
class Look:
    """The result of looking at a process.

    threads: 0 if it has ended. is_unsettled: it has no maps yet, or none any more. is_partial: its user's time was up
    before all of its files were known.
    """

    threads: int
    is_unsettled: bool = False
    is_partial: bool = False


class ProcessMaps:
    """Called from one thread.

    on_room: called with processes to look at again, since their user has room for further objects.
    """

    def __init__(
        self,
        registry: Registry,
        store: ObjectStore,
        calls: LockedCalls,
        memory: MemoryBudget,
        *,
        proc: Proc = procfs,
    ) -> None:
        """calls: makes the reads of maps that a process may hold up by its lock."""
        self.on_room: Callable[[Iterable[int]], None] = lambda _pids: None
        self._registry = registry
        self._store = store
        self._calls = calls
        self._proc = proc
        self._seen: dict[int, tuple[ProcessKey, dict[Mapping, Object | None]]] = {}
        self._memory = memory
        self._waiting_for_room: dict[int, set[int]] = {}
        self._excessive: set[int] = set()
        self._stop_listening = registry.listen(self._on_change)

    def close(self) -> None:
        self._stop_listening()

    def pids(self) -> set[int]:
        """Return the processes that were alive when they were looked at last."""
        return set(self._seen)

    def look_at(self, pid: int, user: int, records: Sequence[Mapped], seconds: float) -> Look:
        """Update the registry with what a process maps now.

        records: its mappings that the kernel reported. seconds: how long its files may take. Raises OSError, and
        ObjectPendingError if its maps cannot be read now.
        """
        mappings = self._calls.call(pid, lambda: self._proc.executable_mappings(pid), kept_as="maps")
        stat = self._proc.stat(pid)
        if stat is None or (stat.state in procfs.DEAD and stat.threads <= 1):
            self.forget(pid)
            self.register_ended(pid, user, records, seconds)
            return Look(threads=0)
        is_unsettled = not mappings and pid not in self._seen
        is_partial = False
        if mappings or stat.state not in procfs.DEAD:
            is_partial = self._update(stat.key, user, mappings, time.monotonic() + seconds)
        return Look(stat.threads, is_unsettled, is_partial)

    def by_owners(self, records: Iterable[Mapped]) -> dict[int, list[Mapped]]:
        """Return mappings by the owners of their files."""
        by_owner: dict[int, list[Mapped]] = {}
        for record in records:
            by_owner.setdefault(self._store.owner_of(record.path), []).append(record)
        return by_owner

    def register_ended(self, pid: int, user: int, records: Iterable[Mapped], seconds: float) -> None:
        """Register the objects that a process mapped which has ended: it may be the first of many that map them.

        seconds: how long its files may take.
        """
        if self._registry.process(pid) is not None:
            # another one has its number
            return
        mapped: dict[ObjectKey, tuple[Object, Mapping]] = {}
        for mapping, obj in self._resolved(pid, records, time.monotonic() + seconds):
            if self._memory.admit(user, obj):
                mapped.setdefault(obj.key, (obj, mapping))
        if mapped:
            # its start time cannot be known any more, and is not needed
            self._registry.update(ProcessKey(pid, 0), mapped)
            self._registry.gone(pid)

    def _resolved(self, pid: int, records: Iterable[Mapped], deadline: float) -> Iterator[tuple[Mapping, Object]]:
        inodes = self._store.inodes_of(pid)
        for record in records:
            if time.monotonic() > deadline:
                _log.debug("pid %d, which has ended, mapped more files than are looked at", pid)
                return
            try:
                obj = self._store.resolve(pid, record.mapping, inodes)
            except (ObjectGoneError, ObjectPendingError, OSError) as error:
                _log.debug("pid %d, which has ended: %s", pid, error)
            else:
                if obj is not None:
                    yield record.mapping, obj

    def forget(self, pid: int) -> None:
        self._seen.pop(pid, None)
        for pids in self._waiting_for_room.values():
            pids.discard(pid)
        self._registry.gone(pid)

    def _update(self, process: ProcessKey, user: int, mappings: Iterable[Mapping], deadline: float) -> bool:
        """Report whether the deadline came before all files were known."""
        seen, before = self._seen.get(process.pid, (process, {}))
        if seen != process:
            before = {}
        now: dict[Mapping, Object | None] = {}
        # subvolumes of btrfs have the same device and inode numbers in maps
        files: dict[tuple[int, int, str], Object | None] = {}
        inodes = self._store.inodes_of(process.pid)
        mapped: dict[ObjectKey, tuple[Object, Mapping]] = {}
        is_partial = is_excessive = False
        for mapping in mappings:
            file = mapping.dev, mapping.inode, mapping.path
            try:
                if mapping in before:
                    obj = before[mapping]
                elif file in files:
                    obj = files[file]
                elif time.monotonic() > deadline:
                    is_partial = True
                    continue
                else:
                    obj = self._store.resolve(process.pid, mapping, inodes)
            except ObjectGoneError as error:
                _log.debug("pid %d: %s", process.pid, error)
                continue
            except ObjectPendingError:
                # the watcher looks again when it is known
                continue
            if obj is not None and not self._memory.admit(user, obj):
                self._warn_of_excess(user)
                is_excessive = True
                obj = None
            now[mapping] = files[file] = obj
            if obj is not None:
                mapped.setdefault(obj.key, (obj, mapping))
        for mapping, obj in self._moved(process.pid, before, mapped):
            now[mapping] = obj
            mapped[obj.key] = obj, mapping
        self._seen[process.pid] = process, now
        if is_excessive:
            self._waiting_for_room.setdefault(user, set()).add(process.pid)
        self._registry.update(process, mapped, _crowded(now))
        return is_partial

    def _moved(
        self, pid: int, before: dict[Mapping, Object | None], mapped: Container[ObjectKey]
    ) -> list[tuple[Mapping, Object]]:
        """Return the objects whose text a process has moved as a whole: it is still listed with them, as what to ask of
        it is why they do not fire.
        """
        gone = [(mapping, obj) for mapping, obj in before.items() if obj is not None and obj.key not in mapped]
        if not gone:
            return []
        regions = self._calls.call(pid, lambda: self._proc.regions(pid, _MAPS_BYTES))
        return [(mapping, obj) for mapping, obj in gone if _is_moved(obj, mapping, regions)]

    def _warn_of_excess(self, user: int) -> None:
        if user not in self._excessive:
            self._excessive.add(user)
            _log.warning(
                "a user has more probes than may be listed; further ones are not listed", extra=fields(uid=user)
            )

    def _on_change(self, change: Change) -> None:
        if change.appeared:
            self._store.mapped(change.object)
        if change.vanished:
            user = self._memory.release(change.object.key)
            self._store.unmapped(change.object)
            self._retry(self._waiting_for_room.pop(user, set()))

    def _retry(self, pids: set[int]) -> None:
        """Have processes looked at again that map objects for which there was no room."""
        for pid in pids:
            process, seen = self._seen[pid]
            self._seen[pid] = process, {mapping: obj for mapping, obj in seen.items() if obj is not None}
        self.on_room(pids)


def _is_moved(obj: Object, mapping: Mapping, regions: Sequence[Region]) -> bool:
    """Report whether a process executes an object's text from elsewhere: where it moved all of it, any site tells."""
    return bool(finish(moved(obj.parsed.sites[:1], obj.parsed.read_only, mapping, regions)))


def _crowded(mapped: dict[Mapping, Object | None]) -> frozenset[ObjectKey]:
    """Return the objects that are mapped MANY_MAPPINGS times or more."""
    if len(mapped) < MANY_MAPPINGS:
        return frozenset()
    counts = Counter(obj.key for obj in mapped.values() if obj is not None)
    return frozenset(key for key, count in counts.items() if count >= MANY_MAPPINGS)
