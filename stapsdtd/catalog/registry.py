"""The registry of living processes and the objects with probes that they map."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from stapsdtd.model import Mapping as FileMapping
from stapsdtd.model import Object, ObjectKey, Probe, ProcessKey, Site


@dataclass(frozen=True, slots=True)
class Change:
    """One object's standing changed: its first process came, its last one went, or others came or went."""

    object: Object
    appeared: bool = False
    vanished: bool = False


@dataclass(frozen=True, slots=True)
class RegistryMetrics:
    """objects: those with probes, or with notes that cannot be used."""

    processes: int
    objects: int
    probes: int


Listener = Callable[[Change], None]


class Registry:
    """Owned by one thread. Listeners are told of a process's changes after all of them were made.

    An object that appears or vanishes is told at once; who else maps it may be told once for many processes.
    """

    def __init__(self) -> None:
        self._processes: dict[int, _Process] = {}
        self._objects: dict[ObjectKey, _Known] = {}
        self._listeners: list[Listener] = []
        self._gathered: dict[ObjectKey, Change] | None = None
        self._probes = 0

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Answer what ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within it, one change tells of all processes that began or ceased to map an object; it is told at the end."""
        gathered: dict[ObjectKey, Change] = {}
        self._gathered = gathered
        try:
            yield
        finally:
            self._gathered = None
            self._tell(list(gathered.values()))

    def update(self, process: ProcessKey, mapped: Mapping[ObjectKey, tuple[Object, FileMapping]]) -> None:
        """Tell all objects with probes that a living process maps now."""
        known = self._processes.get(process.pid)
        if known is not None and known.key != process:
            self.gone(process.pid)
            known = None
        if known is None:
            known = self._processes[process.pid] = _Process(process, set())
        before, known.objects = known.objects, set(mapped)
        # what is new comes first: to let go of an object may take a listener long
        changes = []
        for key, (found, mapping) in mapped.items():
            change = self._map(process.pid, key, found, mapping)
            if key not in before:
                changes.append(change)
        self._tell(changes + [self._unmap(process.pid, key) for key in before - mapped.keys()])

    def gone(self, pid: int) -> None:
        """Forget a process; one that is not known is no error."""
        known = self._processes.pop(pid, None)
        self._tell([self._unmap(pid, key) for key in known.objects] if known else [])

    def _map(self, pid: int, key: ObjectKey, found: Object, mapping: FileMapping) -> Change:
        entry = self._objects.get(key)
        appeared = entry is None
        if entry is None:
            entry = self._objects[key] = _Known(found, {})
            self._probes += _count_probes(found)
        entry.mappings[pid] = mapping
        return Change(entry.object, appeared=appeared)

    def _unmap(self, pid: int, key: ObjectKey) -> Change:
        entry = self._objects[key]
        del entry.mappings[pid]
        if not entry.mappings:
            del self._objects[key]
            self._probes -= _count_probes(entry.object)
        return Change(entry.object, vanished=not entry.mappings)

    def _tell(self, changes: Sequence[Change]) -> None:
        """Tell all of it to all listeners, and raise then what the first of them raised that failed."""
        failure: OSError | None = None
        for change in changes:
            if self._gathered is not None:
                if not change.appeared and not change.vanished:
                    self._gathered[change.object.key] = change
                    continue
                # what is told of it now holds what was to be told of it later
                self._gathered.pop(change.object.key, None)
            for listener in list(self._listeners):
                try:
                    listener(change)
                except OSError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def metrics(self) -> RegistryMetrics:
        """In any thread."""
        return RegistryMetrics(len(self._processes), len(self._objects), self._probes)

    def pids(self) -> frozenset[int]:
        return frozenset(self._processes)

    def process(self, pid: int) -> ProcessKey | None:
        known = self._processes.get(pid)
        return known.key if known else None

    def has(self, key: ObjectKey) -> bool:
        return key in self._objects

    def objects(self) -> list[Object]:
        return [entry.object for entry in self._objects.values()]

    def mappings(self, key: ObjectKey) -> dict[int, FileMapping]:
        """Which processes map an object, and where."""
        entry = self._objects.get(key)
        return dict(entry.mappings) if entry else {}

    def seen_by(self, pids: frozenset[int] | None, probe: Probe) -> Probe:
        """A probe by the path that the first of these processes has it at; None for the first that was seen."""
        return probe if pids is None else replace(probe, object=self.object_seen_by(pids, probe.object))

    def objects_seen_by(self, pids: frozenset[int] | None) -> list[Object]:
        """The objects that any of these processes maps, by the path that it has them at; None for all."""
        if pids is None:
            return self.objects()
        return [
            self.object_seen_by(pids, entry.object)
            for entry in self._objects.values()
            if not pids.isdisjoint(entry.mappings)
        ]

    def object_seen_by(self, pids: frozenset[int] | None, found: Object) -> Object:
        if pids is None:
            return found
        mappings = self.mappings(found.key)
        path = next((mapping.path for pid, mapping in mappings.items() if pid in pids), found.path)
        return replace(found, path=path)

    def probes(self) -> list[Probe]:
        return [probe for entry in self._objects.values() for probe in probes_of(entry.object, sorted(entry.mappings))]


@dataclass(slots=True)
class _Process:
    key: ProcessKey
    objects: set[ObjectKey]


@dataclass(slots=True)
class _Known:
    object: Object
    mappings: dict[int, FileMapping]


def _count_probes(found: Object) -> int:
    return len({(site.provider, site.name) for site in found.parsed.sites})


def probes_of(found: Object, pids: list[int]) -> Iterator[Probe]:
    """Gather an object's sites by provider and name, in the order of the notes."""
    named: dict[tuple[str, str], list[Site]] = {}
    for site in found.parsed.sites:
        named.setdefault((site.provider, site.name), []).append(site)
    for (provider, name), sites in named.items():
        yield Probe(found, provider, name, tuple(sites), tuple(pids))
