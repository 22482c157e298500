"""What a daemon holds in the kernel: events and instances in tracefs, and links to uprobes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stapsdtd.kernel.tracefs import Tracefs


class Link(NamedTuple):
    """A link to uprobes, as /proc/PID/fdinfo tells of it. offsets: of its sites, since Linux 6.17."""

    path: str
    offsets: tuple[int, ...]


def links(pid: int) -> list[Link]:
    """Those of a process, if it is alive."""
    return [_link(text) for text in _descriptions(pid) if "link_type:\tuprobe_multi" in text]


def _descriptions(pid: int) -> Iterator[str]:
    try:
        files = list(Path(f"/proc/{pid}/fdinfo").iterdir())
    except OSError:
        return
    for file in files:
        try:
            yield file.read_text(errors="surrogateescape")
        except OSError:
            continue


def _link(text: str) -> Link:
    path = re.search(r"^path:\s(.*)$", text, re.MULTILINE)
    offsets = re.findall(r"^\d+\s+0x([0-9a-f]+)\s+0x", text, re.MULTILINE)
    return Link(path[1] if path else "", tuple(int(offset, 16) for offset in offsets))


def definitions(tracefs: Tracefs, pid: int) -> list[str]:
    """The lines of `uprobe_events` in a daemon's name, each for a site."""
    return [line for line in tracefs.read("uprobe_events").splitlines() if f"_{pid}_" in line]


def sites(tracefs: Tracefs, pid: int) -> list[str]:
    """A line for each site that a daemon has armed with the bpf engine. Links have them since Linux 6.17."""
    linked = [f"{link.path}:{offset:#x}" for link in links(pid) for offset in link.offsets]
    return sorted(definitions(tracefs, pid) + linked)


def own(tracefs: Tracefs, pid: int) -> list[str]:
    """The names of all events and instances, and the paths of links."""
    names = [f"{group}/{event}" for group, event in tracefs.uprobe_events()] + tracefs.instances()
    return [name for name in names if f"_{pid}_" in name] + [link.path for link in links(pid)]
