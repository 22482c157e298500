"""Calls of kernel functions that the kernel could not hit, which the program never sees (`nmissed` of struct kprobe).

A probe that is hit while another one runs on that CPU is skipped, and so is a return for which there was no room.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from functools import partial

from stapsdtd.capture.bpf.armed import Group
from stapsdtd.capture.bpf.reading import Channel
from stapsdtd.capture.engine import LossStage
from stapsdtd.kernel.tracefs import Tracefs

_LINE = re.compile(r"^\s*(\S+)\s+\d+\s+(\d+)$", re.MULTILINE)


class MissedCalls:
    """Tells subscriptions of them. Any thread may use it."""

    def __init__(self, tracefs: Tracefs, post: Callable[[Callable[[], None]], None]) -> None:
        """post: has the reader thread do something."""
        self._tracefs = tracefs
        self._post = post
        self._told: dict[str, int] = {}
        self._lock = threading.Lock()

    def tell(self, groups: Iterable[Group | None]) -> None:
        """Tell what was missed since the last call. The kernel counts by events, each of which is one function's."""
        functions = {group.name.rpartition("/")[2]: group for group in groups if group and group.is_of_kernel}
        if not functions:
            return
        with self._lock:
            missed = {event: int(count) for event, count in _LINE.findall(self._tracefs.read("kprobe_profile"))}
            told = {event: self._told.get(event, 0) for event in missed}
            for event in functions.keys() & missed.keys():
                if count := missed[event] - told[event]:
                    told[event] = missed[event]
                    for site in functions[event].sites:
                        for consumer in list(site.consumers.values()):
                            self._post(partial(_lose, consumer.channel, count))
            self._told = told


def _lose(channel: Channel, count: int) -> None:
    channel.sink.fired(count)
    channel.sink.lost(LossStage.MISSED, count)
