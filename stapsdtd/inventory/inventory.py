"""Keeps the index of installed files, in a thread: from the store, by a scan at start, and as directories change."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum

from stapsdtd.config import InventorySettings
from stapsdtd.errors import InventoryError
from stapsdtd.inventory.files import Change, Index, InstalledFile
from stapsdtd.inventory.parsing import IdleParser, Parse, ScanParser, WaitingParser
from stapsdtd.inventory.places import default_directories, left_out
from stapsdtd.inventory.store import Store, Stored
from stapsdtd.inventory.survey import ParseNew, Survey
from stapsdtd.inventory.walk import MAX_NAMES, Directory, Walk
from stapsdtd.inventory.watches import DirectoryWatches
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.host_calls import KEEP_INVENTORY, host_call

_log = logging.getLogger(__name__)

_IDLE_REPLY_SECONDS = 600.0
_REPLY_SECONDS = 10.0
_STOP_SECONDS = 1.0


class InventoryState(Enum):
    OFF = "off"
    SCANNING = "scanning"
    CURRENT = "current"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class InventoryStatus:
    """files, probes: with probes, and in all of them. scanned_at: Unix time of the last scan, 0 if there was none.
    problem: why the last one failed, or why files are left out; else empty.
    """

    state: InventoryState = InventoryState.OFF
    files: int = 0
    probes: int = 0
    scanned_at: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """settle: from a change until it is looked at. share: of the time that looking may take, once it has taken more
    than burst. rescan: between scans of everything. retry: after one that failed.
    """

    settle_seconds: float = 0.02
    share: float = 0.2
    burst_seconds: float = 3.0
    rescan_seconds: float = 3600.0
    retry_seconds: float = 60.0


DEFAULT_PACE = Pace()
_STATE = "/var/lib/stapsdtd"


class Inventory:
    """Files with probes in some directories. Any thread may call all methods.

    on_change: called in the inventory's thread; set it before `start`.
    """

    def __init__(
        self,
        directories: Collection[Directory],
        store: Store,
        filesystems: Filesystems,
        index: Index,
        parse: Parse,
        *,
        version: str,
        pace: Pace = DEFAULT_PACE,
        scan_parser: Callable[[], ScanParser] = IdleParser,
    ) -> None:
        """directories: none for an inventory that is off. filesystems: for this thread alone. parse: for what changed;
        what a scan finds is parsed by scan_parser, made for each.
        """
        self._directories = directories
        self._store = store
        self._filesystems = filesystems
        self._index = index
        self._version = version
        self._pace = pace
        self._scan_parser = scan_parser
        self.on_change: Callable[[Change], None] = lambda _change: None
        self._status = InventoryStatus(InventoryState.SCANNING if directories else InventoryState.OFF)
        self._is_stopping = threading.Event()
        self._parse_changed = WaitingParser(parse, self._is_stopping).parse
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="stapsdtd-inventory", daemon=True)
        self._walk: Walk | None = None
        self._scanning: ScanParser | None = None
        self._lock = threading.Lock()
        self._is_saved = True
        self._exceeding: frozenset[str] = frozenset()

    @property
    def is_on(self) -> bool:
        return bool(self._directories)

    def start(self) -> None:
        if self.is_on:
            self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended, or after a second: a file system may hold it up."""
        self._is_stopping.set()
        os.eventfd_write(self._wake, 1)
        with self._lock:
            if self._walk is not None:
                self._walk.stop()
            if self._scanning is not None:
                self._scanning.abort()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        if not self._thread.is_alive():
            os.close(self._wake)

    def files(self) -> tuple[InstalledFile, ...]:
        return self._index.all()

    @property
    def status(self) -> InventoryStatus:
        files = self._index.all()
        problems = [self._status.problem] if self._status.problem else []
        problems += [
            f"{path} has more than {MAX_NAMES:,} names: the rest is left out" for path in sorted(self._exceeding)
        ]
        if left_out := self._index.left_out:
            problems.append(f"{left_out:,} files are left out, beyond its bounds")
        probes = sum(len(file.probes) for file in files)
        return replace(self._status, files=len(files), probes=probes, problem="; ".join(problems))

    def _run(self) -> None:
        try:
            watches = DirectoryWatches()
        except OSError as error:
            _log.warning("what is installed is noticed by a scan every hour: %s", error)
            watches = None
        with contextlib.closing(watches) if watches is not None else contextlib.nullcontext():
            survey = Survey(self._index, watches, self._changed)
            self._load(survey)
            while not self._is_stopping.is_set():
                is_scanned = self._scan(survey)
                pause = self._pace.rescan_seconds if is_scanned else self._pace.retry_seconds
                self._follow(survey, watches, time.monotonic() + pause)
            self._save(survey)

    def _load(self, survey: Survey) -> None:
        stored = self._store.load()
        if stored is None:
            return
        survey.known.frombytes(stored.known)
        kept = tuple(file for each in stored.files if (file := self._index.add(each)) is not None)
        self._status = replace(self._status, scanned_at=stored.scanned_at)
        if kept:
            self.on_change(Change(installed=kept))

    def _scan(self, survey: Survey) -> bool:
        """Look at everything. Report whether that succeeded."""
        self._status = replace(self._status, state=InventoryState.SCANNING)
        began = time.monotonic()
        self._index.begin_scan()
        self._is_saved = False
        with contextlib.closing(self._scan_parser()) as parser:
            with self._lock:
                self._scanning = parser
            try:
                again = self._look(survey, None, parser.parse)
            finally:
                with self._lock:
                    self._scanning = None
        if again is None:
            return False
        self._status = InventoryStatus(InventoryState.CURRENT, scanned_at=time.time())
        _log.info(
            "inventory: %d files with probes, looked at in %.1f s", len(self._index.all()), time.monotonic() - began
        )
        self._save(survey)
        if again:
            self._look(survey, again, self._parse_changed)
        return True

    def _look(self, survey: Survey, within: Collection[Directory] | None, parse: ParseNew) -> set[Directory] | None:
        """Look at directories, or at all. Return which are to be looked at again, None if it failed."""
        directories = self._directories if within is None else within
        try:
            walk = self._new_walk(_REPLY_SECONDS if within else _IDLE_REPLY_SECONDS)
            found = walk.found(directories, survey.fingerprints(), left_out(self._filesystems), is_idle=within is None)
            with contextlib.closing(found):
                again = survey.update(found, parse, within)
            self._exceeding = survey.exceeding
        except (InventoryError, OSError) as error:
            if not self._is_stopping.is_set():
                _log.warning("installed files cannot be looked for: %s", error)
                self._status = replace(self._status, state=InventoryState.FAILED, problem=str(error))
            return None
        return again

    def _new_walk(self, reply_seconds: float) -> Walk:
        """Raises InventoryError if the daemon stops, or if the last walk does not end."""
        with self._lock:
            if self._is_stopping.is_set():
                raise InventoryError("the daemon stops")
            if self._walk is not None and self._walk.is_running:
                # another one would wait for the same
                raise InventoryError("a file system still does not reply")
            self._walk = Walk(reply_seconds=reply_seconds)
            return self._walk

    def _follow(self, survey: Survey, watches: DirectoryWatches | None, until: float) -> None:
        """Look at directories as they change, until it is time for the next scan."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if watches is not None:
            poll.register(watches.fileno(), select.POLLIN)
        budget, looked_at = self._pace.burst_seconds, time.monotonic()
        while not self._is_stopping.is_set() and (left := until - time.monotonic()) > 0:
            if not poll.poll(left * 1000) or watches is None:
                continue
            if self._is_stopping.wait(self._pace.settle_seconds):
                return
            changed = watches.changed()
            if changed is None:
                return
            began = time.monotonic()
            again: set[Directory] | None = changed
            while again:
                again = self._look(survey, again, self._parse_changed)
            if again is None:
                self._is_stopping.wait(self._pace.retry_seconds)
                return
            now = time.monotonic()
            budget = min(budget + self._pace.share * (now - looked_at), self._pace.burst_seconds) - (now - began)
            looked_at = now
            if budget < 0:
                self._is_stopping.wait(-budget / self._pace.share)

    def _changed(self, change: Change) -> None:
        self._is_saved = False
        self.on_change(change)

    def _save(self, survey: Survey) -> None:
        if self._status.state is not InventoryState.CURRENT or self._is_saved:
            return
        stored = Stored(self._version, self._status.scanned_at, self._index.all(), survey.known.tobytes())
        try:
            with host_call(KEEP_INVENTORY, self._store.path):
                self._store.save(stored)
        except OSError as error:
            _log.warning("the next start reads files once more: %s", error)
        self._is_saved = True


def state_directory(settings: InventorySettings) -> str:
    """Return the directory that keeps the inventory across restarts."""
    # systemd puts colons between several
    return settings.state or os.environ.get("STATE_DIRECTORY", _STATE).partition(":")[0]


def make_inventory(settings: InventorySettings, armed_too: Collection[str], parse: Parse, version: str) -> Inventory:
    """Return the inventory that a configuration asks for. armed_too: as for `Filesystems`."""
    own = tuple(Directory(path, is_any_owner=True) for path in settings.directories)
    # the system's first, so that whoever fills the others takes no room, and no watches, from them
    directories = (*(default_directories() if settings.system else ()), *own) if settings.enabled else ()
    return Inventory(
        directories,
        Store(state_directory(settings), version),
        Filesystems(armed_too),
        Index(settings.max_files, settings.max_probes),
        parse,
        version=version,
    )
