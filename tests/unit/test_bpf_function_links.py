"""How kernel functions are attached to: few by programs of their own, many together, and the rest by events."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from typing import cast

import pytest

from stapsdtd.capture.bpf import function_links
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.function_links import MOST_AT_ONCE, MOST_PROGRAMS, FunctionLinks, MakeFunctionEvent, Part
from stapsdtd.capture.engine import Target
from stapsdtd.errors import KernelFeatureError
from stapsdtd.functions.attaching import FENTRY, KPROBE, MULTI, Attachability
from stapsdtd.functions.chain import Link, LinkKind
from stapsdtd.functions.model import FunctionArgument, KernelFunction
from stapsdtd.functions.passing import Passed
from stapsdtd.functions.probes import objects_of
from stapsdtd.kernel import own_programs
from stapsdtd.kernel.function_links import FEXIT_TYPE, MULTI_TYPE, FunctionLink, tells_missed_entries
from stapsdtd.kernel.own_programs import OwnProgram
from stapsdtd.kernel.places import FunctionPlace
from stapsdtd.plan.attachments import EVENTS_ALONE, Choice
from stapsdtd.query.actions import Action, BeginSpan, Emit, EndSpan
from stapsdtd.spans.span import Span
from tests.unit.bpf_rig import LINKS_BY_PID, LINKS_FOR_ALL, made_engine, opened, refused
from tests.unit.fake_bpf import FakeKernel
from tests.unit.kernel_types import BOTH_WAYS
from tests.unit.samples import captured, wanted_site

ALL = frozenset([FENTRY, KPROBE, MULTI])


class Programs:
    """Descriptors of pipes stand for programs. refused: functions that the kernel takes none for."""

    def __init__(self) -> None:
        self.loaded: dict[str, int] = {}
        self.refused: set[str] = set()
        self.waits = 0

    def program_of_call(self, function: str, *, is_return: bool) -> int:
        return self._load(f"{function}:{'return' if is_return else 'entry'}")

    def program_of_entries(self) -> int:
        return self._load("entries")

    def program_of_kprobes(self) -> int:
        return self._load("kprobes")

    def _load(self, name: str) -> int:
        if name in self.refused:
            raise KernelFeatureError("bpf", f"no {name}", "")
        self.loaded[name] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        return self.loaded[name]

    def wait_for_hits(self) -> None:
        self.waits += 1

    @property
    def alive(self) -> set[str]:
        return {name for name, descriptor in self.loaded.items() if os.path.exists(f"/proc/self/fd/{descriptor}")}

    def close(self) -> None:
        for name in self.alive:
            os.close(self.loaded[name])


@pytest.fixture
def programs() -> Iterator[Programs]:
    with closing(Programs()) as made:
        yield made


def entries(count: int, module: str = "") -> list[FunctionPlace]:
    return [FunctionPlace(module, f"f{number}", is_return=False) for number in range(count)]


def returns(count: int) -> list[FunctionPlace]:
    return [place._replace(is_return=True) for place in entries(count)]


FEW, MANY = MOST_AT_ONCE, MOST_AT_ONCE + 1


@pytest.mark.parametrize(
    ("ways", "places", "expected"),
    [
        (ALL, entries(FEW), [Part(FENTRY, [each]) for each in range(FEW)]),
        (ALL, entries(MANY), [Part(MULTI, range(MANY))]),
        (ALL, returns(MANY), [Part(KPROBE, [each]) for each in range(MANY)]),
        (ALL, entries(2, "ext4"), [Part(KPROBE, [0]), Part(KPROBE, [1])]),
        (ALL, [*entries(MANY), *entries(1, "ext4")], [Part(MULTI, range(MANY)), Part(KPROBE, [MANY])]),
        (ALL, [*entries(1, "ext4"), *returns(1)], [Part(FENTRY, [1]), Part(KPROBE, [0])]),
        ({FENTRY, KPROBE}, entries(MANY), [Part(KPROBE, [each]) for each in range(MANY)]),
        ({KPROBE, MULTI}, entries(2), [Part(MULTI, [0, 1])]),
        ({KPROBE}, entries(2), [Part(KPROBE, [0]), Part(KPROBE, [1])]),
        ({FENTRY}, entries(MANY), [Part(FENTRY, [each]) for each in range(MANY)]),
        (set(), entries(1), [Part(KPROBE, [0])]),
    ],
)
def test_which_way(
    programs: Programs, ways: Collection[str], places: list[FunctionPlace], expected: list[Part]
) -> None:
    found = FunctionLinks(programs, lambda: ways).parts(places, {})
    assert [(part.way, list(part.positions)) for part in found] == [(way, list(each)) for way, each in expected]


@pytest.mark.parametrize(
    ("places", "attached", "expected"),
    [
        (returns(2), {"f0": KPROBE, "f1": MULTI}, [Part(KPROBE, [0]), Part(KPROBE, [1])]),
        (returns(2), {"f1": MULTI}, [Part(FENTRY, [0]), Part(KPROBE, [1])]),
        (returns(MANY), {"f3": FENTRY}, [Part(FENTRY, [3]), *(Part(KPROBE, [at]) for at in range(MANY) if at != 3)]),
        (entries(3), {"f0": KPROBE, "f1": FENTRY}, [Part(FENTRY, [1]), Part(FENTRY, [2]), Part(MULTI, [0])]),
        (entries(MANY), {"f2": FENTRY}, [Part(FENTRY, [2]), Part(MULTI, [each for each in range(MANY) if each != 2])]),
    ],
)
def test_both_ends_of_a_function_are_attached_to_alike(
    programs: Programs, places: list[FunctionPlace], attached: dict[str, str], expected: list[Part]
) -> None:
    """Only then is a call's frame the same at both."""
    found = FunctionLinks(programs, lambda: ALL).parts(places, attached)
    assert [(part.way, list(part.positions)) for part in found] == [(way, list(each)) for way, each in expected]


