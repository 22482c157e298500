"""tests/targets/kernel_types.c: its BTF, and what its program says of the same types."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from stapsdtd.arch.record import Architecture
from stapsdtd.arch.x86_64 import X86_64
from stapsdtd.btf.types import Function, Prototype
from stapsdtd.functions.attaching import Way
from stapsdtd.functions.kernel import KernelFunctions
from stapsdtd.kernel.btf import Btf
from stapsdtd.kernel.function_tables import Symbol
from tests.support import TARGETS, require

SOURCE = TARGETS / "kernel_types.c"
BOTH_WAYS = (Way("fentry"), Way("kprobe"))
NO_WAYS = (Way("fentry", "refused", "be root"), Way("kprobe", "the kernel has none", "boot another"))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="kernel_types")


@cache
def layouts_path() -> Path:
    """Return an object with the BTF of structs, and of functions that take pointers."""
    path = Path(_folder().name, "layouts.o")
    subprocess.run(["clang", "-target", "bpf", "-g", "-O2", "-c", "-o", path, SOURCE], check=True)
    return path


@cache
def btf_path() -> Path:
    """Return an object with the BTF of all functions."""
    path = Path(_folder().name, "kernel_types.o")
    done = subprocess.run(["gcc", "-gbtf", "-c", "-o", path, SOURCE], capture_output=True, check=False)
    require(done.returncode == 0, "a gcc that writes BTF (12 or newer)")
    return path


@cache
def colors() -> dict[str, int]:
    """Return the enumerators of enum color that `btf_path` has: gcc 12 leaves out what is above INT_MAX."""
    version = subprocess.run(["gcc", "-dumpversion"], capture_output=True, text=True, check=True).stdout
    found = {"RED": 0, "GREEN": 5}
    return found if int(version.partition(".")[0]) < 13 else found | {"DEEP": 0x80000000}


@cache
def printed() -> list[list[str]]:
    """Return the words of each line that the program prints."""
    program = Path(_folder().name, "kernel_types")
    subprocess.run(["gcc", "-o", program, SOURCE], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def prototype(types: Btf, name: str) -> Prototype:
    ident = types.function(name)
    assert ident is not None
    function = types.get(ident)
    assert isinstance(function, Function)
    found = types.get(function.prototype)
    assert isinstance(found, Prototype)
    return found


class FakeKernel:
    """A kernel whose vmlinux has the functions of kernel_types.c. symbols_: in place of one for each of them.

    modules_: the BTF of each. traceable_: None if the kernel does not tell. opened: which BTF is open now.
    """

    def __init__(self) -> None:
        with Btf(str(btf_path())) as types:
            self.symbols_ = [Symbol("vmlinux", name) for name, _ in types.functions() if name]
        self.modules_: dict[str, Path] = {}
        self.traceable_: list[Symbol] | None = list(self.symbols_)
        self.blacklisted_: frozenset[str] = frozenset()
        self.opened: list[Btf] = []

    def symbols(self, *, only_modules: bool = False) -> Iterator[Symbol]:
        return (symbol for symbol in self.symbols_ if not only_modules or symbol.module != "vmlinux")

    def traceable(self) -> Iterator[Symbol] | None:
        return None if self.traceable_ is None else iter(self.traceable_)

    def blacklisted(self) -> frozenset[str]:
        return self.blacklisted_

    def modules(self) -> list[str]:
        return sorted(self.modules_)

    def open_btf(self, module: str, base: Btf | None) -> Btf:
        self.opened.append(Btf(str(self.modules_[module] if base else btf_path()), base))
        return self.opened[-1]


@contextmanager
def kernel_functions(
    kernel: FakeKernel, ways: tuple[Way, ...] = BOTH_WAYS, architecture: Architecture = X86_64
) -> Iterator[KernelFunctions]:
    functions = KernelFunctions(lambda: ways, kernel, architecture)
    try:
        yield functions
    finally:
        functions.stop()
