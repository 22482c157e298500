from __future__ import annotations

import pytest

from stapsdtd.cli.probe_tables import object_lines
from stapsdtd.client import Argument, Constant, Probe, ProbeListing, Site

UINT64 = Argument("8@$1", 8, signed=False, is_float=False, operand=Constant(1))
INT32 = Argument("-4@$1", 4, signed=True, is_float=False, operand=Constant(1))


def listing(*names: str, pids: tuple[int, ...] = (7,)) -> ProbeListing:
    site = Site(0, 0x1000, 0x2000, None, (UINT64, INT32, UINT64, INT32))
    probes = tuple(Probe("app", name, "/bin/app", None, "x86-64", pids, (site,)) for name in names)
    return ProbeListing(probes, (), ())


@pytest.mark.parametrize(
    ("width", "length", "table"),
    [
        (80, 30, ["{}      1  yes        uint64 int32 uint64 int32"]),
        (80, 36, ["{}      1  yes        uint64 int32 uint64", " " * 58 + "int32"]),
        (80, 50, ["{}      1  uint64 int32 uint64", " " * 61 + "int32"]),
        (80, 60, ["{}  uint64 int32", " " * 64 + "uint64 int32"]),
        (80, 78, ["{}", "      uint64 int32 uint64 int32"]),
        (20, 78, ["{}", "      uint64 int32", "      uint64 int32"]),
        (None, 200, ["{}      1  yes        uint64 int32 uint64 int32"]),
    ],
)
def test_name_is_never_broken(width: int | None, length: int, table: list[str]) -> None:
    name = "n" * (length - len("app:"))
    lines = list(object_lines(listing(name), width=width, color=False, details=False))
    assert lines[3:] == [line.format(f"  app:{name}") for line in table]


def test_probes_of_a_table_are_aligned() -> None:
    lines = list(object_lines(listing("long__name", "b"), width=60, color=False, details=False))
    assert lines[2:] == [
        "  PROBE           SITES  SEMAPHORE  ARGUMENTS",
        "  app:b               1  yes        uint64 int32 uint64",
        "                                    int32",
        "  app:long__name      1  yes        uint64 int32 uint64",
        "                                    int32",
    ]


def test_owners_are_folded() -> None:
    lines = list(object_lines(listing("a", pids=(1, 22, 333, 4444)), width=20, color=False, details=False))
    assert lines[:3] == ["/bin/app", "  mapped by 1, 22,", "    333, 4444"]


def test_file_that_nobody_maps() -> None:
    lines = list(object_lines(listing("a", pids=()), width=80, color=False, details=False))
    assert lines[1] == "  mapped by no process"


def test_what_strangers_named_is_escaped() -> None:
    lines = list(object_lines(listing("a\x1b[2J"), width=80, color=False, details=False))
    assert lines[3].startswith(r'  app:"a\x1b[2J"  ')


def test_colors_do_not_count_as_width() -> None:
    plain, painted = (
        list(object_lines(listing("long__name", "b"), width=60, color=color, details=False)) for color in (False, True)
    )
    assert "\x1b[36mapp:b\x1b[0m" in painted[3]
    assert len(plain) == len(painted)
