"""Reads what `opening.py` sends of one request: descriptors, which are parsed, and why a path cannot be used."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from stapsdtd.errors import FileRefusedError, LimitReachedError, ObjectPendingError, ObjectUnreadableError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.reach import status_of
from stapsdtd.model import FileId, ObjectKey, ParsedObject
from stapsdtd.procs.file_keys import identify_open, open_now
from stapsdtd.procs.named_files import Credentials, NamedFile
from stapsdtd.procs.objects import Parse

FIRST_PID = 1
_PENDING_SECONDS = 0.05
_PROCESS_ROOT = re.compile(r"/proc/([0-9]+)/root(?:/|$)")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a request: files with notes, and notes in all of them, which take some 500 bytes each.

    reply_seconds: without a word from a file system. parse_seconds: for a file. all_seconds: for everything.
    """

    files: int = 1000
    notes: int = 200_000
    reply_seconds: float = 5.0
    parse_seconds: float = 10.0
    all_seconds: float = 30.0


DEFAULT_BOUNDS = Bounds()


def ended(path: str) -> FileRefusedError:
    return FileRefusedError(path, "cannot be opened: the process that opens files ended; try again")


class _UselessError(Exception):
    """Why a file is of no use, though others in its directory may be."""


class _NoNotesError(_UselessError):
    """A file has no notes, as most have none."""


def _check_unchanged(before: ObjectKey, after: ObjectKey) -> None:
    """Raises _UselessError."""
    if before != after:
        raise _UselessError("was written to while it was read; try again")


@dataclass(slots=True)
class OpenedFiles:
    """What was opened so far, each file once. path: that is being opened. why_none: why it has given no file yet.

    are_expected: files that cannot be used, or exceed the bounds, are put into `unusable`, and refuse nothing; as are
    all that are left when time is up, or when there is no reply.
    """

    parse: Parse
    filesystems: Filesystems
    credentials: Credentials
    bounds: Bounds
    path: str
    _: KW_ONLY
    are_expected: bool = False
    files: dict[FileId, NamedFile] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    unusable: dict[str, str] = field(default_factory=dict)
    why_none: str = ""
    notes: int = 0
    began: float = field(default_factory=time.monotonic)

    def take(self, kind: bytes, text: str, descriptor: int | None) -> bool:
        """Take a message. Report whether more are to come. Raises FileRefusedError, and OSError."""
        if descriptor is None:
            return self._take_text(kind, text)
        try:
            self._check_time()
            if kind == b"D":
                self.paths.add(procfs.shown_link(f"/proc/self/fd/{descriptor}"))
            else:
                self._take_file(descriptor, is_named=kind == b"N")
        finally:
            os.close(descriptor)
        return True

    def give_up(self, error: FileRefusedError, paths: Sequence[str]) -> None:
        """Take the path that is being opened, and those after it, to be of no use. Raises the error, unless they are
        merely expected files.
        """
        if not self.are_expected:
            raise error
        left = paths.index(self.path) if self.path in paths else 0
        if self.files and not self.why_none:
            # it has given its file
            left += 1
        for path in paths[left:]:
            self.unusable.setdefault(path, error.reason)

    def _take_text(self, kind: bytes, text: str) -> bool:
        if kind in {b"P", b"."} and self.why_none and not self.are_expected:
            raise FileRefusedError(self.path, self.why_none)
        if kind == b"P":
            self.path, self.why_none = text, "no ELF file there has a stapsdt note"
        elif kind == b"E":
            self._refuse(text)
        elif kind == b"+":
            self._check_time()
        elif kind != b".":
            raise ended(self.path)
        return kind != b"."

    def _refuse(self, reason: str) -> None:
        """Raises FileRefusedError, unless it is merely an expected file."""
        if not self.are_expected:
            raise FileRefusedError(self.path, reason)
        self.unusable[self.path] = reason

    def _check_time(self) -> None:
        """Raises FileRefusedError."""
        if time.monotonic() - self.began > self.bounds.all_seconds:
            raise FileRefusedError(self.path, f"takes longer than {self.bounds.all_seconds:g} s to read")

    def _take_file(self, held: int, *, is_named: bool) -> None:
        try:
            self._keep(held)
        except LimitReachedError as error:
            if not self.are_expected:
                raise
            self.unusable[self.path] = str(error)
        except _NoNotesError as error:
            if is_named and not self.are_expected:
                raise FileRefusedError(self.path, str(error)) from error
        except _UselessError as error:
            if is_named:
                self._refuse(str(error))
        else:
            self.why_none = ""

    def _keep(self, held: int) -> None:
        """Parse a file that is held by O_PATH, and keep it open.

        Raises FileRefusedError, LimitReachedError and _UselessError.
        """
        match = _PROCESS_ROOT.match(self.path)
        viewer = int(match[1]) if match else FIRST_PID
        shown = procfs.shown_link(f"/proc/self/fd/{held}")
        status = status_of(held)
        if status.st_nlink == 0:
            raise _UselessError("has been deleted")
        if reason := self.filesystems.why_not(held, viewer):
            self._refuse(reason)
            return
        descriptor = open_now(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            key = identify_open(descriptor, viewer, shown, self.filesystems).key
            if key.file in self.files:
                os.close(descriptor)
                return
            parsed = self._parsed(descriptor)
            _check_unchanged(key, identify_open(descriptor, viewer, shown, self.filesystems).key)
            self._check_bounds(parsed)
        except BaseException:
            os.close(descriptor)
            raise
        self.paths.add(shown)
        self.files[key.file] = NamedFile(descriptor, shown, viewer, key, parsed, self.credentials)

    def _parsed(self, descriptor: int) -> ParsedObject:
        """Raises _UselessError."""
        deadline = time.monotonic() + self.bounds.parse_seconds
        while True:
            try:
                parsed = self.parse(descriptor, self.credentials.pid, self.credentials.user)
            except ObjectUnreadableError as error:
                raise _UselessError(f"cannot be parsed: {error}") from error
            except ObjectPendingError:
                if time.monotonic() > deadline:
                    raise _UselessError("takes long to parse; try again") from None
                time.sleep(_PENDING_SECONDS)
                continue
            if not parsed.sites and not parsed.problems:
                raise _NoNotesError("has no stapsdt note")
            return parsed

    def _check_bounds(self, parsed: ParsedObject) -> None:
        """Raises LimitReachedError."""
        self.notes += len(parsed.sites) + len(parsed.problems)
        if len(self.files) >= self.bounds.files:
            text = f"{self.path}: too many files: more than {self.bounds.files} have stapsdt notes"
            raise LimitReachedError(text, "files")
        if self.notes > self.bounds.notes:
            text = f"{self.path}: too many probes: more than {self.bounds.notes} stapsdt notes"
            raise LimitReachedError(text, "notes")
