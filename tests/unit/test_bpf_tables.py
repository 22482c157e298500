from __future__ import annotations

import itertools
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.encode import Filter, encode_filters
from stapsdtd.capture.bpf.layout import Counter
from stapsdtd.capture.bpf.operands import encode_value
from stapsdtd.capture.bpf.pool import TableFullError
from stapsdtd.capture.bpf.slots import Word
from stapsdtd.capture.bpf.tables import PlanEntry, PlanSpec, Tables
from stapsdtd.model import Memory
from stapsdtd.plan.groups import Window, partition_by_page_offset
from stapsdtd.plan.values import Value
from stapsdtd.query.program import ACCEPT, REJECT, Program, Relation, Source
from stapsdtd.query.program import Test as One
from tests.unit.samples import argument

CPUS = 3
NOBODY = frozenset[int]()
EVERYTHING = Filter(None, NOBODY, None)
DTYPES = {
    ".bss.index": (np.dtype("u4"), layout.INDEX_ENTRIES),
    ".bss.slots": (layout.SLOT, layout.MAX_SLOTS),
    ".bss.plans": (layout.PLAN, layout.MAX_PLANS),
    ".bss.operands": (layout.OPERAND, layout.MAX_OPERANDS),
    ".bss.tests": (layout.TEST, layout.MAX_TESTS),
    ".bss.recipes": (layout.RECIPE, layout.MAX_RECIPES),
    ".bss.edges": (np.dtype("i8"), layout.MAX_EDGES),
    ".bss.pairings": (layout.PAIRING, layout.MAX_PAIRING_ROWS),
    "counters": (np.dtype("u8"), CPUS * layout.MAX_COUNTERS),
}


class Kernel:
    """The tables' memory, and what the program sees there."""

    def __init__(self) -> None:
        self._memory = {name: mmap.mmap(-1, dtype.itemsize * count) for name, (dtype, count) in DTYPES.items()}
        self.tables = Tables(self._memory.__getitem__, CPUS)

    def table(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        dtype, count = DTYPES[name]
        return np.frombuffer(self._memory[name], dtype, count)

    def plan(self, entry: PlanEntry) -> Any:
        return self.table(".bss.plans")[entry.id]

    def operands(self, entry: PlanEntry) -> bytes:
        """As many as the entry says that it has."""
        first = int(self.plan(entry)["operands"])
        count = len(entry.operands) // layout.OPERAND.itemsize
        return self.table(".bss.operands")[first : first + count].tobytes()

    def tests(self, entry: PlanEntry) -> bytes:
        first = int(self.plan(entry)["tests"])
        return self.table(".bss.tests")[first : first + entry.tests].tobytes()

    def count(self, cpu: int, cell: int, number: int = 1) -> None:
        self.table("counters").reshape(CPUS, -1)[cpu, cell] += np.uint64(number)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def operand(number: int) -> bytes:
    return encode_value(Value(0), argument(Memory("rsp", number)), "x86-64")


def only(*pids: int) -> Filter:
    return Filter(frozenset(pids), NOBODY, None)


def allocate(
    kernel: Kernel,
    values: Sequence[int] = (),
    filters: Mapping[int, Filter] | None = None,
    further: Sequence[int] = (),
    *,
    has_texts: bool = False,
) -> PlanEntry:
    """Take numbers in place of operands."""
    spec = PlanSpec(
        [operand(number) for number in values],
        [operand(number) for number in further],
        {0: EVERYTHING} if filters is None else filters,
        {},
        has_texts=has_texts,
    )
    return kernel.tables.allocate_plan(spec)


def allocate_until_full(kernel: Kernel, values: Sequence[int], filters: Mapping[int, Filter]) -> tuple[int, str]:
    """Answer how many plans there was room for, and what the tables said then."""
    for count in itertools.count():
        try:
            allocate(kernel, values, filters)
        except TableFullError as error:
            return count, str(error)
    raise AssertionError


# groups


def test_group_begins_with_no_sites(kernel: Kernel) -> None:
    window = Window(shift=4, bits=3)
    first = kernel.tables.allocate_index(window)
    kernel.tables.fill_index(first, window, {0x1000: 5, 0x1070: 6})
    kernel.tables.free_index(first, window)
    assert not kernel.table(".bss.index").any()
    kernel.table(".bss.index")[:] = 9
    first = kernel.tables.allocate_index(window)
    assert kernel.table(".bss.index")[first : first + 8].tolist() == [0] * 8


def test_group_0_stands_for_none(kernel: Kernel) -> None:
    assert kernel.tables.allocate_index(Window(0, 0)) > 0


def test_groups_do_not_disturb_each_other(kernel: Kernel) -> None:
    window = Window(shift=0, bits=2)
    groups = [kernel.tables.allocate_index(window) for _ in range(3)]
    for number, group in enumerate(groups, 1):
        kernel.tables.fill_index(group, window, {offset: 10 * number + offset for offset in range(4)})
    kernel.tables.free_index(groups[1], window)
    index = kernel.table(".bss.index")
    assert [index[group : group + 4].tolist() for group in groups] == [[10, 11, 12, 13], [0] * 4, [30, 31, 32, 33]]
    assert kernel.tables.allocate_index(window) == groups[1]


@settings(max_examples=30)
@given(
    offsets=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40, unique=True),
    load_page=st.integers(0, (1 << 35) - 1),
)
def test_hit_finds_its_slot_by_its_groups_window(offsets: list[int], load_page: int) -> None:
    kernel = Kernel()
    found = []
    for colour in partition_by_page_offset(offsets):
        slots = {offsets[position]: position + 1 for position in colour.members}
        first = kernel.tables.allocate_index(colour.window)
        kernel.tables.fill_index(first, colour.window, slots)
        found.append((first, colour.window, slots))
    index = kernel.table(".bss.index")
    for first, window, slots in found:
        for offset, slot in slots.items():
            ip = (load_page << 12) + offset
            assert index[first + (ip >> window.shift & (1 << window.bits) - 1)] == slot


