"""The options of a subscription: their names, types, defaults and meaning.

The clients, the commands and the API share these classes, and the protobuf messages have fields of the same names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Self

FIELDS = ("uid", "gid", "cgroup", "container")
"""What an event may tell of the thread that hit, besides the probe's arguments."""


HISTOGRAMS = ("quantize", "lquantize", "llquantize", "percentiles")
"""The functions of an aggregation that have buckets, at most one of which is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """What to compute of the hits instead of delivering them.

    functions: `count`, `sum`, `min`, `max`, `avg`, `stddev`, `values` (how many hits had a value), and a histogram:
        `quantize` (powers of two), `lquantize(low, high, step)`, `llquantize(factor, low, high, steps)`, or
        `percentiles` (32 buckets for each power of two).
    value: of which value, an expression such as `arg0` or `arg1 - arg0`; empty if count is all that is wanted.
    by: compute them for each combination of these: expressions, such as `pid`, `arg0 / 1000` or `str(arg1, arg2)`, or
        arguments as in a capture list, `arg1:str[64]`.
    max_keys: how many combinations are kept; 0 for the server's limit.
    interval_ms: the time between snapshots; 0 for only one, at the end.
    cumulative: a snapshot covers all hits so far, rather than those since the last one.
    """

    functions: Sequence[str] = ("count",)
    value: str = ""
    by: Sequence[str] = ()
    max_keys: int = 0
    interval_ms: int = 0
    cumulative: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Pairs each hit of the probes that are subscribed to, an end, with an earlier hit of others, its start.

    A pair is an event of its end. Its values are the arguments of the end, those of the start, and fields, of which the
    first is `elapsed`, in nanoseconds.

    start_selectors: the starts; their capture lists, which must be equal, say what a pair tells of its start.
    start_where: a filter expression for starts; `SubscribeOptions.where` is for ends and, with `elapsed`, for pairs.
        Neither changes which start an end belongs to, but for filters_choose.
    key: what start and end have in common, as `Aggregate.by`, without strings; the thread if empty.
    timeout_ms: how long a start waits for its end; 0 for no limit.
    nested: an end belongs to the last start that has none yet, to a depth of 128, rather than to the first.
    max_open: how many keys may wait for their ends; 0 for the server's limit.
    latest: an end belongs to the latest start, which replaces the one that waited.
    filters_choose: hits that do not satisfy their filter are no starts and ends, rather than those of unwanted pairs.
    report_open_ms: after how long a stream of events tells of a start that still waits; 0 for never.
    """

    start_selectors: Sequence[str]
    start_where: str = ""
    key: Sequence[str] = ()
    timeout_ms: int = 0
    nested: bool = False
    max_open: int = 0
    latest: bool = False
    filters_choose: bool = False
    report_open_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """One of several questions that share a subscription: which hits, and what to do at them.

    tag: names it in whatever the stream carries; no two of a subscription may be equal.
    selectors, where, fields: as for a subscription of its own.
    aggregate: what to compute of the hits, rather than deliver events.
    span: what to pair the hits with.
    chain: kernel functions, as FUNCTION or MODULE:FUNCTION, whose entries and returns selectors choose. Only calls of
        the first one count that satisfy the filter, in these only such calls of the second one, and so on, directly or
        not, and what else selectors choose only in all of them.
    """

    selectors: Sequence[str]
    tag: str = ""
    where: str = ""
    fields: Sequence[str] = ()
    aggregate: Aggregate | None = None
    span: Span | None = None
    chain: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The processes and threads whose events are delivered.

    Values of one field are combined with OR, different fields with AND; an empty field does not restrict.

    pids: of running processes, each until it ends.
    follow: also the processes that those of pids have forked and fork from now on, and so on.
    exclude_pids: never deliver events of these processes.
    uids, execnames: users and command names (comm) of threads.
    cgroups: paths as in /proc/PID/cgroup. A cgroup must exist, and includes those below it.
    containers: names, ids, or at least the first 12 digits of an id. A container must exist, and includes those in it.
    include_clients: deliver events of the server's other clients too, which by default count as filtered.
    """

    pids: Collection[int] = ()
    exclude_pids: Collection[int] = ()
    uids: Sequence[int] = ()
    execnames: Sequence[str] = ()
    cgroups: Sequence[str] = ()
    containers: Sequence[str] = ()
    include_clients: bool = False
    follow: bool = False

    @classmethod
    def of(cls, *sources: object) -> Self:
        """Take each field from the first source that has an attribute of its name, such as a protobuf message."""
        values = {
            field.name: next(getattr(source, field.name) for source in sources if hasattr(source, field.name))
            for field in fields(cls)
        }
        values |= {name: tuple(value) for name, value in values.items() if not isinstance(value, str | int)}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeOptions(Scope):
    """What to deliver, and how much to buffer. Of a number, 0 means the server's default.

    where: a filter expression such as `arg0 > 100 && execname != "psql"`; see docs/commands.md, Filters.
    lease_seconds: how long the subscription lives without a stream.
    queue_bytes: how much the server buffers for this client.
    kernel_buffer_kib: size of the kernel buffer per CPU.
    require_match: fail if no probe matches yet, rather than wait for one.
    files: only probes in these files, which are armed even before a process maps them: absolute paths, globs, or
        directories for the ELF files in them, of the server's host.
    fields: what else to tell of each event, behind its arguments: FIELDS, or expressions such as `arg1 - arg0`.
    expected_files: paths as of files, which are armed before a process maps them, too. Probes are not restricted to
        these, and what has no probes or cannot be used is left out.
    functions: kernel functions from which selectors choose, too, as `fbt:MODULE:FUNCTION:entry` and `:return`: NAME,
        MODULE:NAME, both of which may be globs, or NAME(VALUE, ...). arg0 and the following are a function's arguments,
        and its result; behind them are the values.
    exclude: probes that selectors do not choose, as `provider:name`.
    all_or_nothing: fail if a site that matches now cannot be armed, rather than trace the others.
    """

    where: str = ""
    lease_seconds: int = 0
    queue_bytes: int = 0
    kernel_buffer_kib: int = 0
    require_match: bool = False
    all_or_nothing: bool = False
    files: Sequence[str] = ()
    fields: Sequence[str] = ()
    expected_files: Sequence[str] = ()
    functions: Sequence[str] = ()
    exclude: Sequence[str] = ()