def test_kprobes_that_are_attached_together_have_a_program(programs: Programs) -> None:
    """Which goes with the last one of them, and is no later one's."""
    shared: list[OwnProgram] = []

    class Event:
        def __init__(self, program: OwnProgram, *_: object) -> None:
            shared.append(program.shared())

    links = FunctionLinks(programs, lambda: {KPROBE}, cast("MakeFunctionEvent", Event))
    for places in (entries(2), returns(1)):
        links.parts(places, {})
        for place in places:
            links.event("name", [place], 1)
    first, *others = shared
    assert all(each is first for each in others)
    links.forget_unused()
    for each in shared:
        assert programs.alive == {"kprobes"}
        each.release()
    assert not programs.alive
    links.event("name", entries(1), 1)
    links.forget_unused()
    assert shared[-1] is not first
    shared[-1].release()


def test_without_a_count_of_what_is_skipped_kprobes_share_the_program_of_all(programs: Programs) -> None:
    assert FunctionLinks(programs, lambda: ALL).event("name", entries(1), 1) is None
    assert not programs.loaded


def linked(links: FunctionLinks, places: list[FunctionPlace]) -> list[FunctionLink]:
    parts = links.parts(places, {})
    return [links.link(way, [places[each] for each in positions], [0]) for way, positions in parts if way == FENTRY]


