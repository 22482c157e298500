"""The kernel's tables of its functions: which symbols there are, which ftrace can patch, which kprobes refuse.

/proc/kallsyms                     ffffffff816d5370 T vfs_read
                                   ffffffffc0402010 t nf_ct_get [nf_conntrack]
available_filter_functions         vfs_read
                                   nf_ct_get [nf_conntrack]
/sys/kernel/debug/kprobes/blacklist
                                   0xffffffff81001000-0xffffffff8100101e	do_int3
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.btf import VMLINUX
from stapsdtd.kernel.tracefs import Tracefs

KALLSYMS = "/proc/kallsyms"
BLACKLIST = "/sys/kernel/debug/kprobes/blacklist"
_CODE = frozenset({"t", "T", "w", "W"})
_NO_MODULES = ("[bpf]", "[__builtin__")
"""What is no module, although it stands where modules do: JITed programs and trampolines."""


class Symbol(NamedTuple):
    module: str
    name: str


def functions(path: str = KALLSYMS, *, only_modules: bool = False) -> Iterator[Symbol]:
    """Yield what code_symbols does or, where a sandbox such as systemd's ProtectKernelTunables= puts an empty file in
    the place of kallsyms, the functions that ftrace can patch: all that can be traced. Raises OSError, and
    KernelFeatureError if both are hidden.
    """
    symbols = code_symbols(path, only_modules=only_modules) if _has_content(path) else filter_functions()
    return (symbol for symbol in symbols if not (only_modules and symbol.module == VMLINUX))


def _has_content(path: str) -> bool:
    try:
        with open(path, "rb", buffering=0) as file:
            return bool(file.read(1))
    except OSError:
        return False


def code_symbols(path: str = KALLSYMS, *, only_modules: bool = False) -> Iterator[Symbol]:
    """Yield the symbols of code, those of the kernel with the module `vmlinux`. Raises OSError.

    only_modules: leave out the kernel's, which takes a third of the time.
    """
    with open(path, encoding="utf-8", errors="backslashreplace") as lines:
        for line in lines:
            if only_modules and "[" not in line:
                continue
            _, kind, name, *module = line.split()
            if kind in _CODE and not (module and module[0].startswith(_NO_MODULES)):
                yield Symbol(module[0][1:-1] if module else VMLINUX, name)


def filter_functions() -> Iterator[Symbol]:
    """Yield the functions that ftrace can patch. Raises OSError or KernelFeatureError if the kernel does not tell."""
    path = Tracefs.locate().path("available_filter_functions")
    with open(path, encoding="utf-8", errors="backslashreplace") as lines:
        for line in lines:
            name, *module = line.split()
            yield Symbol(module[0][1:-1] if module else VMLINUX, name)


def blacklisted(path: str = BLACKLIST) -> frozenset[str]:
    """Return the names of the functions that kprobes refuse; none if the kernel does not tell."""
    try:
        with open(path, encoding="utf-8", errors="backslashreplace") as lines:
            return frozenset(line.split()[-1] for line in lines if line.strip())
    except OSError:
        return frozenset()


def why_no_filter_functions() -> str | None:
    """Return why it cannot be known what ftrace can patch; None if it can be."""
    try:
        next(filter_functions(), None)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except KernelFeatureError as error:
        return error.reason
    return None
