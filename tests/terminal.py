"""Runs a command on a terminal of its own, which decides whether it prints tables and colors."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.support import TIME_FACTOR

_TIMEOUT_SECONDS = 60 * TIME_FACTOR


def run_on_terminal(
    command: str,
    environment: Mapping[str, str],
    meanwhile: Callable[[subprocess.Popen[bytes]], None],
    *,
    folder: Path | None = None,
    columns: int = 120,
    lines: int = 60,
) -> str:
    """Run a shell's command in a folder, and meanwhile a function. Return all that the command wrote."""
    # these would count more than the terminal's own size
    environment = {name: value for name, value in environment.items() if name not in {"COLUMNS", "LINES"}}
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    output = bytearray()

    def read() -> None:
        # EIO: nobody has the other end open any more
        with suppress(OSError):
            while data := os.read(ours, 1 << 16):
                output.extend(data)

    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    os.close(theirs)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        meanwhile(process)
        process.wait(_TIMEOUT_SECONDS)
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(ours)
    return output.decode().replace("\r\n", "\n")
