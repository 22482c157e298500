r"""Keeps the inventory across restarts, in one file:

    stapsdtd inventory 2\n   SHA-256 of the rest, 32 bytes   the rest: `_Content` as MessagePack

Many files have the same probes, such as all hard links to one: these are written once, and files refer to them.

It is believed only if it belongs to root, as does its directory, and is whole; otherwise the files are read once more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from contextlib import suppress
from typing import Annotated

from msgspec import DecodeError, Meta, Struct, msgpack

from stapsdtd.inventory.files import Fingerprint, InstalledFile
from stapsdtd.kernel.host_calls import OPEN_FILE, host_call
from stapsdtd.model import ArchitectureName, BuildId, Name

_log = logging.getLogger(__name__)

_NAME = "inventory"
_PART = "inventory.part"
_MAGIC = b"stapsdtd inventory 2\n"
_DIGEST_BYTES = 32
_MAX_BYTES = 32 << 20
_FINGERPRINT_BYTES = 8


class Stored(Struct, frozen=True):
    """version: of the daemon, whose parser found the probes. scanned_at: Unix time. known: fingerprints of files
    without probes, 8 bytes each.
    """

    version: str
    scanned_at: float
    files: tuple[InstalledFile, ...]
    known: bytes


class _File(Struct, frozen=True):
    """As `InstalledFile`. probes: which of the tables they are."""

    fingerprint: Fingerprint
    path: str
    architecture: ArchitectureName
    build_id: BuildId | None
    probes: Annotated[int, Meta(ge=0)]
    sites: Annotated[int, Meta(ge=0)]


class _Content(Struct, frozen=True):
    """As `Stored`. tables: probes of files, each once."""

    version: str
    scanned_at: float
    tables: tuple[tuple[tuple[Name, Name], ...], ...]
    files: tuple[_File, ...]
    known: bytes


class Store:
    """directory: is made if it is missing. max_bytes: of its file."""

    def __init__(self, directory: str, version: str, *, max_bytes: int = _MAX_BYTES) -> None:
        self._directory = directory
        self._version = version
        self._max_bytes = max_bytes
        self.path = f"{directory}/{_NAME}"

    def load(self) -> Stored | None:
        """Return what was saved last; None if there is nothing, or nothing to believe."""
        try:
            with host_call(OPEN_FILE, self.path):
                content = self._read()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("files are read once more: %s", error)
            return None
        reason = "is no inventory, or not whole"
        body = content[len(_MAGIC) + _DIGEST_BYTES :]
        if content == _MAGIC + hashlib.sha256(body).digest() + body:
            # IndexError: there is no such table
            with suppress(DecodeError, IndexError):
                decoded = msgpack.decode(body, type=_Content)
                if decoded.version != self._version:
                    reason = f"is of version {decoded.version}"
                elif not len(decoded.known) % _FINGERPRINT_BYTES:
                    return _unpacked(decoded)
        _log.warning("%s %s, and files are read once more", self.path, reason)
        return None

    def _read(self) -> bytes:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            for each in (status, os.stat(self._directory)):
                if each.st_uid not in {0, os.geteuid()} or each.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    raise PermissionError("others than root may write to it or its directory")
            if not stat.S_ISREG(status.st_mode):
                raise OSError("it is not a regular file")
            if status.st_size > self._max_bytes:
                raise OSError(f"it has {status.st_size:,} bytes, more than {self._max_bytes:,}")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(self._max_bytes)
        finally:
            os.close(descriptor)

    def save(self, stored: Stored) -> None:
        """Replace what was saved, unless it has grown too large to be loaded. Raises OSError."""
        body = msgpack.encode(_packed(stored))
        size = len(_MAGIC) + _DIGEST_BYTES + len(body)
        if size > self._max_bytes:
            _log.warning(
                "%s is not written: it would have %s bytes, more than %s; the next start reads files once more",
                self.path,
                f"{size:,}",
                f"{self._max_bytes:,}",
            )
            return
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        # one name, so that what a kill leaves behind is written over
        part = f"{self._directory}/{_PART}"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.writelines((_MAGIC, hashlib.sha256(body).digest(), body))
                file.flush()
                os.fsync(descriptor)
            os.rename(part, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise


def _packed(stored: Stored) -> _Content:
    numbers: dict[tuple[tuple[str, str], ...], int] = {}
    files = tuple(
        _File(
            file.fingerprint,
            file.path,
            file.architecture,
            file.build_id,
            numbers.setdefault(file.probes, len(numbers)),
            file.sites,
        )
        for file in stored.files
    )
    return _Content(stored.version, stored.scanned_at, tuple(numbers), files, stored.known)


def _unpacked(content: _Content) -> Stored:
    """Raises IndexError."""
    files = tuple(
        InstalledFile(
            file.fingerprint,
            file.path,
            file.architecture,
            file.build_id,
            content.tables[file.probes],
            file.sites,
        )
        for file in content.files
    )
    return Stored(content.version, content.scanned_at, files, content.known)
