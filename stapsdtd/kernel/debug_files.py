"""Separate debug files: what `strip` removed from a program, shipped in -dbg, -dbgsym or -debuginfo packages."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

ROOT = "/usr/lib/debug"
"""Per GDB's manual (Separate Debug Files), and on all distributions."""


@contextlib.contextmanager
def debug_file(build_id: str, root: str | None = None) -> Iterator[int | None]:
    """Open the host's debug file for a build-id in hex; None if there is none that is world-readable.

    World-readable, because its contents are shown to whoever chose the build-id. The process's own root is not
    searched: its user could have put anything there.
    """
    path = f"{ROOT if root is None else root}/.build-id/{build_id[:2]}/{build_id[2:]}.debug"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        mode = os.fstat(descriptor).st_mode
        yield descriptor if stat.S_ISREG(mode) and mode & stat.S_IROTH else None
    finally:
        os.close(descriptor)
