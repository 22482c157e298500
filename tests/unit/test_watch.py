"""What changes while a watching client does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import pytest

from stapsdtd.api.access import Caller
from stapsdtd.api.watch import MAX_WAITING, Watch
from stapsdtd.catalog.registry import MappedObject, Registry
from stapsdtd.errors import LimitReachedError
from stapsdtd.model import FileOffset, Mapping, Object, ProcessKey
from stapsdtd.runtime.shares import Shares
from tests.unit.samples import sample_object, site

FOUND, OTHER = (sample_object(site("a"), inode=inode) for inode in (1, 2))


def set_mapped(registry: Registry, pid: int, *objects: Object) -> None:
    mapping = Mapping(0x1000, 0x2000, FileOffset(0), 1, 1, "/app")
    registry.update(ProcessKey(pid, 1), {each.key: (each, mapping) for each in objects})


def run(scenario: Callable[[Registry, Watch], Awaitable[None]], shares: Shares | None = None) -> None:
    async def within() -> None:
        registry, caller = Registry(), cast("Caller", SimpleNamespace(peer=SimpleNamespace(client="anne")))
        await scenario(registry, Watch(registry, asyncio.get_running_loop(), caller, shares or Shares()))

    asyncio.run(within())


def test_what_changes_more_than_once_is_told_as_it_is() -> None:
    async def scenario(registry: Registry, watch: Watch) -> None:
        assert watch.begin(None) == []
        for pid in (1, 2, 3):
            set_mapped(registry, pid, FOUND)
        assert await watch.next(None) == [MappedObject(FOUND, (1, 2, 3))]
        for pid in (1, 2, 3):
            set_mapped(registry, pid)
        set_mapped(registry, 4, FOUND)
        assert [each.pids for each in await watch.next(None)] == [(3,), (), (4,)]
        assert await watch.next(0.001) == []

    run(scenario)


def test_what_others_map_is_not_told() -> None:
    async def scenario(registry: Registry, watch: Watch) -> None:
        set_mapped(registry, 1, FOUND)
        set_mapped(registry, 2, OTHER)
        assert [each.object.key for each in watch.begin(frozenset({1}))] == [FOUND.key]
        set_mapped(registry, 2)
        set_mapped(registry, 3, OTHER)
        assert await watch.next(0.001) == []
        watch.show(frozenset({3}))
        changes = {(each.object.key, each.pids) for each in await watch.next(None)}
        assert changes == {(FOUND.key, ()), (OTHER.key, (3,))}

    run(scenario)


def test_client_that_is_too_slow_is_told() -> None:
    async def scenario(registry: Registry, watch: Watch) -> None:
        watch.begin(None)
        for _ in range(MAX_WAITING // 2):
            set_mapped(registry, 1, FOUND)
            set_mapped(registry, 1)
        assert len(await watch.next(None)) == MAX_WAITING
        for _ in range(MAX_WAITING // 2 + 1):
            set_mapped(registry, 1, FOUND)
            set_mapped(registry, 1)
        with pytest.raises(LimitReachedError, match="watch again"):
            await watch.next(None)

    run(scenario)


def test_beyond_its_share_a_client_is_told_what_is_different_later() -> None:
    shares = Shares()

    async def scenario(registry: Registry, watch: Watch) -> None:
        set_mapped(registry, 1, FOUND)
        watch.begin(None)
        shares.began("bert")
        shares.charge("anne", "matching", 1000)
        set_mapped(registry, 1)
        set_mapped(registry, 2, OTHER)
        # it is woken to see that
        assert await watch.next(None) == []
        assert watch.is_behind
        set_mapped(registry, 3, OTHER)
        watch.show(None)
        changes = {(each.object.key, each.pids) for each in await watch.next(None)}
        assert changes == {(FOUND.key, ()), (OTHER.key, (2, 3))}

    run(scenario, shares)
