"""Makes objects that come and go: memfds that hold a library. `passing.py LIBRARY SITE_OFFSET`, then on standard input

    hold N      map N of them
    drop        unmap them
    time N      map N, one after the other, each until its site is patched; the reply has the milliseconds of each

Each reply is a line of JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from pathlib import Path

BREAKPOINT = 0xCC
SECONDS_AT_MOST = 2.0
LIBRARY, SITE_OFFSET = Path(sys.argv[1]).read_bytes(), int(sys.argv[2])


def mapped() -> mmap.mmap:
    descriptor = os.memfd_create("passing", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, LIBRARY)
        return mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    finally:
        os.close(descriptor)


def timed() -> float:
    begin = time.monotonic()
    with mapped() as code:
        while code[SITE_OFFSET] != BREAKPOINT and time.monotonic() - begin < SECONDS_AT_MOST:
            time.sleep(0.0002)
        return (time.monotonic() - begin) * 1e3


held: list[mmap.mmap] = []
print("ready", flush=True)
for line in sys.stdin:
    command, *arguments = line.split()
    reply: list[float] = []
    if command == "hold":
        held += [mapped() for _ in range(int(arguments[0]))]
    elif command == "drop":
        while held:
            held.pop().close()
    else:
        for _ in range(int(arguments[0])):
            reply.append(timed())
            time.sleep(0.05)
    print(json.dumps(reply), flush=True)
