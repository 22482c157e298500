"""The program's tables, which are written here and read by every hit.

    index ─► slot ─► plan ─► operands, tests, counters

They are mapped into this process, so that writing costs no system call. A plan is complete before a slot names it, and
stays as it is until no hit can still be using it (capture/bpf/endings.py).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.encode import Calculations, Filter, encode_calculations, encode_filters
from stapsdtd.capture.bpf.layout import Counter, SpanCounter
from stapsdtd.capture.bpf.pairing_rows import PairingRows, PairingRun, PairingSpec
from stapsdtd.capture.bpf.pool import Pool, Shared
from stapsdtd.capture.bpf.recipe_rows import RecipePools, RecipeRows, RecipeRun, RecipeSpec
from stapsdtd.capture.bpf.slots import PlanId, Slot, Slots
from stapsdtd.events.columns import U64
from stapsdtd.plan.groups import Window
from stapsdtd.query.program import ACCEPT, Program

Generation = int
"""Identifies a plan in its records; never used twice by one daemon."""

_NO_RECIPES = RecipeRun()
_NO_PAIRINGS = PairingRun()
_ALL_FILTERS = (1 << layout.MAX_FILTERS) - 1


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A plan in the kernel's table. counters: its first cell. bits: of its filters, in order.

    recipes: of its consumers that aggregate. pairings: of those that pair. is_single: its hits are counted either as
    such, or by what its only filter does with them. counts_undecided: its filters have a counter of that, too.
    """

    generation: Generation
    counters: int
    operands: bytes
    first_test: int
    tests: int
    bits: tuple[int, ...]
    recipes: RecipeRun = _NO_RECIPES
    pairings: PairingRun = _NO_PAIRINGS
    is_single: bool = False
    counts_undecided: bool = False

    @property
    def id(self) -> PlanId:
        return self.generation & (1 << layout.PLAN_BITS) - 1

    def cell(self, counter: Counter, bit: int = 0) -> int:
        """Return the index of one of its counters. bit: names the filter of all but HITS."""
        return self.counters + counter + _filter_counters(self.counts_undecided) * bit

    def lost_by(self, recipe: int) -> int:
        """Return the index of the counter of hits for which a table had no room."""
        return self.counters + _cells_of(self.bits, self.counts_undecided) + recipe

    def pairing_cell(self, counter: SpanCounter, pairing: int) -> int:
        """Return the index of one of a pairing's counters."""
        return self.lost_by(self.recipes.count) + layout.COUNTERS_OF_PAIRING * pairing + counter

    @property
    def cells(self) -> int:
        return _cells_of(self.bits, self.counts_undecided) + self.recipes.count + self.pairings.cells


def _is_of_one_process(filters: Mapping[int, Filter]) -> bool:
    """Report whether there are no tests, or that of a single filter for one process."""
    if all(each.accepts_all for each in filters.values()):
        return True
    if list(filters) != [0] or filters[0].pids is None or len(filters[0].pids) != 1:
        return False
    return filters[0].steps == 1 and filters[0].decision.start == ACCEPT


def _filter_counters(counts_undecided: bool) -> int:
    return layout.COUNTERS_OF_FILTER + counts_undecided


def _cells_of(bits: Sequence[int], counts_undecided: bool) -> int:
    """Return how many counters a plan has for itself and its filters."""
    return 1 + _filter_counters(counts_undecided) * (max(bits, default=-1) + 1)


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """What the program is to do at a site.

    values: operands of the record's values. has_texts: there are strings, raw bytes or something in the kernel's memory
    among those. tested: operands that only tests read. filters: by their bits. operand_indexes: of arguments' operands
    among both, by argument index. emitted: the bits of the filters whose hits are recorded. recipes: of the consumers
    whose hits are added up. pairings: of those whose hits are starts or ends. is_paired: there are no other consumers
    than one of these. pair_tests: which pairs are wanted. calculations: of keys and values of recipes.
    """

    values: Sequence[bytes]
    tested: Sequence[bytes]
    filters: Mapping[int, Filter]
    operand_indexes: Mapping[int, int]
    has_texts: bool
    emitted: int = _ALL_FILTERS
    recipes: Sequence[RecipeSpec] = ()
    pairings: Sequence[PairingSpec] = ()
    is_paired: bool = False
    pair_tests: Sequence[Calculations] = ()
    calculations: Sequence[Calculations] = ()

    @property
    def uses_words(self) -> bool:
        return bool(self.calculations) or any(program.uses_words for program in self._programs)

    @property
    def may_be_undecided(self) -> bool:
        """Report whether a filter may need what is missing."""
        return any(program.may_be_undecided for program in self._programs)

    @property
    def _programs(self) -> Iterator[Program]:
        yield from (each.decision for each in self.filters.values())
        yield from (each.program for each in (*self.pair_tests, *self.calculations))


