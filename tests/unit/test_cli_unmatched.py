from __future__ import annotations

import pytest

from stapsdtd.catalog.selectors import parse
from stapsdtd.cli.unmatched import Hints, Unmatched, why_unmatched
from stapsdtd.client import Probe, Problem

PROBES = [
    Probe(provider, name, f"/usr/bin/{provider}", None, "x86-64", (7,), ())
    for provider, name in (
        ("postgresql", "query__start"),
        ("postgresql", "query__done"),
        ("postgresql", "query__rewrite__start"),
        ("python", "gc__start"),
        ("hotspot", "gc__begin"),
        ("my-app", "start"),
        ("ts", "&HttpSM::state_read"),
        ("paren", "a(b)"),
    )
]


STATIC = "stapsdt has static probes of programs"
SPECIAL = "this name is a selector of others unless it is in quotes"


@pytest.mark.parametrize(
    ("selector", "reason", "nearest"),
    [
        ("postgresql:query__strt", "no such probe yet", ("query__start",)),
        ("postgresql:query-dune", "no such probe yet", ("query__done",)),
        ("postgresql99:::query-strt", "no such probe yet", ("query__start",)),
        ("*:gc-start(arg0)", "no such probe in the selected processes, modules and functions yet", ()),
        ("gc__strat", "no such probe yet", ("gc__start",)),
        ("postgresql", "postgresql is a provider, not a probe", ("postgresql:*",)),
        ("postgres:*", "no running program has a provider postgres yet", ("postgresql:*",)),
        ("postgres:", "no running program has a provider postgres yet", ("postgresql:*",)),
        ("pythn:gc__start(arg0)", "no running program has a provider pythn yet", ("python:gc__start",)),
        ("my-ap:start", "no running program has a provider my-ap yet", ("my-app:start",)),
        ("my-app:strt()", "no such probe yet", ("start",)),
        ("mysql:*", "no running program has a provider mysql yet", ()),
        ("postgresql:::zzz", "no such probe yet", ()),
        ("usdt:/opt/a b:app:hit", "write bpftrace's usdt:PATH:PROBE as: app:hit --file '/opt/a b'", ()),
        ("fbt::tcp_*:entry", "kernel functions are no static probes: see 'stapsdt kernel info tcp_*'", ()),
        ("usdt:/bin/app:hit", "write bpftrace's usdt:PATH:PROBE as: hit --file /bin/app", ()),
        ("kprobe:vfs_read", "for functions of the kernel, type: stapsdt kernel trace vfs_read", ()),
        ("fentry:vmlinux:vfs_*", "for functions of the kernel, type: stapsdt kernel trace 'vfs_*'", ()),
        ("uprobe:/bin/app:main", f"{STATIC}; for any function of a program use bpftrace's uprobe", ()),
        ("tracepoint:syscalls:sys_enter_open", f"{STATIC}; for system calls and tracepoints use bpftrace or perf", ()),
        ("syscall::open:entry", f"{STATIC}; for system calls and tracepoints use bpftrace or perf", ()),
        ("ts:&HttpSM::state_read", SPECIAL, ('ts:"&HttpSM::state_read"',)),
        ("&HttpSM::state_read", SPECIAL, ('ts:"&HttpSM::state_read"',)),
        ('paren:"a(c)"', "no such probe yet", ('"a(b)"',)),
        ('pareb:"a(b)"', "no running program has a provider pareb yet", ('paren:"a(b)"',)),
        ('"pareb":"a(b)"', 'no running program has a provider "pareb" yet', ('paren:"a(b)"',)),
        ("ts:&HttpSM", "no such probe yet", ()),
        ("postgresql::main:query__start", "no such probe in the selected processes, modules and functions yet", ()),
    ],
)
def test_reason_and_nearest_names(selector: str, reason: str, nearest: tuple[str, ...]) -> None:
    assert why_unmatched(parse(selector), PROBES) == Unmatched(selector.removesuffix("()"), reason, nearest)


def test_notes_that_cannot_be_used() -> None:
    problems = [Problem("/bin/app", "app", "hit", "no nop"), Problem("/bin/app", "", "", "truncated")]
    reason = "app:hit is there, but cannot be used: no nop: a note in /bin/app"
    for text in ("app:hit", "app:app::hit", "*:h*"):
        assert why_unmatched(parse(text), PROBES, problems=problems) == Unmatched(text, reason)
        assert why_unmatched(parse(text), [], problems=problems) == Unmatched(text, reason)
    assert why_unmatched(parse("app:other:f:hit"), PROBES, problems=problems).reason != reason


def test_host_without_probes() -> None:
    assert why_unmatched(parse("python:*"), []) == Unmatched("python:*", "no running program has static probes yet")


@pytest.mark.parametrize(
    ("selector", "reason", "nearest"),
    [
        ("ruby:gc__start", "no running program has it yet, though an installed file does", ()),
        ("ruby:gc__stat", "no such probe yet", ("gc__start",)),
        ("rubi:*", "no running program and no installed file has a provider rubi yet", ("ruby:*",)),
        ("postgresql:query__strt", "no such probe yet", ("query__start",)),
    ],
)
def test_installed_files(selector: str, reason: str, nearest: tuple[str, ...]) -> None:
    installed = [*PROBES, Probe("ruby", "gc__start", "/usr/bin/ruby", None, "x86-64", (), ())]
    assert why_unmatched(parse(selector), PROBES, installed) == Unmatched(selector, reason, nearest)


def test_host_without_probes_that_run() -> None:
    installed = PROBES[:1]
    found = why_unmatched(parse("mysql:start"), [], installed)
    assert found.reason == "no running program and no installed file has a provider mysql yet"
    assert why_unmatched(parse("mysql:start"), (), ()).reason == "no running program has static probes yet"


@pytest.mark.parametrize(
    ("nearest", "hint"),
    [
        ((), ""),
        (("a",), "; did you mean a?"),
        (("a", "b"), "; did you mean a or b?"),
        (("a", "b", "c\x1b"), "; did you mean a, b or c\\x1b?"),
    ],
)
def test_in_words(nearest: tuple[str, ...], hint: str) -> None:
    assert str(Unmatched("x:y", "no such probe yet", nearest)) == f"x:y: no such probe yet{hint}"


def test_what_the_server_adds_up_is_told_unless_the_filter_says_so_already() -> None:
    late = {"for a reason": 1, "for\nanother": 2}
    told = "each hit of {} is sent to the server, which adds them up: {}"
    assert Hints(added_late=late).lines == [
        told.format("1 site", "for a reason"), told.format("2 sites", "for\\nanother"),
    ]  # fmt: skip
    (line,) = Hints(added_late=late, evaluated_late={"pid * 2 == 4": "for a reason"}).lines
    assert line.startswith("the server evaluates pid * 2 == 4 after the hit")
