"""copyin() of D programs, of memory that a probe's arguments point to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import TICKER, Daemon, stapsdt

pytestmark = pytest.mark.kernel

TICK = f"{TICKER}$target:::tick"
"""Its third argument points to "tick"."""


@pytest.mark.parametrize("engine", ["bpf"])
@pytest.mark.usefixtures("engine")
def test_what_an_argument_points_to(daemon: Daemon, ticker_program: Path) -> None:
    program = f"""
        {TICK} {{ printf("%s %x\\n", stringof(copyin(arg2, 5)), *(uint16_t *)copyin(arg2 + 1, sizeof (uint16_t))); }}
        {TICK} {{ this->p = (char *)copyin(arg2, 4); @[*this->p] = count(); tracemem(this->p, 4, 3); }}
        {TICK} /stringof(copyin(arg2, 2)) == "ti"/ {{ trace(copyin(arg2 + 2, 2)); }}
    """
    done = stapsdt(daemon.target, "d", "-q", "-n", program, "-c", f"{ticker_program} 1")
    dumps = [line.split(":")[1].split() for line in done.stdout.splitlines() if line.startswith("         0:")]
    assert done.stdout.splitlines()[0] == "tick 6369"
    assert dumps == [["74", "69", "63", "tic"], ["63", "6b", "ck"]]
    assert done.stdout.splitlines()[-1].split() == [str(ord("t")), "1"]
    assert done.stderr == ""


@pytest.mark.parametrize("engine", ["bpf"])
@pytest.mark.usefixtures("engine")
def test_an_address_that_is_none(daemon: Daemon, ticker_program: Path) -> None:
    program = f"{TICK} {{ trace(*(int *)copyin(arg0, 4)); }} {TICK} {{ trace(arg0); }}"
    done = stapsdt(daemon.target, "d", "-q", "-n", program, "-c", f"{ticker_program} 2")
    assert done.stdout.split() == ["01"]
    assert done.stderr.count("copyin(arg0): ") == 2


@pytest.mark.parametrize("engine", ["ftrace"])
@pytest.mark.usefixtures("engine")
def test_an_engine_that_cannot(daemon: Daemon, ticker_program: Path) -> None:
    program = f"{TICK} {{ trace(stringof(copyin(arg2, 5))); }}"
    done = stapsdt(daemon.target, "d", "-q", "-n", program, "-c", f"{ticker_program} 1")
    assert "copyin(arg2): 8@%rdx: the ftrace engine cannot fetch" in done.stderr
