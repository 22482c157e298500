"""The bpf engine over a kernel in memory: how its tests make it, ask it for sites, and look at what it holds."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.function_links import FunctionLinks
from stapsdtd.capture.bpf.groups import Attachments
from stapsdtd.capture.bpf.pool import Pool, TableFullError
from stapsdtd.capture.bpf.slots import Word
from stapsdtd.capture.engine import Refusal, Target
from stapsdtd.capture.names import Owner
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import Capture, Object, Register, Site
from stapsdtd.plan.attachments import EVENTS_ALONE, Choice, Means
from stapsdtd.query.expression import Condition
from stapsdtd.query.parse import parse
from tests.support import wait_for
from tests.unit.fake_bpf import PATIENCE_SECONDS, FakeKernel, RecordingSink, descriptors_of, record
from tests.unit.samples import argument, captured, predicated, sample_object, site, wanted_site

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
"""`Pools`, and what a refusal calls them."""

LINKS_FOR_ALL = Choice(Means.LINK, Means.EVENT)
LINKS_BY_PID = Choice(Means.LINK, Means.LINK)
LINKS_SHARED = Choice(Means.LINK, Means.SHARED_LINK)


def made_engine(
    kernel: FakeKernel,
    tracefs: str = "/nowhere",
    *,
    max_buffer_bytes: int = 1 << 40,
    choice: Choice = EVENTS_ALONE,
    functions: FunctionLinks | None = None,
) -> BpfEngine:
    return BpfEngine(
        Tracefs(tracefs),
        OWNER,
        kernel.loaded,
        kernel.paging,
        max_buffer_bytes,
        attachments=Attachments(
            kernel.make_event,
            None if choice is EVENTS_ALONE else kernel.make_link,
            kernel.wait_for_uprobes,
            functions,
            choice,
        ),
        tables=kernel.tables,
        reaper=kernel.reaper,
    )


def opened(engine: BpfEngine, subscription_key: int, kib: int = 64) -> RecordingSink:
    made = RecordingSink()
    engine.open(subscription_key, made, kib)
    return made


def closed(engine: BpfEngine, subscription_key: int) -> None:
    """Close a subscription, and wait until its sink has everything."""
    engine.close(subscription_key).result(PATIENCE_SECONDS)


def target(
    kernel: FakeKernel,
    *sites: Site,
    pids: set[int] | None = None,
    of: Object = FOUND,
    predicate: Condition | None = None,
    **more: Any,
) -> Target:
    """All of the object's sites where none are given; their site_ids are their places in the object, from 1 on."""
    wanted = tuple(
        wanted_site(captured(each), of.parsed.sites.index(each) + 1, None if pids is None else frozenset(pids))
        for each in sites or of.parsed.sites
    )
    return predicated(Target(of, kernel.path, wanted, **more), predicate)


def taking(kernel: FakeKernel, where: Site, *captures: Capture, of: Object) -> Target:
    return Target(of, kernel.path, (wanted_site(captured(where, *captures), 1),))


def where(text: str) -> Condition:
    return parse(text, lambda _: None)


def refused(refusals: Sequence[Refusal]) -> dict[str, str]:
    return {refusal.site.name: refusal.reason for refusal in refusals}


def take_all(pool: Pool) -> list[tuple[int, int]]:
    """Allocate all that is free. Return the runs, the largest first."""
    runs, count = [], 1 << 20
    while count:
        try:
            runs.append((pool.allocate(count), count))
        except TableFullError:
            count //= 2
    return runs


def give_back(pool: Pool, runs: Sequence[tuple[int, int]]) -> None:
    for start, count in runs:
        pool.free(start, count)


def free(kernel: FakeKernel, engine: BpfEngine) -> dict[str, list[tuple[int, int]]]:
    """What each pool has to allocate, once all is over that ended until now."""
    # the reaper's worker is done with it; the second subscription to go frees what ended with the first
    kernel.reaper.collect()
    for _ in range(2):
        opened(engine, -1, 1)
        closed(engine, -1)
    runs = {name: take_all(pool(kernel, name)) for name in TABLES}
    for name in TABLES:
        give_back(pool(kernel, name), runs[name])
    return runs


def pool(kernel: FakeKernel, name: str) -> Pool:
    """One of `Pools`."""
    found: Pool = getattr(kernel.pools, name)
    return found


def nothing_is_left(engine: BpfEngine, kernel: FakeKernel, before: dict[str, list[tuple[int, int]]]) -> None:
    assert free(kernel, engine) == before
    assert not np.frombuffer(kernel.loaded.table(".bss.slots"), "u8").any()
    assert not np.frombuffer(kernel.loaded.table(".bss.index"), "u4").any()
    assert (engine.metrics().attachments, engine.metrics().groups) == (0, 0)
    assert (kernel.events, descriptors_of(kernel.path)) == ({}, 0)
    plans_are_forgotten(engine, kernel)


def plans_are_forgotten(engine: BpfEngine, kernel: FakeKernel) -> None:
    """Records of plans that ended are nobody's."""
    strays = engine.metrics().strays + len(kernel.tables.generations)
    while kernel.tables.generations:
        ring = kernel.loaded.rings[0]
        assert ring.put(record(ring.stride, kernel.tables.generations.pop()))
        kernel.loaded.wake_up(ring)
    wait_for(lambda: engine.metrics().strays == strays, "the records to be nobody's")


def rejecting(text: str) -> Callable[[str], Exception | None]:
    """Refuse each step that has a text in it."""
    return lambda step: TracefsRejectedError("uprobe_events", step, errno.EINVAL, "as told") if text in step else None


def quiesced(engine: BpfEngine) -> None:
    """Wait until what was written is delivered."""
    wait_for(lambda: not any(ring.filled_bytes for ring in engine.metrics().rings), "the rings to be empty")
    engine.ask().result(PATIENCE_SECONDS)


class Traffic:
    """Hits a site at each step of the kernel's and each change of a slot; fired counts the hits.

    Such a hit lasts until the next step: it has run one of its programs by then, or none, and runs the rest behind it.
    """

    def __init__(self, kernel: FakeKernel, *hits: tuple[Site, int]) -> None:
        self.fired = 0
        self._kernel = kernel
        self._hits = hits
        self._begun: list[Callable[[], None]] = []
        kernel.before_step = kernel.after_arming = kernel.slots.around_change = self._at_step

    def fire(self) -> None:
        """Hit it, and let all hits end."""
        self._at_step()
        self._finish()

    def _at_step(self) -> None:
        self._finish()
        for each, pid in self._hits:
            programs = self._kernel.programs(each.site_offset, pid=pid, rdi=self.fired, rsi=self.fired)
            for run in programs[: self.fired % 2]:
                run()
            self._begun += programs[self.fired % 2 :]
        self.fired += 1

    def _finish(self) -> None:
        begun, self._begun = self._begun, []
        for run in begun:
            run()


def wide(operand: int, count: int, name: str = "a") -> Site:
    return site(name, 0x10 * operand, [argument(Register("rdi")) for _ in range(count)])


def slots(kernel: FakeKernel) -> list[int]:
    """The generations of the plans that sites have now."""
    words = np.frombuffer(kernel.loaded.table(".bss.slots"), "u8")
    plans = np.frombuffer(kernel.loaded.table(".bss.plans"), layout.PLAN)
    return [int(plans[Word.unpack(int(word)).plan]["generation"]) for word in words if word]
