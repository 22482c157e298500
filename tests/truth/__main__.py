"""`./dev truth`: every question, so many times under each load."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.truth.answer import HEADING, Row, line
from tests.truth.loads import LOADS
from tests.truth.runs import ALL, answers

_SHOWN_PROBLEMS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="./dev truth",
        description="Exit 1 if any answer differs from what the traced program says of itself.",
    )
    parser.add_argument("--runs", type=int, default=20, help="of each question under each load (%(default)d)")
    parser.add_argument("--load", action="append", choices=LOADS, metavar="NAME", help=", ".join(LOADS))
    parser.add_argument("--only", action="append", choices=ALL, metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--engine", choices=["bpf", "ftrace"], default="bpf")
    options = parser.parse_args(arguments)
    # so that the daemon and the programs are ended, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("dev truth: ended by SIGTERM"))
    rows = []
    print(line(HEADING), flush=True)
    for load in options.load or LOADS:
        for question in options.only or ALL:
            with tempfile.TemporaryDirectory(prefix="stapsdtd-truth-") as folder:
                found = list(answers(question, load, options.engine, options.runs, Path(folder)))
            row = Row(question, load, found)
            rows.append(row)
            print(line(row.cells), flush=True)
            for each in row.wrong[:_SHOWN_PROBLEMS]:
                print(*(f"    {problem}" for problem in each.problems[:_SHOWN_PROBLEMS]), sep="\n", flush=True)
    wrong = [f"{row.question} ({row.load})" for row in rows if row.wrong]
    print(f"{len(rows) - len(wrong)} of {len(rows)} rows are right; those that are not: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
