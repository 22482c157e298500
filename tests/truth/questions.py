"""Questions about tests/targets/truth.c, which tells what it did."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.truth.answer import Answer
from tests.truth.asking import PROVIDER, Program, Told, ask, real_minus_monotonic_ns

_BEGIN, _END, _WORD, _TICK = (f"{PROVIDER}:{name}" for name in ("begin", "end", "word", "tick"))
_THREADS, _DEPTH = 4, 3
_OPERATIONS, _WORDS = 300, 20_000
_TICKS_MS, _TICKS_PER_SECOND = 5000, 5000
_STALLED_SECONDS = 2.0
_ROOM = ("--buffer", "32768")
"""In KiB, for the ftrace engine, which has a record of each hit."""
_CLOCKS_NS = 2_000_000
"""By how much two readings of two clocks may be apart on a busy host."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Where a question is asked. folder: for what is compiled."""

    target: str
    folder: Path


class Operation(NamedTuple):
    """As the program tells it; times in ns of CLOCK_MONOTONIC."""

    thread: int
    number: int
    depth: int
    status: int
    before_begin: int
    after_begin: int
    before_end: int
    after_end: int

    @property
    def is_open(self) -> bool:
        return self.status < 0

    @property
    def least_ns(self) -> int:
        return self.before_end - self.after_begin

    @property
    def most_ns(self) -> int:
        return self.after_end - self.before_begin


def _operations(asked: Asked, *arguments: str, depth: int = 1) -> tuple[list[Operation], Told[Any]]:
    with Program(asked.folder) as program:
        told = ask(
            asked.target,
            *arguments,
            sites=2,
            pids=[program.pid],
            work=lambda _: program.do("spans", _OPERATIONS, _THREADS, depth),
        )
    return [Operation(*each) for each in told.truth], told


def _pairs(asked: Asked, *options: str, depth: int = 1, status: int | None = None) -> Answer:
    """status: of the operations that are wanted; None for all."""
    operations, told = _operations(asked, "spans", _BEGIN, _END, *options, depth=depth)
    ended = [each for each in operations if not each.is_open]
    wanted = {(each.thread, each.number): each for each in ended if status in {None, each.status}}
    answer = Answer("ns")
    found = Counter((record["args"][1], record["args"][0]) for record in told.records)
    answer.compare("pair", found, dict.fromkeys(wanted, 1))
    for record in told.records:
        if (operation := wanted.get((record["args"][1], record["args"][0]))) is not None:
            name = f"operation {operation.number} of thread {operation.thread}"
            answer.bracket(name, operation.least_ns, record["elapsed"], operation.most_ns)
            answer.bracket(f"end of {name}", operation.before_end, record["monotonic_ns"], operation.after_end)
    answer.require("lost", told.summary["lost"], 0)
    answer.require("filtered", told.summary["filtered"], len(ended) - len(wanted))
    answer.require("starts", told.summary["spans"]["starts"], len(operations))
    without_end = "open" if "--key" in options else "died"
    answer.require(without_end, told.summary["spans"][without_end], _THREADS)
    return answer


def pairs(asked: Asked) -> Answer:
    return _pairs(asked)


def nested_pairs(asked: Asked) -> Answer:
    return _pairs(asked, "--nested", depth=_DEPTH)


def filtered_pairs(asked: Asked) -> Answer:
    return _pairs(asked, "--where", "arg2 == 1", status=1)


def nested_filtered_pairs(asked: Asked) -> Answer:
    return _pairs(asked, "--nested", "--where", "arg2 == 1", depth=_DEPTH, status=1)


def pairs_by_key(asked: Asked) -> Answer:
    """Those that are open at the end outlive their threads."""
    return _pairs(asked, "--key", "arg0,arg1")


def latency(asked: Asked) -> Answer:
    operations, told = _operations(asked, "latency", _BEGIN, _END, "--by", "arg1")
    answer = Answer("ns")
    rows = {record["key"][0]: record for record in told.records if "key" in record}
    ended: dict[int, list[Operation]] = {}
    for each in operations:
        if not each.is_open:
            ended.setdefault(each.thread, []).append(each)
    answer.compare(
        "pairs of thread",
        {thread: row["count"] for thread, row in rows.items()},
        {thread: len(some) for thread, some in ended.items()},
    )
    for thread, row in rows.items():
        some = ended.get(thread, [])
        least, most = [each.least_ns for each in some], [each.most_ns for each in some]
        answer.bracket(f"total of thread {thread}", sum(least), row["sum"], sum(most))
        answer.bracket(f"maximum of thread {thread}", max(least, default=0), row["max"], max(most, default=0))
    answer.require("lost", told.summary["lost"], 0)
    return answer


