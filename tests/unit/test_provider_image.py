from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.elf import parse_object
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.provider import INT32, INT64, MAX_ARGUMENTS, STRING, UINT64, ArgType, image
from stapsdtd.provider.architecture import AARCH64, X86_64, Architecture
from stapsdtd.provider.argtypes import Declaration
from stapsdtd.provider.image import build_image

ARCHITECTURES = {"x86_64": X86_64, "aarch64": AARCH64}
FOUR = [
    Declaration("nothing", ()),
    Declaration("request__start", (STRING, INT32)),
    Declaration("every__signed", (ArgType.INT8, ArgType.INT16, INT32, INT64)),
    Declaration("six", (UINT64, ArgType.UINT32, ArgType.UINT16, ArgType.UINT8, ArgType.UINT8, ArgType.UINT16)),
]
OPERANDS = {
    "x86_64": [
        "",
        "8@%rdi -4@%esi",
        "-1@%dil -2@%si -4@%edx -8@%rcx",
        "8@%rdi 4@%esi 2@%dx 1@%cl 1@%r8b 2@%r9w",
    ],
    "aarch64": ["", "8@x0 -4@x1", "-1@x0 -2@x1 -4@x2 -8@x3", "8@x0 4@x1 2@x2 1@x3 1@x4 2@x5"],
}

identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,30}", fullmatch=True)
declarations = st.lists(
    st.builds(Declaration, identifiers, st.lists(st.sampled_from(ArgType), max_size=MAX_ARGUMENTS).map(tuple)),
    min_size=1,
    max_size=40,
    unique_by=lambda declaration: declaration.name,
)


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def section_of(content: bytes, name: str) -> Any:
    section = ELFFile(BytesIO(content)).get_section_by_name(name)
    assert section is not None
    return section


def notes_of(content: bytes) -> list[dict[str, Any]]:
    notes = []
    for note in section_of(content, ".note.stapsdt").iter_notes():
        # pyelftools calls every type 3 by GNU's name for it.
        assert (note["n_name"], note["n_type"]) == ("stapsdt", "NT_GNU_BUILD_ID")
        raw: bytes = note["n_descdata"]
        location, base, semaphore = (int.from_bytes(raw[at : at + 8], "little") for at in (0, 8, 16))
        provider, name, arguments, rest = raw[24:].split(b"\0")
        assert rest == b""
        notes.append(
            {
                "location": location,
                "base": base,
                "semaphore": semaphore,
                "provider": provider.decode(),
                "name": name.decode(),
                "arguments": arguments.decode(),
            }
        )
    return notes


