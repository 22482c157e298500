"""The bpf engine over a kernel in memory: how its tests make it, ask it for sites, and look at what it holds."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.pool import Pool
from stapsdtd.capture.bpf.tables import Tables
from stapsdtd.capture.engine import Refusal, Target
from stapsdtd.capture.names import Owner
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import Capture, Object, Register, Site
from stapsdtd.query.expression import Expression
from stapsdtd.query.parse import parse
from tests.support import wait_for
from tests.unit.fake_bpf import PATIENCE_SECONDS, FakeKernel, RecordingSink, descriptors_of
from tests.unit.samples import argument, captured, sample_object, site, wanted_site

OWNER = Owner(1, 2, 3)
A, B, C = (
    site("a", 0x10, [argument(Register("rdi"))]),
    site("b", 0x1020, [argument(Register("rsi"))]),
    site("c", 0x2030),
)
FOUND = sample_object(A, B, C)
TABLES = {
    "slots": "sites", "index": "groups", "plans": "plans", "operands": "operands", "tests": "tests",
    "counters": "counters",
}  # fmt: skip
"""Pools of Tables, and what a refusal calls them."""


def made_engine(kernel: FakeKernel, tracefs: str = "/nowhere", *, max_buffer_bytes: int = 1 << 40) -> BpfEngine:
    return BpfEngine(
        Tracefs(tracefs), OWNER, kernel.loaded, kernel.paging, max_buffer_bytes, make_event=kernel.make_event
    )


def opened(engine: BpfEngine, subscription_key: int, kib: int = 64) -> RecordingSink:
    made = RecordingSink()
    engine.open(subscription_key, made, kib)
    return made


def closed(engine: BpfEngine, subscription_key: int) -> None:
    """Close a subscription, and wait until its sink has everything."""
    engine.close(subscription_key).result(PATIENCE_SECONDS)


def target(kernel: FakeKernel, *sites: Site, pids: set[int] | None = None, of: Object = FOUND, **more: Any) -> Target:
    """All of the object's sites where none are given; their site_ids are their places in the object, from 1 on."""
    wanted = tuple(
        wanted_site(captured(each), of.parsed.sites.index(each) + 1, None if pids is None else frozenset(pids))
        for each in sites or of.parsed.sites
    )
    return Target(of, kernel.path, wanted, **more)


def taking(kernel: FakeKernel, where: Site, *captures: Capture, of: Object) -> Target:
    return Target(of, kernel.path, (wanted_site(captured(where, *captures), 1),))


def where(text: str) -> Expression:
    return parse(text, lambda _: None)


def refused(refusals: Sequence[Refusal]) -> dict[str, str]:
    return {refusal.site.name: refusal.reason for refusal in refusals}


def free(engine: BpfEngine) -> dict[str, list[tuple[int, int]]]:
    """What each pool has to allocate, once all is over that ended until now."""
    engine._reaper.collect()
    engine._endings.begin([]).result(PATIENCE_SECONDS)
    engine._reconciler.reconcile([], "", 0)
    return {name: deepcopy(pool(engine, name)._free) for name in TABLES}


def pool(engine: BpfEngine, name: str) -> Pool:
    found = getattr(engine._tables, f"_free_{name}")
    return found if isinstance(found, Pool) else found._pool


def nothing_is_left(engine: BpfEngine, kernel: FakeKernel, before: dict[str, list[tuple[int, int]]]) -> None:
    assert free(engine) == before
    assert not np.frombuffer(kernel.loaded.table(".bss.slots"), "u8").any()
    assert not np.frombuffer(kernel.loaded.table(".bss.index"), "u4").any()
    assert (engine._reader._plans, engine._reader._counters._by_cell, engine._objects) == ({}, {}, {})
    assert (kernel.events, descriptors_of(kernel.path)) == ({}, 0)


def rejecting(text: str) -> Callable[[str], Exception | None]:
    """Refuse each step that has a text in it."""
    return lambda step: TracefsRejectedError("uprobe_events", step, errno.EINVAL, "as told") if text in step else None


def quiesced(engine: BpfEngine) -> None:
    """Wait until what was written is delivered."""
    wait_for(lambda: not any(ring.filled for ring in engine._reader._rings), "the rings to be empty")
    engine._reader._jobs.call(lambda: None)


class Traffic:
    """Hits a site before each step of the kernel's and each change of a slot; fired counts the hits."""

    def __init__(self, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, *hits: tuple[Site, int]) -> None:
        self.fired = 0
        self._kernel = kernel
        self._hits = hits
        set_slot = Tables.set_slot

        def set_slot_amid_hits(changed: Tables, slot: int, group: int, plan: int) -> None:
            self.fire()
            set_slot(changed, slot, group, plan)
            self.fire()

        kernel.before_step = kernel.after_arming = self.fire
        monkeypatch.setattr(Tables, "set_slot", set_slot_amid_hits)

    def fire(self) -> None:
        for each, pid in self._hits:
            self._kernel.hit(each.site_offset, pid=pid, rdi=self.fired, rsi=self.fired)
        self.fired += 1


def wide(operand: int, count: int, name: str = "a") -> Site:
    return site(name, 0x10 * operand, [argument(Register("rdi")) for _ in range(count)])


def slots(kernel: FakeKernel) -> list[int]:
    """The generations of the plans that sites have now."""
    slots = np.frombuffer(kernel.loaded.table(".bss.slots"), layout.SLOT)
    plans = np.frombuffer(kernel.loaded.table(".bss.plans"), layout.PLAN)
    return [int(plans[number]["generation"]) for number in slots["plan"] if number]
