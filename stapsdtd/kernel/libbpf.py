"""Bindings to the libbpf of the system: its functions, rings, arrays of maps, and programs of no file.

Those of a file are in `bpf_object`. Only functions of libbpf 1.0 are called (bpf/libbpf.h, bpf/bpf.h).
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any

from stapsdtd.errors import HostRefusedError, KernelFeatureError
from stapsdtd.kernel.host_calls import (
    BPF_MAP_CREATE,
    BPF_MAP_DELETE,
    BPF_MAP_UPDATE,
    BPF_PROG_LOAD,
    BTF_LOOKUP,
    Operation,
)

_LIBRARY = "libbpf.so.1"
MAP_TYPE_HASH = 1
_MAP_TYPE_RINGBUF = 27
FLAG_NO_PREALLOC = 1

_RETURN_0 = struct.pack("=BBhi", 0xB7, 0, 0, 0) + struct.pack("=BBhi", 0x95, 0, 0, 0)
"""r0 = 0; exit (struct bpf_insn in include/uapi/linux/bpf.h)."""

UPDATE_ANY = 0


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
    "bpf_program__set_attach_target": (ctypes.c_int, _Pointer, ctypes.c_int, ctypes.c_char_p),
    "bpf_program__fd": (ctypes.c_int, _Pointer),
    "bpf_object__next_program": (_Pointer, _Pointer, _Pointer),
    "bpf_object__next_map": (_Pointer, _Pointer, _Pointer),
    "bpf_map__name": (ctypes.c_char_p, _Pointer),
    "bpf_map__reuse_fd": (ctypes.c_int, _Pointer, ctypes.c_int),
    "bpf_obj_get_info_by_fd": (ctypes.c_int, ctypes.c_int, _Pointer, _Pointer),
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
    "bpf_map_get_next_key": (ctypes.c_int, ctypes.c_int, _Pointer, _Pointer),
    "bpf_map_lookup_batch": (ctypes.c_int, ctypes.c_int, *[_Pointer] * 6),
    "bpf_map_lookup_and_delete_batch": (ctypes.c_int, ctypes.c_int, *[_Pointer] * 6),
    "bpf_prog_load": (ctypes.c_int, ctypes.c_int, *[ctypes.c_char_p] * 3, ctypes.c_size_t, _Pointer),
    "libbpf_find_vmlinux_btf_id": (ctypes.c_int, ctypes.c_char_p, ctypes.c_int),
    "bpf_raw_tracepoint_open": (ctypes.c_int, _Pointer, ctypes.c_int),
    "bpf_iter_create": (ctypes.c_int, ctypes.c_int),
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


def last_error(operation: Operation, subject: str) -> HostRefusedError:
    """Return what the last call failed with, in this thread. subject: what it was of, such as a map's name."""
    return operation.refused(subject, ctypes.get_errno())


def create_ring(size: int) -> int:
    """Create a ring buffer of size bytes, a power of two and at least a page. Return its descriptor. Raises OSError."""
    ring: int = library().bpf_map_create(_MAP_TYPE_RINGBUF, b"stapsdt_ring", 0, 0, size, None)
    if ring < 0:
        raise last_error(BPF_MAP_CREATE, f"a ring of {size} bytes")
    return ring


def put_map(outer: int, index: int, inner: int) -> None:
    """Put a map into an array of maps. Raises OSError."""
    key, value = ctypes.c_uint32(index), ctypes.c_uint32(inner)
    if library().bpf_map_update_elem(outer, ctypes.byref(key), ctypes.byref(value), UPDATE_ANY):
        raise last_error(BPF_MAP_UPDATE, f"entry {index} of an array of maps")


def remove_map(outer: int, index: int) -> None:
    """Remove a map from an array of maps. Raises OSError."""
    key = ctypes.c_uint32(index)
    if library().bpf_map_delete_elem(outer, ctypes.byref(key)):
        raise last_error(BPF_MAP_DELETE, f"entry {index} of an array of maps")


def load_trial(program_type: int, attach_type: int, btf_id: int = 0) -> int:
    """Load a program that does nothing, to see what the kernel takes. btf_id: what it is for, if that is a function.

    Return its descriptor. Raises OSError.
    """
    options = _ProgramOptions(sz=ctypes.sizeof(_ProgramOptions), expected_attach_type=attach_type, attach_btf_id=btf_id)
    program: int = library().bpf_prog_load(
        program_type, b"stapsdt_trial", b"GPL", _RETURN_0, len(_RETURN_0) // 8, ctypes.byref(options)
    )
    if program < 0:
        raise last_error(BPF_PROG_LOAD, "stapsdt_trial")
    return program


def vmlinux_function(name: str, attach_type: int) -> int:
    """Return the number of a kernel function in the kernel's BTF. Raises OSError if there is none."""
    found: int = library().libbpf_find_vmlinux_btf_id(name.encode(), attach_type)
    if found <= 0:
        raise BTF_LOOKUP.refused(name, -found)
    return found