def test_index_becomes_full(kernel: Kernel) -> None:
    page = Window(0, 12)
    last = max(kernel.tables.allocate_index(page) for _ in range(layout.INDEX_ENTRIES // 4096 - 1))
    assert last + 4096 <= layout.INDEX_ENTRIES
    with pytest.raises(TableFullError, match="groups"):
        kernel.tables.allocate_index(page)
    # 0 is nobody's
    for _ in range(4096 - layout.FIRST_INDEX_ENTRY):
        kernel.tables.allocate_index(Window(0, 0))
    with pytest.raises(TableFullError, match="groups"):
        kernel.tables.allocate_index(Window(0, 0))


# slots


def words(kernel: Kernel, *slots: int) -> list[Word]:
    return [Word.unpack(int(word)) for word in kernel.table(".bss.slots")["word"][list(slots)]]


def test_slot_says_which_group_and_plan_count(kernel: Kernel) -> None:
    first, second = kernel.tables.slots.allocate(), kernel.tables.slots.allocate()
    last = (1 << layout.GROUP_BITS) - 1
    kernel.tables.slots.set(first, group=last, plan=7)
    kernel.tables.slots.set(second, group=3, plan=layout.MAX_PLANS - 1)
    assert words(kernel, first, second) == [(last, last, 7), (3, 3, layout.MAX_PLANS - 1)]
    assert np.count_nonzero(kernel.table(".bss.slots")["word"]) == 2


@given(newest=st.integers(0, (1 << 24) - 1), oldest=st.integers(0, (1 << 24) - 1), plan=st.integers(0, (1 << 16) - 1))
def test_word_is_made_of_groups_and_a_plan(newest: int, oldest: int, plan: int) -> None:
    word = Word(newest, oldest, plan)
    assert word.packed() == newest << 40 | oldest << 16 | plan
    assert Word.unpack(word.packed()) == word


def test_site_that_moves_has_its_groups_until_they_are_dismissed(kernel: Kernel) -> None:
    slots = kernel.tables.slots
    slot = slots.allocate()
    slots.set(slot, 5, plan=7)
    slots.admit(slot, 6)
    assert words(kernel, slot) == [(6, 5, 7)]
    slots.set(slot, 6, plan=8)
    assert words(kernel, slot) == [(6, 5, 8)]
    slots.admit(slot, 9)
    slots.dismiss([slot], 6)
    assert words(kernel, slot) == [(9, 5, 8)]
    slots.dismiss([slot], 5)
    assert words(kernel, slot) == [(9, 9, 8)]
    # the last one stays, and one that is not there is none of them
    slots.dismiss([slot], 9)
    slots.dismiss([slot], 5)
    assert words(kernel, slot) == [(9, 9, 8)]


def test_refused_group_leaves_those_that_were_there(kernel: Kernel) -> None:
    slots = kernel.tables.slots
    slot = slots.allocate()
    slots.set(slot, 5, plan=7)
    slots.admit(slot, 6)
    slots.dismiss([slot], 6)
    assert words(kernel, slot) == [(5, 5, 7)]


def test_group_that_was_not_admitted_replaces_all_others(kernel: Kernel) -> None:
    slots = kernel.tables.slots
    slot = slots.allocate()
    slots.set(slot, 5, plan=7)
    slots.admit(slot, 6)
    slots.set(slot, 8, plan=7)
    assert words(kernel, slot) == [(8, 8, 7)]


def test_site_that_nobody_wants_has_no_hits_of_a_further_group(kernel: Kernel) -> None:
    slots = kernel.tables.slots
    slot = slots.allocate()
    slots.set(slot, 5, plan=7)
    slots.clear(slot)
    slots.admit(slot, 6)
    assert words(kernel, slot) == [(0, 0, 0)]
    slots.set(slot, 6, plan=8)
    assert words(kernel, slot) == [(6, 6, 8)]


def test_slot_given_back_has_no_plan(kernel: Kernel) -> None:
    slots = kernel.tables.slots
    first, second = slots.allocate(), slots.allocate()
    for slot in (first, second):
        slots.set(slot, 3, plan=7)
        slots.admit(slot, 4)
    slots.free(first)
    assert words(kernel, first, second) == [(0, 0, 0), (4, 3, 7)]
    assert slots.allocate() == first
    # of the site that had it before
    slots.dismiss([first], 3)
    assert words(kernel, first) == [(0, 0, 0)]


def test_slots_become_full_and_0_is_none_of_them(kernel: Kernel) -> None:
    lent = {kernel.tables.slots.allocate() for _ in range(layout.MAX_SLOTS - layout.FIRST_SLOT)}
    assert lent == set(range(layout.FIRST_SLOT, layout.MAX_SLOTS))
    with pytest.raises(TableFullError, match="sites"):
        kernel.tables.slots.allocate()
    kernel.tables.slots.free(4711)
    assert kernel.tables.slots.allocate() == 4711


# plans


def test_plan_names_its_operands_and_tests(kernel: Kernel) -> None:
    allocate(kernel, [1, 2], {0: only(7)})
    program = Program((One(Source.ARGUMENT, 5, Relation.GT, 0xFF, 3, bytes(16), ACCEPT, REJECT),))
    filters = {0: EVERYTHING, 2: only(8, 9), 5: Filter(None, frozenset({4}), program), 63: EVERYTHING}
    entry = kernel.tables.allocate_plan(
        PlanSpec([operand(1), operand(2), operand(3)], [operand(4)], filters, {5: 3}, has_texts=True)
    )
    plan = kernel.plan(entry)
    assert plan["always"] == 1 << 63 | 1
    assert (plan["values"], plan["has_tests"], plan["has_texts"]) == (3, 1, 1)
    assert plan["counters"] == entry.cell(Counter.HITS)
    assert kernel.operands(entry) == b"".join(map(operand, (1, 2, 3, 4)))
    assert kernel.tests(entry) == encode_filters([(2, filters[2]), (5, filters[5])], {5: 3})
    assert entry.bits == (0, 2, 5, 63)


def test_plan_of_nothing_but_the_hit(kernel: Kernel) -> None:
    entry = allocate(kernel)
    plan = kernel.plan(entry)
    assert (plan["always"], plan["values"], plan["has_tests"], plan["has_texts"]) == (1, 0, 0, 0)
    assert entry.id > 0
    assert not kernel.table(".bss.operands").tobytes().strip(b"\0")
    assert not kernel.table(".bss.tests").tobytes().strip(b"\0")


def test_plan_that_takes_the_room_of_another_keeps_nothing_of_it(kernel: Kernel) -> None:
    old = allocate(kernel, [1, 2], {0: only(7), 1: EVERYTHING}, has_texts=True)
    kernel.tables.free_plan(old)
    new = allocate(kernel, [3])
    assert new.id == old.id
    plan = kernel.plan(new)
    assert (plan["always"], plan["values"], plan["has_tests"], plan["has_texts"]) == (1, 1, 0, 0)


def test_same_operands_are_written_once(kernel: Kernel) -> None:
    first, second = allocate(kernel, [1, 2, 3]), allocate(kernel, [1, 2], further=[3])
    other = allocate(kernel, [1, 2, 4])
    places = [int(kernel.plan(entry)["operands"]) for entry in (first, second, other)]
    assert places[0] == places[1]
    assert abs(places[2] - places[0]) >= 3
    assert [int(kernel.plan(entry)["values"]) for entry in (first, second)] == [3, 2]


def test_shared_operands_stay_for_as_long_as_one_plan_has_them(kernel: Kernel) -> None:
    first, second = allocate(kernel, [1, 2]), allocate(kernel, [1, 2])
    kernel.tables.free_plan(first)
    allocate(kernel, [3, 4])
    assert kernel.operands(second) == operand(1) + operand(2)
    place = int(kernel.plan(second)["operands"])
    kernel.tables.free_plan(second)
    assert kernel.plan(allocate(kernel, [5, 6]))["operands"] == place


def test_room_of_a_plan_is_not_used_before_it_is_given_back(kernel: Kernel) -> None:
    old = allocate(kernel, [1, 2], {0: only(7, 8)})
    row, operands, tests = kernel.plan(old).tobytes(), kernel.operands(old), kernel.tests(old)
    for _ in range(2):
        new = allocate(kernel, [3, 4], {0: only(5, 6)})
        assert (kernel.plan(old).tobytes(), kernel.operands(old), kernel.tests(old)) == (row, operands, tests)
        assert new.id != old.id
        assert new.counters >= old.counters + old.cells
    kernel.tables.free_plan(old)
    again = allocate(kernel, [9, 8], {0: only(3, 4)})
    assert (again.id, again.counters, again.first_test) == (old.id, old.counters, old.first_test)
    assert kernel.plan(again)["operands"] == np.frombuffer(row, layout.PLAN)["operands"][0]


def test_generation_tells_plans_apart_that_have_the_same_number(kernel: Kernel) -> None:
    generations = []
    for _ in range(100):
        entry = allocate(kernel, [1])
        assert kernel.plan(entry)["generation"] == entry.generation
        assert entry.id == entry.generation % (1 << layout.PLAN_BITS) == layout.FIRST_PLAN
        generations.append(entry.generation)
        kernel.tables.free_plan(entry)
    assert len(set(generations)) == 100
    assert 0 not in generations


def test_plans_number_fits_its_bits_of_the_generation() -> None:
    assert layout.MAX_PLANS <= 1 << layout.PLAN_BITS


OPERANDS = st.lists(st.integers(0, 2), max_size=3)
FILTERS = st.dictionaries(
    st.integers(0, 4), st.just(EVERYTHING) | st.frozensets(st.integers(1, 9), min_size=1).map(lambda pids: only(*pids))
)
GIVE_BACK = st.integers(0, 20)


@settings(max_examples=60)
@given(st.lists(st.tuples(OPERANDS, FILTERS) | GIVE_BACK, max_size=30))
def test_plans_in_use_never_change(steps: list[tuple[list[int], dict[int, Filter]] | int]) -> None:
    """A step allocates a plan, or gives one of them back."""
    kernel = Kernel()
    in_use: list[tuple[PlanEntry, bytes]] = []
    generations = set[int]()
    for step in steps:
        match step:
            case int():
                if in_use:
                    kernel.tables.free_plan(in_use.pop(step % len(in_use))[0])
            case values, filters:
                entry = allocate(kernel, values, filters)
                assert entry.generation not in generations
                generations.add(entry.generation)
                in_use.append((entry, kernel.plan(entry).tobytes()))
                tested = [(bit, each) for bit, each in filters.items() if each != EVERYTHING]
                assert kernel.operands(entry) == b"".join(map(operand, values))
                assert kernel.tests(entry) == encode_filters(tested, {})
        entries = [entry for entry, _ in in_use]
        assert len({entry.id for entry in entries}) == len(entries)
        for runs in (
            [range(entry.counters, entry.counters + entry.cells) for entry in entries],
            [range(entry.first_test, entry.first_test + entry.tests) for entry in entries],
        ):
            taken = list(itertools.chain.from_iterable(runs))
            assert len(set(taken)) == len(taken)
        for entry, row in in_use:
            assert kernel.plan(entry).tobytes() == row
            assert kernel.operands(entry) == entry.operands


# full


def test_operands_become_full(kernel: Kernel) -> None:
    most = 1 << 12
    room = layout.MAX_OPERANDS - layout.FIRST_OPERAND
    for number, size in enumerate([most] * (room // most) + [room % most]):
        kernel.tables.allocate_plan(PlanSpec([operand(number)], [operand(0)] * (size - 1), {}, {}, has_texts=False))
    with pytest.raises(TableFullError, match="operands"):
        allocate(kernel, [99])
    # what is there already costs nothing more
    kernel.tables.allocate_plan(PlanSpec([operand(0)], [operand(0)] * (most - 1), {}, {}, has_texts=False))


def test_tests_become_full(kernel: Kernel) -> None:
    wanted = only(*range(layout.MAX_STEPS))
    expected = (layout.MAX_TESTS - layout.FIRST_TEST) // layout.MAX_STEPS
    count, reason = allocate_until_full(kernel, [], {0: wanted})
    assert (count, reason) == (expected, "the bpf engine's table of tests is full")


def test_counters_become_full(kernel: Kernel) -> None:
    cells = 1 + layout.COUNTERS_OF_FILTER * layout.MAX_FILTERS
    count, reason = allocate_until_full(kernel, [], {layout.MAX_FILTERS - 1: EVERYTHING})
    expected = (layout.MAX_COUNTERS - layout.FIRST_COUNTER) // cells
    assert (count, reason) == (expected, "the bpf engine's table of counters is full")


def test_plans_become_full(kernel: Kernel) -> None:
    count, reason = allocate_until_full(kernel, [], {})
    assert (count, reason) == (layout.MAX_PLANS - layout.FIRST_PLAN, "the bpf engine's table of plans is full")


@pytest.mark.parametrize("full", ["tests", "counters"])
def test_plan_that_found_no_room_takes_none(kernel: Kernel, full: str) -> None:
    crowd: Mapping[int, Filter] = {0: only(*range(layout.MAX_STEPS))} if full == "tests" else {63: EVERYTHING}
    first = allocate(kernel, [], crowd)
    count, _ = allocate_until_full(kernel, [], crowd)
    for _ in range(3):
        with pytest.raises(TableFullError, match=full):
            allocate(kernel, [1, 2], {0: only(*range(layout.MAX_STEPS)), 63: EVERYTHING})
    small = allocate(kernel, [3])
    assert small.id == layout.FIRST_PLAN + count + 1
    assert kernel.plan(small)["operands"] == layout.FIRST_OPERAND
    kernel.tables.free_plan(first)
    assert allocate(kernel, [], {0: only(*range(layout.MAX_STEPS))}).first_test == layout.FIRST_TEST


# counters


def test_cells_are_where_the_program_counts() -> None:
    entry = PlanEntry(1, 100, b"", 0, 0, (0, 2))
    assert entry.cell(Counter.HITS) == 100
    of_filter = [Counter.FILTERED, Counter.EXCLUDED, Counter.LOST]
    cells = [entry.cell(counter, bit) for bit in (0, 1, 2) for counter in of_filter]
    # stapsdt.bpf.c, count_of(): filter * COUNTERS_OF_FILTER + counter
    assert cells == list(range(101, 110))
    assert entry.cells == 10
    entry = PlanEntry(1, 100, b"", 0, 0, (0, 2), counts_undecided=True)
    cells = [entry.cell(counter, bit) for bit in (0, 1, 2) for counter in (*of_filter, Counter.UNDECIDED)]
    assert cells == list(range(101, 113))
    assert entry.cells == 13


def test_totals_are_over_all_cpus(kernel: Kernel) -> None:
    first, second = allocate(kernel, [], {0: EVERYTHING, 1: only(7)}), allocate(kernel)
    for cpu in range(CPUS):
        kernel.count(cpu, first.cell(Counter.HITS), 10**cpu)
    kernel.count(2, first.cell(Counter.LOST, 1), 5)
    kernel.count(0, second.cell(Counter.FILTERED), 7)
    totals = kernel.tables.totals()
    assert totals[first.cell(Counter.HITS)] == 111
    assert totals[first.cell(Counter.LOST, 1)] == 5
    assert totals[second.cell(Counter.FILTERED)] == 7
    assert totals.sum() == 123


def test_totals_stay_as_they_were_asked_for(kernel: Kernel) -> None:
    entry = allocate(kernel)
    totals = kernel.tables.totals()
    kernel.count(0, entry.cell(Counter.HITS))
    assert totals[entry.cell(Counter.HITS)] == 0


def test_stray_hits_have_a_cell_that_is_no_plans(kernel: Kernel) -> None:
    entries = [allocate(kernel, [], {0: EVERYTHING}) for _ in range(3)]
    assert all(layout.STRAY_HITS not in range(entry.counters, entry.counters + entry.cells) for entry in entries)
    for cpu in range(CPUS):
        kernel.count(cpu, layout.STRAY_HITS)
    assert kernel.tables.totals()[layout.STRAY_HITS] == CPUS
    # also while nothing was ever lent
    assert Kernel().tables.totals().tolist() == [0]


def test_new_plan_counts_from_0_and_others_go_on(kernel: Kernel) -> None:
    old, stays = allocate(kernel), allocate(kernel)
    for cpu in range(CPUS):
        for entry in (stays, old):
            kernel.count(cpu, entry.cell(Counter.HITS))
            kernel.count(cpu, entry.cell(Counter.LOST))
    kernel.tables.free_plan(old)
    new = allocate(kernel)
    assert new.counters == old.counters
    totals = kernel.tables.totals()
    assert [totals[stays.cell(counter)] for counter in (Counter.HITS, Counter.LOST)] == [3, 3]
    assert [totals[new.cell(counter)] for counter in (Counter.HITS, Counter.LOST)] == [0, 0]
