"""Changes files until it is killed: `changing.py PAUSE CONTENT PATH...`.

PAUSE is in seconds, between two changes; CONTENT is a file that the others are copies of at times.
"""

from __future__ import annotations

import os
import random
import sys
import time
from itertools import cycle
from pathlib import Path

PAUSE_SECONDS = float(sys.argv[1])
CONTENT = Path(sys.argv[2]).read_bytes()
PATHS = [Path(argument) for argument in sys.argv[3:]]


def rewrite(path: Path) -> None:
    path.write_bytes(CONTENT)


def truncate(path: Path) -> None:
    os.truncate(path, random.choice((0, len(CONTENT) // 2, len(CONTENT) - 1)))


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(CONTENT)


def scribble(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(random.randrange(len(CONTENT)))
        file.write(random.randbytes(64))


def replace(path: Path) -> None:
    other = path.with_name(f"{path.name}.new")
    other.write_bytes(CONTENT)
    other.rename(path)


def vanish(path: Path) -> None:
    path.unlink()
    replace(path)


CHANGES = (rewrite, truncate, rewrite, grow, rewrite, scribble, replace, vanish)

for each in PATHS:
    rewrite(each)
print("ready", flush=True)
for each in cycle(PATHS):
    random.choice(CHANGES)(each)
    time.sleep(PAUSE_SECONDS)
