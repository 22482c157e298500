"""What the inventory knows of an installed file, and its index of all of them."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.catalog.selectors import Selector
from stapsdtd.model import ArchitectureName, BuildId, Name, ParsedObject

Fingerprint = Annotated[int, Meta(ge=0)]
"""Of a path and its file's device, inode, size and times; see `walking`."""

MAX_PROBES = 5_000
"""Of a file. libjvm.so has 500."""


@dataclass(frozen=True, slots=True)
class InstalledFile:
    """A file with probes. path: as in maps. probes: providers and names; sites: how many they have."""

    fingerprint: Fingerprint
    path: str
    architecture: ArchitectureName
    build_id: BuildId | None
    probes: tuple[tuple[Name, Name], ...]
    sites: Annotated[int, Meta(ge=0)]

    @classmethod
    def of(cls, fingerprint: int, path: str, parsed: ParsedObject) -> InstalledFile:
        probes = dict.fromkeys((site.provider, site.name) for site in parsed.sites)
        return cls(fingerprint, path, parsed.architecture, parsed.build_id, tuple(probes), len(parsed.sites))

    @property
    def is_library(self) -> bool:
        return ".so" in self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Change:
    """Files that were installed or removed. A file that was written to is both."""

    installed: tuple[InstalledFile, ...] = ()
    removed: tuple[InstalledFile, ...] = ()


class Index:
    """Installed files by fingerprint. Changed by one thread; any may read."""

    def __init__(self, max_files: int, max_probes: int) -> None:
        """max_probes: of all files together; what several files have alike counts once."""
        self._max_files = max_files
        self._max_probes = max_probes
        self._files: dict[int, InstalledFile] = {}
        self._shared: dict[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]] = {}
        self._left_out: set[str] = set()

    def all(self) -> tuple[InstalledFile, ...]:
        # one step for the interpreter, so that other threads see no dictionary that changes
        return tuple(self._files.values())

    def get(self, fingerprint: int) -> InstalledFile | None:
        return self._files.get(fingerprint)

    @property
    def probes(self) -> int:
        return sum(len(file.probes) for file in self.all())

    @property
    def left_out(self) -> int:
        """How many files there was no room for, since `begin_scan`."""
        return len(self._left_out)

    def begin_scan(self) -> None:
        self._left_out = set()

    def add(self, file: InstalledFile) -> InstalledFile | None:
        """Return the file as it is kept; None if there is no room for it."""
        probes = self._shared.get(file.probes)
        names = 0 if probes is not None else sum(map(len, self._shared)) + len(file.probes)
        if len(self._files) >= self._max_files or len(file.probes) > MAX_PROBES or names > self._max_probes:
            self._left_out.add(file.path)
            return None
        self._left_out.discard(file.path)
        if probes is None:
            probes = tuple((sys.intern(provider), sys.intern(name)) for provider, name in file.probes)
            self._shared[probes] = probes
        kept = InstalledFile(file.fingerprint, file.path, file.architecture, file.build_id, probes, file.sites)
        self._files[kept.fingerprint] = kept
        return kept

    def remove(self, fingerprints: Iterable[int]) -> tuple[InstalledFile, ...]:
        removed = tuple(file for each in fingerprints if (file := self._files.pop(each, None)) is not None)
        used = {file.probes for file in self._files.values()}
        self._shared = {probes: probes for probes in self._shared if probes in used}
        return removed


def matching(
    files: Iterable[InstalledFile], selectors: Sequence[Selector]
) -> Generator[None, None, list[InstalledFile]]:
    """Find the files that may have what any of the selectors names, libraries first, in steps. No selectors match all.

    Which functions a file's probes are in is known only when it is opened.
    """
    by_name = [(file.path, file.probes) for file in files]
    naming = yield from SelectorSet(selectors).naming(by_name)
    found = [file for file, by in zip(files, naming, strict=True) if by]
    return sorted(found, key=lambda file: (not file.is_library, file.path))
