"""What D programs on the real kernel share with DTrace's: variables of a hit, exit(), and names."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from stapsdtd.cli.d import BACKLOG_SECONDS
from tests.kernel.test_d import rows, run
from tests.support import TICKER, TIME_FACTOR, Daemon, Ticker, compile_target, stapsdt_command, wait_for

pytestmark = pytest.mark.kernel

TICK = f"{TICKER}$target:::tick"
DASHES = TICKER.replace("ticker", "dashes")


def test_clauses_of_one_hit_share_their_variables(daemon: Daemon, ticker_program: Path) -> None:
    program = f"""
        this int n;
        {TICK} {{ @before = sum(this->n); this->n = arg0 + 10; }}
        {TICK} {{ @ = count(); }}
        {TICK} /this->n > 11/ {{ @behind = sum(this->n); }}
        END {{ printa("%@d ", @before); printa("%@d ", @); printa("%@d", @behind); }}
    """
    assert rows(run(daemon, "-q", "-n", program, "-c", f"{ticker_program} 4").stdout) == [["0", "4", "25"]]


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("BEGIN { exit(5); trace(1); } BEGIN { trace(2); } TICK { trace(3); } END { trace(4); }", ["4"]),
        ("BEGIN { exit(5); } END { exit(5); trace(1); } END { trace(2); }", ["2"]),
        ("BEGIN { exit(5); } TICK { @ = count(); }", []),
        ("TICK { @ = count(); } TICK /arg0 == 2/ { exit(5); } TICK { @behind = count(); }", ["3", "2"]),
        ("tick-50ms { exit(5); } tick-50ms { trace(1); } END { trace(2); } END { trace(3); }", ["23"]),
    ],
)
def test_nothing_runs_behind_exit_but_end(
    daemon: Daemon, ticker_program: Path, program: str, output: list[str]
) -> None:
    count = 100 if "TICK" in program else 0
    command = f"{ticker_program} {count}" if count else "sleep 20"
    done = run(daemon, "-q", "-n", program.replace("TICK", TICK), "-c", command, check=False)
    assert (done.returncode, done.stdout.split()) == (5, output)


@pytest.fixture(scope="session")
def dashes_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("targets") / "dashes"
    return compile_target("dashes.c", output, f"-DPROVIDER={DASHES}")


@pytest.mark.parametrize("name", ["go-on", "go__on"])
# the kernel adds up, or the command
@pytest.mark.parametrize("more", ["", "n++;"])
def test_both_spellings_of_a_name_are_one(daemon: Daemon, dashes_program: Path, name: str, more: str) -> None:
    program = f"""
        {DASHES}$target:::{name} {{ @by[probename] = count(); {more} }}
        {DASHES}$target::: /probename == "{name}"/ {{ @same = count(); {more} }}
        {DASHES}$target::: /"{name}" != probename/ {{ @others[probename] = count(); {more} }}
        END {{ printa("%s %@d ", @by); printa("%@d ", @same); printa("%s %@d", @others); }}
    """
    done = run(daemon, "-q", "-n", f"int n; {program}", "-c", f"{dashes_program} 3")
    assert rows(done.stdout) == [["go-on", "3", "3", "go", "3"]]


@pytest.mark.parametrize(("size", "shown"), [(1, 0), (4, 3), (256, 255), (1001, 1000), (4096, 1500)])
def test_strings_are_as_long_as_strsize_says(daemon: Daemon, ticker: Ticker, size: int, shown: int) -> None:
    text = "".join(chr(ord("a") + number % 26) for number in range(1500))
    program = f'{TICKER}{ticker.pid}:::text {{ @[copyinstr(arg0)] = count(); printf("%s,%d,%d", copyinstr(arg0),'
    program += f"strlen(copyinstr(arg0)), sizeof (string)); exit(0); }} {TICKER}{ticker.pid}:::tick {{ }}"
    command = [*stapsdt_command(daemon.target, "d"), "-q", "-x", f"strsize={size}", "-n", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tracing:
        wait_for(lambda: ticker.semaphore, "the probe to be armed")
        ticker.do(f"text {text}")
        output, _ = tracing.communicate(timeout=20)
    first, *_, row = output.splitlines()
    assert first == f"{text[:shown]},{shown},{size}"
    assert row.split() == [*filter(None, [text[:shown]]), "1"]


def test_names_are_shown_with_dashes(daemon: Daemon, dashes_program: Path) -> None:
    listed = rows(run(daemon, "-l", "-n", f"{DASHES}$target:::go_*", "-c", str(dashes_program)).stdout)
    assert [line[-1] for line in listed] == ["NAME", "go-on"]
    done = run(daemon, "-n", f"{DASHES}$target:::go-on", "-c", str(dashes_program))
    assert [line[2] for line in rows(done.stdout)] == ["FUNCTION:NAME", "main:go-on"]


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_ends_a_program_soon(daemon: Daemon, ticker_program: Path, interrupts: int) -> None:
    program = f'BEGIN {{ printf("begun\\n"); }} {TICKER}*:::tick {{ @ = count(); n++; @q[arg0 % 9] = quantize(arg1); }}'
    command = [*stapsdt_command(daemon.target, "d"), "-q", "-Z", "-n", f'{program} END {{ printf("%d ends", n); }}']
    with (
        subprocess.Popen([str(ticker_program), str(1 << 40)]) as ticking,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tracing,
    ):
        try:
            assert tracing.stdout is not None
            assert tracing.stdout.readline() == "begun\n"
            # more than it can look at meanwhile
            time.sleep(4)
            begin = time.monotonic()
            for _ in range(interrupts):
                tracing.send_signal(signal.SIGINT)
                time.sleep(0.2)
            output, errors = tracing.communicate(timeout=60)
            seconds = time.monotonic() - begin
        finally:
            ticking.kill()
    count = output.partition(" ends")[0]
    assert int(count)
    assert [count] in rows(output)
    assert re.search(r"\d+ hits not shown: interrupted", errors)
    # it took 15 s
    assert seconds < (BACKLOG_SECONDS + 5) * TIME_FACTOR
