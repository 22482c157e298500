"""What keeps the host or the daemon busy while a question is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from stapsdtd.client import Client
from tests.support import compile_target, stapsdt_command, wait_for

_PER_PROCESSOR = 2
_FLOOD_PER_SECOND = 200_000
_FLOOD_MILLISECONDS = 300_000
PROVIDER = f"p{os.getpid()}flood"


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def busy(_target: str, _folder: Path) -> Iterator[None]:
    """Twice as many processes as there are processors burn these."""
    with ExitStack() as stack:
        for _ in range(_PER_PROCESSOR * (os.cpu_count() or 1)):
            stack.enter_context(_ended(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])))
        yield


@contextmanager
def flooded(target: str, folder: Path) -> Iterator[None]:
    """Another subscriber has more events than it can print."""
    program = folder / "flood"
    if not program.exists():
        compile_target("truth.c", program, f"-DPROVIDER={PROVIDER}", "-lpthread")
    command = stapsdt_command(target, "trace", f"{PROVIDER}:tick", "--json", "-o", os.devnull)
    with ExitStack() as stack, Client(target) as client:
        firing = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        stack.enter_context(_ended(firing))
        stack.enter_context(_ended(subprocess.Popen(command, stderr=subprocess.DEVNULL)))
        assert firing.stdin is not None
        firing.stdin.write(f"ticks {_FLOOD_MILLISECONDS} 1 {_FLOOD_PER_SECOND}\n".encode())
        firing.stdin.flush()
        wait_for(lambda: any(each.account.fired for each in client.subscriptions()), "the flood", seconds=60)
        yield


Load = Callable[[str, Path], AbstractContextManager[None]]

LOADS: dict[str, Load] = {"none": lambda _target, _folder: nullcontext(), "busy": busy, "flooded": flooded}
