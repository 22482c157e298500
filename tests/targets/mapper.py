"""Maps files as a loader does, each once executable and once writable, and touches none of their pages.

Without arguments it does what it is told on standard input, and answers each command with a line: `map PATH`.
With paths it maps them in turn until it is killed, and holds on to the last mappings.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections import deque
from contextlib import suppress
from itertools import cycle

HELD = 8
PAUSE_SECONDS = 0.002


def mapped(path: str) -> tuple[mmap.mmap, mmap.mmap]:
    with open(path, "rb") as file:
        return (
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC),
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE),
        )


held: deque[tuple[mmap.mmap, mmap.mmap]] = deque(maxlen=HELD)
print("ready", flush=True)
for each in cycle(sys.argv[1:]):
    # it may be gone or empty now
    with suppress(OSError, ValueError):
        held.append(mapped(each))
    time.sleep(PAUSE_SECONDS)
for line in sys.stdin:
    held.append(mapped(line.rstrip("\n").removeprefix("map ")))
    print("map 0", flush=True)
