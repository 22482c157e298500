"""`stapsdt kernel info` on the running kernel: what it says of functions is what the kernel's own files say."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from stapsdtd.client import Client, RecordShape
from stapsdtd.kernel import btf, function_hooks
from stapsdtd.kernel.function_tables import filter_functions, why_no_filter_functions
from tests.support import TIME_FACTOR, Daemon, require, stapsdt, status_kib, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.parametrize("engine", ["bpf"], indirect=True)]

VMLINUX = btf.path_of(btf.VMLINUX)
_VALUES = 12
_KEPT_KIB = 3 << 10
"""Of 20 MB that a lookup takes while it runs."""


@pytest.fixture(autouse=True)
def _btf() -> None:
    require(os.path.exists(VMLINUX), "the kernel's BTF")


def info(daemon: Daemon, *arguments: str) -> list[dict[str, Any]]:
    done = stapsdt(daemon.target, "kernel", "info", "--json", *arguments)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_prototype(daemon: Daemon) -> None:
    (function,) = info(daemon, "vfs_read")
    assert function["prototype"] == "ssize_t vfs_read(struct file *file, char *buf, size_t count, loff_t *pos)"
    assert (function["module"], function["refused"]) == ("vmlinux", [])
    registers = ["rdi", "rsi", "rdx", "rcx"] if platform.machine() == "x86_64" else ["x0", "x1", "x2", "x3"]
    assert [argument["registers"] for argument in function["args"]] == [[register] for register in registers]


@pytest.mark.vm
def test_ways_are_those_that_doctor_finds(daemon: Daemon) -> None:
    def checked() -> dict[str, dict[str, Any]]:
        done = stapsdt(daemon.target, "doctor", "--json", check=False)
        checks = {check["name"]: check for check in map(json.loads, done.stdout.splitlines())}
        return {} if "has not let go" in done.stdout else checks

    checks = wait_for(checked, "the trials to end")
    assert {*function_hooks.NAMES} <= checks.keys()
    assert checks["kernel BTF"]["available"]
    has = {"fentry": checks["fentry"]["available"], "kprobe": checks["kprobes"]["available"]}
    assert has["kprobe"] == os.path.exists("/sys/bus/event_source/devices/kprobe")
    if TIME_FACTOR > 1 and platform.machine() == "x86_64":
        # Debian's kernels have both
        assert has == {"fentry": True, "kprobe": True}
    (function,) = info(daemon, "vfs_read")
    assert function["attaches_by"] == [name for name, available in has.items() if available]


def test_host_without_any_way_is_told_of_in_one_line(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        ways = client.kernel_functions("vfs_read").ways
    require(not any(way.available for way in ways), "a host without fentry and kprobes")
    done = stapsdt(daemon.target, "kernel", "info", "vfs_read", "vfs_write")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stderr.startswith("stapsdt: no kernel function can be attached to on this host (fentry: ")
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.vm
def test_what_ftrace_cannot_patch_does_not_attach(daemon: Daemon) -> None:
    if reason := why_no_filter_functions():
        pytest.skip(reason)
    wait_for(lambda: info(daemon, "vfs_read")[0]["attaches_by"], "the trials to end")
    functions = info(daemon, "vmlinux:ktime_*", "vmlinux:sched_*", "vmlinux:rcu_*")
    traceable = {symbol.name for symbol in filter_functions() if symbol.module == "vmlinux"}
    reasons = {each["function"]: " ".join(each["refused"]) for each in functions}
    notrace = {name for name, reason in reasons.items() if reason.startswith("ftrace cannot patch it")}
    # of these, the name alone is reason enough
    unclear = {name for name, reason in reasons.items() if re.search("functions have this name| of it", reason)}
    assert notrace
    assert notrace == {name for name in reasons if name not in traceable} - unclear
    assert not any(each["attaches_by"] for each in functions if each["function"] in notrace | unclear)
    assert any(each["attaches_by"] for each in functions)


@pytest.mark.vm
def test_functions_of_a_module(daemon: Daemon) -> None:
    modules = btf.modules()
    if not modules:
        pytest.skip("no module has BTF")
    for module in modules[:3]:
        found = info(daemon, f"{module}:*")
        assert found
        assert {function["module"] for function in found} == {module}
        assert all(f"{function['function']}(" in function["prototype"] for function in found)
        assert not [function for function in found if not function["refused"] and not function["attaches_by"]]


def test_names_that_there_are_not(daemon: Daemon) -> None:
    done = stapsdt(daemon.target, "kernel", "info", "vfs_raed", "_stext", "vfs_read(fil)", check=False)
    assert (done.returncode, "no argument is called fil" in done.stderr) == (2, True)
    done = stapsdt(daemon.target, "kernel", "info", "vfs_raed", "_stext", check=False)
    assert done.returncode == 1
    inlined, untyped = done.stderr.splitlines()
    assert "did you mean vfs_read" in inlined
    assert untyped == "stapsdt: _stext: BTF of vmlinux has no type of it"


@dataclass
class Record:
    size: int
    members: list[tuple[str, int, int, int]] = field(default_factory=list)


@cache
def dumped() -> tuple[dict[int, Record], dict[str, int], dict[int, int]]:
    """Return what bpftool says: records by id, ids of structs by name, and what each other type stands for."""
    dump = subprocess.run(
        ["bpftool", "btf", "dump", "file", VMLINUX, "format", "raw"], capture_output=True, text=True, check=True
    ).stdout
    records: dict[int, Record] = {}
    names: dict[str, int] = {}
    targets: dict[int, int] = {}
    current: Record | None = None
    for line in dump.splitlines():
        if head := re.match(r"\[(\d+)\] (STRUCT|UNION) '([^']*)' size=(\d+)", line):
            current = records[int(head[1])] = Record(int(head[4]))
            names.setdefault(head[3], int(head[1]))
        elif member := re.match(r"\t'([^']*)' type_id=(\d+) bits_offset=(\d+)(?: bitfield_size=(\d+))?", line):
            if current is not None:
                current.members.append((member[1], int(member[2]), int(member[3]), int(member[4] or 0)))
        elif other := re.match(r"\[(\d+)\] (?:CONST|VOLATILE|TYPEDEF|TYPE_TAG) .*type_id=(\d+)", line):
            current, targets[int(other[1])] = None, int(other[2])
        elif line.startswith("["):
            current = None
    return records, names, targets


def places(ident: int, prefix: str, base: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield every member of a record, through those that are records themselves: path, first bit, bits of a field."""
    records, _, targets = dumped()
    for given, target, offset, bits in records[ident].members:
        name = given.replace("(anon)", "")
        if name:
            yield f"{prefix}{name}", base + offset, bits
        while target in targets:
            target = targets[target]  # noqa: PLW2901 - followed
        if target in records:
            yield from places(target, f"{prefix}{name}." if name else prefix, base + offset)


