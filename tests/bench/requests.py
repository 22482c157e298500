"""What the largest requests cost the daemon, from their bytes to a subscription that is checked and may begin, and what
many selectors cost that have to be tried on many probes.
"""

from __future__ import annotations

import re
import time
from statistics import median

from stapsdtd.api.requests import spec_of
from stapsdtd.api.texts import RequestTexts
from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selection import select
from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.catalog.selectors import parse
from stapsdtd.config import Limits
from stapsdtd.kernel import cgroups
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.bench.report import Figure
from tests.bench.setup import Setup
from tests.largest_requests import LARGEST
from tests.unit.samples import sample_object, site

_GOAL_SECONDS = 20e-3
_RUNS = 5

_GLOBS = 256
_OBJECTS, _PROBES = 4, 20_000
_WIDE_GOAL_SECONDS = 1.0


def run(setup: Setup) -> list[Figure]:
    figures = []
    for kind, make in LARGEST.items():
        data = make().SerializeToString()
        seconds = median(_processor_seconds(data) for _ in range(setup.repeats * _RUNS))
        met = seconds <= _GOAL_SECONDS
        figures.append(Figure(f"{kind}, {len(data)} bytes", seconds, "s", goal="<= 20 ms of CPU", met=met))
    seconds = median(_seconds_to_select() for _ in range(setup.repeats))
    wide = f"{_GLOBS} globs on {_OBJECTS * _PROBES:,} probes"
    return [*figures, Figure(wide, seconds, "s", goal="<= 1 s of CPU", met=seconds <= _WIDE_GOAL_SECONDS)]


def _seconds_to_select() -> float:
    """Return the processor time of a list whose globs are all tried on all names, and of which few match one."""
    sites = [site("a" * 200 + str(number), number + 1, provider="big") for number in range(_PROBES)]
    objects = [MappedObject(sample_object(*sites), (pid,)) for pid in range(_OBJECTS)]
    begin = time.thread_time()
    globs = SelectorSet([parse(f"big:{'*a' * 60}{number}") for number in range(_GLOBS)])
    for _ in select(globs, objects):
        pass
    return time.thread_time() - begin


def _processor_seconds(data: bytes) -> float:
    # a client would send other patterns each time
    re.purge()
    limits = Limits()
    begin = time.thread_time()
    spec_of(pb.SubscribeRequest.FromString(data), limits, RequestTexts(limits, cgroups.find), cgroups, None)
    return time.thread_time() - begin
