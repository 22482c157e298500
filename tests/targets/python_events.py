"""Makes the interpreter fire each of its eight probes, and tells in JSON what it did."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

audited: list[str] = []
collected: list[tuple[int, int]] = []
lines: list[int] = []


def walk(steps: int) -> int:
    total = 0
    for step in range(steps):
        if step % 2:
            total += step
        else:
            total -= step
    return total


def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
    if frame.f_code is not walk.__code__:
        return None
    if event == "line":
        lines.append(frame.f_lineno)
    return trace


gc.disable()
print("ready", flush=True)
sys.stdin.readline()
sys.addaudithook(lambda name, _: audited.append(name))
for generation in range(3):
    for _ in range(generation + 1):
        ring: list[Any] = []
        ring.append(ring)
        del ring
    collected.append((generation, gc.collect(generation)))
import bisect  # noqa: E402, F401 - which imports _bisect in turn

with contextlib.suppress(ImportError):
    import there_is_no_such_module  # type: ignore[import-not-found] # noqa: F401
sys.settrace(trace)
walk(10)
sys.settrace(None)
print(json.dumps({"audited": audited, "collected": collected, "lines": lines}), flush=True)
# what the interpreter does at its end would not be in the record
os._exit(0)
