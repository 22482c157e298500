"""What a hit costs the traced program while a D program asks a question, beside `stapsdt count`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from stapsdtd.client import Client
from tests.bench.report import Figure, median_ratio
from tests.bench.setup import Firing, Setup
from tests.support import Daemon, stapsdt_command, wait_for

_TEXTS = 1000
_ROUNDS = 100
_MOST = 1.0
_QUESTIONS = {
    "{ @[copyinstr(arg1)] = count(); }": ["d", "-q", "-n", "firing:::hit { @[copyinstr(arg1)] = count(); }"],
    "count --by 'str(arg1, 255)'": ["count", "firing:hit", "--by", "str(arg1, 255)"],
    "count --by arg1:str, 64 bytes": ["count", "firing:hit", "--by", "arg1:str"],
}
"""By their names; the first two mean the same."""


def run(setup: Setup) -> list[Figure]:
    costs: dict[str, list[float]] = {name: [] for name in _QUESTIONS}
    with setup.daemon() as daemon, Firing(setup.folder, _TEXTS) as firing:
        for _ in range(setup.repeats):
            for name, command in _QUESTIONS.items():
                with _asking(daemon, *command):
                    firing.fire(_TEXTS)
                    costs[name].append(min(firing.fire(_TEXTS).seconds_a_hit for _ in range(_ROUNDS)))
    ours, same, _ = costs.values()
    name, *others = costs
    ratio = median_ratio(ours, same)
    met = None if ratio is None else round(ratio, 2) <= _MOST
    return [
        Figure(name, median(ours), "s", ratio, f"<= {_MOST} of count's", met),
        *(Figure(each, median(costs[each]), "s", median_ratio(costs[each], same)) for each in others),
    ]


@contextmanager
def _asking(daemon: Daemon, *command: str) -> Iterator[None]:
    """Run a command of stapsdt's from when it is armed."""
    with (
        Client(daemon.target) as client,
        subprocess.Popen(
            stapsdt_command(daemon.target, *command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process,
    ):
        wait_for(lambda: any(each.streaming for each in client.subscriptions()), "the command to ask")
        yield
        process.terminate()
        process.wait()
        wait_for(lambda: not client.subscriptions(), "the command to be over")