def readelf(*arguments: str) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    done = subprocess.run(["readelf", *arguments], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "arning" not in done.stdout
    assert "rror" not in done.stdout
    return done.stdout


def test_the_sample_in_the_module_is_what_readelf_prints(tmp_path: Path) -> None:
    built = build_image("myapp", [Declaration("request__start", (STRING, INT32))], X86_64)
    (tmp_path / "image").write_bytes(built.content)
    assert image.__doc__ is not None
    printed = readelf("-nW", str(tmp_path / "image"))
    assert " ".join(printed.split()) in " ".join(image.__doc__.split())


def test_readelf_finds_no_fault(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "image"
    path.write_bytes(build_image("myapp", FOUR, ARCHITECTURES[architecture]).content)
    for options in ("-a", "-Wn", "-Wl", "-WS", "-Ws", "-Wd"):
        readelf(options, "--lint", str(path))
    printed = readelf("-Wn", str(path))
    for declaration, operands in zip(FOUR, OPERANDS[architecture], strict=True):
        assert f"Name: {declaration.name}\n" in printed
        assert f"Arguments: {operands}" in printed


def test_operands_are_spelled_as_compilers_do(architecture: str) -> None:
    notes = notes_of(build_image("myapp", FOUR, ARCHITECTURES[architecture]).content)
    assert [note["arguments"] for note in notes] == OPERANDS[architecture]


def test_a_stub_is_a_nop_and_a_return(architecture: str) -> None:
    nop, ret = {"x86_64": (b"\x90", b"\xc3"), "aarch64": (b"\x1f\x20\x03\xd5", b"\xc0\x03\x5f\xd6")}[architecture]
    built = build_image("myapp", FOUR, ARCHITECTURES[architecture])
    for stub in built.stubs:
        assert built.content[stub:].startswith(nop + ret)


def test_no_kernel_rewrites_a_stub(architecture: str) -> None:
    parsed = parse_object(BytesIO(build_image("myapp", FOUR, ARCHITECTURES[architecture]).content))
    assert len(parsed.sites) == len(FOUR)
    for site in parsed.sites:
        assert NopRewriting(unknown=frozenset({5, 10})).why_not(site.nop_bytes) is None


@given(declarations, identifiers, st.sampled_from([X86_64, AARCH64]))
def test_notes_say_what_was_declared(declared: list[Declaration], provider: str, architecture: Architecture) -> None:
    built = build_image(provider, declared, architecture)
    base = section_of(built.content, ".stapsdt.base")["sh_addr"]
    assert notes_of(built.content) == [
        {
            "location": stub,
            "base": base,
            "semaphore": semaphore,
            "provider": provider,
            "name": declaration.name,
            "arguments": architecture.operands(declaration.types),
        }
        for declaration, stub, semaphore in zip(declared, built.stubs, built.semaphores, strict=True)
    ]


@given(declarations, st.sampled_from([X86_64, AARCH64]))
def test_every_address_lies_in_a_segment_with_its_rights(
    declared: list[Declaration], architecture: Architecture
) -> None:
    built = build_image("myapp", declared, architecture)
    elf = ELFFile(BytesIO(built.content))
    loads = [segment.header for segment in elf.iter_segments("PT_LOAD")]
    assert [(load.p_offset, load.p_filesz, load.p_flags) for load in loads] == [
        (segment.offset, segment.size, segment.flags) for segment in built.segments
    ]
    for load in loads:
        assert load.p_offset == load.p_vaddr
        assert load.p_filesz == load.p_memsz
        assert load.p_offset % architecture.page_size == 0
    for before, after in itertools.pairwise(built.segments):
        assert before.offset + before.size <= after.offset
    readable, executable, writable = built.segments
    assert (readable.flags, executable.flags, writable.flags) == (4, 5, 6)
    assert readable.offset == 0
    for stub in built.stubs:
        assert executable.offset <= stub <= executable.offset + executable.size - len(architecture.stub)
    for semaphore in built.semaphores:
        assert writable.offset <= semaphore <= writable.offset + writable.size - 2
        assert semaphore % 2 == 0
        assert built.content[semaphore : semaphore + 2] == b"\0\0"
    assert len({*built.stubs, *built.semaphores}) == 2 * len(declared)


@given(declarations)
def test_a_symbol_shows_the_function_and_the_semaphore_of_each_probe(declared: list[Declaration]) -> None:
    built = build_image("myapp", declared, X86_64)
    elf = ELFFile(BytesIO(built.content))
    symbols = [
        (symbol.name, symbol["st_value"], elf.get_section(symbol["st_shndx"]).name)
        for symbol in section_of(built.content, ".dynsym").iter_symbols()
        if symbol.name
    ]
    names = [declaration.name for declaration in declared]
    assert symbols == [
        *((name, stub, ".text") for name, stub in zip(names, built.stubs, strict=True)),
        *(
            (f"myapp_{name}_semaphore", address, ".probes")
            for name, address in zip(names, built.semaphores, strict=True)
        ),
    ]


def test_the_stack_is_not_to_be_executable(architecture: str) -> None:
    elf = ELFFile(BytesIO(build_image("myapp", FOUR, ARCHITECTURES[architecture]).content))
    (stack,) = elf.iter_segments("PT_GNU_STACK")
    assert stack["p_flags"] == 6


def test_the_build_id_depends_on_the_declarations_alone() -> None:
    def build_id(declared: list[Declaration]) -> object:
        content = build_image("myapp", declared, X86_64).content
        (note,) = section_of(content, ".note.gnu.build-id").iter_notes()
        return note["n_desc"]

    assert build_id(FOUR) == build_id(list(FOUR))
    assert build_id(FOUR) != build_id(FOUR[1:])


def test_the_dynamic_loader_takes_it(tmp_path: Path) -> None:
    built = build_image("myapp", FOUR, X86_64)
    (tmp_path / "image.so").write_bytes(built.content)
    loaded = ctypes.CDLL(str(tmp_path / "image.so"))
    addresses = [ctypes.cast(loaded[declaration.name], ctypes.c_void_p).value for declaration in FOUR]
    start = (addresses[0] or 0) - built.stubs[0]
    assert addresses == [start + stub for stub in built.stubs]
    semaphores = [
        ctypes.addressof(ctypes.c_uint16.in_dll(loaded, f"myapp_{declaration.name}_semaphore")) for declaration in FOUR
    ]
    assert semaphores == [start + semaphore for semaphore in built.semaphores]
    loaded[FOUR[1].name](b"/index", 7)


def test_thousands_of_probes(tmp_path: Path) -> None:
    declared = [Declaration(f"probe{number}", (INT64,) * MAX_ARGUMENTS) for number in range(5000)]
    path = tmp_path / "image"
    path.write_bytes(build_image("myapp", declared, X86_64).content)
    assert readelf("-Wn", str(path)).count("Name: probe") == 5000


def test_a_provider_without_probes_has_no_image() -> None:
    with pytest.raises(ValueError, match="provider myapp declares no probes"):
        build_image("myapp", [], X86_64)
