"""A program that begins and ends spans, for tests and benchmarks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Self

from tests.support import compile_target


class Spans:
    """A running tests/targets/spans.c."""

    def __init__(self, folder: Path) -> None:
        self.path = compile_target("spans.c", folder / "spans", "-lpthread")
        self._process = subprocess.Popen([self.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._answer() == ["ready"]

    def do(self, order: str, count: int, threads: int = 1) -> int:
        """Return the nanoseconds that it took."""
        self._send(f"{order} {count} {threads}")
        return int(self._answer()[1])

    def execute(self, count: int, threads: int) -> None:
        self._send(f"exec {count} {threads}")
        assert self._answer() == ["ready"]

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
