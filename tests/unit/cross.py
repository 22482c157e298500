"""Programs with probes, compiled for every architecture that Debian has a compiler for.

loongarch64 has none in Debian 12.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from stapsdtd.elf import parse_object
from stapsdtd.model import ParsedObject
from tests.support import require, shared_folder

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

WITH_SEMAPHORES = r"""
#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>

#define SEMAPHORE __attribute__((section(".probes"), visibility("hidden"))) unsigned short

SEMAPHORE cross_guarded_semaphore, cross_guarded_too_semaphore;

void guarded(int a) {
  if (cross_guarded_semaphore) STAP_PROBE1(cross, guarded, a);
  if (cross_guarded_too_semaphore) STAP_PROBE1(cross, guarded_too, a);
}
"""

SOURCES = {"cross.c": SOURCE, "guarded.c": WITH_SEMAPHORES}

ARGUMENTS = {
    "registers": 6, "many": 10, "constants": 7, "stack": 8, "arrays": 8, "narrow_indices": 6, "globals": 10,
    "of_one_global": 1, "addresses": 8, "structs": 1, "wide": 3, "floats": 2, "of_the_thread": 2, "guarded": 1,
    "guarded_too": 1,
}  # fmt: skip
"""How many the sites of each name have together."""

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

    def tool(self, name: str) -> str:
        """Another of the binutils that the linker belongs to."""
        return self.linker.removesuffix("ld") + name


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


def prepared(factory: pytest.TempPathFactory) -> Path:
    """The sources, and sys/sdt.h apart from the other headers, which are the host's; made once, for all processes."""
    folder = shared_folder(factory) / "cross"
    if folder.exists():
        return folder
    candidates = [Path("/usr/include/x86_64-linux-gnu/sys"), Path("/usr/include/sys")]
    found = next((path for path in candidates if (path / "sdt.h").exists()), None)
    require(found, "sys/sdt.h of systemtap-sdt-dev")
    assert found is not None
    own = Path(tempfile.mkdtemp(dir=folder.parent))
    (own / "include" / "sys").mkdir(parents=True)
    for header in ("sdt.h", "sdt-config.h"):
        (own / "include" / "sys" / header).symlink_to(found / header)
    for name, text in SOURCES.items():
        (own / name).write_text(text)
    with suppress(OSError):
        own.rename(folder)  # unless another process was faster
    return folder


def objects(folder: Path, target: Target) -> Iterator[tuple[Path, ParsedObject]]:
    """The program at every level of optimisation, as a shared object and as a fixed program; each compiled once."""
    for tool in (target.compiler, target.linker):
        require(shutil.which(tool), tool)
    for level, (kind, flags) in product(LEVELS, LINKED.items()):
        output = folder / f"{target.id}{level}-{kind}"
        if not output.exists():
            own = output.with_name(f"{output.name}.{os.getpid()}")
            command = [target.compiler, *target.flags, level, *flags, "-nostdlib", "-I", str(folder / "include")]
            subprocess.run([*command, "-o", str(own), *(str(folder / name) for name in SOURCES)], check=True)
            own.rename(output)
        with open(output, "rb") as file:
            yield output, parse_object(file)
