"""Calls functions of many kinds, and tells each call and return as its own profile function saw it, in JSON.

CPython 3.11 fires function__entry only in a thread that has a profile or trace function, or while the semaphore of
`line` is up; function__return always.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from types import FrameType

record: list[tuple[str, str, str, int]] = []


def note(frame: FrameType, event: str, _: object) -> None:
    if event in {"call", "return"}:
        record.append((event, frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))


def fibonacci(number: int) -> int:
    if number < 2:
        return number
    return fibonacci(number - 1) + fibonacci(number - 2)


def countdown(number: int) -> Iterator[int]:
    while number:
        yield number
        number -= 1


def fail() -> None:
    raise ValueError


def größe(*things: object) -> int:  # noqa: PLC2401 - its name is not ASCII on purpose
    return len(things)


def work() -> None:
    fibonacci(11)
    sum(countdown(20))
    sorted([3, 1, 2], key=lambda number: -number)
    [größe(*range(number)) for number in range(50)]
    with contextlib.suppress(ValueError):
        fail()
    exec(compile("def elsewhere():\n\n    return 1\n\nelsewhere()\n", "/nicht/da/☃.py", "exec"), {})

    class Thing:
        def method(self) -> None:
            pass

    for _ in range(50):
        Thing().method()


print("ready", flush=True)
sys.stdin.readline()
sys.setprofile(note)
work()
sys.setprofile(None)
print(json.dumps(record), flush=True)
