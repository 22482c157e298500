"""What a start and an end cost the traced program while the kernel pairs them, beside bpftrace's idiom for that."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from statistics import median

from stapsdtd.client import Aggregate, Client, Span, SubscribeOptions
from stapsdtd.elf import parse_object
from tests.bench.report import Figure, median_ratio
from tests.bench.setup import BREAKPOINT, Setup
from tests.bench.tracers import running
from tests.spanning import Spans
from tests.support import mapped_bytes

_PAIRS = 100_000
_GOAL = 1.0
_LATENCIES = Aggregate(functions=["quantize"], value="elapsed")


@dataclass(frozen=True, slots=True)
class _Traced:
    spans: Spans
    offsets: tuple[int, ...]

    @property
    def is_armed(self) -> bool:
        path = str(self.spans.path)
        return all(mapped_bytes(self.spans.pid, path, offset, 1, "x") == BREAKPOINT for offset in self.offsets)


def run(setup: Setup) -> list[Figure]:
    has_bpftrace = shutil.which("bpftrace") is not None
    ours: list[float] = []
    theirs: list[float] = []
    with setup.daemon() as daemon, Spans(setup.folder) as spans, Client(daemon.target) as client:
        with open(spans.path, "rb") as file:
            traced = _Traced(spans, tuple(site.site_offset for site in parse_object(file).sites))
        path = f"usdt:{spans.path}:spans"
        begin, end = "{ @s[tid] = nsecs; }", "/@s[tid]/ { @ = hist(nsecs - @s[tid]); delete(@s[tid]); }"
        for _ in range(setup.repeats):
            options, span = SubscribeOptions(pids=[spans.pid]), Span(start_selectors=["spans:begin"])
            with client.aggregate("spans:end", _LATENCIES, options, span) as subscription:
                ours.append(_seconds_a_pair(spans))
                account = subscription.unsubscribe()
                assert account.aggregated == account.spans.paired == _PAIRS, account
            if has_bpftrace:
                clauses = f"{path}:begin {begin} {path}:end {end}"
                with running(traced, "bpftrace", "-p", str(spans.pid), "-e", clauses):
                    theirs.append(_seconds_a_pair(spans))
    ratio = median_ratio(ours, theirs)
    met = None if ratio is None else ratio <= _GOAL
    goal = f"<= {_GOAL} of bpftrace's"
    return [Figure("start to end, by thread, quantized: both hits", median(ours), "s", ratio, goal, met)]


def _seconds_a_pair(spans: Spans) -> float:
    return spans.do("fast", _PAIRS) / _PAIRS / 1e9
