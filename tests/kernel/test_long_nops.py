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
from functools import partial
from pathlib import Path

import pytest

from stapsdtd.capture.names import Owner
from stapsdtd.client import Client, SiteState
from stapsdtd.kernel import nop_trial
from stapsdtd.kernel.nop_arming import arm_by_event, arm_by_link
from stapsdtd.kernel.nops import probe_nops
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.kernel.uprobe_links import are_supported
from tests.refusing import refusing
from tests.support import (
    TARGETS,
    TIME_FACTOR,
    Daemon,
    Recorder,
    Ticker,
    children,
    compile_target,
    require,
    stapsdt,
    wait_for,
)

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


def _by_event() -> nop_trial.Arm:
    return partial(arm_by_event, Owner.this_process().group)


@pytest.mark.alone
@pytest.mark.vm
def test_trying_it_leaves_nothing(tracefs: Tracefs, rewritten: int | None) -> None:
    before = tracefs.read("uprobe_events"), children()
    found = probe_nops(Owner.this_process().group)
    assert found.rewritten == (frozenset() if rewritten is None else {rewritten})
    assert not found.unknown
    # what the kernel says of itself and what it does are the same
    for arm in [_by_event(), *([arm_by_link] if are_supported() else [])]:
        tried, answer = nop_trial.run(arm)
        assert {length for length, was_rewritten in tried.items() if was_rewritten} == found.rewritten
        assert answer == nop_trial.syscall_errno()
        assert tried.keys() == {5, 10}
    assert (tracefs.read("uprobe_events"), children()) == before


_TRIAL = """
from stapsdtd.capture.names import Owner
from stapsdtd.kernel.nops import probe_nops
found = probe_nops(Owner.this_process().group)
print(sorted(found.rewritten), sorted(found.unknown))
"""


@pytest.mark.parametrize("answer", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize(
    ("refused", "is_known"),
    [
        (["uprobe"], True),
        pytest.param(["uprobe", "perf_event_open"], are_supported(), marks=pytest.mark.vm),
        (["uprobe", "bpf"], True),
        (["uprobe", "perf_event_open", "bpf"], False),
        (["uprobe", "execve"], False),
    ],
)
def test_a_seccomp_profile_that_knows_nothing_of_it(
    refused: list[str], is_known: bool, answer: int, rewritten: int | None
) -> None:
    """It answers as an old kernel would, or refuses. Where the trial cannot be made, nothing that may be rewritten is
    safe.

    Kernels that rewrite nops let this syscall through all filters (kernel/seccomp.c); the others do not.
    """
    is_known = is_known or (rewritten is not None and "execve" not in refused)
    command = [*refusing(*refused, answer=answer), sys.executable, "-c", _TRIAL]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20 * TIME_FACTOR).stdout.strip()
    certain = [] if rewritten is None else [rewritten]
    assert found == (f"{certain} []" if is_known else "[] [5, 10]")


@pytest.mark.vm
def test_what_a_filter_hides_is_seen_where_it_happens(rewritten: int | None) -> None:
    """As if the syscall said nothing: the trial alone finds what the kernel makes of armed nops."""
    script = """
from stapsdtd.kernel import nop_trial, nops
from functools import partial
from stapsdtd.capture.names import Owner
from stapsdtd.kernel.nop_arming import arm_by_event
tried, _ = nop_trial.run(partial(arm_by_event, Owner.this_process().group))
found = nops.judge(tried, None, is_filtered=True)
print(sorted(found.rewritten), sorted(found.unknown))
"""
    command = [*refusing("uprobe"), sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20 * TIME_FACTOR).stdout.strip()
    assert found == f"{[] if rewritten is None else [rewritten]} []"
