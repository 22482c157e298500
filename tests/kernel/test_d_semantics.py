"""What D programs on the real kernel share with DTrace's: variables of a hit, exit(), and names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel.test_d import rows, run
from tests.support import TICKER, Daemon

pytestmark = pytest.mark.kernel

TICK = f"{TICKER}$target:::tick"


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
        # DTrace runs the rest of the clause, too
        ("BEGIN { exit(5); trace(1); } BEGIN { trace(2); } TICK { trace(3); } END { trace(4); }", ["14"]),
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
