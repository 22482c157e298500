"""BTF through the system's libbpf (bpf/btf.h, of libbpf 1.0): the kernel's types, and those of a module on top of them.

    /sys/kernel/btf/vmlinux ◄── base ── /sys/kernel/btf/MODULE

A kernel's takes some MB while it is open, so whoever needs it opens it and closes it again. It is trusted: it comes
from the kernel, and from those who may load modules.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from types import TracebackType
from typing import Any, Self

from stapsdtd.btf import records
from stapsdtd.btf.types import VOID, BtfError, CType, TypeId, Void
from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import libbpf
from stapsdtd.kernel.host_calls import BTF_LOOKUP

FOLDER = "/sys/kernel/btf"
VMLINUX = "vmlinux"
REMEDY = "boot a kernel built with CONFIG_DEBUG_INFO_BTF=y"

_Pointer = ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "btf__parse": (_Pointer, ctypes.c_char_p, _Pointer),
    "btf__parse_split": (_Pointer, ctypes.c_char_p, _Pointer),
    "btf__free": (None, _Pointer),
    "btf__type_cnt": (ctypes.c_uint32, _Pointer),
    "btf__type_by_id": (_Pointer, _Pointer, ctypes.c_uint32),
    "btf__name_by_offset": (ctypes.c_char_p, _Pointer, ctypes.c_uint32),
    "btf__find_by_name_kind": (ctypes.c_int32, _Pointer, ctypes.c_char_p, ctypes.c_uint32),
    "btf__pointer_size": (ctypes.c_size_t, _Pointer),
}


@cache
def _library() -> ctypes.CDLL:
    """Raises KernelFeatureError if libbpf is not installed."""
    library = libbpf.library()
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def path_of(module: str, folder: str = FOLDER) -> str:
    return os.path.join(folder, module)


def modules(folder: str = FOLDER) -> list[str]:
    """Return the modules that have BTF. Raises KernelFeatureError if the kernel has none."""
    try:
        return sorted(set(os.listdir(folder)) - {VMLINUX})
    except OSError as error:
        raise KernelFeatureError("kernel BTF", f"{folder}: {error.strerror}", REMEDY) from error


class Btf:
    """An open BTF, as btf.types.Types. For one thread. A context manager that closes it.

    count: one more than the number of its last type, those of its base included.
    """

    def __init__(self, path: str, base: Btf | None = None) -> None:
        """path: a raw BTF, or an object with a section .BTF. base: whose types it refers to, open for as long.

        Raises KernelFeatureError.
        """
        self._library = _library()
        self._first: int = base.count if base else 1
        self._handle: int | None = (
            self._library.btf__parse_split(os.fsencode(path), base.handle)
            if base
            else self._library.btf__parse(os.fsencode(path), None)
        )
        if not self._handle:
            raise KernelFeatureError("kernel BTF", f"{path}: {libbpf.last_error(BTF_LOOKUP, path).strerror}", REMEDY)
        self.count: int = int(self._library.btf__type_cnt(self._handle))
        self.pointer_bytes = int(self._library.btf__pointer_size(self._handle)) or ctypes.sizeof(_Pointer)

    @property
    def handle(self) -> int:
        """What libbpf calls it."""
        if self._handle is None:
            raise ValueError("the BTF is closed")
        return self._handle

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._handle is not None:
            self._library.btf__free(self._handle)
            self._handle = None

    def get(self, ident: TypeId) -> CType:
        """Raises BtfError if there is no such type."""
        if ident == VOID:
            return Void()
        address, header = self._record(ident)
        body = ctypes.string_at(address + records.HEADER.size, records.body_bytes(header[1]))
        return records.decode(header, body, self._name)

    def function(self, name: str) -> TypeId | None:
        """Return the function of this name; of a module with a base, its own one."""
        found: int = self._library.btf__find_by_name_kind(self.handle, name.encode(), records.FUNCTION)
        if found >= self._first:
            return TypeId(found)
        # libbpf looks into the base first
        return next((ident for own, ident in self.functions() if own == name), None) if self._first > 1 else None

    def functions(self) -> Iterator[tuple[str, TypeId]]:
        """Yield all functions, but for those of the base: 60,000 of a kernel, which takes 0.15 s."""
        for number in range(self._first, self.count):
            _, (name, info, _) = self._record(number)
            if records.kind_of(info) == records.FUNCTION:
                yield self._name(name), TypeId(number)

    def _record(self, number: int) -> tuple[int, tuple[int, int, int]]:
        address: int | None = self._library.btf__type_by_id(self.handle, number)
        if not address:
            raise BtfError(f"type {number} is none")
        header: tuple[int, int, int] = records.HEADER.unpack(ctypes.string_at(address, records.HEADER.size))
        return address, header

    def _name(self, offset: int) -> str:
        name: bytes | None = self._library.btf__name_by_offset(self.handle, offset)
        return (name or b"").decode(errors="backslashreplace")
