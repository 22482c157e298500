"""The compiled program in the kernel, and the maps it shares with the daemon."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.resources import as_file, files

import numpy as np

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.fingerprint import fingerprint
from stapsdtd.capture.bpf.inner_maps import InnerMaps
from stapsdtd.capture.bpf.rings import Ring
from stapsdtd.capture.bpf.span_kinds import SMALL_SPAN, SPAN_OF_WORDS, SPANS_OF_RECORDS, SpanKind
from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import procfs, uprobe_links
from stapsdtd.kernel.bpf_entries import EntryMap
from stapsdtd.kernel.bpf_links import attach_to_tracepoint
from stapsdtd.kernel.bpf_object import BpfObject
from stapsdtd.kernel.bpf_rows import RowMap
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.libbpf import create_ring, put_map, remove_map
from stapsdtd.kernel.number_map import NumberMap
from stapsdtd.kernel.perf import MappingRing, online_cpus, possible_cpus
from stapsdtd.plan.attachments import EVENTS_ALONE, Choice, Means

_OBJECT = "stapsdt.bpf.o"
_OF_EVENTS, _LINKED, _OF_ENTRIES = "on_hit", "on_linked_hit", "on_function_entries"
_OF_CALLS = {False: "on_function_entry", True: "on_function_return"}
"""By whether they are of returns."""


class Loaded:
    """Raises KernelFeatureError where this host or this build cannot have it."""

    def __init__(self, object_path: str | None = None) -> None:
        """object_path: of another build than the package's."""
        if procfs.pid_namespace() != procfs.INITIAL_PID_NAMESPACE:
            raise KernelFeatureError(
                "bpf", "programs see the host's process ids, and this is a pid namespace of its own", "share the host's"
            )
        self.choice = _choose()
        takes_links = self.choice.for_all is Means.LINK
        self.cpus = max(possible_cpus()) + 1
        constants = np.array([os.getpid(), self.cpus, 0], "u4").tobytes()
        sizes = {
            "counters": self.cpus,
            "scratches": 2 * self.cpus,
            "workspaces": layout.WORKSPACES * self.cpus,
            "hit_spaces": layout.HIT_SPACES * self.cpus,
        }
        attach_types = {
            _LINKED: uprobe_links.ATTACH_TYPE if takes_links else None,
            # loaded when functions are traced
            **dict.fromkeys([_OF_ENTRIES, *_OF_CALLS.values()]),
        }
        self._path = object_path
        with self._file() as path:
            self._object = BpfObject(
                path, sizes, {".rodata": constants}, {".rodata.fingerprint": _fingerprint()}, attach_types
            )
        self.program = self._object.program(_OF_EVENTS)
        self.linked_program = self._object.program(_LINKED) if takes_links else None
        self._rings = self._object.map("rings")
        self._spares = self._object.map("spares")
        self._following = self._object.map("following")
        self.chains = InnerMaps(self._object.map("chains"))
        self._unfollowed = np.frombuffer(self.table(".bss.unfollowed"), "u8", layout.MAX_FOLLOWING)
        self._waits = np.frombuffer(self.table(".bss.reader"), "u4", 1)
        self._row_tables = [self._object.map(f"tables_{size // 8}") for size in layout.KEY_BYTES]
        self._epoch = np.frombuffer(self.table(".bss.epoch"), "u4", 1)
        self._filled = np.frombuffer(self.table(".bss.filled"), "u8", 2 * layout.MAX_TABLES)
        kinds = SMALL_SPAN, SPAN_OF_WORDS, *SPANS_OF_RECORDS
        self._spans = {kind: self._object.map(kind.table) for kind in kinds}
        self._spans_of_threads = np.frombuffer(self.table(".bss.threads"), "u8", 1)
        self._died = np.frombuffer(self.table(".bss.died"), "u8", layout.THREAD_SPANS)
        self._hits_to_wait_for = self._object.map("hits_to_wait_for")
        self._any_map = create_ring(mmap.PAGESIZE)

    def _file(self) -> AbstractContextManager[str]:
        return nullcontext(self._path) if self._path else _packaged()

    def program_of_call(self, function: str, *, is_return: bool) -> int:
        """Load a program for one kernel function, which takes some 0.1 s. Return its descriptor.

        Raises KernelFeatureError where the kernel has no such programs, or none for this function.
        """
        with self._file() as path:
            return self._object.instance(path, _OF_CALLS[is_return], function=function)

    def program_of_entries(self) -> int:
        """The same for entries of many kernel functions."""
        with self._file() as path:
            return self._object.instance(path, _OF_ENTRIES)

    def program_of_kprobes(self) -> int:
        """The same for kprobes that are attached together."""
        with self._file() as path:
            return self._object.instance(path, _OF_EVENTS)

    def table(self, name: str) -> mmap.mmap:
        return self._object.table(name)

    def make_ring(self, stride: int, size: int) -> Ring:
        """Raises OSError where the kernel has no memory for it."""
        return Ring(stride, size)

    def put_ring(self, record_class: int, ring: int) -> None:
        """Let records of a class go to a ring. Raises OSError."""
        put_map(self._rings, record_class, ring)

    def put_spare(self, record_class: int, ring: int) -> None:
        """Let records of a class go to a ring where the class's own is full, of who does not write many."""
        put_map(self._spares, record_class, ring)

    def take_ring(self, record_class: int) -> None:
        """Have records of a class go nowhere. Raises OSError."""
        remove_map(self._rings, record_class)

    def attach_followers(self) -> list[int]:
        """Have sets of followed processes kept. Return descriptors, which end that when they are closed.

        Raises OSError.
        """
        return self._attach("on_exit", "on_fork")

    def attach_to_ends_of_threads(self) -> list[int]:
        """Have starts taken out of tables whose threads end. Return descriptors, which end that when they are closed.

        Raises OSError.
        """
        return self._attach("on_thread_exit", "on_exec")

    def attach_to_ends_of_tasks(self) -> list[int]:
        """Forget calls of tasks that have ended. Return descriptors, which end that when they are closed.

        Raises OSError.
        """
        return self._attach("on_task_free")

    def _attach(self, *programs: str) -> list[int]:
        with ExitStack() as undo:
            links = []
            for program in programs:
                links.append(attach_to_tracepoint(self._object.program(program)))
                undo.callback(os.close, links[-1])
            undo.pop_all()
        return links

    def put_followed(self, scope: int, processes: NumberMap) -> None:
        """Follow a set of processes for a scope. Raises OSError."""
        self._unfollowed[scope] = 0
        put_map(self._following, scope, processes.descriptor)

    def take_followed(self, scope: int) -> None:
        """Follow no processes for a scope. Raises OSError."""
        remove_map(self._following, scope)

    def unfollowed(self, scope: int) -> int:
        """Return how many processes a scope's set had no room for."""
        return int(self._unfollowed[scope])

    def make_rows(self, key_bytes: int, max_entries: int) -> RowMap:
        """Raises OSError where the kernel has no memory for it."""
        return RowMap(key_bytes, layout.ROW.itemsize, max_entries)

    def put_rows(self, key_class: int, bank: int, rows: RowMap) -> None:
        """Let hits use a bank. Raises OSError."""
        put_map(self._row_tables[key_class], bank, rows.descriptor)

    def take_rows(self, key_class: int, bank: int) -> None:
        """Have hits find no such bank. Raises OSError."""
        remove_map(self._row_tables[key_class], bank)

    def filled(self, bank: int) -> int:
        """Return how many rows hits have added to a bank."""
        return int(self._filled[bank])

    def set_empty(self, bank: int) -> None:
        """Note that a bank that no hit uses has no rows."""
        self._filled[bank] = 0

    def make_span(self, max_entries: int, kind: SpanKind) -> EntryMap:
        """Raises OSError where the kernel has no memory for it."""
        return EntryMap(kind.key_bytes, kind.entry_bytes, max_entries)

    def put_span(self, span: int, entries: EntryMap, kind: SpanKind, *, is_of_thread: bool) -> None:
        """Keep starts in a table. is_of_thread: their keys are threads. Raises OSError."""
        if is_of_thread:
            self._died[span] = 0
            self._spans_of_threads[0] |= np.uint64(1 << span)
        put_map(self._spans[kind], span, entries.descriptor)

    def take_span(self, span: int, kind: SpanKind) -> None:
        """Have hits find no such table. Raises OSError."""
        self._spans_of_threads[0] &= np.uint64(~(1 << span) & (1 << layout.THREAD_SPANS) - 1)
        remove_map(self._spans[kind], span)

    def died(self, span: int) -> int:
        """Return how many starts were taken out of a table of threads because these ended."""
        return int(self._died[span])

    @property
    def parity(self) -> int:
        """Return which bank of each table hits use."""
        return int(self._epoch[0]) & 1

    def flip(self) -> int:
        """Have hits that begin from now on use the other bank of each table. Return the parity of the old ones."""
        parity = self.parity
        self._epoch[0] = 1 - parity
        return parity

    def set_reader_waits(self, waits: bool) -> None:
        self._waits[0] = waits

    def wait_for_hits(self) -> None:
        """Return when all hits that had begun are over: some 10 ms later, since the program never waits.

        For any thread. Raises OSError.
        """
        put_map(self._hits_to_wait_for, 0, self._any_map)

    def wait_for_uprobes(self) -> None:
        """Return when uprobe hits that had begun have run all of their programs. For any thread. Raises OSError."""
        if self.linked_program is not None:
            uprobe_links.wait_for_hits(self.linked_program)

    def close(self) -> None:
        os.close(self._any_map)
        self._object.close()


