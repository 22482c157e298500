"""Object files in the kernel: their programs and maps, and further instances of a program.

object file ──BpfObject──► programs' and maps' descriptors ──mmap──► tables that the daemon writes
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.bpf_refusal import Host, refusal, stale
from stapsdtd.kernel.host_calls import BPF_PROG_LOAD, BUFFER_MMAP, MAKE_DESCRIPTOR, host_call
from stapsdtd.kernel.libbpf import last_error, library

_LOG_BYTES = 1 << 20
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


class _File:
    """An object file that libbpf has opened, which is loaded or closed next."""

    def __init__(self, path: str, expected: Mapping[str, bytes]) -> None:
        """Raises KernelFeatureError."""
        self._library = library()
        self._path = path
        self._log = ctypes.create_string_buffer(_LOG_BYTES)
        options = _OpenOptions(
            sz=ctypes.sizeof(_OpenOptions),
            object_name=b"stapsdt",
            kernel_log_buf=ctypes.cast(self._log, ctypes.c_char_p),
            kernel_log_size=_LOG_BYTES,
        )
        self._handle = self._library.bpf_object__open_file(os.fsencode(path), ctypes.byref(options))
        if not self._handle:
            raise refusal(path, last_error(BPF_PROG_LOAD, path), "", Host.here())
        if any(self.initial(name) != content for name, content in expected.items()):
            self.close()
            raise stale(path)

    def load(self) -> None:
        """Raises KernelFeatureError with the kernel's or libbpf's reason."""
        if self._library.bpf_object__load(self._handle):
            error = last_error(BPF_PROG_LOAD, self._path)
            raise refusal(self._path, error, self._log.value.decode(errors="replace"), Host.here())

    def map(self, name: str) -> int:
        """Raises KeyError."""
        handle: int | None = self._library.bpf_object__find_map_by_name(self._handle, name.encode())
        if not handle:
            raise KeyError(name)
        return handle

    def maps(self) -> Iterator[tuple[str, int]]:
        handle = None
        while handle := self._library.bpf_object__next_map(self._handle, handle):
            yield self._library.bpf_map__name(handle).decode(), handle

    def program(self, name: str) -> int | None:
        """Return None if the file was compiled for a machine that has no such program."""
        handle: int | None = self._library.bpf_object__find_program_by_name(self._handle, name.encode())
        return handle

    def programs(self) -> Iterator[int]:
        handle = None
        while handle := self._library.bpf_object__next_program(self._handle, handle):
            yield handle

    def initial(self, name: str) -> bytes | None:
        """Return a map's initial contents; None if there is no such map."""
        handle, size = self._library.bpf_object__find_map_by_name(self._handle, name.encode()), ctypes.c_size_t()
        address = self._library.bpf_map__initial_value(handle, ctypes.byref(size)) if handle else None
        return ctypes.string_at(address, size.value) if address else None

    def set_initial(self, name: str, content: bytes) -> None:
        size = ctypes.c_size_t()
        address = self._library.bpf_map__initial_value(self.map(name), ctypes.byref(size))
        if not address or size.value != len(content):
            raise ValueError(f"{name} has {size.value} bytes, not {len(content)}")
        ctypes.memmove(address, content, len(content))

    def close(self) -> None:
        """What holds a descriptor of the kernel's own stays."""
        if self._handle:
            self._library.bpf_object__close(self._handle)
            self._handle = None


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
        self._expected = expected
        self._file = _File(path, expected)
        try:
            for name, entries in max_entries.items():
                self._library.bpf_map__set_max_entries(self._file.map(name), entries)
            for name, content in constants.items():
                self._file.set_initial(name, content)
            for name, attach_type in attach_types.items():
                self._set_attach_type(self._file.program(name), attach_type)
            self._file.load()
        except BaseException:
            self.close()
            raise

    def _set_attach_type(self, program: int | None, attach_type: int | None) -> None:
        if program is None:
            return
        if attach_type is None:
            self._library.bpf_program__set_autoload(program, False)
        else:
            self._library.bpf_program__set_expected_attach_type(program, attach_type)

    def instance(self, path: str, name: str, *, function: str = "") -> int:
        """Load a program once more, with the maps of this object. Return its descriptor.

        path: of the same file. function: of the kernel, which it is for.

        The verifier takes some 0.1 s for a large one. Raises KernelFeatureError, also if the file is of another build.
        """
        file = _File(path, self._expected)
        try:
            program = file.program(name)
            if program is None:
                raise KernelFeatureError("bpf", f"{os.path.basename(path)} has no {name}", "")
            for other in file.programs():
                self._library.bpf_program__set_autoload(other, other == program)
            for map_name, handle in file.maps():
                if self._library.bpf_map__reuse_fd(handle, self.map(map_name)):
                    raise refusal(path, last_error(BPF_PROG_LOAD, path), "", Host.here())
            if function and self._library.bpf_program__set_attach_target(program, 0, function.encode()):
                reason = f"the kernel's BTF has no function {function}"
                raise KernelFeatureError("bpf", reason, "")
            file.load()
            with host_call(MAKE_DESCRIPTOR, name):
                return os.dup(self._library.bpf_program__fd(program))
        finally:
            file.close()

    def program(self, name: str) -> int:
        """Return a program's descriptor, which is closed with the object."""
        return int(self._library.bpf_program__fd(self._file.program(name)))

    def map(self, name: str) -> int:
        """Return a map's descriptor, which is closed with the object."""
        return int(self._library.bpf_map__fd(self._file.map(name)))

    def max_entries(self, name: str) -> int:
        """Return a map's size; a ring's in bytes."""
        return int(self._library.bpf_map__max_entries(self._file.map(name)))

    def table(self, name: str) -> mmap.mmap:
        """Map an array map's values, which are contiguous. The mapping outlives the object."""
        handle = self._file.map(name)
        value_bytes = (self._library.bpf_map__value_size(handle) + 7) // 8 * 8
        size = value_bytes * self._library.bpf_map__max_entries(handle)
        self._drop_initial(handle)
        with host_call(BUFFER_MMAP, name):
            return mmap.mmap(self._library.bpf_map__fd(handle), size)

    def _drop_initial(self, handle: int) -> None:
        """Free libbpf's copy of a table's initial contents, which before libbpf 1.6 it keeps until the close.

        Later versions map the table itself there, of which the kernel frees nothing.
        """
        size = ctypes.c_size_t()
        if address := self._library.bpf_map__initial_value(handle, ctypes.byref(size)):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(address), size, _MADV_REMOVE)

    def close(self) -> None:
        self._file.close()
