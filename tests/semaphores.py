"""What processes have in memory of files, such as the semaphores of probes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from stapsdtd.client import Probe


def mapped_bytes(pid: int, path: str, file_offset: int, size: int, permission: str) -> bytes:
    """What a process has in memory of a file at an offset: in its code (permission `x`) or its data (`w`)."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, permissions, offset, _, _, *rest = line.split(maxsplit=5)
        if permission not in permissions or rest != [path]:
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        position = start + file_offset - int(offset, 16)
        if start <= position < end:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(position)
                return memory.read(size)
    raise ValueError(f"process {pid} does not map {path} at {file_offset:#x}")


def semaphores(pid: int, probes: Iterable[Probe]) -> Counter[int]:
    """The semaphores' values in a process, by file offset."""
    found: Counter[int] = Counter()
    for probe in probes:
        for offset in {site.semaphore_offset for site in probe.sites if site.semaphore_offset is not None}:
            found[offset] = int.from_bytes(mapped_bytes(pid, probe.path, offset, 2, "w"), sys.byteorder)
    return found
