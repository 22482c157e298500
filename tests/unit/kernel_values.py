"""tests/targets/kernel_values.c: the shapes of its structs, and the bytes that its library fills them with."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from stapsdtd.api.kernel_shapes import shape_message
from stapsdtd.btf.types import Pointer, TypeId
from stapsdtd.client.kernel_shapes import RecordShape, Shape, shapes
from stapsdtd.functions.shapes import ShapeTable
from stapsdtd.kernel.btf import Btf
from tests.support import TARGETS
from tests.unit.kernel_types import prototype

SOURCE = TARGETS / "kernel_values.c"


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="kernel_values")


@cache
def btf_path() -> Path:
    path = Path(_folder().name, "kernel_values.o")
    subprocess.run(["clang", "-target", "bpf", "-g", "-O2", "-c", "-o", path, SOURCE], check=True)
    return path


@cache
def library() -> ctypes.CDLL:
    path = Path(_folder().name, "kernel_values.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, SOURCE], check=True)
    return ctypes.CDLL(str(path))


def pointed_to(types: Btf, name: str) -> TypeId:
    """Return the struct that an argument of takes() points to."""
    (parameter,) = (each for each in prototype(types, "takes").parameters if each.name == name)
    pointer = types.get(parameter.type)
    assert isinstance(pointer, Pointer)
    return pointer.target


@cache
def shape_of(name: str) -> RecordShape:
    """Return the shape of a struct that takes() has a pointer to, as a client gets it."""
    table = ShapeTable()
    with Btf(str(btf_path())) as types:
        number = table.add(types, pointed_to(types, name))
    found: Shape = shapes(map(shape_message, table.shapes))[number]
    assert isinstance(found, RecordShape)
    return found


def filled(function: str, *arguments: int) -> bytes:
    """Return the struct that a function of the library fills."""
    memory = ctypes.create_string_buffer(4096)
    call = library()[function]
    call.restype = ctypes.c_ulong
    size: int = call(memory, *map(ctypes.c_ulonglong, arguments))
    return memory.raw[:size]
