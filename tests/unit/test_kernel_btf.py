"""BTF through libbpf: of a compiled object, of a module on top of it, and none at all."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from stapsdtd.btf.types import BtfError, Function, Prototype, Record, TypeId, Void, stripped
from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import btf, libbpf
from stapsdtd.kernel.btf import Btf
from tests.unit.kernel_types import layouts_path, prototype


def module_btf(base: Btf, path: Path, *names: str) -> Path:
    """Write the BTF of a module, with functions that have the type of the kernel's by_pointer."""
    library = libbpf.library()
    new, add, raw = library.btf__new_empty_split, library.btf__add_func, library.btf__raw_data
    new.restype, new.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    add.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
    raw.restype, raw.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32))
    function = base.get(base.function("by_pointer") or TypeId(0))
    assert isinstance(function, Function)
    split = new(base.handle)
    for name in names:
        assert add(split, name.encode(), 1, function.prototype) > 0
    size = ctypes.c_uint32()
    path.write_bytes(ctypes.string_at(raw(split, ctypes.byref(size)), size.value))
    library.btf__free(split)
    return path


def test_functions_and_types() -> None:
    with Btf(str(layouts_path())) as types:
        found = dict(types.functions())
        assert found.keys() == {"by_pointer", "returns_nothing"}
        assert types.function("by_pointer") == found["by_pointer"]
        assert types.function("outer") is None
        pointer = types.get(prototype(types, "by_pointer").parameters[0].type)
        assert types.pointer_bytes == 8
        assert types.get(TypeId(0)) == Void()
        record = stripped(types, getattr(pointer, "target"))  # noqa: B009 - of a type that the line below checks
    assert isinstance(record, Record)
    assert record.name == "outer"


def test_type_that_there_is_not() -> None:
    with Btf(str(layouts_path())) as types, pytest.raises(BtfError, match="type 100000 is none"):
        types.get(TypeId(100_000))


def test_module_has_its_own_functions_and_the_types_of_its_base(tmp_path: Path) -> None:
    with Btf(str(layouts_path())) as base:
        path = module_btf(base, tmp_path / "module", "probe_device", "returns_nothing")
        with Btf(str(path), base) as module:
            assert [name for name, _ in module.functions()] == ["probe_device", "returns_nothing"]
            own = module.function("returns_nothing")
            assert own is not None
            assert own >= base.count
            assert module.function("by_pointer") is None
            found = prototype(module, "probe_device")
            assert isinstance(found, Prototype)
            assert [parameter.name for parameter in found.parameters][:2] == ["outer", "text"]


@pytest.mark.parametrize("content", [None, b"", b"\x9f\xeb\1\0", b"\x7fELF" + bytes(60)])
def test_no_btf(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "vmlinux"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KernelFeatureError, match="CONFIG_DEBUG_INFO_BTF") as raised:
        Btf(str(path))
    assert str(path) in raised.value.reason


def test_closed() -> None:
    types = Btf(str(layouts_path()))
    types.close()
    types.close()
    with pytest.raises(ValueError, match="closed"):
        types.get(TypeId(1))


def test_modules(tmp_path: Path) -> None:
    for name in ("vmlinux", "nf_nat", "ext4"):
        (tmp_path / name).touch()
    assert btf.modules(str(tmp_path)) == ["ext4", "nf_nat"]
    with pytest.raises(KernelFeatureError, match="CONFIG_DEBUG_INFO_BTF"):
        btf.modules(str(tmp_path / "none"))
