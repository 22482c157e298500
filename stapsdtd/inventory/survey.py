"""Brings the index up to date with what a walk finds."""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto
from typing import Protocol

from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.inventory.files import Change, Index, InstalledFile
from stapsdtd.inventory.walk import Directory, Exceeding, Found, Known, NewFile, Watched
from stapsdtd.inventory.watches import DirectoryWatches
from stapsdtd.model import ParsedObject
from stapsdtd.sandbox.parser import ParserLostError, TooSlowError

_log = logging.getLogger(__name__)

_REPORT_SECONDS = 0.1
_RECENT_SECONDS = 1.0


class ParseNew(Protocol):
    """Parses the file that is open at a descriptor. Raises ObjectUnreadableError, or OSError if none can be parsed."""

    def __call__(self, descriptor: int, /) -> ParsedObject: ...


class Outcome(Enum):
    """Of reading a file. NO_ROOM, and NOT_PARSED for want of time or a process: the next look reads it again."""

    INDEXED = auto()
    NO_PROBES = auto()
    NO_ROOM = auto()
    NOT_PARSED = auto()


class Survey:
    """Used by one thread. on_change: called with what was installed and removed.

    known: fingerprints of ELF files without probes, and of other files. exceeding: directories that have more names
    than are looked at.
    """

    def __init__(self, index: Index, watches: DirectoryWatches | None, on_change: Callable[[Change], None]) -> None:
        self._index = index
        self._watches = watches
        self._on_change = on_change
        self._installed: list[InstalledFile] = []
        self._reported_at = time.monotonic()
        self.known = array("Q")
        self.exceeding: frozenset[str] = frozenset()

    def fingerprints(self) -> bytes:
        """Return all that need not be read again."""
        return self.known.tobytes() + array("Q", (file.fingerprint for file in self._index.all())).tobytes()

    def update(self, found: Iterable[Found], parse: ParseNew, within: Collection[Directory] | None) -> set[Directory]:
        """Take what a walk finds, and return what to look at again.

        within: the directories that it looks at; None for all. Raises InventoryError and OSError, and then forgets
        nothing.
        """
        seen: set[int] = set()
        again: set[Directory] = set()
        without = array("Q")
        exceeding = set[str]()
        lacked_room = False
        try:
            for each in found:
                match each:
                    case Watched():
                        if self._watches is not None and (changed := self._watches.add(each)):
                            again.add(changed)
                    case Known(fingerprints, is_new):
                        without.extend(fingerprints) if is_new else seen.update(fingerprints)
                    case Exceeding(path):
                        exceeding.add(path)
                    case NewFile():
                        match self._read(each, parse):
                            case Outcome.INDEXED:
                                seen.add(each.fingerprint)
                            case Outcome.NO_ROOM:
                                lacked_room = True
                            case Outcome.NO_PROBES if not _is_recent(each.descriptor):
                                without.append(each.fingerprint)
                self._report_soon()
        finally:
            self._report()
        if within is None:
            without.extend(each for each in self.known if each in seen)
            self.known = without
            self.exceeding = frozenset(exceeding)
        else:
            self.known.extend(without)
            self.exceeding |= exceeding
        stale = [
            file.fingerprint
            for file in self._index.all()
            if file.fingerprint not in seen and (within is None or any(_is_in(file.path, each) for each in within))
        ]
        if removed := self._index.remove(stale):
            self._on_change(Change(removed=removed))
            if lacked_room and within is not None:
                again.update(within)
        return again

    def _read(self, new: NewFile, parse: ParseNew) -> Outcome:
        """Raises OSError."""
        try:
            parsed = parse(new.descriptor)
        except ObjectUnreadableError as error:
            _log.debug("%s: %s", new.path, error)
            return Outcome.NOT_PARSED if isinstance(error, ParserLostError | TooSlowError) else Outcome.NO_PROBES
        if not parsed.sites:
            return Outcome.NO_PROBES
        file = self._index.add(InstalledFile.of(new.fingerprint, new.path, parsed))
        if file is None:
            return Outcome.NO_ROOM
        self._installed.append(file)
        return Outcome.INDEXED

    def _report_soon(self) -> None:
        if time.monotonic() - self._reported_at > _REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        if self._installed:
            installed, self._installed = tuple(self._installed), []
            self._on_change(Change(installed=installed))


def _is_recent(descriptor: int) -> bool:
    """Report whether a file may still be written to, within one tick of the file system's clock."""
    status = os.fstat(descriptor)
    return time.time() - max(status.st_mtime, status.st_ctime) < _RECENT_SECONDS


def _is_in(path: str, directory: Directory) -> bool:
    parent = path.rpartition("/")[0] or "/"
    if not directory.is_deep:
        return parent == directory.path
    return f"{parent}/".startswith(f"{directory.path.rstrip('/')}/")
