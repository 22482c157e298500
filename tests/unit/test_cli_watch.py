from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from stapsdtd.cli.watch import HEADING, batches, object_lines
from stapsdtd.client import Probe, ProbeAdded, ProbeRemoved

PATIENCE_SECONDS = 20


def probe(name: str, path: str = "/usr/lib/libjvm.so", pids: tuple[int, ...] = (1234,)) -> Probe:
    return Probe("hotspot", name, path, None, "x86-64", pids, ())


def test_consecutive_changes_of_an_object_are_a_line() -> None:
    changes: list[ProbeAdded | ProbeRemoved] = [
        ProbeAdded(probe("a")),
        ProbeAdded(probe("b")),
        ProbeAdded(probe("a", "/usr/bin/app\x1b", (1, 2, 3, 4, 5))),
        ProbeRemoved(probe("a")),
    ]
    assert [HEADING, *object_lines(changes, "14:03:07", {1234: "java", 2: "app\x1b", 3: ""}, width=None)] == [
        "TIME         OBJECT                            PROBES  PROCESSES",
        "14:03:07  +  libjvm.so                              2  java (1234)",
        r"14:03:07  +  app\x1b                                1  1, app\x1b (2), 3 and 2 more",
        "14:03:07  -  libjvm.so                              1  java (1234)",
    ]


def test_line_is_cut_to_the_terminal() -> None:
    (line,) = object_lines([ProbeAdded(probe("a"))], "14:03:07", {1234: "java"}, width=60)
    assert line == "14:03:07  +  libjvm.so                              1  java "


def test_messages_that_come_together_are_a_batch() -> None:
    pause = asyncio.Event()

    async def messages() -> AsyncIterator[int]:
        yield 1
        yield 2
        await pause.wait()
        yield 3

    async def read() -> list[list[int]]:
        read = []
        async for batch in batches(messages(), 0.01):
            read.append(batch)
            pause.set()
        return read

    assert asyncio.run(asyncio.wait_for(read(), PATIENCE_SECONDS)) == [[1, 2], [3]]
