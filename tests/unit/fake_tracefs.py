"""A tracefs in a folder: what it takes is recorded, and rings are pipes that a test writes pages to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from stapsdtd.capture.ftrace.format import EventFormat
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.perf import online_cpus
from stapsdtd.kernel.tracefs import Tracefs

HEADER_PAGE = (
    "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\tfield: char data;\toffset:16;\tsize:4080;\tsigned:0;\n"
)
NOTHING_LOST = "entries: 0\noverrun: 0\ncommit overrun: 0\ndropped events: 0\nread events: 0\n"


class FakeTracefs(Tracefs):
    """refuse: answers whether a write of this line to this file is refused; each attempt is in attempts.

    refuse_reads: what each read raises.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.definitions: dict[str, list[str]] = {}
        self.enabled: set[tuple[str, str]] = set()
        self.touched: set[tuple[str, str]] = set()
        self.attempts: list[str] = []
        self.refuse: Callable[[str, str], bool] = lambda _path, _line: False
        self.refuse_reads: OSError | None = None
        self.hits: dict[str, int] = {}
        self._ids: dict[str, int] = {}
        self._pipes: dict[tuple[str, int], int] = {}
        (folder / "instances").mkdir()

    def _attempt(self, path: str, line: str) -> None:
        self.attempts.append(f"{path} {line}")
        if self.refuse(path, line):
            raise TracefsRejectedError(path, line, 22, "the test refuses")

    def write(self, relative: str, text: str) -> None:
        self._attempt(relative, text)
        if relative.endswith("/enable"):
            _, instance, _, _, name, _ = relative.split("/")
            assert name in self.definitions
            assert (self.folder / "instances" / instance).is_dir()
            if text == "1":
                self.enabled.add((instance, name))
                self.touched.add((instance, name))
            else:
                self.enabled.discard((instance, name))

    def append(self, relative: str, text: str) -> None:
        self._attempt(relative, text)
        if relative != "uprobe_events":
            return
        if text.startswith("p:"):
            name = text[2:].split(" ", maxsplit=1)[0].partition("/")[2]
            self.definitions.setdefault(name, []).append(text)
            self._ids.setdefault(name, 2000 + len(self._ids))
            return
        name = text.partition("/")[2]
        if any(enabled == name for _, enabled in self.enabled):
            raise TracefsRejectedError(relative, text, 16, "")
        assert not any(touched == name for _, touched in self.touched), "this empties a ring"
        del self.definitions[name]

    def read(self, relative: str) -> str:
        if self.refuse_reads is not None:
            raise self.refuse_reads
        if relative == "uprobe_events":
            return "\n".join(line for lines in self.definitions.values() for line in lines)
        if relative == "events/header_page":
            return HEADER_PAGE
        if relative == "uprobe_profile":
            return "".join(f"  /path {name} {count}\n" for name, count in self.hits.items())
        if relative.endswith("/format"):
            return self._format(relative.split("/")[2])
        return (self.folder / relative).read_text()

    def _format(self, name: str) -> str:
        lines = [f"name: {name}", f"ID: {self._ids[name]}", "format:"]
        at = 16
        for field in self.definitions[name][0].split(" ")[2:]:
            label, _, expression = field.partition("=")
            size = {"u64": 8, "u16": 2, "u8": 1}.get(expression.rpartition(":")[2], 4)
            lines.append(f"\tfield:u{8 * size} {label};\toffset:{at};\tsize:{size};\tsigned:0;")
            at += size
        lines.append("\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;")
        return "\n".join(lines)

    def format_of(self, name: str) -> EventFormat:
        return EventFormat.parse(self._format(name))

    def make_instance(self, name: str) -> None:
        self._attempt("instances", f"mkdir {name}")
        for cpu in online_cpus():
            base = self.folder / "instances" / name / "per_cpu" / f"cpu{cpu}"
            base.mkdir(parents=True)
            (base / "stats").write_text(NOTHING_LOST)
            os.mkfifo(base / "trace_pipe_raw")
            # open for writing from the beginning, or the reader would see an end
            self._pipes[name, cpu] = os.open(base / "trace_pipe_raw", os.O_RDWR | os.O_NONBLOCK)

    def remove_instance(self, name: str) -> None:
        self._attempt("instances", f"rmdir {name}")
        for instance, cpu in list(self._pipes):
            if instance == name:
                os.close(self._pipes.pop((instance, cpu)))
        shutil.rmtree(self.folder / "instances" / name)
        self.enabled = {pair for pair in self.enabled if pair[0] != name}
        self.touched = {pair for pair in self.touched if pair[0] != name}

    def put_page(self, instance: str, cpu: int, page: bytes) -> None:
        assert os.write(self._pipes[instance, cpu], page) == len(page)

    def take_offline(self, instance: str, cpu: int) -> None:
        """Let a CPU's ring be gone."""
        (self.folder / "instances" / instance / "per_cpu" / f"cpu{cpu}" / "trace_pipe_raw").unlink()

    def drop(self, instance: str, cpu: int, count: int) -> None:
        stats = self.folder / "instances" / instance / "per_cpu" / f"cpu{cpu}" / "stats"
        stats.write_text(NOTHING_LOST.replace("dropped events: 0", f"dropped events: {count}"))

    def instances(self) -> list[str]:
        return sorted(os.listdir(self.folder / "instances"))
