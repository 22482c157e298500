"""Bindings to the system's libbpf: load an object, access its maps, create rings and programs.

    object file ──Object──► programs' and maps' descriptors ──mmap──► tables that the daemon writes

Only functions of libbpf 1.0 are called (bpf/libbpf.h, bpf/bpf.h).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.bpf_refusal import Host, refusal, stale

_LIBRARY = "libbpf.so.1"
_LOG_BYTES = 1 << 20
MAP_TYPE_HASH = 1
_MAP_TYPE_RINGBUF = 27
FLAG_NO_PREALLOC = 1

_RETURN_0 = struct.pack("=BBhi", 0xB7, 0, 0, 0) + struct.pack("=BBhi", 0x95, 0, 0, 0)
"""r0 = 0; exit (struct bpf_insn in include/uapi/linux/bpf.h)."""

UPDATE_ANY = 0
_MADV_REMOVE = 9
"""include/uapi/asm-generic/mman-common.h."""


class _OpenOptions(ctypes.Structure):
    """struct bpf_object_open_opts."""

    _fields_ = [
        ("sz", ctypes.c_size_t),
        ("object_name", ctypes.c_char_p),
        ("relaxed_maps", ctypes.c_bool),
        ("pin_root_path", ctypes.c_char_p),
        ("unused", ctypes.c_uint32),
        ("kconfig", ctypes.c_char_p),
        ("btf_custom_path", ctypes.c_char_p),
        ("kernel_log_buf", ctypes.c_char_p),
        ("kernel_log_size", ctypes.c_size_t),
        ("kernel_log_level", ctypes.c_uint32),
    ]


class _ProgramOptions(ctypes.Structure):
    """The first members of struct bpf_prog_load_opts."""

    _fields_ = [
        ("sz", ctypes.c_size_t),
        ("attempts", ctypes.c_int),
        ("expected_attach_type", ctypes.c_uint32),
        ("prog_btf_fd", ctypes.c_uint32),
        ("prog_flags", ctypes.c_uint32),
        ("prog_ifindex", ctypes.c_uint32),
        ("kern_version", ctypes.c_uint32),
        ("attach_btf_id", ctypes.c_uint32),
        ("attach_prog_fd", ctypes.c_uint32),
        ("attach_btf_obj_fd", ctypes.c_uint32),
    ]


class MapOptions(ctypes.Structure):
    """struct bpf_map_create_opts."""

    _fields_ = [
        ("sz", ctypes.c_size_t),
        ("btf_fd", ctypes.c_uint32),
        ("btf_key_type_id", ctypes.c_uint32),
        ("btf_value_type_id", ctypes.c_uint32),
        ("btf_vmlinux_value_type_id", ctypes.c_uint32),
        ("inner_map_fd", ctypes.c_uint32),
        ("map_flags", ctypes.c_uint32),
        ("map_extra", ctypes.c_uint64),
    ]


_Pointer = ctypes.c_void_p
_PrintFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def _print_nothing(level: int, format_: bytes, arguments: int) -> int:  # noqa: ARG001 - libbpf_print_fn_t
    """Discard messages: errors reach the caller as errno, the verifier's through the log buffer."""
    return 0


