"""`./dev siege`: every attack in turn, then mixtures of them, each beside a bystander who works."""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from tests.siege import report
from tests.siege.attacker import ATTACKS
from tests.siege.siege import Row, Siege, besieged

_QUIET_SHARE = 0.08
_OVERHEAD_SECONDS = 1.5
"""Of a row: starting the attack, and waiting until the daemon is at rest."""
_LEAST_SECONDS = 1.0
_MIXTURES, _MIXED = 3, 6
_SHOWN_LINES = 20


class Run:
    """Rows under one daemon after the other: one that does not come to rest, or dies, makes room for the next."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._stack = ExitStack()
        self._siege: Siege | None = None
        self.problems: list[str] = []

    def row(self, attacks: Sequence[str], seconds: float) -> Row:
        if self._siege is None:
            self._siege = self._stack.enter_context(besieged(self._engine))
        row = self._siege.under(attacks, seconds)
        if not row.has_settled or row.round.fired < 0:
            self.close()
        return row

    def close(self) -> None:
        """Stop the daemon, and look at how it ends."""
        self._siege = None
        try:
            self._stack.close()
        except (AssertionError, OSError, subprocess.SubprocessError, pytest.fail.Exception) as error:
            lines = str(error).splitlines()
            # the log is in the message of what is asserted of it
            wrong = [each for each in lines if " ERROR " in each or "Traceback" in each] or lines
            told = "\n".join(["the daemon did not end well:", *wrong[:_SHOWN_LINES]])
            self.problems.append(told)
            print(told, flush=True)


def _plan(names: Sequence[str], seed: int) -> list[tuple[str, ...]]:
    chosen = random.Random(seed)
    mixtures = [tuple(chosen.sample(names, _MIXED)) for _ in range(_MIXTURES)] if len(names) > _MIXED else []
    return [(name,) for name in names] + mixtures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="./dev siege",
        description="Exit 1 if the bystander's p99 is above 1.5 x the quiet one + 20 ms in any row, if it lost an "
        "event or saw anything of the attacker's.",
    )
    parser.add_argument("--seconds", type=float, default=600, help="of the whole run (%(default)g)")
    parser.add_argument("--only", action="append", choices=ATTACKS, metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument("--seed", type=int, default=1, help="which attacks are mixed")
    parser.add_argument("--engine", choices=["bpf", "ftrace"], default="bpf")
    options = parser.parse_args(arguments)
    # so that the daemon and the users' processes are ended, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("dev siege: ended by SIGTERM"))
    end = time.monotonic() + options.seconds
    plan = _plan(options.only or list(ATTACKS), options.seed)
    run = Run(options.engine)
    failed = []
    try:
        print(report.heading(), flush=True)
        quiet = run.row((), max(_LEAST_SECONDS, _QUIET_SHARE * options.seconds))
        print(report.line(quiet), flush=True)
        for position, attacks in enumerate(plan):
            share = (end - time.monotonic()) / (len(plan) - position)
            row = run.row(attacks, max(_LEAST_SECONDS, share - _OVERHEAD_SECONDS))
            print(report.line(row), *report.details(row), sep="\n", flush=True)
            if found := report.failures(row, quiet):
                failed.append(row.name)
                print(*(f"    FAILS {each}" for each in found), sep="\n", flush=True)
    finally:
        run.close()
    print(f"{len(plan) - len(failed)} of {len(plan)} rows hold; those that do not: {', '.join(failed) or 'none'}")
    return 1 if failed or run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