def test_programs_go_with_their_links_and_make_room(programs: Programs) -> None:
    links = FunctionLinks(programs, lambda: ALL)
    held = [link for number in range(MOST_PROGRAMS // FEW) for link in linked(links, entries(FEW))]
    assert len(held) == MOST_PROGRAMS
    assert links.parts(entries(1), {}) == [Part(MULTI, [0])]
    for link in held[:2]:
        link.disarm()
        link.remove()
        # the reaper may try again
        link.remove()
    assert programs.waits == 2
    assert links.parts(entries(2), {}) == [Part(FENTRY, [0]), Part(FENTRY, [1])]


def test_programs_of_what_was_never_attached_are_freed(programs: Programs) -> None:
    links = FunctionLinks(programs, lambda: ALL)
    links.parts(entries(2), {})
    assert programs.alive == {"f0:entry", "f1:entry"}
    links.forget_unused()
    assert not programs.alive


def test_a_function_that_the_kernel_refuses_concerns_no_other(programs: Programs) -> None:
    programs.refused = {"f0:entry"}
    links, places = FunctionLinks(programs, lambda: ALL), entries(2)
    parts = links.parts(places, {})
    with pytest.raises(OSError, match="no f0:entry"):
        links.link(*parts[0][:1], places[:1], [1])
    assert links.link(FENTRY, places[1:], [2]).missed(dict) == 0
    # nor later ones
    assert links.parts(places, {}) == [Part(FENTRY, [0]), Part(FENTRY, [1])]


def test_a_program_for_many_is_tried_once(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.refused = {"entries"}
    links, places = FunctionLinks(programs, lambda: ALL), entries(MANY)
    assert links.parts(places, {})[0].way == MULTI
    for message in ("no entries", "refuses the program for kprobe.multi"):
        with pytest.raises(OSError, match=message):
            links.link(MULTI, places, range(MANY))
    assert {part.way for part in links.parts(places, {})} == {KPROBE}
    monkeypatch.setattr(function_links, "MOST_AT_ONCE", MANY)
    assert {part.way for part in links.parts(places, {})} == {FENTRY}


@pytest.mark.parametrize(
    ("release", "tells"),
    [
        ("6.6.90-amd64", False),
        ("6.7.0", True),
        ("6.12.117+deb12-amd64", True),
        ("5.19", False),
        ("10.0.1", True),
        ("x", False),
    ],
)
def test_kernels_that_tell_what_a_link_missed(release: str, tells: bool) -> None:
    assert tells_missed_entries(release) is tells


FUNCTIONS = [
    KernelFunction(
        name, "vmlinux", "", (), FunctionArgument("return", "void", 0, Passed()), Attachability(("kprobe",), ())
    )
    for name in ("one", "two")
]


def kernel_target(names: Collection[str]) -> Target:
    (kernel,) = objects_of(FUNCTIONS, BOTH_WAYS, "x86-64")
    wanted = [site for site in kernel.parsed.sites if site.name in names]
    return Target(
        kernel, kernel.path, tuple(wanted_site(captured(each), number) for number, each in enumerate(wanted, 1))
    )


@pytest.mark.parametrize("choice", [EVENTS_ALONE, LINKS_FOR_ALL, LINKS_BY_PID])
@pytest.mark.parametrize(
    ("ways", "programs_wanted"),
    [(ALL, {"one:entry", "two:entry"}), ({MULTI, KPROBE}, {"entries"})],
)
def test_what_the_kernel_refuses_to_link_gets_kprobes(
    kernel: FakeKernel, programs: Programs, ways: Collection[str], programs_wanted: set[str], choice: Choice
) -> None:
    """What stands for programs is none, so that no link can be made. Returns are attached to as their entries are."""
    names = ("entry", "return") if FENTRY in ways else ("entry",)
    engine = made_engine(kernel, choice=choice, functions=FunctionLinks(programs, lambda: ways))
    opened(engine, 1)
    assert engine.arm(1, kernel_target(names)) == []
    assert programs.loaded.keys() == programs_wanted
    assert not programs.alive
    steps = kernel.steps()
    assert [step for step in steps if step.startswith("define")] == [
        f"define g{number} {name}" for number, name in enumerate(["one", "two"] * len(names))
    ]
    engine.shutdown()
    assert not kernel.events


def test_a_function_is_refused_where_there_is_no_kprobe_either(kernel: FakeKernel, programs: Programs) -> None:
    kernel.fail = lambda step: OSError("no kprobes") if step == "define g1 two" else None
    engine = made_engine(kernel, choice=LINKS_FOR_ALL, functions=FunctionLinks(programs, lambda: {FENTRY}))
    opened(engine, 1)
    assert refused(engine.arm(1, kernel_target(["entry"]))) == {"entry": "no kprobes"}
    assert kernel.events.keys() == {"g0"}
    engine.shutdown()


def test_a_function_that_is_wanted_twice_is_linked_to_once(programs: Programs) -> None:
    """For different values, it is two sites. A link may name it once."""
    links = FunctionLinks(programs, lambda: ALL)
    few = [*entries(2), *entries(1)]
    parts = links.parts(few, {})
    assert parts == [Part(FENTRY, [0]), Part(FENTRY, [1]), Part(FENTRY, [2])]
    made = [links.link(way, [few[each] for each in positions], [0]) for way, positions in parts]
    links.forget_unused()
    for link in made:
        link.remove()
    assert not programs.alive
    many = links.parts([*entries(MANY), *entries(1)], {})
    assert [(part.way, list(part.positions)) for part in many] == [(MULTI, [*range(MANY)]), (KPROBE, [MANY])]


def test_a_program_for_many_that_was_not_attached_is_used_again(programs: Programs) -> None:
    links, places = FunctionLinks(programs, lambda: ALL), entries(MANY)
    first = links.link(MULTI, places, range(MANY))
    first.remove()
    loaded = programs.loaded.copy()
    second = links.link(MULTI, places[:2], range(2))
    assert programs.loaded == loaded
    third = links.link(MULTI, places[2:], range(2, MANY))
    assert programs.loaded != loaded
    for link in (second, third):
        link.remove()
    links.forget_unused()
    assert not programs.alive


@pytest.mark.parametrize("error", [errno.ESRCH, errno.EINVAL])
def test_a_function_that_ftrace_does_not_find_is_no_process_that_ended(
    kernel: FakeKernel, programs: Programs, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """The kernel refuses both alike, and the others are attached all the same."""

    def link(_program: int, functions: Collection[str], cookies: Collection[int]) -> int:
        del cookies
        if "two" in functions:
            raise OSError(error, "as told")
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    monkeypatch.setattr(function_links, "link_entries", link)
    monkeypatch.setattr(function_links, "missed_entries", lambda _: 0)
    engine = made_engine(kernel, functions=FunctionLinks(programs, lambda: {MULTI, KPROBE}))
    opened(engine, 1)
    assert engine.arm(1, kernel_target(("entry",))) == []
    groups = engine._objects.groups()
    assert sorted(group.way for group in groups) == [KPROBE, MULTI]
    engine.shutdown()


def attaching(monkeypatch: pytest.MonkeyPatch, refused: Collection[int] = ()) -> None:
    """Have links be made, but for types of attachment that are refused."""

    def link(_program: int, attach_type: int = MULTI_TYPE, **_: object) -> int:
        if attach_type in refused:
            raise OSError(errno.E2BIG, "as told")
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    monkeypatch.setattr(function_links, "link_call", link)
    monkeypatch.setattr(function_links, "link_entries", link)
    monkeypatch.setattr(function_links, "missed_entries", lambda _: 0)
    monkeypatch.setattr(own_programs, "recursion_misses", lambda _: 0)


def ways_of(engine: BpfEngine) -> dict[str, str]:
    return {
        f"{each.site.function}:{each.site.name}": group.way
        for group in engine._objects.groups()
        for each in group.sites
    }


def test_what_is_attached_later_goes_by_what_there_is(
    kernel: FakeKernel, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    attaching(monkeypatch)
    monkeypatch.setattr(function_links, "MOST_AT_ONCE", 1)
    engine = made_engine(kernel, functions=FunctionLinks(programs, lambda: ALL))
    for number, names in enumerate([("entry",), ("return",)], 1):
        opened(engine, number)
        assert engine.arm(number, kernel_target(names)) == []
        monkeypatch.setattr(function_links, "MOST_AT_ONCE", 8)
    assert ways_of(engine) == dict.fromkeys(("one:entry", "two:entry"), MULTI) | dict.fromkeys(
        ("one:return", "two:return"), KPROBE
    )
    engine.shutdown()


def test_a_return_that_would_not_find_its_entry_is_refused(
    kernel: FakeKernel, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where calls are wanted. Returns alone take a kprobe."""
    attaching(monkeypatch, {FEXIT_TYPE})
    span = Span(is_of_calls=True)
    engine = made_engine(kernel, functions=FunctionLinks(programs, lambda: ALL))
    target = kernel_target(("entry", "return"))
    actions: dict[str, Action] = {"entry": BeginSpan(span), "return": EndSpan(span, Emit(()))}
    calls = replace(target, sites=tuple(replace(each, action=actions[each.site.name]) for each in target.sites))
    opened(engine, 1)
    refusals = engine.arm(1, calls)
    assert {(each.site.name, each.reason) for each in refusals} == {("return", "[Errno 7] as told")}
    opened(engine, 2)
    assert engine.arm(2, kernel_target(("return",))) == []
    assert set(ways_of(engine).values()) == {FENTRY, KPROBE}
    engine.shutdown()


def test_so_is_one_of_a_chain(kernel: FakeKernel, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    attaching(monkeypatch, {FEXIT_TYPE})
    engine = made_engine(kernel, functions=FunctionLinks(programs, lambda: ALL))
    monkeypatch.setattr(engine._chains, "number_for", lambda *_: 0)
    target = kernel_target(("entry", "return"))
    kinds = {"entry": LinkKind.ENTERED, "return": LinkKind.RETURNED}
    chained = (replace(each, link=Link(kinds[each.site.name], 0)) for each in target.sites)
    opened(engine, 1)
    refusals = engine.arm(1, replace(target, sites=tuple(chained)))
    assert {(each.site.name, each.reason) for each in refusals} == {("return", "[Errno 7] as told")}
    assert set(ways_of(engine).values()) == {FENTRY}
    engine.shutdown()


def test_chains_begin_anew_when_all_their_functions_are_attached(
    kernel: FakeKernel, programs: Programs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls that were entered before their returns are hit would stay on them. What cannot be forgotten is logged."""
    attaching(monkeypatch)
    engine = made_engine(kernel, functions=FunctionLinks(programs, lambda: ALL))
    forgotten: list[tuple[object, set[str]]] = []

    def forget(key: object) -> None:
        forgotten.append((key, {*ways_of(engine)}))
        raise OSError(errno.ENOMEM, "as told")

    monkeypatch.setattr(engine._chains, "number_for", lambda *_: 0)
    monkeypatch.setattr(engine._chains, "forget_calls", forget)
    target = kernel_target(("entry", "return"))
    kinds = {"entry": LinkKind.ENTERED, "return": LinkKind.RETURNED}
    chained = replace(target, sites=tuple(replace(each, link=Link(kinds[each.site.name], 0)) for each in target.sites))
    opened(engine, 1)
    assert engine.arm(1, chained) == []
    assert forgotten == [(1, {"one:entry", "one:return", "two:entry", "two:return"})]
    assert "calls in progress may be taken for such that led to others" in caplog.text
    # one that comes later to what is attached takes nothing off others' chains
    opened(engine, 2)
    assert engine.arm(2, target) == []
    assert len(forgotten) == 1
    engine.shutdown()
