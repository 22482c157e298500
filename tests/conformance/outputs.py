"""What D programs print, in tests/conformance/output.

NAME.d       a program, which needs nothing but BEGIN and END
NAME.out     what it prints
"""

from __future__ import annotations

from pathlib import Path

from stapsdtd.query.d.check import check
from stapsdtd.query.d.interpret import Program
from stapsdtd.query.d.machine import Hit
from stapsdtd.query.d.options import options_of
from stapsdtd.query.d.parse import parse
from stapsdtd.query.d.probes import Moment, meaning
from stapsdtd.query.d.records import Records

FOLDER = Path(__file__).parent / "output"

CASES = sorted(path.stem for path in FOLDER.glob("*.out"))

_IDS = {Moment.BEGIN: 1, Moment.END: 2}


def program(name: str) -> str:
    return (FOLDER / f"{name}.d").read_text()


def expected(name: str) -> str:
    return (FOLDER / f"{name}.out").read_text()


def output_of(text: str) -> str:
    """Return what a program without probes of others prints, as the first of two processors."""
    parsed = parse(text)
    options = options_of(parsed.options)
    shown: list[str] = []
    records = Records(shown.append, is_quiet=options.is_quiet)

    def tell_fault(hit: Hit, reason: str) -> None:
        shown.append(f"error in {hit.name}: {reason}\n")

    program = Program(check(parsed, lambda *_: None), records, options.sorting, tell_fault)
    for moment in Moment:
        hit = Hit(_IDS[moment], "dtrace", "", "", moment.value, pid=4711, tid=4711, uid=0, gid=0, execname="dtrace")
        clauses = [clause for clause in parsed.clauses if moment in map(meaning, clause.descriptions)]
        program.run(clauses, hit, is_end=moment is Moment.END)
    program.finish()
    return "".join(shown)
