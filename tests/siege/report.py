"""A row held against the quiet baseline of its run, and how both are shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.siege.bystander import CALLS
from tests.siege.siege import Row

_FACTOR = 1.5
_ALLOWANCE_SECONDS = 0.020

_NAME_WIDTH, _CALL_WIDTH = 30, 14


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest rank, of few values the greatest: one long wait is one too many. NaN without values."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else float("nan")


def failures(row: Row, quiet: Row) -> list[str]:
    """Return what the bystander suffered beyond what it may."""
    told = row.round
    found = list(row.problems)
    for call in CALLS:
        bound = _FACTOR * percentile(quiet.round.seconds.get(call, ()), 0.99) + _ALLOWANCE_SECONDS
        p99 = percentile(told.seconds.get(call, ()), 0.99)
        # a call that never returned has no time
        if not p99 <= bound:
            found.append(f"{call}: p99 {p99 * 1e3:.0f} ms, more than {bound * 1e3:.0f} ms")
    if not told.is_exact:
        found.append(
            f"account: {told.received} of {told.fired} events came, {told.miscounted} counts were wrong; the daemon "
            f"says {told.accounted}"
        )
    if told.foreign:
        found.append(f"{told.foreign} records of others were seen")
    found += [f"{failure} ({count} times)" for failure, count in told.failures.items()]
    return found


def heading() -> str:
    calls = "".join(f"{call:>{_CALL_WIDTH}}" for call in CALLS)
    return (
        f"{'p50/p99 in ms':{_NAME_WIDTH}}{calls}{'events':>14}{'foreign':>9}{'MiB':>7}{'CPU':>7}{'log KiB':>9}"
        f"  longest slice"
    )


def line(row: Row) -> str:
    told = row.round
    calls = "".join(f"{_times(told.seconds.get(call, ())):>{_CALL_WIDTH}}" for call in CALLS)
    name = row.name if len(row.name) < _NAME_WIDTH else "mixed:"
    events = f"{told.received}/{told.fired}"
    text = (
        f"{name:{_NAME_WIDTH}}{calls}{events:>14}{told.foreign:>9}{row.peak_kib / 1024:>7.0f}{row.cpu_share:>7.0%}"
        f"{row.log_bytes / 1024:>9.0f}  {_longest(row)}"
    )
    return text if name == row.name else f"{text}\n    {row.name}"


def details(row: Row) -> list[str]:
    """What the attacker got."""
    done = ", ".join(f"{name} {count:,}" for name, count in sorted(row.gained.done.items()))
    refused = [
        f"    refused: {code} {count:,} {row.gained.examples.get(code, '')!a}"
        for code, count in row.gained.refusals.items()
    ]
    return [f"    done: {done or 'nothing'}", *refused]


def _times(seconds: Sequence[float]) -> str:
    p50, p99 = (percentile(seconds, share) * 1e3 for share in (0.5, 0.99))
    return f"{p50:.3g}/{p99:.3g}" if p99 < 1000 else f"{p50:.0f}/{p99:.0f}"


def _longest(row: Row) -> str:
    if not row.slices:
        return ""
    thread, bound = max(row.slices.items(), key=lambda item: item[1])
    return f"{thread} <= {bound * 1e3:g} ms"
