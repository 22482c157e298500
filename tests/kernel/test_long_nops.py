"""Probes at nops that some kernels turn into calls: what is traced computes and ends as it does untraced."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Client, SiteState
from stapsdtd.kernel import nop_trial
from stapsdtd.kernel.nops import probe_nops
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import TARGETS, Daemon, Recorder, Ticker, children, compile_target, require, stapsdt, wait_for

pytestmark = pytest.mark.kernel

_UPROBE = 336
_REWRITTEN = {errno.ENXIO: 5, errno.EPROTO: 10, errno.ENOSYS: None}

LEAVES = 10_000
FORKS = 20


@pytest.fixture(scope="module")
def rewritten() -> int | None:
    """The length of the nops that this kernel turns into calls, by what it answers outside of such a call."""
    require(platform.machine() == "x86_64", "x86-64")
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.syscall(_UPROBE) == -1
    return _REWRITTEN[ctypes.get_errno()]


@contextmanager
def longnop(folder: Path, nop_bytes: int, *flags: str) -> Iterator[tuple[Path, Ticker]]:
    program = compile_target("longnop.c", folder / f"longnop{nop_bytes}", f"-DNOP_BYTES={nop_bytes}", *flags)
    with Ticker(program) as running:
        yield program, running


def results(running: Ticker) -> tuple[int, int]:
    """How many results are wrong, and which signal killed the child."""
    return running.do(f"leaf {LEAVES}"), running.do(f"fork {FORKS}")


@pytest.mark.parametrize("nop_bytes", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_no_result_is_wrong_and_no_child_dies(
    daemon: Daemon, tmp_path: Path, nop_bytes: int, rewritten: int | None
) -> None:
    with (
        longnop(tmp_path, nop_bytes) as (program, running),
        Recorder(daemon.target, f"longnop:{program}::*(arg0)") as recorder,
    ):
        assert results(running) == (0, 0)
    assert len(recorder.sites) >= 2
    if nop_bytes == rewritten:
        assert not recorder.armed()
        for site in recorder.sites:
            assert site.state is SiteState.REFUSED
            assert f"this kernel turns its {nop_bytes}-byte nop into a call" in site.reason
        assert not recorder.events
    elif recorder.armed():
        assert len(recorder.armed()) == len(recorder.sites)
        assert len(recorder.events) == LEAVES + 2 * FORKS
    else:
        # uprobes take no cs prefix, which only the longest ones have (is_prefix_bad in arch/x86/kernel/uprobes.c)
        assert nop_bytes == 10
        assert not recorder.events


@pytest.mark.parametrize("nop_bytes", [5, 10])
def test_a_one_byte_nop_in_front_of_it_is_armed(daemon: Daemon, tmp_path: Path, nop_bytes: int) -> None:
    with (
        longnop(tmp_path, nop_bytes, "-DLEADING") as (program, running),
        Recorder(daemon.target, f"longnop:{program}::*(arg0)") as recorder,
    ):
        assert results(running) == (0, 0)
    assert recorder.sites
    assert recorder.armed() == list(recorder.sites)
    assert len(recorder.events) == LEAVES + 2 * FORKS


def test_users_are_told(daemon: Daemon, tmp_path: Path, rewritten: int | None) -> None:
    reason = f"this kernel turns its {rewritten}-byte nop into a call" if rewritten else ""
    with longnop(tmp_path, rewritten or 5) as (program, running):
        selector = f"longnop:{program}::*"
        wait_for(
            lambda: stapsdt(daemon.target, "list", selector, check=False).returncode == 0, "the program to be listed"
        )
        listed = stapsdt(daemon.target, "list", selector, "--json")
        sites = [site for line in listed.stdout.splitlines() for site in json.loads(line)["sites"]]
        assert sites
        traced = stapsdt(daemon.target, "trace", selector, "--pid", str(running.pid), "--duration", "0.1", check=False)
        assert traced.returncode == (1 if rewritten else 0)
        if rewritten:
            assert all(reason in site["refused"] for site in sites)
            assert "cannot be armed here: " in listed.stderr
            assert f" and {len(sites) - 1} more\n" in listed.stderr
            assert f"{len(sites)} sites refused" in traced.stderr
            assert reason in traced.stderr
        else:
            assert not any("refused" in site for site in sites)
            assert f"{len(sites)} sites armed" in traced.stderr
    with Client(daemon.target) as client:
        (feature,) = [feature for feature in client.info().features if feature.name == "safe nops"]
    assert feature.available
    told = f"whose nop is {rewritten} bytes long: these are refused" if rewritten else "leaves nops as they are"
    assert told in feature.detail
    assert f"safe nops: {feature.detail}" in stapsdt(daemon.target, "doctor").stdout


def test_what_became_one_since_it_was_read_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    """A memfd is written to through a mapping, which leaves its times as they were."""
    library = compile_target("library.c", tmp_path / "library.so", "-shared", "-fPIC").read_bytes()
    memfd = os.memfd_create("changing")
    try:
        os.write(memfd, library)
        path = f"/proc/{os.getpid()}/fd/{memfd}"
        with (
            Ticker(sys.executable, TARGETS / "mapper.py") as mapper,
            Client(daemon.target) as client,
            mmap.mmap(memfd, 0) as writable,
        ):
            # the first write through a mapping changes the file's time, later ones do not
            writable[0] = writable[0]
            mapper.do(f"map {path}")
            (probe,) = wait_for(
                lambda: client.list_probes(["library:*"], pids=[mapper.pid]).probes, "the memfd to be listed"
            )
            (site,) = probe.sites
            before = os.fstat(memfd).st_mtime_ns
            writable[site.offset : site.offset + 5] = bytes.fromhex("0f1f440000")
            assert os.fstat(memfd).st_mtime_ns == before
            with Recorder(daemon.target, "library:*", pids=[mapper.pid]) as recorder:
                pass
    finally:
        os.close(memfd)
    (status,) = recorder.sites
    assert status.state is SiteState.REFUSED
    assert status.reason == "the file changed since it was read: a nop of 5 bytes instead of 1"


@pytest.mark.alone
def test_trying_it_leaves_nothing(tracefs: Tracefs, rewritten: int | None) -> None:
    before = tracefs.read("uprobe_events"), children()
    found = probe_nops()
    assert found.rewritten == (frozenset() if rewritten is None else {rewritten})
    assert not found.unknown
    # what the kernel says of itself and what it does are the same
    tried, answer = nop_trial.run()
    assert {length for length, was_rewritten in tried.items() if was_rewritten} == found.rewritten
    assert answer == nop_trial.syscall_errno()
    assert (tracefs.read("uprobe_events"), children()) == before


_REFUSE = """
import ctypes, errno, os, struct, sys
numbers = [int(number) for number in sys.argv[1].split(",")]
LOAD_NUMBER, IS, ANSWER = 0x20, 0x15, 0x06
lines = [(LOAD_NUMBER, 0, 0, 0)]
lines += [(IS, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
lines += [(ANSWER, 0, 0, 0x7FFF0000), (ANSWER, 0, 0, 0x50000 | errno.ENOSYS)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
assert ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) == 0
from stapsdtd.kernel.nops import probe_nops
found = probe_nops()
print(sorted(found.rewritten), sorted(found.unknown))
"""
_PERF_EVENT_OPEN, _EXECVE = 298, 59


@pytest.mark.parametrize("refused", [(_UPROBE,), (_UPROBE, _PERF_EVENT_OPEN), (_UPROBE, _EXECVE)])
def test_a_seccomp_profile_that_knows_nothing_of_it(refused: tuple[int, ...], rewritten: int | None) -> None:
    """It answers as an old kernel would. Where the trial cannot be made either, nothing that may be rewritten is safe.

    Kernels that rewrite nops let this syscall through all filters (kernel/seccomp.c); the others do not.
    """
    is_known = {_UPROBE: True, _PERF_EVENT_OPEN: rewritten is not None, _EXECVE: False}[refused[-1]]
    command = [sys.executable, "-c", _REFUSE, ",".join(map(str, refused))]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    certain = [] if rewritten is None else [rewritten]
    assert found == (f"{certain} []" if is_known else "[] [5, 10]")
