from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.model import (
    Argument,
    Capture,
    Constant,
    Memory,
    Operand,
    Register,
    SiteCapture,
    StartArgument,
    Unavailable,
)
from stapsdtd.plan.events import MAX_SITES_PER_EVENT, EventSpec, Field, group_sites, split
from stapsdtd.plan.fetch import Fetch, SlotKind, fetch
from tests.unit.samples import argument, captured, key, site

ARCHITECTURE = "x86-64"
INSTANCE = "instance"
OPERANDS: st.SearchStrategy[Operand] = st.one_of(
    st.builds(Constant, st.integers(-(1 << 63), (1 << 64) - 1)),
    st.builds(Register, st.sampled_from(["rax", "rdi", "r15", "xmm0"])),
    st.builds(Memory, st.sampled_from(["rbp", "rsp"]), st.integers(-64, 64)),
    st.just(Unavailable("a reason")),
)
ARGUMENTS = st.builds(
    Argument, st.just("text"), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.just(value=False), OPERANDS
)


@st.composite
def site_captures(draw: st.DrawFn) -> list[SiteCapture]:
    found = []
    for number, arguments in enumerate(draw(st.lists(st.lists(ARGUMENTS, max_size=12), max_size=12))):
        indices = st.integers(0, len(arguments) - 1) if arguments else st.nothing()
        captures = draw(st.lists(st.builds(Capture, indices, st.booleans()), max_size=14 if arguments else 0))
        found.append(SiteCapture(site(f"n{number}", number, arguments), tuple(captures)))
    return found


def fields_of(spec: EventSpec, position: int) -> dict[str, str]:
    """Name to expression, and a failure where two fields have one name."""
    pairs = [field.partition("=")[::2] for field in spec.fetch_arguments(position).split(" ")]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def types_of(fields: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, expression.rpartition(":")[2]) for name, expression in fields.items()]


@given(site_captures())
def test_every_site_is_in_exactly_one_event(captures: list[SiteCapture]) -> None:
    specs = group_sites(INSTANCE, key(), ARCHITECTURE, captures)
    assert Counter(plan.capture for spec in specs for plan in spec.sites) == Counter(captures)
    for spec in specs:
        order = [captures.index(plan.capture) for plan in spec.sites]
        assert order == sorted(order)


@given(site_captures())
def test_definitions_of_one_event_agree_in_names_and_types(captures: list[SiteCapture]) -> None:
    for spec in group_sites(INSTANCE, key(), ARCHITECTURE, captures):
        fields = [fields_of(spec, position) for position in range(len(spec.sites))]
        assert all(types_of(each) == types_of(fields[0]) for each in fields)
        assert [each["site"] for each in fields] == [f"\\{position}:u32" for position in range(len(fields))]
        assert all(each["comm"] == "$comm" for each in fields)


@given(site_captures())
def test_values_come_from_where_the_operand_says(captures: list[SiteCapture]) -> None:
    for spec in group_sites(INSTANCE, key(), ARCHITECTURE, captures):
        for position, plan in enumerate(spec.sites):
            fields = fields_of(spec, position)
            named = [source.name for source in plan.sources if isinstance(source, Field)]
            assert len(named) == len(set(named))
            for number, (capture, source) in enumerate(zip(plan.capture.captures, plan.sources, strict=True)):
                subject = plan.capture.subject(number)
                assert not isinstance(subject, StartArgument)
                wanted = fetch(capture, subject, ARCHITECTURE)
                if isinstance(source, Field):
                    assert isinstance(wanted, Fetch)
                    assert (wanted.kind, wanted.expression) == (source.kind, fields[source.name])
                else:
                    assert source == wanted
            # what is not fetched costs no field of its own: the others are fillers, and no string can be one
            fillers = [expression for name, expression in fields.items() if name not in {*named, "site", "comm"}]
            assert all(expression.startswith("\\0:u") for expression in fillers)


@given(site_captures())
def test_equal_wishes_give_equal_events(captures: list[SiteCapture]) -> None:
    first, second = (group_sites(INSTANCE, key(), ARCHITECTURE, list(captures)) for _ in range(2))
    assert first == second
    assert len({*first, *second}) == len(first)


def test_sites_are_brought_to_few_shapes() -> None:
    captures = [captured(site(f"n{count}", count, [argument(Register("rdi"))] * count)) for count in range(13)]
    specs = group_sites(INSTANCE, key(), ARCHITECTURE, captures)
    assert len(specs) <= 4
    for spec in specs:
        # no more fields than the largest of its sites needs
        assert dict(spec.shape).get(SlotKind.QUAD, 0) == max(len(plan.fetched) for plan in spec.sites)


def test_sites_that_together_need_more_fields_than_an_event_has_are_kept_apart() -> None:
    memory = [argument(Memory("rbp"), size) for size in (1, 2, 4, 8)]
    captures = [captured(site(f"n{number}", number, memory), *[Capture(number)] * 100) for number in range(4)]
    specs = group_sites(INSTANCE, key(), ARCHITECTURE, captures)
    assert [sum(count for _, count in spec.shape) for spec in specs] == [100] * 4
    assert Counter(plan.capture for spec in specs for plan in spec.sites) == Counter(captures)


def test_strings_may_be_forbidden() -> None:
    captures = captured(site(arguments=[argument()]), Capture(0), Capture(0, is_string=True))
    (spec,) = group_sites(INSTANCE, key(), ARCHITECTURE, [captures], "not here")
    assert spec.sites[0].sources == (Field(SlotKind.QUAD, 0), Unavailable("not here"))
    assert dict(spec.shape) == {SlotKind.QUAD: 1}


def test_instances_have_events_of_their_own() -> None:
    captures = [captured(site())]
    first, second = (group_sites(instance, key(), ARCHITECTURE, captures)[0] for instance in "ab")
    assert first != second
    assert (first.instance, second.instance) == ("a", "b")


def test_sample() -> None:
    arguments = [
        argument(Register("rax")), argument(Memory("rbp", -4), 4), argument(Constant(7)), argument(Register("rsi")),
    ]  # fmt: skip
    captures = captured(site(arguments=arguments), Capture(3, is_string=True), Capture(0), Capture(2), Capture(1))
    (spec,) = group_sites(INSTANCE, key(), ARCHITECTURE, [captures])
    assert spec.fetch_arguments(0) == (r"site=\0:u32 comm=$comm q0=%ax:u64 d0=-4(%bp):u32 s0=+0(%si):ustring")
    assert spec.sites[0].sources == (
        Field(SlotKind.STRING, 0), Field(SlotKind.QUAD, 0), Constant(7), Field(SlotKind.DOUBLE, 0),
    )  # fmt: skip


def test_events_are_bounded_and_can_be_halved() -> None:
    captures = [captured(site(f"n{number}", number)) for number in range(2 * MAX_SITES_PER_EVENT + 3)]
    specs = group_sites(INSTANCE, key(), ARCHITECTURE, captures)
    assert [len(spec.sites) for spec in specs] == [MAX_SITES_PER_EVENT, MAX_SITES_PER_EVENT, 3]
    first, second = split(specs[-1])
    assert [len(first.sites), len(second.sites)] == [1, 2]
    assert first.sites + second.sites == specs[-1].sites
    assert first.shape == second.shape == specs[-1].shape
    assert len(dict.fromkeys(itertools.chain(specs, split(specs[0])))) == 5
