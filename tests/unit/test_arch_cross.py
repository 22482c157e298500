"""What the compilers of Debian make of one program's probes: every argument is understood.

Linked files are read as the daemon reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.model import Constant, Memory, Register, Site, Unavailable
from tests.unit import cross
from tests.unit.cross import ARGUMENTS, LEVELS, LINKED, TARGETS, Target

IN_PAIRS = "8 bytes are in two registers, and of the second one nothing is said"
LABEL = "the assembler's own labels are in no symbol table"
LINKED_AWAY = "the linker replaces the entry of the global offset table by the address, where it can"
RELAXED = "the linker removes the instruction that sets the base, where it can do without"
PER_THREAD = "every thread has its own"

UNRESOLVABLE: dict[str, dict[str, str]] = {
    "x86-64-gcc": {r"8@\w+@GOTPCREL\(%rip\)": LINKED_AWAY, r"-4@%fs:mine@tpoff": PER_THREAD},
    "i386-gcc": {
        r"-8@%e[a-z]{2}|8f@%e[a-z]{2}": IN_PAIRS,
        r"-4@%gs:mine@ntpoff": PER_THREAD,
    },
    "aarch64-gcc": {r"8@\[x[0-9]+, #:lo12:\.LANCHOR[0-9]+\]": LABEL},
    "arm-gcc": {r"-?8f?@(?:r[0-9]+|fp|ip)": IN_PAIRS, r"4@#\.L(?:ANCHOR|C)[0-9].*": LABEL},
    "arm-clang": {r"4@\.L\.str\.[0-9]": LABEL, r"4@mine": PER_THREAD},
    "riscv64-gcc": {r".*@%lo\(.*\)\([ast][0-9]+\)": RELAXED, r"-4@%tprel_lo\(mine\)\(a[0-9]\)": PER_THREAD},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cross.prepared(tmp_path_factory)


def sites(folder: Path, target: Target) -> Iterator[Site]:
    for _, parsed in cross.objects(folder, target):
        assert parsed.architecture == target.architecture
        assert parsed.problems == ()
        counts = dict.fromkeys(ARGUMENTS, 0)
        for site in parsed.sites:
            counts[site.name] += len(site.arguments)
        assert counts == ARGUMENTS
        yield from parsed.sites


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.id)
def test_every_argument_is_understood(folder: Path, target: Target) -> None:
    arguments = [argument for site in sites(folder, target) for argument in site.arguments]
    known = UNRESOLVABLE.get(target.id, {})
    unavailable = {
        argument.text: argument.operand for argument in arguments if isinstance(argument.operand, Unavailable)
    }
    met = {text: [pattern for pattern in known if re.fullmatch(pattern, text)] for text in unavailable}
    assert {text: unavailable[text] for text, patterns in met.items() if not patterns} == {}
    assert set(known) == {pattern for patterns in met.values() for pattern in patterns}
    kinds = {type(argument.operand) for argument in arguments}
    assert kinds >= {Constant, Memory} | ({Register} if target.compiler != "clang" else set())


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.id)
def test_constants_are_what_the_program_says(folder: Path, target: Target) -> None:
    values = (5, -9, 0x12345678, -1, 200, -5, -1)
    found = [site.arguments for site in sites(folder, target) if site.name == "constants"]
    assert len(found) == len(LEVELS) * len(LINKED)
    for arguments in found:
        assert tuple(argument.operand for argument in arguments) == tuple(map(Constant, values))