_QUIET = _PrintFunction(_print_nothing)

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "libbpf_set_print": (_Pointer, _PrintFunction),
    "bpf_object__open_file": (_Pointer, ctypes.c_char_p, _Pointer),
    "bpf_object__load": (ctypes.c_int, _Pointer),
    "bpf_object__close": (None, _Pointer),
    "bpf_object__find_map_by_name": (_Pointer, _Pointer, ctypes.c_char_p),
    "bpf_object__find_program_by_name": (_Pointer, _Pointer, ctypes.c_char_p),
    "bpf_program__set_autoload": (ctypes.c_int, _Pointer, ctypes.c_bool),
    "bpf_program__set_expected_attach_type": (ctypes.c_int, _Pointer, ctypes.c_int),
    "bpf_program__fd": (ctypes.c_int, _Pointer),
    "bpf_map__fd": (ctypes.c_int, _Pointer),
    "bpf_map__set_max_entries": (ctypes.c_int, _Pointer, ctypes.c_uint32),
    "bpf_map__max_entries": (ctypes.c_uint32, _Pointer),
    "bpf_map__value_size": (ctypes.c_uint32, _Pointer),
    "bpf_map__initial_value": (_Pointer, _Pointer, ctypes.POINTER(ctypes.c_size_t)),
    "bpf_map_create": (ctypes.c_int, ctypes.c_int, ctypes.c_char_p, *[ctypes.c_uint32] * 3, _Pointer),
    "bpf_map_update_elem": (ctypes.c_int, ctypes.c_int, _Pointer, _Pointer, ctypes.c_uint64),
    "bpf_map_delete_elem": (ctypes.c_int, ctypes.c_int, _Pointer),
    "bpf_map_lookup_elem": (ctypes.c_int, ctypes.c_int, _Pointer, _Pointer),
    "bpf_map_lookup_and_delete_elem": (ctypes.c_int, ctypes.c_int, _Pointer, _Pointer),
    "bpf_map_lookup_batch": (ctypes.c_int, ctypes.c_int, *[_Pointer] * 6),
    "bpf_map_lookup_and_delete_batch": (ctypes.c_int, ctypes.c_int, *[_Pointer] * 6),
    "bpf_prog_load": (ctypes.c_int, ctypes.c_int, *[ctypes.c_char_p] * 3, ctypes.c_size_t, _Pointer),
    "libbpf_find_vmlinux_btf_id": (ctypes.c_int, ctypes.c_char_p, ctypes.c_int),
    "bpf_raw_tracepoint_open": (ctypes.c_int, _Pointer, ctypes.c_int),
    "bpf_link_create": (ctypes.c_int, *[ctypes.c_int] * 3, _Pointer),
}
"""Result and argument types."""


@cache
def library() -> ctypes.CDLL:
    """Return libbpf with its functions typed. Raises KernelFeatureError if it is not installed."""
    try:
        found = ctypes.CDLL(_LIBRARY, use_errno=True)
    except OSError as error:
        raise KernelFeatureError("bpf", f"{_LIBRARY} cannot be loaded: {error}", "apt-get install libbpf1") from error
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(found, name)
        function.restype = result
        function.argtypes = arguments
    found.libbpf_set_print(_QUIET)
    return found


def last_error() -> OSError:
    """Return what the last call failed with, in this thread."""
    error = ctypes.get_errno()
    return OSError(error, os.strerror(error))


