"""`./dev bench`; its --help lists the options."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stapsdtd.client import Client
from tests.bench import (
    adding,
    against,
    arming,
    arming_pids,
    delay,
    dtrace,
    hit,
    jvm,
    questions,
    rate,
    removals,
    requests,
    sandbox,
    spans,
    subscribers,
    unread,
    watching,
)
from tests.bench.report import Figure, table
from tests.bench.setup import Setup
from tests.bench.tracers import missing
from tests.support import running_daemon

_BENCHMARKS: dict[str, Callable[[Setup], list[Figure]]] = {
    "hit": hit.run,
    "questions": questions.run,
    "dtrace": dtrace.run,
    "spans": spans.run,
    "adding": adding.run,
    "rate": rate.run,
    "delay": delay.run,
    "subscribers": subscribers.run,
    "jvm": jvm.run,
    "arming": arming.run,
    "arming-pids": arming_pids.run,
    "removals": removals.run,
    "watching": watching.run,
    "requests": requests.run,
    "sandbox": sandbox.run,
    "unread": unread.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench")
    parser.add_argument("--quick", action="store_true", help="under two minutes in all, and less to rely on")
    parser.add_argument("--only", action="append", choices=_BENCHMARKS, metavar="NAME", help=", ".join(_BENCHMARKS))
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="a line for each figure, times in seconds")
    parser.add_argument("--engine", choices=("auto", "bpf", "ftrace"), default="auto")
    parser.add_argument("--repeats", type=int, help="runs of which a figure is the median (5, quick 2)")
    parser.add_argument("--against", metavar="REVISION", help="measure the daemon beside another revision's instead")
    parser.add_argument(
        "--pairs", type=int, default=against.PAIRS, help="how often each is measured then (%(default)s)"
    )
    options = parser.parse_args()
    repeats = options.repeats or (2 if options.quick else 5)
    for command in missing():
        print(f"bench: {command} is not installed, so nothing is measured beside it", file=sys.stderr)
    engine = _engine(options.engine)
    figures: list[Figure] = []
    runs = {name: _BENCHMARKS[name] for name in options.only or _BENCHMARKS}
    if options.against:
        repeats = options.pairs
        runs = {f"against {options.against}": partial(against.run, revision=options.against, pairs=options.pairs)}
    for name, run in runs.items():
        print(f"bench: {name} …", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            figures += run(Setup(Path(folder), repeats, engine, options.quick))
    lines = "".join(
        json.dumps({"engine": engine, **dataclasses.asdict(figure)}, ensure_ascii=False) + "\n" for figure in figures
    )
    if options.json == "-":
        print(lines, end="")
        return
    if options.json:
        Path(options.json).write_text(lines)
    print(f"engine {engine}, Linux {platform.release()}, {os.cpu_count()} CPUs, medians of up to {repeats} runs\n")
    print(table(figures))


def _engine(asked: str) -> str:
    """Which engine the daemon takes, so that all of a run is measured with one, and the figures say with which."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_daemon(Path(folder), "--engine", asked) as daemon,
        Client(daemon.target) as client,
    ):
        return client.info().engine


if __name__ == "__main__":
    main()
