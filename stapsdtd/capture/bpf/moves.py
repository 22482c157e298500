"""Ends moves of sites from one group to another.

    newer group is attached ──► every hit runs it ──► hits of the older one do not count ──► that is detached
                                (a grace period)      (Slots.dismiss)

A hit that began before the newer group was attached may still be about to run the older one alone, and counts there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stapsdtd.capture.bpf.slots import GroupNumber, Slot, Slots

_log = logging.getLogger(__name__)

Wait = Callable[[], None]
"""Returns when the hits that had begun have run all of their programs. Raises OSError."""


class _Move(NamedTuple):
    slots: Sequence[Slot]
    wait: Wait


class Moves:
    """For any thread."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._begun: dict[GroupNumber, _Move] = {}
        self._lock = threading.Lock()
        self._ending = threading.Lock()

    def begin(self, group: GroupNumber, slots: Sequence[Slot], wait: Wait) -> None:
        """Note that these sites have left a group for others, which are attached."""
        with self._lock:
            self._begun[group] = _Move(slots, wait)

    def end(self, group: GroupNumber) -> None:
        """Wait until no hit needs a group any more. All moves that have begun share the grace period."""
        with self._ending:
            with self._lock:
                if group not in self._begun:
                    return
                begun, self._begun = self._begun, {}
            for wait in {move.wait for move in begun.values()}:
                try:
                    wait()
                except OSError as error:
                    _log.warning("hits of sites that moved may be lost, for one of each thread at most: %s", error)
            for each, move in begun.items():
                self._slots.dismiss(move.slots, each)