class BpfObject:
    """An object file whose programs and maps stay loaded in the kernel until it is closed."""

    def __init__(
        self,
        path: str,
        max_entries: Mapping[str, int],
        constants: Mapping[str, bytes],
        expected: Mapping[str, bytes] = MappingProxyType({}),
        attach_types: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        """max_entries: overrides, by map. constants: initial contents, by .rodata map. expected: those that the file
        must have, unless it is of another build. attach_types: overrides, by program; None: it is not loaded.

        Raises KernelFeatureError with the kernel's or libbpf's reason.
        """
        self._library = library()
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = _OpenOptions(
            sz=ctypes.sizeof(_OpenOptions),
            object_name=b"stapsdt",
            kernel_log_buf=ctypes.cast(log, ctypes.c_char_p),
            kernel_log_size=_LOG_BYTES,
        )
        self._object = self._library.bpf_object__open_file(os.fsencode(path), ctypes.byref(options))
        if not self._object:
            raise refusal(path, last_error(), "", Host.here())
        try:
            self._check_initial(path, expected)
            for name, entries in max_entries.items():
                self._library.bpf_map__set_max_entries(self._map(name), entries)
            for name, content in constants.items():
                self._set_initial(name, content)
            for name, attach_type in attach_types.items():
                self._set_attach_type(name, attach_type)
            self._load(path, log)
        except BaseException:
            self.close()
            raise

    def _load(self, path: str, log: ctypes.Array[ctypes.c_char]) -> None:
        if self._library.bpf_object__load(self._object):
            raise refusal(path, last_error(), log.value.decode(errors="replace"), Host.here())

    def _map(self, name: str) -> int:
        handle: int | None = self._library.bpf_object__find_map_by_name(self._object, name.encode())
        if not handle:
            raise KeyError(name)
        return handle

    def _check_initial(self, path: str, expected: Mapping[str, bytes]) -> None:
        if any(self._initial(name) != content for name, content in expected.items()):
            raise stale(path)

    def _initial(self, name: str) -> bytes | None:
        """Return a map's initial contents; None if there is no such map."""
        handle, size = self._library.bpf_object__find_map_by_name(self._object, name.encode()), ctypes.c_size_t()
        address = self._library.bpf_map__initial_value(handle, ctypes.byref(size)) if handle else None
        return ctypes.string_at(address, size.value) if address else None

    def _set_initial(self, name: str, content: bytes) -> None:
        size = ctypes.c_size_t()
        address = self._library.bpf_map__initial_value(self._map(name), ctypes.byref(size))
        if not address or size.value != len(content):
            raise ValueError(f"{name} has {size.value} bytes, not {len(content)}")
        ctypes.memmove(address, content, len(content))

    def _set_attach_type(self, name: str, attach_type: int | None) -> None:
        if attach_type is None:
            self._library.bpf_program__set_autoload(self._program(name), False)
        else:
            self._library.bpf_program__set_expected_attach_type(self._program(name), attach_type)

    def _program(self, name: str) -> int | None:
        handle: int | None = self._library.bpf_object__find_program_by_name(self._object, name.encode())
        return handle

    def program(self, name: str) -> int:
        """Return a program's descriptor, which is closed with the object."""
        return int(self._library.bpf_program__fd(self._program(name)))

    def map(self, name: str) -> int:
        """Return a map's descriptor, which is closed with the object."""
        return int(self._library.bpf_map__fd(self._map(name)))

    def table(self, name: str) -> mmap.mmap:
        """Map an array map's values, which are contiguous. The mapping outlives the object."""
        handle = self._map(name)
        value_bytes = (self._library.bpf_map__value_size(handle) + 7) // 8 * 8
        size = value_bytes * self._library.bpf_map__max_entries(handle)
        self._drop_initial(handle)
        return mmap.mmap(self._library.bpf_map__fd(handle), size)

    def _drop_initial(self, handle: int) -> None:
        """Free libbpf's copy of a table's initial contents, which before libbpf 1.6 it keeps until the close.

        Later versions map the table itself there, of which the kernel frees nothing.
        """
        size = ctypes.c_size_t()
        if address := self._library.bpf_map__initial_value(handle, ctypes.byref(size)):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(address), size, _MADV_REMOVE)

    def close(self) -> None:
        if self._object:
            self._library.bpf_object__close(self._object)
            self._object = None


def create_ring(size: int) -> int:
    """Create a ring buffer of size bytes, a power of two and at least a page. Return its descriptor. Raises OSError."""
    ring: int = library().bpf_map_create(_MAP_TYPE_RINGBUF, b"stapsdt_ring", 0, 0, size, None)
    if ring < 0:
        raise last_error()
    return ring


def put_map(outer: int, index: int, inner: int) -> None:
    """Put a map into an array of maps. Raises OSError."""
    key, value = ctypes.c_uint32(index), ctypes.c_uint32(inner)
    if library().bpf_map_update_elem(outer, ctypes.byref(key), ctypes.byref(value), UPDATE_ANY):
        raise last_error()


def remove_map(outer: int, index: int) -> None:
    """Remove a map from an array of maps. Raises OSError."""
    key = ctypes.c_uint32(index)
    if library().bpf_map_delete_elem(outer, ctypes.byref(key)):
        raise last_error()


def load_trial(program_type: int, attach_type: int, btf_id: int = 0) -> int:
    """Load a program that does nothing, to see what the kernel takes. btf_id: what it is for, if that is a function.

    Return its descriptor. Raises OSError.
    """
    options = _ProgramOptions(sz=ctypes.sizeof(_ProgramOptions), expected_attach_type=attach_type, attach_btf_id=btf_id)
    program: int = library().bpf_prog_load(
        program_type, b"stapsdt_trial", b"GPL", _RETURN_0, len(_RETURN_0) // 8, ctypes.byref(options)
    )
    if program < 0:
        raise last_error()
    return program


def vmlinux_function(name: str, attach_type: int) -> int:
    """Return the number of a kernel function in the kernel's BTF. Raises OSError if there is none."""
    found: int = library().libbpf_find_vmlinux_btf_id(name.encode(), attach_type)
    if found <= 0:
        raise OSError(-found, os.strerror(-found))
    return found
