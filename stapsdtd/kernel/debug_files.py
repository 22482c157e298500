"""Separate debug files: what `strip` took from a program, in the package that ends in -dbg, -dbgsym or -debuginfo."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

ROOT = "/usr/lib/debug"
"""Where GDB's manual (Separate Debug Files) and all distributions have them."""


@contextlib.contextmanager
def debug_file(build_id: str, root: str | None = None) -> Iterator[int | None]:
    """A descriptor of the host's debug file for a build-id in hex; None where there is none that anybody may read.

    Whoever chose the build-id gets to know what the file says. A process's own root is not looked into: what its user
    put there could be anything.
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
