"""A user's process that makes objects which come and go: tests/targets/passing.py."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Self

from stapsdtd.elf import parse_object
from tests.support import SYSTEM_PYTHON, TARGETS
from tests.users import User

SELECTOR = "library:called"


class Passing:
    """library: a file with one site, which the user may read, as the program must be."""

    def __init__(self, user: User, folder: Path, library: Path) -> None:
        program = folder / "passing.py"
        program.write_bytes((TARGETS / "passing.py").read_bytes())
        program.chmod(0o644)
        with open(library, "rb") as file:
            (site,) = parse_object(file).sites
        command = user.command(SYSTEM_PYTHON, program, library, str(site.site_offset))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def begin(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def finish(self) -> list[float]:
        """Wait for what was begun; return the milliseconds until each was patched, where it was timed."""
        reply: list[float] = json.loads(self._read())
        return reply

    def do(self, command: str) -> list[float]:
        self.begin(command)
        return self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
