"""Errors of the host name the operation, its object, what that takes, and the command that mends it."""

from __future__ import annotations

import ast
import ctypes
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stapsdtd
from stapsdtd.errors import HostRefusedError, KernelFeatureError
from stapsdtd.kernel import bpf_entries, bpf_links, bpf_rows, host_calls, inotify, libbpf, number_map, reach
from stapsdtd.kernel import process_memory as memory
from stapsdtd.kernel.host_calls import BPF_LINK_CREATE, BPF_MAP_CREATE, OPEN_FILE, Operation, host_call
from stapsdtd.runtime import logs

OPERATIONS = {name: each for name, each in vars(host_calls).items() if isinstance(each, Operation)}
DENIALS = (errno.EPERM, errno.EACCES)
ORDINARY = (
    *DENIALS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ESRCH, errno.EROFS, errno.ENODEV,
    errno.EAGAIN, errno.ENOENT, errno.EINVAL, errno.EBUSY, errno.EIO, errno.ENOSYS, errno.EOPNOTSUPP,
)  # fmt: skip


@pytest.fixture
def rights(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Play what /proc/self/status says of capabilities and of seccomp."""

    def play(capabilities: int, seccomp: int) -> None:
        status = {"CapEff": capabilities, "Seccomp": seccomp}
        monkeypatch.setattr(host_calls, "_status", status.__getitem__)

    return play


@pytest.mark.parametrize("number", ORDINARY)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_refusal_says_what_to_do(name: str, number: int) -> None:
    operation = OPERATIONS[name]
    error = operation.refused("/some/object", number)
    assert str(error) == f"{operation.name} /some/object: {os.strerror(number)}; {operation.remedy(number)}"
    assert (error.errno, error.strerror) == (number, os.strerror(number))
    assert isinstance(error, type(OSError(number, "")))
    assert operation.remedy(number)


def test_a_denial_names_the_capability_that_is_lacking(rights: Callable[[int, int], None]) -> None:
    rights(1 << 38, 2)
    assert BPF_LINK_CREATE.remedy(errno.EPERM) == (
        "it takes CAP_BPF, which this daemon lacks: add it to CapabilityBoundingSet with 'systemctl edit stapsdtd', or "
        "to a container with --cap-add"
    )


def test_a_denial_despite_the_capability_is_a_filters(rights: Callable[[int, int], None]) -> None:
    rights(1 << 39, 2)
    assert BPF_MAP_CREATE.remedy(errno.EPERM) == (
        "it takes CAP_BPF, which this daemon has, so a seccomp filter may forbid bpf(): allow it in SystemCallFilter "
        "with 'systemctl edit stapsdtd', or in the container's profile"
    )


def test_a_denial_without_a_filter_is_a_security_modules(rights: Callable[[int, int], None]) -> None:
    rights(1 << 39, 0)
    assert "a security module may forbid it: 'journalctl -k | grep" in BPF_MAP_CREATE.remedy(errno.EPERM)


def test_an_error_keeps_its_own_words_and_the_most_exact_operation() -> None:
    with pytest.raises(HostRefusedError) as raised, host_call(OPEN_FILE, "/far"), host_call(BPF_MAP_CREATE, "near"):
        raise OSError(errno.EPERM, "not today")
    assert str(raised.value) == "bpf(BPF_MAP_CREATE) near: not today"
    with pytest.raises(FileNotFoundError, match=r"^open /nowhere: No such .*; "), host_call(OPEN_FILE):
        os.open("/nowhere", os.O_RDONLY)


class _Failing:
    """A library each of whose functions fails with EPERM."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def fail(*_: object) -> int:
            ctypes.set_errno(errno.EPERM)
            return 1 if name.startswith(("bpf_map_update", "bpf_map_delete", "bpf_map_lookup")) else -1

        return fail


_ADAPTERS: dict[str, Callable[[], object]] = {
    "ring": lambda: libbpf.create_ring(4096),
    "map of maps": lambda: libbpf.put_map(3, 1, 4),
    "removal": lambda: libbpf.remove_map(3, 1),
    "program": lambda: libbpf.load_trial(2, 0),
    "function": lambda: libbpf.vmlinux_function("vfs_read", 24),
    "numbers": lambda: number_map.NumberMap(4),
    "entries": lambda: bpf_entries.EntryMap(4, 4, 4),
    "rows": lambda: bpf_rows.RowMap(4, 4, 4),
    "tracepoint": lambda: bpf_links.attach_to_tracepoint(3),
    "perf event": lambda: bpf_links.link_perf_event(3, 4, 5),
    "inotify": inotify.Inotify,
    "memory": lambda: memory.touch(os.getpid(), 0, 1),
    "path": lambda: reach.hold("/some/path"),
    "descriptor": lambda: reach.status_of(3),
}


@pytest.mark.parametrize("name", _ADAPTERS)
def test_adapters_name_what_the_kernel_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (libbpf, number_map, bpf_entries, bpf_rows, bpf_links):
        monkeypatch.setattr(module, "library", _Failing)
    for module in (inotify, reach):
        monkeypatch.setattr(module, "_libc", _Failing())
    monkeypatch.setattr(memory, "_libc", _Failing)
    with pytest.raises(HostRefusedError) as raised:
        _ADAPTERS[name]()
    error = raised.value
    assert error.operation in {each.name for each in OPERATIONS.values()}
    assert error.subject
    assert error.remedy


# what must not come back

_PACKAGE = Path(stapsdtd.__file__).parent
_CLIENTS = {"cli", "client", "demo", "provider", "v1"}
"""Run as the user, whose errors are about his own files and are told in one line by the commands."""
_APART = {"procs/opening.py", "procs/copying.py", "inventory/walking.py", "sandbox/worker.py", "sandbox/lockdown.py"}
"""Processes of their own, which say what is wrong in their own protocols."""
_KNOWN_PERF = {"kernel/perf.py"}
"""Explains perf_event_open by itself."""


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = str(path.relative_to(_PACKAGE))
        if name.split("/", maxsplit=1)[0] not in _CLIENTS and name not in _APART | _KNOWN_PERF:
            yield name, ast.parse(path.read_text())


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def test_no_error_of_the_host_is_raised_bare() -> None:
    """`OSError(...)` names neither operation nor remedy; `Operation.refused` does, and `host_call`."""
    allowed = {
        "errors.py",
        "kernel/host_calls.py",
        # the file is checked, which store.load makes an error of OPEN_FILE
        "inventory/store.py",
    }
    found = [
        f"{name}:{node.lineno}"
        for name, module in _modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and _called(node) == "OSError" and name not in allowed
    ]
    assert found == []


def test_last_errors_have_an_operation_and_an_object() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, module in _modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and _called(node) in {"last_error", "get_errno"}
        and not _is_complete(node, module)
    ]
    assert found == []


