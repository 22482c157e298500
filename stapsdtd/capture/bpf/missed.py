"""Calls of kernel functions that the kernel could not hit, which the program never sees.

A probe that is hit while another one runs on that CPU is skipped, and so is a return for which there was no room. Where
functions share a link or a program, the kernel does not say of which a call was: whoever wants one of them is told.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial

from stapsdtd.capture.bpf.armed import Group
from stapsdtd.capture.bpf.reading import Channel
from stapsdtd.capture.engine import LossStage
from stapsdtd.kernel.own_programs import OwnProgram
from stapsdtd.kernel.tracefs import Tracefs

_log = logging.getLogger(__name__)

_LINE = re.compile(r"^\s*(\S+)\s+\d+\s+(\d+)$", re.MULTILINE)


class MissedCalls:
    """Tells subscriptions of them. Any thread may use it that may wait for the kernel to arm (event_mutex)."""

    def __init__(self, tracefs: Tracefs, post: Callable[[Callable[[], None]], None]) -> None:
        """post: has the reader thread do something."""
        self._tracefs = tracefs
        self._post = post
        self._lock = threading.Lock()

    def tell(self, groups: Iterable[Group | None]) -> None:
        """Tell what was missed since the last call. groups: all that there are.

        What cannot be read now is told by a later call: nobody may fail to disarm for its sake.
        """
        missed = self._missed({group for group in groups if group is not None and group.is_of_kernel})
        with self._lock:
            of_programs: defaultdict[OwnProgram, set[Channel]] = defaultdict(set)
            for group, so_far in missed.items():
                consumers = (consumer for site in group.sites for consumer in list(site.consumers.values()))
                channels = {consumer.channel for consumer in consumers}
                count, group.missed = so_far - group.missed, max(so_far, group.missed)
                self._tell(channels, count)
                if group.event.own_program is not None:
                    of_programs[group.event.own_program] |= channels
            for program, channels in of_programs.items():
                self._tell(channels, _skipped_by(program))

    def _missed(self, groups: Iterable[Group]) -> dict[Group, int]:
        """Return what each group has missed so far, but those of which it cannot be read."""
        missed = {}
        unread: OSError | None = None

        @cache
        def of_events() -> Mapping[str, int]:
            return {event: int(count) for event, count in _LINE.findall(self._tracefs.read("kprobe_profile"))}

        for group in groups:
            try:
                missed[group] = group.event.missed(of_events)
            except OSError as error:
                unread = error
        if unread is not None:
            _log.warning("cannot tell which calls of kernel functions the kernel missed, trying again: %s", unread)
        return missed

    def _tell(self, channels: Iterable[Channel], count: int) -> None:
        for channel in channels if count > 0 else ():
            self._post(partial(_lose, channel, count))


def _skipped_by(program: OwnProgram) -> int:
    try:
        return program.take_skipped()
    except OSError as error:
        _log.warning("cannot tell what a program of kernel functions skipped, trying again: %s", error)
        return 0


def _lose(channel: Channel, count: int) -> None:
    channel.sink.fired(count)
    channel.sink.lost(LossStage.MISSED, count)
