"""`stapsdt` as its own process, from this tree and not as it is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

PROGRAM = (sys.executable, "-c", "from stapsdtd.cli.stapsdt import main; main()")

Start = Callable[..., "subprocess.Popen[str]"]


@contextmanager
def starting(*before: str) -> Iterator[Start]:
    """Gives what starts the command with these arguments and more; whatever becomes of it, it is gone in the end."""
    with ExitStack() as stack:

        def start(*arguments: str, **more: Any) -> subprocess.Popen[str]:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
            process: subprocess.Popen[str] = subprocess.Popen([*PROGRAM, *before, *arguments], text=True, **pipes)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    """Wait for it; answer its exit code, and what it wrote to standard output and standard error."""
    out, err = process.communicate(timeout=20)
    return process.returncode, out.splitlines(), err.splitlines()
