"""What bpf/stapsdt.h says in C and capture/bpf/layout.py in numpy, by the compiled object's own description."""

from __future__ import annotations

import enum
import subprocess
import sys
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.fingerprint import fingerprint
from stapsdtd.capture.bpf.span_kinds import SPANS_OF_RECORDS
from stapsdtd.functions.chain import MAX_LENGTH, LinkKind
from stapsdtd.query import program
from tests.support import ROOT
from tests.unit.btf import Btf, Member

OBJECT = Path(ROOT / "stapsdtd" / "capture" / "bpf" / "stapsdt.bpf.o")


@pytest.fixture(scope="module")
def btf() -> Btf:
    return Btf(OBJECT)


def members(dtype: np.dtype[Any]) -> dict[str, Member]:
    assert dtype.fields is not None
    return {name: Member(offset, field.itemsize) for name, (field, offset, *_) in dtype.fields.items()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("operand", layout.OPERAND),
        ("test", layout.TEST),
        ("plan", layout.PLAN),
        ("slot", layout.SLOT),
        ("recipe", layout.RECIPE),
        ("pairing", layout.PAIRING),
        ("span_entry", layout.SPAN_ENTRY),
        ("row", layout.ROW),
        ("chain", layout.CHAIN),
    ],
)
def test_tables_have_the_same_rows(btf: Btf, name: str, dtype: np.dtype[Any]) -> None:
    assert btf.struct(name) == (dtype.itemsize, members(dtype))


@pytest.mark.parametrize(
    ("packed", "dtype"),
    [
        (layout.PACKED_OPERAND, layout.OPERAND),
        (layout.PACKED_TEST, layout.TEST),
        (layout.PACKED_PLAN, layout.PLAN),
        (layout.PACKED_RECIPE, layout.RECIPE),
        (layout.PACKED_PAIRING, layout.PAIRING),
    ],
)
def test_rows_are_packed_as_they_are_laid_out(packed: Any, dtype: np.dtype[Any]) -> None:
    """Every field gets its own number, and is found again."""
    names = [name for name in dtype.names or () if name != "unused"]
    lengths = [dtype[name].shape[0] if dtype[name].shape and name != "comm" else 1 for name in names]
    numbers = count(1)
    values = [
        [b"0123456789abcdef"] if name == "comm" else list(islice(numbers, length))
        for name, length in zip(names, lengths, strict=True)
    ]
    (row,) = np.frombuffer(packed.pack(*chain.from_iterable(values)), dtype)
    found = [row[name].tobytes() if name == "comm" else row[name].tolist() for name in names]
    assert [each if isinstance(each, list) else [each] for each in found] == values


def test_object_has_the_fingerprint_of_these_sources() -> None:
    with OBJECT.open("rb") as file:
        elf: Any = ELFFile(file)
        found = elf.get_section_by_name(".rodata.fingerprint").data()
    assert found == fingerprint().to_bytes(8, sys.byteorder)


def test_records_begin_the_same(btf: Btf) -> None:
    size, found = btf.struct("record")
    assert found.pop("values") == Member(layout.RECORD.itemsize, 0)
    assert (size, found) == (layout.RECORD.itemsize, members(layout.RECORD))
    assert btf.struct("text") == (8, {"offset": Member(0, 4), "length": Member(4, 4)})


def test_constants_are_the_same(btf: Btf) -> None:
    enumerators = btf.enumerators()
    for name in (
        "INDEX_ENTRIES", "MAX_SLOTS", "MAX_PLANS", "PLAN_BITS", "MAX_OPERANDS", "MAX_TESTS", "MAX_COUNTERS",
        "MAX_VALUES", "MAX_FILTERS", "MAX_STEPS", "MAX_TEXT", "JUMP_EXCLUDE", "JUMP_END", "RECORD_HEADER",
        "COUNTERS_OF_FILTER", "MAX_FOLLOWING", "MAX_FOLLOWED", "MAX_RECIPES", "MAX_EDGES", "MAX_TABLES", "MAX_PARTS",
        "KEY_WORDS", "KEY_CLASSES", "WORKSPACES", "MAX_SPANS", "MAX_PAIRING_ROWS", "MAX_PAIRINGS", "PAIR_KEY_WORDS",
        "THREAD_SPANS", "PAIR_WORDS", "HIT_SPACES", "COUNTERS_OF_PAIRING", "MAX_WORDS", "MAX_CELLS", "JUMP_LOST",
        "MAX_CHAINS", "MAX_LINKS", "MAX_CHAINED", "GROUP_BITS", "MAX_MARKS",
    ):  # fmt: skip
        assert enumerators[name] == getattr(layout, name), name
    assert layout.MAX_LINKS == 1 << layout.LINK_BITS == MAX_LENGTH
    assert layout.FIRST_MISSING_CELL + layout.MAX_WORDS // 64 <= layout.MAX_CELLS <= 1 << 8
    assert (enumerators["JUMP_ACCEPT"], enumerators["JUMP_REJECT"]) == (program.ACCEPT, program.REJECT)
    strides = [enumerators[f"CLASS_{number}"] + layout.RECORD_HEADER for number in range(len(layout.STRIDES))]
    assert tuple(strides) == layout.STRIDES
    assert enumerators["RECORD_CLASSES"] == len(layout.STRIDES)
    for number, kind in enumerate(SPANS_OF_RECORDS, 1):
        assert (kind.start_class, kind.entry_bytes) == (number, enumerators[f"START_{number}"])


