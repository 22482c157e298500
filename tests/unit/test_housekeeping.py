from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from stapsdtd.model import Object, ObjectKey
from stapsdtd.runtime.slices import TURN_SECONDS
from stapsdtd.sessions.housekeeping import Housekeeping
from tests.unit.samples import sample_object, site

_OBJECTS = 30


class _Follower:
    """Takes a third of a turn for each object."""

    def __init__(self) -> None:
        self.considered: list[ObjectKey] = []
        self.has_all = asyncio.Event()

    def is_host_file(self, obj: Object) -> bool:  # noqa: ARG002
        return False

    def consider_pending(self, live: object) -> None:
        pass

    def consider(self, live: object, obj: Object) -> None:  # noqa: ARG002
        until = time.thread_time() + TURN_SECONDS / 3
        while time.thread_time() < until:
            pass
        self.considered.append(obj.key)
        if len(self.considered) == _OBJECTS:
            self.has_all.set()


def _housekeeping(follower: _Follower) -> Housekeeping:
    objects = [sample_object(site("a"), inode=number) for number in range(_OBJECTS)]
    live: Any = SimpleNamespace(considered={obj.key: SimpleNamespace(object=obj) for obj in objects})
    nothing: Any = SimpleNamespace(
        mappings=lambda _: {}, look_at=lambda _: None, retry_cleanup=None, submit=lambda *_: Future()
    )
    followed: Any = follower
    return Housekeeping({"id": live}, nothing, nothing, nothing, followed, nothing, nothing, nothing, nothing)


def test_many_objects_are_considered_in_turns() -> None:
    async def clean_up() -> None:
        follower = _Follower()
        housekeeping = _housekeeping(follower)
        housekeeping.clean_up()
        assert len(follower.considered) <= _OBJECTS / 3
        # those of the next time do not come in between
        housekeeping.clean_up()
        await asyncio.wait_for(follower.has_all.wait(), 30)
        assert len(set(follower.considered)) == _OBJECTS

    asyncio.run(clean_up())