@pytest.mark.parametrize(
    ("function", "argument", "struct"),
    [
        pytest.param("ip_rcv", "skb", "sk_buff", marks=pytest.mark.vm),
        ("tcp_v4_connect", "sk", "sock"),
        ("wake_up_process", "p", "task_struct"),
    ],
)
def test_members_are_where_bpftool_says(daemon: Daemon, function: str, argument: str, struct: str) -> None:
    """Anonymous structs and unions, bit fields and arrays among them."""
    require(shutil.which("bpftool"), "bpftool")
    _, names, _ = dumped()
    # of two members with one path, C takes neither
    expected = {path: (at, bits) for path, at, bits in places(names[struct], "")}
    paths = [path for path in expected if path.count(".") < 2][:_VALUES * 60]  # fmt: skip
    selectors = [
        f"{function}({', '.join(f'{argument}->{path}' for path in paths[first : first + _VALUES])})"
        for first in range(0, len(paths), _VALUES)
    ]
    (found,) = info(daemon, *selectors)
    at = {
        value["text"].partition("->")[2]: (
            8 * value["offsets"][1] + value.get("bit_offset", 0),
            value.get("bits", 0),
        )
        for value in found["values"]
    }
    assert at == {path: expected[path] for path in paths}
    assert len(paths) > 50
    assert any(bits for _, bits in at.values())


def shown(shape: RecordShape, prefix: str, base: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield every member of a shape, as places does of a record."""
    for member in shape.members:
        at = base + member.bit_offset
        if member.name:
            yield f"{prefix}{member.name}", at, member.bits
        if isinstance(member.shape, RecordShape):
            yield from shown(member.shape, f"{prefix}{member.name}." if member.name else prefix, at)


@pytest.mark.parametrize(
    ("value", "struct"),
    [("ip_rcv(skb[0])", "sk_buff"), ("tcp_v4_connect(sk[0])", "sock"), ("vfs_read(file[0])", "file")],
)
def test_shapes_have_the_members_that_bpftool_says(daemon: Daemon, value: str, struct: str) -> None:
    require(shutil.which("bpftool"), "bpftool")
    records, names, _ = dumped()
    with Client(daemon.target) as client:
        (function,) = client.kernel_functions(value, types=True)
    shape = function.values[0].shape
    assert isinstance(shape, RecordShape)
    assert (shape.name, shape.size) == (struct, records[names[struct]].size)
    assert list(shown(shape, "")) == list(places(names[struct], ""))


def test_types_are_not_kept(own_daemon: Daemon) -> None:
    with Client(own_daemon.target) as client:
        for _ in range(3):
            client.kernel_functions("vfs_read")
        before = status_kib(own_daemon.pid, "RssAnon")
        for _ in range(10):
            client.kernel_functions("vfs_read")
            client.kernel_functions("tcp_v4_*")
        assert status_kib(own_daemon.pid, "RssAnon") - before < _KEPT_KIB
