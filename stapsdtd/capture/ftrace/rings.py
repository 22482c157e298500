"""Ring buffers of tracefs instances: per_cpu/cpuN/trace_pipe_raw, and stats beside it.

    entries: 120
    overrun: 0
    commit overrun: 0
    bytes: 5760
    oldest event ts: 2725561.093243
    now ts: 2725571.310217
    dropped events: 7
    read events: 480

A ring that does not overwrite counts records that it has no room for as dropped events.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from stapsdtd.capture.ftrace.format import PageFormat
from stapsdtd.capture.ftrace.pages import Records
from stapsdtd.kernel.host_calls import TRACEFS_READ, host_call
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.plan.events import Instance

PAGES_PER_READ = 256
_STATS_BYTES = 4096
_FILLED = re.compile(r"^bytes: (\d+)$", re.MULTILINE)
_DROPPED = re.compile(r"^dropped events: (\d+)$|^overrun: (\d+)$|^commit overrun: (\d+)$", re.MULTILINE)


@dataclass(slots=True)
class Ring:
    """One CPU's buffer of one instance.

    stats: an open descriptor of its statistics, which stay readable if tracefs is unmounted. held: records that are
    too recent to be delivered.
    """

    instance: Instance
    cpu: int
    descriptor: int
    stats: int
    size_bytes: int
    page_format: PageFormat
    held: Records | None = None
    read: int = 0
    lost: int = 0
    filled_bytes: int = 0

    def read_pages(self) -> list[bytes]:
        """Return the oldest pages, up to PAGES_PER_READ of them."""
        pages: list[bytes] = []
        while len(pages) < PAGES_PER_READ:
            try:
                page = os.read(self.descriptor, self.page_format.bytes)
            except BlockingIOError:
                break
            if not page:
                break
            pages.append(page.ljust(self.page_format.bytes, b"\0"))
        return pages

    def newly_lost(self) -> int:
        """Return how many records were dropped since the last call, and update filled_bytes."""
        stats = os.pread(self.stats, _STATS_BYTES, 0).decode()
        filled = _FILLED.search(stats)
        self.filled_bytes = int(filled[1]) if filled else 0
        total = sum(int(number) for numbers in _DROPPED.findall(stats) for number in numbers if number)
        newly_lost = max(total - self.lost, 0)
        self.lost += newly_lost
        return newly_lost

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self.stats)


def open_rings(tracefs: Tracefs, instance: Instance, cpus: list[int], buffer_kib: int) -> list[Ring]:
    """Raises OSError."""
    page_format = PageFormat.parse(tracefs.read("events/header_page"))
    rings: list[Ring] = []
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        for cpu in cpus:
            folder = f"instances/{instance}/per_cpu/cpu{cpu}"
            with host_call(TRACEFS_READ):
                stats = os.open(tracefs.path(f"{folder}/stats"), flags)
            try:
                with host_call(TRACEFS_READ):
                    descriptor = os.open(tracefs.path(f"{folder}/trace_pipe_raw"), flags)
            except OSError:
                os.close(stats)
                raise
            rings.append(Ring(instance, cpu, descriptor, stats, buffer_kib * 1024, page_format))
    except OSError:
        # an instance cannot be removed while one of its files is open
        for ring in rings:
            ring.close()
        raise
    return rings
