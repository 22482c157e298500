"""The program's tables: written here, read by every hit.

    index ─► slot ─► plan ─► operands, tests, counters

They are mapped into this process, so that writing costs no system call. A plan is complete before a slot names it, and
stays as it is until no hit can still be using it (capture/bpf/endings.py).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.encode import Filter, encode_filters
from stapsdtd.capture.bpf.layout import Counter
from stapsdtd.capture.bpf.pool import Pool, Shared
from stapsdtd.events.columns import U64
from stapsdtd.plan.groups import Window

Slot = int
PlanId = int

Generation = int
"""Of a plan: never used twice by one daemon, and what its records name it by."""

_PLAN = struct.Struct("=QQIII3Bx")
"""As layout.PLAN."""


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A plan in the kernel's table. counters: its first cell; bits: of its filters, in their order."""

    generation: Generation
    counters: int
    operands: bytes
    first_test: int
    tests: int
    bits: tuple[int, ...]

    @property
    def id(self) -> PlanId:
        return self.generation & (1 << layout.PLAN_BITS) - 1

    def cell(self, counter: Counter, bit: int = 0) -> int:
        """Return the place of one of its counters; bit names the filter of all but HITS."""
        return self.counters + counter + layout.COUNTERS_OF_FILTER * bit

    @property
    def cells(self) -> int:
        return 1 + layout.COUNTERS_OF_FILTER * (max(self.bits, default=-1) + 1)


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """What the program is to do at a site.

    values: operands of the record's values, strings or raw bytes among them where it has_texts. tested: operands that
    only tests read. filters: by their bits. argument_places: where an argument's number is among all operands.
    """

    values: Sequence[bytes]
    tested: Sequence[bytes]
    filters: Mapping[int, Filter]
    argument_places: Mapping[int, int]
    has_texts: bool


class Tables:
    """Changed by one thread; counters may be read by another."""

    def __init__(self, table: Callable[[str], mmap.mmap], cpus: int) -> None:
        """table: gives the memory of a map by its name."""
        self._index: npt.NDArray[np.uint32] = np.frombuffer(table(".bss.index"), "u4", layout.INDEX_ENTRIES)
        # a slot is read and written whole, so it is one number here: group << 32 | plan
        self._slots: U64 = np.frombuffer(table(".bss.slots"), "u8", layout.MAX_SLOTS)
        self._plans = table(".bss.plans")
        self._operands = np.frombuffer(table(".bss.operands"), layout.OPERAND, layout.MAX_OPERANDS)
        self._tests = np.frombuffer(table(".bss.tests"), layout.TEST, layout.MAX_TESTS)
        self._counters: U64 = np.frombuffer(table("counters"), "u8").reshape(cpus, layout.MAX_COUNTERS)
        # 0 stands for nothing, everywhere
        self._free_index = Pool("groups", layout.INDEX_ENTRIES, 1)
        self._free_slots = Pool("sites", layout.MAX_SLOTS, 1)
        self._free_plans = Pool("plans", layout.MAX_PLANS, 1)
        self._free_operands = Shared[bytes](Pool("operands", layout.MAX_OPERANDS))
        self._free_tests = Pool("tests", layout.MAX_TESTS)
        self._free_counters = Pool("counters", layout.MAX_COUNTERS, layout.STRAY_HITS + 1)
        self._cells_used = layout.STRAY_HITS + 1
        self._generations = itertools.count(1)

    def allocate_group(self, window: Window) -> int:
        """Return a group's first entry in the index. Raises TableFullError."""
        start = self._free_index.allocate(window.entries)
        self._index[start : start + window.entries] = 0
        return start

    def fill_group(self, group: int, window: Window, slots: Mapping[int, Slot]) -> None:
        """slots: by the file offsets of the group's sites."""
        for offset, slot in slots.items():
            self._index[group + window.entry(offset)] = slot

    def free_group(self, group: int, window: Window) -> None:
        self._index[group : group + window.entries] = 0
        self._free_index.free(group, window.entries)

    def allocate_slot(self) -> Slot:
        """Raises TableFullError."""
        return self._free_slots.allocate(1)

    def free_slot(self, slot: Slot) -> None:
        self._slots[slot] = 0
        self._free_slots.free(slot, 1)

    def set_slot(self, slot: Slot, group: int, plan: PlanId) -> None:
        """From now on hits at the site are those of this group, by this plan."""
        self._slots[slot] = group << 32 | plan

    def allocate_plan(self, plan: PlanSpec) -> PlanEntry:
        """Write a plan that no slot names yet. Raises TableFullError."""
        tested = [(bit, wanted) for bit, wanted in plan.filters.items() if not wanted.accepts_all]
        operands, tests = b"".join((*plan.values, *plan.tested)), encode_filters(tested, plan.argument_places)
        rows = np.frombuffer(tests, layout.TEST)
        with contextlib.ExitStack() as taken_back:
            number = self._free_plans.allocate(1)
            taken_back.callback(self._free_plans.free, number, 1)
            first_operand = self._allocate_operands(operands)
            if operands:
                taken_back.callback(self._free_operands.free, operands)
            first_test = self._free_tests.allocate(len(rows)) if tests else 0
            taken_back.callback(self._free_tests.free, first_test, len(rows))
            generation = next(self._generations) << layout.PLAN_BITS | number
            entry = PlanEntry(generation, 0, operands, first_test, len(rows), tuple(plan.filters))
            first_counter = self._free_counters.allocate(entry.cells)
            taken_back.pop_all()
        entry = replace(entry, counters=first_counter)
        self._cells_used = max(self._cells_used, first_counter + entry.cells)
        self._counters[:, first_counter : first_counter + entry.cells] = 0
        self._tests[first_test : first_test + len(rows)] = rows
        always = sum(1 << bit for bit, wanted in plan.filters.items() if wanted.accepts_all)
        heads = always, entry.generation, first_operand, first_test, first_counter
        row = _PLAN.pack(*heads, len(plan.values), bool(tested), plan.has_texts)
        self._plans[number * _PLAN.size : (number + 1) * _PLAN.size] = row
        return entry

    def _allocate_operands(self, operands: bytes) -> int:
        rows = np.frombuffer(operands, layout.OPERAND)
        if not len(rows):
            return 0
        start, is_new = self._free_operands.allocate(operands, len(rows))
        if is_new:
            self._operands[start : start + len(rows)] = rows
        return start

    def free_plan(self, plan: PlanEntry) -> None:
        """Allocate its room again: no slot names it, and no hit is on its way through it."""
        self._free_plans.free(plan.id, 1)
        if plan.operands:
            self._free_operands.free(plan.operands)
        self._free_tests.free(plan.first_test, plan.tests)
        self._free_counters.free(plan.counters, plan.cells)

    def totals(self) -> U64:
        """Sum each counter over all CPUs; a plan's are at `PlanEntry.cell`, stray hits at `layout.STRAY_HITS`."""
        totals: U64 = self._counters[:, : self._cells_used].sum(axis=0)
        return totals

    def sums(self, cells: Sequence[int]) -> list[int]:
        """Sum some counters over all CPUs, which takes less than all of them where there are many plans."""
        sums: list[int] = self._counters[:, cells].sum(axis=0).tolist()
        return sums
