"""Prototypes as they are printed: what gcc takes for another declaration of the same functions is right."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.btf.declare import declare
from stapsdtd.btf.types import TypeId
from stapsdtd.kernel.btf import Btf
from tests.unit.kernel_types import SOURCE, btf_path, prototype


@pytest.fixture
def types() -> Iterator[Btf]:
    with Btf(str(btf_path())) as opened:
        yield opened


def test_compiler_agrees(types: Btf, tmp_path: Path) -> None:
    # gcc takes exception to others, which are static or have another name for the linker
    names = ("by_", "with_", "returns_", "variadic", "main", "printf")
    declared = [declare(types, ident) for name, ident in types.functions() if name.startswith(names)]
    assert len(declared) > 15
    source = tmp_path / "again.c"
    source.write_text(f'#include "{SOURCE}"\n' + "".join(f"{each};\n" for each in declared))
    subprocess.run(["gcc", "-Werror", "-fsyntax-only", source], check=True)
    source.write_text(
        f'#include "{SOURCE}"\n' + "".join(f"{each};\n" for each in declared).replace("rows)[3]", "rows)[4]")
    )
    assert subprocess.run(["gcc", "-fsyntax-only", source], check=False, capture_output=True).returncode != 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("with_wide", "int with_wide(int a, __int128 wide, int b)"),
        ("variadic", "int variadic(const char *format, ...)"),
        ("returns_nothing", "void returns_nothing(void)"),
        ("returns_large", "struct large returns_large(int a, int b)"),
    ],
)
def test_prototypes(types: Btf, name: str, text: str) -> None:
    assert declare(types, types.function(name) or TypeId(0)) == text


def test_pointers(types: Btf) -> None:
    shown = declare(types, types.function("by_pointer") or TypeId(0))
    text = "struct outer *outer, volatile const char *text, int (*rows)[3], compare_t compare, void *anything"
    assert shown == f"int by_pointer({text})"


def test_types_alone(types: Btf) -> None:
    shown = [declare(types, parameter.type) for parameter in prototype(types, "by_pointer").parameters]
    assert shown == ["struct outer *", "volatile const char *", "int (*)[3]", "compare_t", "void *"]
