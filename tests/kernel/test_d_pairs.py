"""D programs that take the time between probes: the kernel pairs them, with the result that the command comes to."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import TICKER, Daemon, Ticker, compile_target, stapsdt, stapsdt_command

pytestmark = pytest.mark.kernel

SPANNER = TICKER.replace("ticker", "spanner")
BEGIN, END = (f"{SPANNER}$target:::{name}" for name in ("begin", "end"))
PROGRAM = f"""
    self uint64_t first;
    BEGIN {{ printf("armed\\n"); }}
    {BEGIN} {{ self->latest = timestamp; INTERPRETED }}
    {BEGIN} /!self->first/ {{ self->first = timestamp; INTERPRETED }}
    {END} /self->latest && arg0 != 9/
    {{ @pairs[arg0] = count(); @latest = sum(timestamp - self->latest); self->latest = 0; }}
    {END} /self->first && arg0 != 9/ {{ @first = sum((timestamp - self->first) / 1000); self->first = 0; }}
    END {{ printa("pairs %d %@d\\n", @pairs); printa("latest %@d\\n", @latest); printa("first %@d\\n", @first); }}
"""


@pytest.fixture(scope="session")
def spanner_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("targets") / "spanner"
    return compile_target("spanner.c", output, f"-DPROVIDER={SPANNER}", "-lpthread")


@pytest.fixture
def spanner(spanner_program: Path) -> Iterator[Ticker]:
    with Ticker(spanner_program) as running:
        yield running


@pytest.mark.parametrize("interpreted", ["", "x++;"], ids=["lowered", "interpreted"])
def test_the_start_that_counts(daemon: Daemon, spanner: Ticker, interpreted: str) -> None:
    text = PROGRAM.replace("INTERPRETED", interpreted)
    options = ["-p", str(spanner.pid), "-q", "-n", text]
    plan = stapsdt(daemon.target, "d", "--explain", *options).stdout
    assert plan.count("the server pairs it with the clause that ends it") == (0 if interpreted else 2)
    assert plan.count("runs it for each hit: it does more than add up") == (4 if interpreted else 0)
    with subprocess.Popen(
        [*stapsdt_command(daemon.target, "d"), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as tracing:
        assert tracing.stdout is not None
        assert tracing.stdout.readline() == "armed\n"
        began = time.monotonic_ns()
        # an end without a start, and one whose predicate is false
        for command in ("end 1", "begin 1", "end 9"):
            spanner.do(command)
        between = time.monotonic_ns()
        for command in ("begin 1", "end 1", "end 1"):
            spanner.do(command)
        ended = time.monotonic_ns()
        tracing.send_signal(signal.SIGINT)
        output, errors = tracing.communicate(timeout=30)
    assert errors == ""
    counted = {what: int(number) for what, number in (line.rsplit(maxsplit=1) for line in output.splitlines() if line)}
    assert counted.keys() == {"pairs 1", "latest", "first"}
    assert counted["pairs 1"] == 1
    assert 0 < counted["latest"] < ended - between
    assert counted["latest"] // 1000 < counted["first"] < (ended - began) // 1000