@pytest.mark.parametrize("name", ["LINK_BITS", "STRAY_HITS", "UNREAD_OPERAND", "ADDRESS_MASK", "VALUE_MISSING"])
def test_macros_are_the_same(name: str) -> None:
    """Enumerators of 64 bits are none in the BTF of Debian 12's clang, so the compiler is asked."""

    def compiles(value: int) -> bool:
        source = f'#include "stapsdt.h"\n_Static_assert({name} == {value}ULL, "");'
        command = ["clang", "-fsyntax-only", f"-I{ROOT / 'bpf'}", "-xc", "-"]
        return not subprocess.run(command, input=source, text=True, capture_output=True, check=False).returncode

    assert compiles(getattr(layout, name))
    assert not compiles(getattr(layout, name) ^ 1)


def test_what_marks_an_unread_operand_is_no_part_of_an_address() -> None:
    assert not layout.UNREAD_OPERAND & layout.ADDRESS_MASK


@pytest.mark.parametrize(
    ("prefix", "members_of"),
    [
        ("OPERAND_", layout.OperandKind), ("TAKE_", layout.Take), ("COUNTER_", layout.Counter),
        ("SOURCE_", program.Source), ("RELATION_", program.Relation), ("OPERATION_", program.Operation),
        ("MEMBER_", layout.Membership), ("LINK_", LinkKind),
        ("BUCKETS_", layout.BucketKind), ("SPAN_", layout.SpanCounter),
    ],
)  # fmt: skip
def test_enums_are_the_same(btf: Btf, prefix: str, members_of: type[enum.IntEnum]) -> None:
    found = {name.removeprefix(prefix): value for name, value in btf.enumerators().items() if name.startswith(prefix)}
    assert found == {member.name: member.value for member in members_of}


def test_constants_of_the_program_are_where_they_are_set(btf: Btf) -> None:
    assert btf.variables(".rodata") == {
        "daemon_pid": Member(0, 4), "cpus": Member(4, 4), "never": Member(8, 4),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "size"),
    [
        (".bss.index", 4 * layout.INDEX_ENTRIES), (".bss.slots", 8 * layout.MAX_SLOTS),
        (".bss.marks", 8 * layout.MAX_MARKS),
        (".bss.plans", layout.PLAN.itemsize * layout.MAX_PLANS),
        (".bss.operands", layout.OPERAND.itemsize * layout.MAX_OPERANDS),
        (".bss.tests", layout.TEST.itemsize * layout.MAX_TESTS), (".bss.reader", 4),
        (".bss.unfollowed", 8 * layout.MAX_FOLLOWING), (".bss.recipes", layout.RECIPE.itemsize * layout.MAX_RECIPES),
        (".bss.edges", 8 * layout.MAX_EDGES), (".bss.filled", 16 * layout.MAX_TABLES), (".bss.epoch", 4),
        (".bss.pairings", layout.PAIRING.itemsize * layout.MAX_PAIRING_ROWS), (".bss.threads", 8),
        (".bss.died", 8 * layout.THREAD_SPANS), (".bss.chain", layout.CHAIN.itemsize),
    ],
)  # fmt: skip
def test_sections_hold_one_table_each(btf: Btf, section: str, size: int) -> None:
    (only,) = btf.variables(section).values()
    assert only == Member(0, size)
