"""D programs whose traced threads are moved between CPUs, each of which has a buffer of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import TICKER, Daemon, compile_target, stapsdt

pytestmark = pytest.mark.kernel

MIGRATING = TICKER.replace("ticker", "migrating")
THREADS, PAIRS = 6, 500


@pytest.fixture(scope="session")
def migrating_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("targets") / "migrating"
    return compile_target("migrating.c", output, f"-DPROVIDER={MIGRATING}", "-lpthread")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU alone")
def test_variables_follow_a_thread_to_another_cpu(daemon: Daemon, migrating_program: Path) -> None:
    start, done = (f"{MIGRATING}$target:::{name}" for name in ("start", "done"))
    program = f"""
        uint64_t last; int64_t open[int64_t]; self uint64_t open; self int64_t number; self int from;
        {start}, {done} /timestamp < last/ {{ @["earlier than the hit before"] = count(); }}
        {start}, {done} {{ last = timestamp; }}
        {start} /self->open || open[arg0]/ {{ @["within another"] = count(); }}
        {start} /arg1 != self->number + 1/ {{ @["out of turn"] = count(); }}
        {start} {{ self->open = timestamp; self->number = arg1; open[arg0] = arg1; self->from = cpu + 1; }}
        {done} /self->number != arg1 || open[arg0] != arg1/ {{ @["not its start's"] = count(); }}
        {done} /self->open && timestamp > self->open/ {{ @["paired"] = count(); }}
        {done} /self->from && self->from != cpu + 1/ {{ @["moved"] = count(); }}
        {done} {{ self->open = 0; open[arg0] = 0; self->from = 0; }}
    """
    ran = stapsdt(daemon.target, "d", "-q", "-n", program, "-c", f"{migrating_program} {THREADS} {PAIRS}")
    counted = dict(line.rsplit(maxsplit=1) for line in ran.stdout.splitlines() if line)
    assert {what.strip(): int(count) for what, count in counted.items()} == {
        "paired": THREADS * PAIRS, "moved": THREADS * PAIRS,
    }  # fmt: skip
    assert ran.stderr == ""
