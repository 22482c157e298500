"""parse_object over real programs, compared with what binutils say of them."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from stapsdtd.elf import parse_object
from stapsdtd.model import Argument, Constant, Memory, ParsedObject, Register, Site, Unavailable
from tests.support import SYSTEM_PYTHON


def newest(pattern: str) -> str:
    """Return the file of the highest version, or the pattern if there is none."""
    found = glob.glob(pattern)
    return max(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path)], default=pattern)


POSTGRES = newest("/usr/lib/postgresql/*/bin/postgres")
LIBJVM = newest("/usr/lib/jvm/java-*-openjdk-amd64/lib/server/libjvm.so")
LIBSTDCXX = "/usr/lib/x86_64-linux-gnu/libstdc++.so.6"
LIBC = "/lib/x86_64-linux-gnu/libc.so.6"
SITES = {
    "/usr/bin/python3.11": 8,
    "/usr/lib/postgresql/15/bin/postgres": 71,
    "/usr/lib/jvm/java-17-openjdk-amd64/lib/server/libjvm.so": 531,
    LIBSTDCXX: 3,
    LIBC: 0,
}
"""Of Debian 12. Later versions have others."""

SOURCE = r"""
#include <sys/sdt.h>

struct pair { long a, b; };

__attribute__((noinline)) static void inner(int x, char *s)
{
    STAP_PROBE2(app, inner_called, x, s);
}

static inline __attribute__((always_inline)) void inlined(long n)
{
    STAP_PROBE1(app, inlined, n);
}

void guarding(long a, unsigned char b, short c, long d);

__attribute__((noinline)) void outer(long a, unsigned char b, short c, struct pair *p)
{
    guarding(a, b, c, p->b);
    inlined(a);
    inner((int)a, "x");
    inlined(p->a);
    STAP_PROBE3(app, constants, -9, 5, 'c');
    STAP_PROBE(app, no_arguments);
    __asm__ volatile(STAP_PROBE_ASM(app, by_hand, 1@%%ah -8@8+4(%%rsp) 8@%%xmm0 4@(%%rax,%%rcx,4)) ::);
}

int main(int argc, char **argv)
{
    struct pair p = { argc, 2 };
    outer(argc, 1, 2, &p);
    return argv == 0;
}
"""

# _SDT_HAS_SEMAPHORES gives every probe of a source file one.
GUARDED_SOURCE = r"""
#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>

unsigned short app_other_semaphore __attribute__((section(".probes")));
unsigned short app_guarded_semaphore __attribute__((section(".probes")));