def _choose() -> Choice:
    """Choose what this host attaches sites of files by.

    For single processes perf events come first: the kernel unpatches a child of such a process at its first hit, and
    leaves it patched where the process has a link.
    """
    if not uprobe_links.are_supported():
        return EVENTS_ALONE
    if _has_perf_events():
        return Choice(Means.LINK, Means.EVENT)
    return Choice(Means.LINK, Means.LINK if uprobe_links.are_for_processes() else Means.SHARED_LINK)


def _has_perf_events() -> bool:
    try:
        MappingRing(online_cpus()[0]).close()
    except KernelFeatureError:
        return False
    return True


def _fingerprint() -> bytes:
    return fingerprint().to_bytes(8, sys.byteorder)


@contextmanager
def _packaged() -> Iterator[str]:
    source = files("stapsdtd.capture.bpf") / _OBJECT
    if not source.is_file():
        raise KernelFeatureError("bpf", f"{_OBJECT} was not built", "install stapsdtd anew, where clang can build it")
    with as_file(source) as path:
        yield str(path)


def load() -> Loaded | KernelFeatureError:
    """Return the error where it cannot be had: that the other engine is used then is no failure."""
    try:
        return Loaded()
    except KernelFeatureError as error:
        return error


def feature(found: Loaded | KernelFeatureError) -> Feature:
    """Tell of what load() found."""
    if isinstance(found, KernelFeatureError):
        return Feature("bpf programs", False, False, f"only the ftrace engine: {found.reason}", found.remedy)
    detail = f"the kernel takes the bpf engine's; sites of single processes are attached by {found.choice.by_pid.value}"
    if found.linked_program is None:
        detail += ", and so are those of all processes, since the kernel has no links to uprobes (Linux 6.6)"
    return Feature("bpf programs", True, False, detail, "")