def _words(asked: Asked, *arguments: str, programs: int = 1) -> tuple[dict[int, Any], Told[Any]]:
    """Return what programs say, by pid."""
    with ExitStack() as stack:
        running = [stack.enter_context(Program(asked.folder)) for _ in range(programs)]

        def work(_: object) -> dict[int, Any]:
            for number, each in enumerate(running):
                each.begin("words", _WORDS // (number + 1), _THREADS)
            return {each.pid: each.finish() for each in running}

        told = ask(asked.target, *arguments, *_ROOM, sites=1, pids=[each.pid for each in running], work=work)
    return told.truth, told


def _total(truth: Mapping[str, Any]) -> int:
    return sum(count for _, count, _, _, _ in truth["texts"])


def _rows(told: Told[Any]) -> dict[tuple[object, ...], Any]:
    return {tuple(record["key"]): record for record in told.records}


def count(asked: Asked) -> Answer:
    truth, told = _words(asked, "count", _WORD, programs=3)
    answer = Answer()
    found = {key: row["count"] for key, row in _rows(told).items()}
    expected: dict[tuple[object, ...], int] = {(): sum(map(_total, truth.values()))}
    answer.compare("count", found, expected)
    answer.require("lost", told.summary["lost"], 0)
    return answer


def count_by_pid(asked: Asked) -> Answer:
    truth, told = _words(asked, "count", _WORD, "--by", "pid", programs=3)
    answer = Answer()
    found = {key: row["count"] for key, row in _rows(told).items()}
    expected: dict[tuple[object, ...], int] = {(pid,): _total(each) for pid, each in truth.items()}
    answer.compare("pid", found, expected)
    return answer


def count_by_text(asked: Asked) -> Answer:
    """Texts of 152 bytes, of which 151 are equal."""
    truth, told = _words(asked, "count", _WORD, "--by", "arg0:str")
    answer = Answer()
    found = {key: row["count"] for key, row in _rows(told).items()}
    (of_program,) = truth.values()
    answer.compare("text", found, {(text,): count for text, count, *_ in of_program["texts"]})
    return answer


def stats(asked: Asked) -> Answer:
    truth, told = _words(asked, "stats", _WORD, "arg1", "--by", "arg0:str")
    (of_program,) = truth.values()
    answer = Answer("of a value")
    found = {key: [row[name] for name in ("count", "sum", "min", "max")] for key, row in _rows(told).items()}
    answer.compare("values of", found, {(text,): values for text, *values in of_program["texts"]})
    return answer


def histogram(asked: Asked) -> Answer:
    truth, told = _words(asked, "hist", _WORD, "arg1")
    (of_program,) = truth.values()
    answer = Answer()
    powers: Counter[object] = Counter()
    for low, high, hits in (bucket for record in told.records for bucket in record["buckets"]):
        answer.require(f"one power of two of bucket {low}", low.bit_length(), high.bit_length())
        powers[low.bit_length()] += hits
    answer.compare("values below 2 **", powers, {low.bit_length(): hits for low, hits in of_program["powers"]})
    return answer


class _Fired:
    """How many hits a program had fired at a time, of Unix in ns, from its own moments."""

    def __init__(self, moments: Sequence[Sequence[int]], offset_ns: int) -> None:
        self._moments = [(before + offset_ns, fired, after + offset_ns) for before, fired, after in moments]

    def least(self, time_ns: int) -> int:
        return max((fired for _, fired, after in self._moments if after <= time_ns), default=0)

    def most(self, time_ns: int) -> int:
        return max((fired for before, fired, _ in self._moments if before <= time_ns), default=0)


def top_of_stalled_terminal(asked: Asked) -> Answer:
    """No rate is higher than what was fired, though the command stands still for a while."""

    def work(asking: subprocess.Popen[bytes]) -> Any:
        program.begin("ticks", _TICKS_MS, 1, _TICKS_PER_SECOND)
        time.sleep(1)
        os.kill(asking.pid, signal.SIGSTOP)
        time.sleep(_STALLED_SECONDS)
        os.kill(asking.pid, signal.SIGCONT)
        truth = program.finish()
        # so that the last interval is over
        time.sleep(1)
        return truth

    with Program(asked.folder) as program:
        told = ask(asked.target, "top", _TICK, "--interval", "0.5", sites=1, pids=[program.pid], work=work)
    fired = _Fired(told.truth, real_minus_monotonic_ns())
    answer = Answer()
    for record in told.records:
        end_ns = record["time_ns"]
        begin_ns = end_ns - round(record["seconds"] * 1e9)
        before, after = begin_ns - _CLOCKS_NS, end_ns + _CLOCKS_NS
        most = fired.most(after) - fired.least(before)
        answer.bracket(f"hits of {record['seconds']} s", 0, record["count"], most)
        answer.bracket("hits so far", fired.least(end_ns - _CLOCKS_NS), record["total"], fired.most(after))
        answer.bracket("rate", 0, record["rate"], most / record["seconds"] + 1)
    answer.require("hits in all", told.records[-1]["total"], told.truth[-1][1])
    answer.require("lost", told.summary["lost"], 0)
    return answer


Question = Callable[[Asked], Answer]

QUESTIONS: dict[str, Question] = {
    "spans": pairs,
    "spans-nested": nested_pairs,
    "spans-where": filtered_pairs,
    "spans-nested-where": nested_filtered_pairs,
    "spans-key": pairs_by_key,
    "latency": latency,
    "count": count,
    "count-by-pid": count_by_pid,
    "count-by-text": count_by_text,
    "stats": stats,
    "hist": histogram,
    "top-stalled": top_of_stalled_terminal,
}