void guarding(long a, unsigned char b, short c, long d)
{
    if (app_guarded_semaphore)
        STAP_PROBE4(app, guarded, a, b, c, d);
    if (app_other_semaphore)
        STAP_PROBE(app, other);
}
"""


@dataclass(frozen=True)
class Noted:
    """A note as `readelf -n` shows it."""

    provider: str
    name: str
    location: int
    semaphore: int
    arguments: str


def require(path: str) -> None:
    if shutil.which(path) or os.path.exists(path):
        return
    if os.environ.get("STAPSDTD_REQUIRE_KERNEL") == "1":
        pytest.fail(f"{path} is missing")
    pytest.skip(f"{path} is missing")


def run(*command: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env={"LC_ALL": "C", "PATH": os.environ["PATH"]}
    ).stdout


def parse(path: str) -> ParsedObject:
    with open(path, "rb", buffering=0) as file:
        return parse_object(file)


def noted(path: str) -> list[Noted]:
    pattern = re.compile(
        r"Provider: (.*)\n\s+Name: (.*)\n\s+Location: (0x\w+), Base: 0x\w+, Semaphore: (0x\w+)\n\s+Arguments: ?(.*)\n"
    )
    return [
        Noted(found[1], found[2], int(found[3], 16), int(found[4], 16), found[5])
        for found in pattern.finditer(run("readelf", "-nW", path))
    ]


def file_offsets(path: str) -> dict[str, list[tuple[int, int, int]]]:
    """(address, offset, size in the file) of the load segments, by their flags."""
    loads: dict[str, list[tuple[int, int, int]]] = {}
    for row in re.finditer(r"LOAD +(0x\w+) (0x\w+) 0x\w+ (0x\w+) 0x\w+ (.{3})", run("readelf", "-lW", path)):
        offset, address, size = (int(row[i], 16) for i in (1, 2, 3))
        loads.setdefault(row[4].replace(" ", ""), []).append((address, offset, size))
    return loads


def to_offset(loads: list[tuple[int, int, int]], address: int) -> int:
    (offset,) = (offset + address - start for start, offset, size in loads if start <= address < start + size)
    return offset


def shown(site: Site) -> tuple[str, str, int, int | None, str]:
    arguments = " ".join(argument.text for argument in site.arguments)
    return site.provider, site.name, site.site_offset, site.semaphore_offset, arguments


def assert_as_readelf_says(path: str) -> ParsedObject:
    parsed = parse(path)
    loads = file_offsets(path)
    wanted = [
        (
            note.provider,
            note.name,
            to_offset(loads["RE"], note.location),
            to_offset(loads["RW"], note.semaphore) if note.semaphore else None,
            note.arguments.strip(),
        )
        for note in noted(path)
    ]
    assert [shown(site) for site in parsed.sites] == wanted
    assert parsed.problems == ()
    assert parsed.architecture == "x86-64"
    build_id = re.search(r"Build ID: (\w+)", run("readelf", "-nW", path))
    assert parsed.build_id == (build_id[1] if build_id else None)
    return parsed


@pytest.mark.parametrize("path", [SYSTEM_PYTHON, POSTGRES, LIBJVM, LIBSTDCXX, LIBC])
def test_programs_of_debian(path: str) -> None:
    require(path)
    sites = len(assert_as_readelf_says(path).sites)
    assert sites == SITES[path] if path in SITES else sites


@pytest.mark.parametrize(("path", "table"), [(LIBJVM, "symtab"), (POSTGRES, "dynsym"), (LIBSTDCXX, "dynsym")])
def test_functions_of_debian(path: str, table: str) -> None:
    require(path)
    assert_functions(path, *(["-D"] if table == "dynsym" else []))


def test_everything_can_be_fetched_from_postgres() -> None:
    require(POSTGRES)
    arguments = [(site, argument) for site in parse(POSTGRES).sites for argument in site.arguments]
    assert not [argument for _, argument in arguments if isinstance(argument.operand, Unavailable)]
    (buffers,) = {
        site.site_offset + argument.operand.displacement
        for site, argument in arguments
        if argument.text == "-4@NBuffers(%rip)" and isinstance(argument.operand, Memory)
    }
    symbols = subprocess.run(["nm", "-D", POSTGRES], check=True, stdout=subprocess.PIPE, text=True).stdout
    (address,) = (int(line.split()[0], 16) for line in symbols.splitlines() if line.endswith(" NBuffers"))
    assert buffers == address


def test_everything_can_be_fetched_from_libjvm() -> None:
    require(LIBJVM)
    arguments = [argument for site in parse(LIBJVM).sites for argument in site.arguments]
    assert len(arguments) > 1000
    assert [argument for argument in arguments if isinstance(argument.operand, Unavailable)] == []


def assert_functions(path: str, *nm_options: str) -> set[str | None]:
    symbols = [
        (int(row[1], 16), int(row[2], 16), row[3])
        for row in re.finditer(
            r"(?m)^(\w+) (\w+) [TtWwi] ([^@\n]+)", run("nm", "-S", "--defined-only", *nm_options, path)
        )
    ]
    functions = [site.function for site in parse(path).sites]
    for note, function in zip(noted(path), functions, strict=True):
        covering = [(start, name) for start, size, name in symbols if start <= note.location < start + size]
        nearest = {name for start, name in covering if start == max(covering)[0]}
        assert function in (nearest or {None})
    return set(functions)


@pytest.fixture(scope="module", params=["-O2", "-O0", "-O2 -static", "-O2 -no-pie"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    require("gcc")
    require("/usr/include/x86_64-linux-gnu/sys/sdt.h")
    folder: Path = tmp_path_factory.mktemp("program")
    (folder / "app.c").write_text(SOURCE)
    (folder / "guarded.c").write_text(GUARDED_SOURCE)
    sources = (str(folder / "app.c"), str(folder / "guarded.c"))
    run("gcc", *request.param.split(), "-o", str(folder / "app"), *sources)
    return str(folder / "app")


def test_a_compiled_program(program: str) -> None:
    parsed = assert_as_readelf_says(program)
    by_name: dict[str, list[Site]] = {}
    for site in parsed.sites:
        by_name.setdefault(site.name, []).append(site)
    counts = {name: len(sites) for name, sites in by_name.items() if sites[0].provider == "app"}
    assert counts == {"inlined": 2} | dict.fromkeys(
        ("inner_called", "guarded", "other", "constants", "no_arguments", "by_hand"), 1
    )
    assert {site.function for site in by_name["inlined"]} == {"outer"}
    assert {site.function for site in by_name["guarded"]} == {"guarding"}
    assert by_name["no_arguments"][0].arguments == ()
    assert [argument.operand for argument in by_name["constants"][0].arguments] == [
        Constant(-9),
        Constant(5),
        Constant(99),
    ]
    assert by_name["by_hand"][0].arguments == (
        Argument("1@%ah", 1, signed=False, is_float=False, operand=Register("rax", 8)),
        Argument("-8@8+4(%rsp)", 8, signed=True, is_float=False, operand=Memory("rsp", 12)),
        Argument("8@%xmm0", 8, False, False, Unavailable("%xmm0 is not among the registers saved at a probe")),
        Argument("4@(%rax,%rcx,4)", 4, False, False, Memory("rax", 0, "rcx", 4)),
    )
    sizes = [(argument.size, argument.signed) for argument in by_name["guarded"][0].arguments]
    assert sizes == [(8, True), (1, False), (2, True), (8, True)]


def test_enclosing_functions_are_those_of_nm(program: str) -> None:
    assert {"outer", "inner", "guarding"} <= {
        function and function.partition(".")[0] for function in assert_functions(program)
    }


def test_every_site_is_a_nop_for_objdump(program: str) -> None:
    for note, site in zip(noted(program), parse(program).sites, strict=True):
        listing = run(
            "objdump", "-d", f"--start-address={note.location}", f"--stop-address={note.location + 1}", program
        )
        assert "nop" in listing
        assert f"<{site.function}" in listing


def test_without_symbols_there_are_no_functions(program: str, tmp_path: Path) -> None:
    stripped = str(tmp_path / "stripped")
    run("strip", "--keep-section=.note.stapsdt", "-o", stripped, program)
    parsed = assert_as_readelf_says(stripped)
    assert {site.function for site in parsed.sites if site.provider == "app"} == {None}


def test_an_i386_object_is_understood(tmp_path: Path) -> None:
    require("gcc")
    (tmp_path / "app.s").write_text(
        ".text\n.globl _start\n_start: nop\nret\n"
        '.section .note.stapsdt,"","note"\n.balign 4\n.4byte 8, 2f-1f, 3\n.asciz "stapsdt"\n'
        '1: .4byte _start, 0, 0\n.asciz "app"\n.asciz "start"\n.asciz "4@%eax -4@4(%esp)"\n2: .balign 4\n'
    )
    path = str(tmp_path / "app")
    run("gcc", "-m32", "-nostdlib", "-static", "-o", path, str(tmp_path / "app.s"))
    parsed = parse(path)
    assert parsed.architecture == "i386"
    (site,) = parsed.sites
    assert (site.provider, site.name, site.function) == ("app", "start", None)
    assert [argument.operand for argument in site.arguments] == [Register("eax"), Memory("esp", 4)]