class Pools:
    """What is free of each table. Entry 0 of the first three stands for none."""

    def __init__(self) -> None:
        self.index = Pool("groups", layout.INDEX_ENTRIES, layout.FIRST_INDEX_ENTRY)
        self.slots = Pool("sites", layout.MAX_SLOTS, layout.FIRST_SLOT)
        self.plans = Pool("plans", layout.MAX_PLANS, layout.FIRST_PLAN)
        self.operands = Pool("operands", layout.MAX_OPERANDS, layout.FIRST_OPERAND)
        self.tests = Pool("tests", layout.MAX_TESTS, layout.FIRST_TEST)
        self.counters = Pool("counters", layout.MAX_COUNTERS, layout.FIRST_COUNTER)
        self.recipes = RecipePools()
        self.pairings = Pool("spans", layout.MAX_PAIRING_ROWS)


class Tables:
    """Changed by one thread; counters may be read by another."""

    def __init__(self, table: Callable[[str], mmap.mmap], cpus: int, pools: Pools | None = None) -> None:
        """table: returns the memory of a map, by name."""
        self._index: npt.NDArray[np.uint32] = np.frombuffer(table(".bss.index"), "u4", layout.INDEX_ENTRIES)
        self._plans = table(".bss.plans")
        self._operands = np.frombuffer(table(".bss.operands"), layout.OPERAND, layout.MAX_OPERANDS)
        self._tests = np.frombuffer(table(".bss.tests"), layout.TEST, layout.MAX_TESTS)
        self._counters: U64 = np.frombuffer(table("counters"), "u8").reshape(cpus, layout.MAX_COUNTERS)
        self._pools = pools or Pools()
        self.slots = Slots(np.frombuffer(table(".bss.slots"), "u8", layout.MAX_SLOTS), self._pools.slots)
        self._recipes = RecipeRows(table, self._pools.recipes)
        self._pairings = PairingRows(table(".bss.pairings"), self._pools.pairings)
        self._shared_operands = Shared[bytes](self._pools.operands)
        self._cells_used = layout.STRAY_HITS + 1
        self._generations = itertools.count(1)

    def allocate_index(self, window: Window) -> int:
        """Return the first entry in the index of an event's sites. Raises TableFullError."""
        start = self._pools.index.allocate(window.entries)
        self._index[start : start + window.entries] = 0
        return start

    def fill_index(self, first: int, window: Window, slots: Mapping[int, Slot]) -> None:
        """slots: by the file offsets of the event's sites."""
        for offset, slot in slots.items():
            self._index[first + window.entry(offset)] = slot

    def free_index(self, first: int, window: Window) -> None:
        self._index[first : first + window.entries] = 0
        self._pools.index.free(first, window.entries)

    def allocate_plan(self, plan: PlanSpec) -> PlanEntry:
        """Write a plan that no slot names yet. Raises TableFullError."""
        tested = [(bit, each) for bit, each in plan.filters.items() if not each.accepts_all]
        of_recipes = [operand for spec in plan.recipes for operand in spec.recipe.operands]
        of_pairings = [operand for pairing in plan.pairings for operand in pairing.operands]
        operands = b"".join((*plan.values, *plan.tested, *of_recipes, *of_pairings))
        tests = encode_filters(tested, plan.operand_indexes)
        behind_filters = [layout.JUMP_END, layout.JUMP_END]
        for number, calculations in enumerate((plan.pair_tests, plan.calculations)):
            if calculations:
                behind_filters[number] = len(tests) // layout.TEST.itemsize
                tests += encode_calculations(calculations, behind_filters[number], plan.operand_indexes)
        bits = tuple(plan.filters)
        first_test, test_count = 0, len(tests) // layout.TEST.itemsize
        recipes, pairings = _NO_RECIPES, _NO_PAIRINGS
        with contextlib.ExitStack() as undo:
            plan_id = self._pools.plans.allocate(1)
            undo.callback(self._pools.plans.free, plan_id, 1)
            first_operand = self._allocate_operands(operands)
            if operands:
                undo.callback(self._shared_operands.free, operands)
            if tests:
                first_test = self._pools.tests.allocate(test_count)
                undo.callback(self._pools.tests.free, first_test, test_count)
            first_of_recipes = first_operand + len(plan.values) + len(plan.tested)
            cells = _cells_of(bits, plan.may_be_undecided)
            if plan.recipes:
                recipes = self._recipes.allocate(plan.recipes, first_of_recipes, cells)
                undo.callback(self._recipes.free, recipes)
                cells += recipes.count
            if plan.pairings:
                pairings = self._pairings.allocate(plan.pairings, first_of_recipes + len(of_recipes), cells)
                undo.callback(self._pairings.free, pairings)
                cells += pairings.cells
            first_counter = self._pools.counters.allocate(cells)
            undo.pop_all()
        generation = next(self._generations) << layout.PLAN_BITS | plan_id
        # without space to calculate in, or room on a chain, a filter loses hits, which a record may lose, too; and of
        # pairs, what is filtered was counted when it was paired
        may_lose = plan.uses_words or any(each.link is not None for each in plan.filters.values())
        may_reject = any(each.may_reject for each in plan.pairings)
        is_single = len(bits) == 1 and not may_lose and not may_reject
        entry = PlanEntry(
            generation,
            first_counter,
            operands,
            first_test,
            test_count,
            bits,
            recipes,
            pairings,
            is_single,
            plan.may_be_undecided,
        )
        self._cells_used = max(self._cells_used, first_counter + cells)
        self._counters[:, first_counter : first_counter + cells] = 0
        if tests:
            self._tests[first_test : first_test + test_count] = np.frombuffer(tests, layout.TEST)
        always = sum(1 << bit for bit, each in plan.filters.items() if each.accepts_all)
        numbers = plan.emitted, entry.generation, first_operand, first_test, first_counter
        runs = recipes.first, recipes.count, pairings.first, pairings.count
        is_simple = not plan.recipes and not plan.emitted and _is_of_one_process(plan.filters)
        is_begun = is_simple and [(each.is_small, each.is_end) for each in plan.pairings] == [(True, False)]
        is_counted = is_simple and not plan.pairings
        flags = len(plan.values), bool(tested), plan.has_texts, is_counted, is_begun, plan.is_paired, plan.uses_words
        keeps_records = any(each.kind.start_class for each in plan.pairings)
        begin = plan_id * layout.PACKED_PLAN.size
        layout.PACKED_PLAN.pack_into(
            self._plans,
            begin,
            always,
            *numbers,
            *runs,
            *flags,
            *behind_filters,
            entry.is_single,
            keeps_records,
            _filter_counters(entry.counts_undecided),
        )
        return entry

    def _allocate_operands(self, operands: bytes) -> int:
        if not operands:
            return 0
        count = len(operands) // layout.OPERAND.itemsize
        start, is_new = self._shared_operands.allocate(operands, count)
        if is_new:
            self._operands[start : start + count] = np.frombuffer(operands, layout.OPERAND)
        return start

    def free_plan(self, plan: PlanEntry) -> None:
        """Free a plan that no slot names and no hit can be using."""
        self._pools.plans.free(plan.id, 1)
        if plan.operands:
            self._shared_operands.free(plan.operands)
        self._pools.tests.free(plan.first_test, plan.tests)
        self._pools.counters.free(plan.counters, plan.cells)
        self._recipes.free(plan.recipes)
        self._pairings.free(plan.pairings)

    def totals(self) -> U64:
        """Return each counter's sum over all CPUs: a plan's at `PlanEntry.cell`, stray hits at `layout.STRAY_HITS`."""
        totals: U64 = self._counters[:, : self._cells_used].sum(axis=0)
        return totals

    def sums(self, cells: Sequence[int]) -> list[int]:
        """Return some counters' sums over all CPUs, which costs less than totals() if there are many plans."""
        sums: list[int] = self._counters[:, cells].sum(axis=0).tolist()
        return sums