def _is_complete(call: ast.Call, module: ast.Module) -> bool:
    """Report whether an errno goes into an Operation, or is merely compared."""
    if _called(call) == "last_error":
        return len(call.args) == 2
    return any(
        (_called(node) in {"refused", "bool"} or isinstance(node, ast.Compare))
        and any(each is call for each in ast.walk(node))
        for node in ast.walk(module)
    )


def test_texts_of_errors_are_not_cut() -> None:
    """Strerror is the reason alone. Features tell of it beside their own remedies."""
    allowed = {"errors.py", "config/file.py", "api/errors.py", "kernel/host_calls.py", "api/listeners.py"}
    features = {"features.py", "function_hooks.py", "function_tables.py", "bpf_refusal.py", "btf.py"}
    allowed |= {f"kernel/{name}" for name in features}
    # texts of files, for users
    allowed |= {"elf/__init__.py", "signatures/files.py", "signatures/dtrace_file.py"}
    found = [
        f"{name}:{node.lineno}"
        for name, module in _modules()
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and node.attr == "strerror"
        and name not in allowed
        # the function of os
        and not (isinstance(node.value, ast.Name) and node.value.id == "os")
    ]
    assert found == []


# the log


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    brevity = logs.Brevity()
    caplog.handler.addFilter(brevity)
    yield caplog
    caplog.handler.removeFilter(brevity)


def _log_exception(error: Exception) -> None:
    try:
        raise error
    except type(error):
        logging.getLogger("test").exception("cannot %s", "go on")


def test_refusals_are_logged_in_one_line(log: pytest.LogCaptureFixture) -> None:
    refused = OPEN_FILE.refused("/x", errno.EMFILE)
    for error in (refused, KernelFeatureError("bpf", "is not there", "boot another kernel")):
        _log_exception(error)
        assert log.messages[-1] == f"cannot go on: {error}"
        assert (log.records[-1].levelname, log.records[-1].exc_info) == ("WARNING", None)
    assert "Traceback" not in log.text


def test_a_defect_is_logged_with_its_traceback_once(log: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        _log_exception(ZeroDivisionError("a bug"))
    assert log.text.count("Traceback") == 1
    assert log.messages[1:] == ["cannot go on: ZeroDivisionError: a bug (its traceback is above)"] * 2
    assert {record.levelname for record in log.records} == {"ERROR"}
