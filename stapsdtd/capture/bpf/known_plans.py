"""The plans that records may be of, from before the first hit until the last record is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from stapsdtd.capture.bpf.counters import CounterReader, write_off
from stapsdtd.capture.bpf.reading import ActivePlan, Channel
from stapsdtd.capture.bpf.rings import Ring
from stapsdtd.capture.bpf.tables import Generation, Tables
from stapsdtd.runtime.mailbox import ThreadEndedError


@dataclass(frozen=True, slots=True)
class _Ending:
    """Plans that no hit uses any more. filled_to: up to where each ring may hold their last records."""

    plans: tuple[ActivePlan, ...]
    closing: tuple[Channel, ...]
    filled_to: dict[Ring, int]
    done: Future[None]


class KnownPlans:
    """Used by the reader thread only. by_generation: as records name them."""

    def __init__(self, tables: Tables) -> None:
        self.by_generation: dict[Generation, ActivePlan] = {}
        self._counters = CounterReader(tables)
        self._endings: list[_Ending] = []

    def begin(self, plans: Iterable[ActivePlan]) -> None:
        for plan in plans:
            self.by_generation[plan.entry.generation] = plan
            self._counters.begin(plan)

    def end(
        self, plans: Sequence[ActivePlan], closing: Sequence[Channel], rings: Iterable[Ring], done: Future[None]
    ) -> None:
        """Forget plans that no hit uses any more, once what the rings hold now is read. See `Reader.end`."""
        filled_to = {ring: ring.produced for ring in rings}
        self._endings.append(_Ending(tuple(plans), tuple(closing), filled_to, done))

    def settle(self) -> None:
        """Report counters if it is time for that, and forget the plans whose last records have been read."""
        self._counters.report_if_due()
        while self._endings and all(ring.consumed >= to for ring, to in self._endings[0].filled_to.items()):
            ending = self._endings.pop(0)
            try:
                self._forget(ending)
            finally:
                # somebody waits for it, even if the last counters could not be reported
                ending.done.set_result(None)

    def report(self) -> None:
        """Tell the sinks what was counted until now."""
        self._counters.report()

    def _forget(self, ending: _Ending) -> None:
        try:
            totals = self._counters.report()
            for plan in ending.plans:
                write_off(plan, totals)
        finally:
            for plan in ending.plans:
                del self.by_generation[plan.entry.generation]
                self._counters.end(plan)
            for channel in ending.closing:
                channel.is_open = False

    def abandon(self) -> None:
        """Fail what is waited for, since nothing is read any more."""
        for ending in self._endings:
            ending.done.set_exception(ThreadEndedError())
