"""Parses installed files: at idle priority what a scan finds, at once what changed."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Protocol

from stapsdtd.errors import InventoryError, ObjectPendingError
from stapsdtd.model import ParsedObject
from stapsdtd.sandbox.parser import SandboxedParser
from stapsdtd.sandbox.processes import IDLE_COMMAND, Zygote

_SLOWNESS = 20
"""An idle process gets as little as 1/300 of a core that is busy."""
_PENDING_SECONDS = 0.02


class Parse(Protocol):
    """Parses the file that is open at a descriptor, as `procs.objects.Parse`."""

    def __call__(self, descriptor: int, pid: int, /) -> ParsedObject: ...


class ScanParser(Protocol):
    """Parses what a scan finds. Used by one thread, but for `abort`."""

    def parse(self, descriptor: int, /) -> ParsedObject:
        """Raises InventoryError, ObjectUnreadableError and OSError."""

    def abort(self) -> None:
        """Have what is going on fail, and all that begins later."""

    def close(self) -> None: ...


class IdleParser:
    """A `ScanParser` at idle priority. Its sandbox starts with the first file."""

    def __init__(self) -> None:
        self._parser: SandboxedParser | None = None
        self._is_aborted = False
        self._lock = threading.Lock()

    def parse(self, descriptor: int) -> ParsedObject:
        """As `SandboxedParser.parse`."""
        with self._lock:
            if self._is_aborted:
                raise InventoryError("the daemon stops")
            if self._parser is None:
                start = partial(Zygote, command=IDLE_COMMAND, slowness=_SLOWNESS)
                self._parser = SandboxedParser(start, deadline_seconds=10.0 * _SLOWNESS, slow_seconds=1.0 * _SLOWNESS)
        return self._parser.parse(descriptor, os.getpid())

    def abort(self) -> None:
        with self._lock:
            self._is_aborted = True
            if self._parser is not None:
                self._parser.abort()

    def close(self) -> None:
        if self._parser is not None:
            self._parser.close()


class WaitingParser:
    """Waits for files that are still being parsed."""

    def __init__(self, parse: Parse, is_stopping: threading.Event) -> None:
        self._parse = parse
        self._is_stopping = is_stopping

    def parse(self, descriptor: int) -> ParsedObject:
        """Raises InventoryError when the daemon stops, ObjectUnreadableError and OSError."""
        while True:
            try:
                return self._parse(descriptor, os.getpid())
            except ObjectPendingError:
                if self._is_stopping.wait(_PENDING_SECONDS):
                    raise InventoryError("the daemon stops") from None
