"""What the compilers of Debian make of one program's probes: every argument is understood.

Linked files are read as the daemon reads them. loongarch64 has no cross compiler in Debian 12.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from stapsdtd.elf import parse_object
from stapsdtd.model import Constant, Memory, Register, Site, Unavailable
from tests.support import require

SOURCE = r"""
#include <sys/sdt.h>

struct pair { long first; int second; short third; signed char fourth; };

int counter = 3;
static int hidden_counter = 4;
static long table[16] = {1};
long matrix[4][4];
int elsewhere __attribute__((visibility("hidden"))) = 7;
const char *message __attribute__((section(".data.message"))) = "text";
static struct pair pairs[8];
_Thread_local int mine;

#define PROBE __attribute__((noinline)) void

PROBE use(void *pointer) { __asm__ volatile ("" :: "r"(pointer) : "memory"); hidden_counter++; }

PROBE registers(int a, unsigned b, long c, signed char d, unsigned short e, char *f) {
  STAP_PROBE3(cross, registers, a, b, c);
  STAP_PROBE3(cross, registers, d, e, f);
}

PROBE many(long a, long b, long c, long d, long e, long f, long g, long h, long i, short j) {
  STAP_PROBE5(cross, many, a, b, c, d, e);
  STAP_PROBE5(cross, many, f, g, h, i, j);
}

PROBE constants(void) {
  STAP_PROBE7(cross, constants, 5, -9, 0x12345678, (signed char)-1, (unsigned char)200, -5L, -1LL);
}

PROBE stack(void) {
  long local[200]; int n = 5; struct pair pair = {1, 2, 3, 4};
  use(local); use(&n); use(&pair);
  STAP_PROBE4(cross, stack, local[3], n, pair.first, pair.second);
  STAP_PROBE4(cross, stack, pair.third, pair.fourth, &n, &local[190]);
  use(local); use(&n); use(&pair);
}

PROBE arrays(long *l, int *i, short *s, signed char *c, struct pair *p, long n) {
  STAP_PROBE3(cross, arrays, l[n], i[n], s[n]);
  STAP_PROBE3(cross, arrays, c[n], p[n].second, l[4]);
  STAP_PROBE2(cross, arrays, p->fourth, p[3].first);
}

PROBE narrow_indices(long *l, int *i, short *s, struct pair *p, int n, unsigned m) {
  STAP_PROBE3(cross, narrow_indices, l[n], i[n], s[m]);
  STAP_PROBE3(cross, narrow_indices, p[n].second, l[m], i[m + 1]);
}

PROBE globals(long n) {
  STAP_PROBE3(cross, globals, counter, hidden_counter, table[3]);
  STAP_PROBE3(cross, globals, table[n], matrix[1][2], matrix[n][1]);
  STAP_PROBE4(cross, globals, message, elsewhere, pairs[2].second, pairs[n].first);
}

PROBE of_one_global(void) { STAP_PROBE1(cross, of_one_global, message); }

PROBE addresses(long n) {
  STAP_PROBE3(cross, addresses, &counter, &hidden_counter, &table[3]);
  STAP_PROBE3(cross, addresses, table, &table[n], "literal");
  STAP_PROBE2(cross, addresses, &pairs[1].second, &addresses);
}

PROBE structs(void) {
  struct { long members[3]; } local;
  use(&local);
  STAP_PROBE1(cross, structs, local);
  use(&local);
}

PROBE wide(long long a, long long *b, unsigned long long c) { STAP_PROBE3(cross, wide, a, *b, c); }

PROBE floats(double *a, float *b) { STAP_PROBE2(cross, floats, *a, *b); }

PROBE of_the_thread(void) { STAP_PROBE2(cross, of_the_thread, mine, &mine); }

int main(void) { return 0; }
"""

ARGUMENTS = {
    "registers": 6, "many": 10, "constants": 7, "stack": 8, "arrays": 8, "narrow_indices": 6, "globals": 10,
    "of_one_global": 1, "addresses": 8, "structs": 1, "wide": 3, "floats": 2, "of_the_thread": 2,
}  # fmt: skip

LEVELS = ("-O0", "-O2", "-Os")
LINKED = {
    "shared": ("-shared", "-fPIC"),
    "fixed": ("-static", "-fno-pic", "-no-pie", "-Wl,-e,main"),
}


class Target(NamedTuple):
    architecture: str
    compiler: str
    flags: tuple[str, ...] = ()
    linker: str = "ld"

    @property
    def id(self) -> str:
        return f"{self.architecture}-{'clang' if self.compiler == 'clang' else 'gcc'}"


def gcc(architecture: str, triple: str, *flags: str) -> Target:
    return Target(architecture, f"{triple}-gcc", flags, f"{triple}-ld")


def clang(architecture: str, triple: str, *flags: str) -> Target:
    """One clang has all targets, and links with what belongs to gcc's."""
    return Target(architecture, "clang", ("-target", triple, *flags), f"{triple}-ld")


# clang 14 prefers memory to registers, and has none for riscv64: `Could not match memory address. Inline asm failure!`
TARGETS = [
    Target("x86-64", "gcc"),
    Target("x86-64", "clang"),
    Target("i386", "gcc", ("-m32",)),
    Target("i386", "clang", ("-m32",)),
    gcc("aarch64", "aarch64-linux-gnu"),
    clang("aarch64", "aarch64-linux-gnu"),
    gcc("arm", "arm-linux-gnueabihf", "-marm"),
    clang("arm", "arm-linux-gnueabihf", "-mtp=cp15"),
    gcc("riscv64", "riscv64-linux-gnu"),
    gcc("s390x", "s390x-linux-gnu"),
    clang("s390x", "s390x-linux-gnu"),
    gcc("ppc64le", "powerpc64le-linux-gnu"),
    clang("ppc64le", "powerpc64le-linux-gnu"),
]

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
    """The program, and sys/sdt.h apart from the other headers, which are the host's."""
    folder = tmp_path_factory.mktemp("cross")
    (folder / "cross.c").write_text(SOURCE)
    (folder / "include" / "sys").mkdir(parents=True)
    candidates = [Path("/usr/include/x86_64-linux-gnu/sys"), Path("/usr/include/sys")]
    found = next((path for path in candidates if (path / "sdt.h").exists()), None)
    require(found, "sys/sdt.h of systemtap-sdt-dev")
    assert found is not None
    for header in ("sdt.h", "sdt-config.h"):
        (folder / "include" / "sys" / header).symlink_to(found / header)
    return folder


def sites(folder: Path, target: Target) -> Iterator[Site]:
    """Those of the program at every level of optimisation, in a shared object and in a fixed program."""
    for tool in (target.compiler, target.linker):
        require(shutil.which(tool), tool)
    for level, (kind, flags) in product(LEVELS, LINKED.items()):
        output = folder / f"{target.id}{level}-{kind}"
        command = [target.compiler, *target.flags, level, *flags, "-nostdlib", "-I", str(folder / "include")]
        subprocess.run([*command, "-o", str(output), str(folder / "cross.c")], check=True)
        with open(output, "rb") as file:
            parsed = parse_object(file)
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
