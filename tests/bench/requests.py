"""What the largest requests cost the daemon, from their bytes to a subscription that is checked and may begin."""

from __future__ import annotations

import re
import time
from statistics import median

from stapsdtd.api.requests import spec_of
from stapsdtd.api.texts import RequestTexts
from stapsdtd.config import Limits
from stapsdtd.kernel import cgroups
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.bench.report import Figure
from tests.bench.setup import Setup
from tests.largest_requests import LARGEST

_GOAL_SECONDS = 20e-3
_RUNS = 5


def run(setup: Setup) -> list[Figure]:
    figures = []
    for kind, make in LARGEST.items():
        data = make().SerializeToString()
        seconds = median(_processor_seconds(data) for _ in range(setup.repeats * _RUNS))
        met = seconds <= _GOAL_SECONDS
        figures.append(Figure(f"{kind}, {len(data)} bytes", seconds, "s", goal="<= 20 ms of CPU", met=met))
    return figures


def _processor_seconds(data: bytes) -> float:
    # a client would send other patterns each time
    re.purge()
    limits = Limits()
    begin = time.thread_time()
    spec_of(pb.SubscribeRequest.FromString(data), limits, RequestTexts(limits, cgroups.find), cgroups, None)
    return time.thread_time() - begin
