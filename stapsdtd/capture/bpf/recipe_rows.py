"""The program's recipes, and the edges of their histograms, in the tables that it reads."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from stapsdtd.aggregate.buckets import Edges, LogLinear
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.layout import BucketKind
from stapsdtd.capture.bpf.pool import Pool, Shared
from stapsdtd.capture.bpf.recipes import Recipe
from stapsdtd.events.columns import I64


@dataclass(frozen=True, slots=True)
class RecipeSpec:
    """bit: of the filter that chooses the hits. table, variant: where their rows are, and which keys are theirs.

    hands_over: whether a hit of which something is not in memory is recorded rather than added.
    """

    recipe: Recipe
    bit: int
    table: int
    variant: int
    key_class: int
    hands_over: bool = False


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """A plan's recipes in the table. edges: those of its histograms, in a table of their own."""

    first: int = 0
    count: int = 0
    edges: tuple[tuple[int, ...], ...] = ()


class RecipePools:
    """What is free."""

    def __init__(self) -> None:
        self.recipes = Pool("aggregations", layout.MAX_RECIPES, layout.FIRST_RECIPE)
        self.edges = Pool("histograms' edges", layout.MAX_EDGES)


class RecipeRows:
    """Changed by one thread."""

    def __init__(self, table: Callable[[str], mmap.mmap], pools: RecipePools) -> None:
        """table: returns the memory of a map, by name."""
        self._rows = table(".bss.recipes")
        self._edges: I64 = np.frombuffer(table(".bss.edges"), "i8", layout.MAX_EDGES)
        self._pool = pools.recipes
        self._shared = Shared[tuple[int, ...]](pools.edges)

    def allocate(self, specs: Sequence[RecipeSpec], first_operand: int, first_cell: int) -> RecipeRun:
        """Write recipes, whose operands follow each other from first_operand on, and whose counters from first_cell on.

        Raises TableFullError.
        """
        if not specs:
            return RecipeRun()
        kept: list[tuple[int, ...]] = []
        with ExitStack() as undo:
            first = self._pool.allocate(len(specs))
            undo.callback(self._pool.free, first, len(specs))
            operand = first_operand
            for number, spec in enumerate(specs):
                edges = 0
                if isinstance(spec.recipe.aggregation.buckets, Edges):
                    edges = self._put_edges(spec.recipe.aggregation.buckets.edges)
                    kept.append(spec.recipe.aggregation.buckets.edges)
                    undo.callback(self._shared.free, kept[-1])
                begin = (first + number) * layout.PACKED_RECIPE.size
                layout.PACKED_RECIPE.pack_into(
                    self._rows, begin, spec.table, spec.variant, operand, edges, *_fields(spec, first_cell + number)
                )
                operand += len(spec.recipe.operands)
            undo.pop_all()
        return RecipeRun(first, len(specs), tuple(kept))

    def free(self, run: RecipeRun) -> None:
        self._pool.free(run.first, run.count)
        for edges in run.edges:
            self._shared.free(edges)

    def _put_edges(self, edges: tuple[int, ...]) -> int:
        start, is_new = self._shared.allocate(edges, len(edges))
        if is_new:
            self._edges[start : start + len(edges)] = edges
        return start


def _fields(spec: RecipeSpec, lost: int) -> tuple[int, ...]:
    """Return what follows the first fields of a recipe."""
    recipe = spec.recipe
    kind, edge_count, sub_bits = BucketKind.NONE, 0, 0
    match recipe.aggregation.buckets:
        case LogLinear(sub_bits):
            kind = BucketKind.LOG_LINEAR
        case Edges(edges):
            kind, edge_count = BucketKind.EDGES, len(edges)
    is_signed = recipe.layout.is_signed
    of_value = is_signed is not None, bool(is_signed), recipe.adds, recipe.compares
    is_small = recipe.is_small and kind is not BucketKind.EDGES
    return (
        edge_count,
        lost,
        spec.bit,
        spec.key_class,
        recipe.parts,
        *of_value,
        kind,
        sub_bits,
        spec.hands_over,
        is_small,
    )
