"""The registry of live processes and of the objects with probes that they map, or that a client names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from stapsdtd.model import Mapping as FileMapping
from stapsdtd.model import Object, ObjectKey, ProcessKey


class MappedObject(NamedTuple):
    """An object at one moment, with its path as somebody sees it, and the processes that map it, in order of pid."""

    object: Object
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """The processes that map an object changed, or who holds it. appeared: it is new; vanished: nobody has it any
    more.
    """

    object: Object
    appeared: bool = False
    vanished: bool = False


@dataclass(frozen=True, slots=True)
class RegistryMetrics:
    """objects: those with probes or with unusable notes."""

    processes: int
    objects: int
    probes: int


Listener = Callable[[Change], None]


class Registry:
    """Owned by one thread. Listeners are called once all of a process's changes are made.

    Objects that appear or vanish are reported at once; other changes to their processes may be batched.
    """

    def __init__(self) -> None:
        self._processes: dict[int, _Process] = {}
        self._objects: dict[ObjectKey, _Entry] = {}
        self._listeners: list[Listener] = []
        self._gathered: dict[ObjectKey, Change] | None = None
        self._probes = 0

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call listener on changes, until the returned function is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Batch changes in the with block: report processes that start or stop mapping an object once, at its end."""
        gathered: dict[ObjectKey, Change] = {}
        self._gathered = gathered
        try:
            yield
        finally:
            self._gathered = None
            self._notify(list(gathered.values()))

    def update(
        self,
        process: ProcessKey,
        mapped: Mapping[ObjectKey, tuple[Object, FileMapping]],
        crowded: frozenset[ObjectKey] = frozenset(),
    ) -> None:
        """Set the objects with probes that a live process maps. crowded: those that it maps very many times."""
        entry = self._processes.get(process.pid)
        if entry is not None and entry.key != process:
            self.gone(process.pid)
            entry = None
        if entry is None:
            entry = self._processes[process.pid] = _Process(process, set())
        before, entry.objects, entry.crowded = entry.objects, set(mapped), crowded
        # additions first, because listeners may take long to release an object
        changes = []
        for key, (obj, mapping) in mapped.items():
            change = self._map(process.pid, key, obj, mapping)
            if key not in before:
                changes.append(change)
        self._notify(changes + [self._unmap(process.pid, key) for key in before - mapped.keys()])

    def gone(self, pid: int) -> None:
        """Remove a process, if it is registered."""
        process = self._processes.pop(pid, None)
        self._notify([self._unmap(pid, key) for key in process.objects] if process else [])

    def hold(self, obj: Object) -> None:
        """Keep an object, whether or not a process maps it, until release() is called as often."""
        appeared = obj.key not in self._objects
        entry = self._enter(obj)
        entry.holders += 1
        if appeared:
            self._notify([Change(entry.object, appeared=True)])

    def release(self, key: ObjectKey) -> None:
        """Undo one call of hold()."""
        entry = self._objects[key]
        entry.holders -= 1
        if self._drop_unused(entry):
            self._notify([Change(entry.object, vanished=True)])

    def _enter(self, obj: Object) -> _Entry:
        entry = self._objects.get(obj.key)
        if entry is None:
            entry = self._objects[obj.key] = _Entry(obj, {}, obj.parsed.probe_count)
            self._probes += entry.probes
        return entry

    def _drop_unused(self, entry: _Entry) -> bool:
        """Report whether nobody had it any more."""
        if entry.mappings or entry.holders:
            return False
        del self._objects[entry.object.key]
        self._probes -= entry.probes
        return True

    def _map(self, pid: int, key: ObjectKey, obj: Object, mapping: FileMapping) -> Change:
        appeared = key not in self._objects
        entry = self._enter(obj)
        entry.mappings[pid] = mapping
        return Change(entry.object, appeared=appeared)

    def _unmap(self, pid: int, key: ObjectKey) -> Change:
        entry = self._objects[key]
        del entry.mappings[pid]
        return Change(entry.object, vanished=self._drop_unused(entry))

    def _notify(self, changes: Sequence[Change]) -> None:
        """Report all changes to all listeners, then raise the first error that any of them raised."""
        failure: OSError | None = None
        for change in changes:
            if self._gathered is not None:
                if not change.appeared and not change.vanished:
                    self._gathered[change.object.key] = change
                    continue
                # this change supersedes the batched one
                self._gathered.pop(change.object.key, None)
            for listener in list(self._listeners):
                try:
                    listener(change)
                except OSError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def metrics(self) -> RegistryMetrics:
        """May be called from any thread."""
        return RegistryMetrics(len(self._processes), len(self._objects), self._probes)

    def pids(self) -> frozenset[int]:
        return frozenset(self._processes)

    def process(self, pid: int) -> ProcessKey | None:
        entry = self._processes.get(pid)
        return entry.key if entry else None

    def mapped_by(self, pid: int) -> frozenset[ObjectKey]:
        """Return the objects with probes that a process maps."""
        entry = self._processes.get(pid)
        return frozenset(entry.objects) if entry else frozenset()

    def has(self, key: ObjectKey) -> bool:
        return key in self._objects

    def objects(self) -> list[Object]:
        """Return all objects, those that no process maps included."""
        return [entry.object for entry in self._objects.values()]

    def crowding(self, key: ObjectKey) -> int | None:
        """Return a process that maps an object very many times, if there is one."""
        entry = self._objects.get(key)
        processes = ((pid, self._processes.get(pid)) for pid in entry.mappings) if entry else ()
        return next((pid for pid, process in processes if process and key in process.crowded), None)

    def mappings(self, key: ObjectKey) -> dict[int, FileMapping]:
        """Return the mapping of an object, by pid of the process."""
        entry = self._objects.get(key)
        return dict(entry.mappings) if entry else {}

    def mapped(self, among: Collection[int] | None = None) -> list[MappedObject]:
        """Return the objects that processes map. among: the only processes that count; None for all."""
        if among is None:
            return [_mapped(entry, entry.mappings) for entry in self._objects.values() if entry.mappings]
        by_key: defaultdict[ObjectKey, list[int]] = defaultdict(list)
        # which leaves each object's processes in order
        for pid in sorted(among):
            if process := self._processes.get(pid):
                for key in process.objects:
                    by_key[key].append(pid)
        return [_mapped(self._objects[key], pids, is_seen_by=True) for key, pids in by_key.items()]

    def as_mapped(self, obj: Object, among: Collection[int] | None = None) -> MappedObject:
        """Return an object with those of some processes, or of all, that map it."""
        entry = self._objects.get(obj.key)
        if entry is None:
            return MappedObject(obj, ())
        if among is None:
            return _mapped(entry, entry.mappings)
        return _mapped(entry, [pid for pid in among if pid in entry.mappings], is_seen_by=True)

    def mapped_metrics(self, among: Collection[int] | None = None) -> RegistryMetrics:
        """Count what some processes map, or all."""
        if among is None:
            mapped = [entry for entry in self._objects.values() if entry.mappings]
            return RegistryMetrics(len(self._processes), len(mapped), sum(entry.probes for entry in mapped))
        keys = set[ObjectKey]().union(*(self._processes[pid].objects for pid in among if pid in self._processes))
        return RegistryMetrics(len(among), len(keys), sum(self._objects[key].probes for key in keys))


@dataclass(slots=True)
class _Process:
    key: ProcessKey
    objects: set[ObjectKey]
    crowded: frozenset[ObjectKey] = frozenset()


@dataclass(slots=True)
class _Entry:
    """probes: how many it has."""

    object: Object
    mappings: dict[int, FileMapping]
    probes: int
    holders: int = 0


def _mapped(entry: _Entry, pids: Iterable[int], *, is_seen_by: bool = False) -> MappedObject:
    """is_seen_by: the path is to be as the first of these processes has it."""
    ordered = tuple(sorted(pids))
    obj = replace(entry.object, path=entry.mappings[ordered[0]].path) if is_seen_by and ordered else entry.object
    return MappedObject(obj, ordered)
