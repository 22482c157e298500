from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from stapsdtd.client import Client, ProbeAdded, ProbeRemoved, SnapshotComplete
from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import own
from tests.support import (
    PYPROGRAM,
    ROOT,
    TARGETS,
    TICKER,
    Daemon,
    Recorder,
    Ticker,
    descriptors,
    resident_kib,
    running_daemon,
    wait_for,
)

pytestmark = pytest.mark.kernel


@pytest.fixture
def pyprogram(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ticker]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Ticker(sys.executable, TARGETS / "provider_program.py", PYPROGRAM) as running:
        yield running


def is_armed(recorder: Recorder, count: int) -> bool:
    return len(recorder.armed()) == count


def probe_names(daemon: Daemon, pid: int) -> set[str]:
    with Client(daemon.target) as client:
        return {f"{probe.provider}:{probe.name}" for probe in client.list_probes(pids=[pid])}


@pytest.mark.vm
def test_processes_from_before_and_after_the_start_are_listed(
    ticker: Ticker, own_daemon: Daemon, ticker_program: Path
) -> None:
    assert probe_names(own_daemon, ticker.pid)
    with Ticker(ticker_program) as later:
        wait_for(lambda: probe_names(own_daemon, later.pid), "the new process")
        assert probe_names(own_daemon, later.pid) == {f"{TICKER}:tick", f"{TICKER}:values", f"{TICKER}:text"}
    wait_for(lambda: not probe_names(own_daemon, later.pid), "the process to be gone")


@pytest.mark.vm
def test_library_opened_after_the_subscription_arms_by_itself(daemon: Daemon, ticker: Ticker, library: Path) -> None:
    with Recorder(daemon.target, f"library:{library}::called") as recorder:
        assert recorder.sites == ()
        ticker.do(f"open {library}")
        wait_for(recorder.armed, "the library to be armed")
        ticker.do("call 3")
    assert recorder.values() == [(0,), (1,), (2,)]


@pytest.mark.vm
def test_provider_memfd_with_closed_descriptor_arms_by_itself(daemon: Daemon, pyprogram: Ticker) -> None:
    with Recorder(daemon.target, f"{PYPROGRAM}:request(arg0:str, arg1)") as recorder:
        pyprogram.do("load")
        wait_for(recorder.armed, "the memfd to be armed")
        assert pyprogram.do("close") == 1
        pyprogram.do("fire 2")
        pyprogram.do("fork 1")
    assert recorder.values() == [("/page/0", 0), ("/page/1", 1), ("/child/0", 0)]
    assert recorder.events[0].probe.path == f"/memfd:libstapsdt:{PYPROGRAM}"
    assert len({event.pid for event in recorder.events}) == 2
    assert pyprogram.do("enabled") == 0


def test_memfd_mapped_before_with_closed_descriptor(daemon: Daemon, pyprogram: Ticker) -> None:
    pyprogram.do("load")
    pyprogram.do("close")
    with Recorder(daemon.target, f"{PYPROGRAM}:*(arg1)") as recorder:
        pyprogram.do("fire 2")
    assert recorder.values() == [(0,), (1,)]


def test_reloaded_and_unloaded_memfds_are_let_go(
    daemon: Daemon, engine: str, pyprogram: Ticker, tracefs: Tracefs
) -> None:
    with Recorder(daemon.target, f"{PYPROGRAM}:request(arg1)") as recorder:
        pyprogram.do("load")
        for generation in range(1, 6):
            wait_for(partial(is_armed, recorder, generation), "the new library to be armed")
            pyprogram.do("fire 2")
            pyprogram.do("reload" if generation < 5 else "unload")
        wait_for(
            lambda: not [name for name in own(tracefs, daemon.pid) if "/" in name], "what was attached to be removed"
        )
        assert len(own(tracefs, daemon.pid)) == (1 if engine == "ftrace" else 0)
        account = recorder.finish()
    assert recorder.values() == [(0,), (1,)] * 5
    assert account.fired == account.delivered == 10


@pytest.mark.vm
def test_deleted_program(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    program = shutil.copy(ticker_program, tmp_path / "deleted")
    with Ticker(program) as ticker:
        os.unlink(program)
        with Recorder(daemon.target, f"{TICKER}:tick(arg0)") as recorder:
            assert ticker.do("fire 2") == 1
        assert recorder.values() == [(0,), (1,)]
        assert recorder.events[0].probe.path == str(program)


def test_replaced_program_is_another_object(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    program = shutil.copy(ticker_program, tmp_path / "program")
    with Ticker(program) as old:
        os.rename(shutil.copy(ticker_program, tmp_path / "upgrade"), program)
        with Recorder(daemon.target, f"{TICKER}:tick(arg0)") as recorder, Ticker(program) as new:
            wait_for(lambda: len(recorder.armed()) == 2, "both versions to be armed")
            old.do("fire 1")
            new.do("fire 1")
        assert sorted(event.pid for event in recorder.events) == sorted([old.pid, new.pid])
        assert old.semaphore == 0


def test_other_mount_namespace(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    script = f"mount -t tmpfs none {inside} && cp {ticker_program} {inside}/hidden && exec {inside}/hidden"
    with (
        Recorder(daemon.target, f"{TICKER}:tick(arg0)") as recorder,
        Ticker("unshare", "-m", "sh", "-c", script) as ticker,
    ):
        assert not (inside / "hidden").exists()
        wait_for(recorder.armed, "the hidden program to be armed")
        assert ticker.do("fire 2") == 1
    assert recorder.values() == [(0,), (1,)]
    assert recorder.events[0].probe.path == f"{inside}/hidden"


@pytest.mark.alone
def test_processes_of_a_moment(own_daemon: Daemon, ticker_program: Path, ticker: Ticker, tracefs: Tracefs) -> None:
    def live_and_die(count: int) -> None:
        for _ in range(count):
            subprocess.run([ticker_program, "3"], check=True)

    with Recorder(own_daemon.target, f"{TICKER}:{ticker_program}::tick(arg0)") as recorder:
        live_and_die(50)
        wait_for(lambda: len(recorder.events) == 150, "the first events")
        before = descriptors(own_daemon.pid), resident_kib(own_daemon.pid)
        live_and_die(500)
        wait_for(lambda: len(recorder.events) == 550 * 3, "all events")
        assert len([name for name in own(tracefs, own_daemon.pid) if "/" in name]) == 1
        wait_for(lambda: descriptors(own_daemon.pid) <= before[0], "the descriptors to be as before")
        assert resident_kib(own_daemon.pid) - before[1] < 8 * 1024
        account = recorder.finish()
    assert account.fired == account.delivered == 550 * 3
    assert len({event.pid for event in recorder.events}) > 500
    with Client(own_daemon.target) as client:
        wait_for(
            lambda: set(client.list_probes([f"{TICKER}:{ticker_program}::tick"]).probes[0].pids) == {ticker.pid},
            "the dead to be forgotten",
        )


def test_first_process_of_a_program_may_end_before_anybody_looks(
    daemon: Daemon, ticker_program: Path, tmp_path: Path
) -> None:
    program = shutil.copy(ticker_program, tmp_path / "program")
    with Recorder(daemon.target, f"{TICKER}:{program}::tick(arg0)") as recorder:
        subprocess.run([program, "1"], check=True)
        wait_for(recorder.armed, "the program to be armed")
        # of the first one nobody knows what comes, and when
        with subprocess.Popen([program, "3"]) as second:
            wait_for(lambda: sum(event.pid == second.pid for event in recorder.events) == 3, "the second one's events")
        assert second.returncode == 0


@pytest.mark.vm
def test_watch_tells_what_comes_and_goes(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    # of a file of its own: a busy daemon may hear of another test's ticker only now, when that is gone
    program = shutil.copy(ticker_program, tmp_path / "watched")
    with Client(daemon.target) as client:
        changes = client.watch_probes([f"{TICKER}:{program}::tick"])
        first = next(changes)
        assert isinstance(first, SnapshotComplete)
        with Ticker(program) as ticker:
            added = next(changes)
            assert isinstance(added, ProbeAdded)
            assert added.probe.pids == (ticker.pid,)
        removed = next(changes)
        assert isinstance(removed, ProbeRemoved)
        assert removed.probe.name == "tick"


def test_without_map_files_the_root_and_descriptors_lead_to_objects(
    tmp_path: Path, ticker_program: Path, pyprogram: Ticker
) -> None:
    prefix = ["setpriv", "--bounding-set=-sys_admin,-checkpoint_restore", "--inh-caps=-sys_admin,-checkpoint_restore"]
    script = f"mount -t tmpfs none /mnt && cp {ticker_program} /mnt/hidden && exec /mnt/hidden"
    with running_daemon(tmp_path, prefix=prefix) as daemon, Ticker("unshare", "-m", "sh", "-c", script) as ticker:
        pyprogram.do("load")
        wait_for(lambda: probe_names(daemon, pyprogram.pid), "the memfd")
        with Recorder(daemon.target, f"{TICKER}:tick(arg0)", f"{PYPROGRAM}:request(arg1)") as recorder:
            ticker.do("fire 2")
            pyprogram.do("fire 1")
    assert sorted(recorder.values()) == [(0,), (0,), (1,)]


def test_without_perf_and_connector_it_says_so_once_and_rescans(tmp_path: Path, ticker_program: Path) -> None:
    keep = "-all,+dac_override,+dac_read_search,+sys_ptrace,+checkpoint_restore"
    # the connector speaks to the first network namespace only
    prefix = ["unshare", "-n", "setpriv", f"--bounding-set={keep}", f"--inh-caps={keep}"]
    with running_daemon(tmp_path, prefix=prefix) as daemon:
        with Recorder(daemon.target, f"{TICKER}:tick(arg0)") as recorder, Ticker(ticker_program) as ticker:
            wait_for(recorder.armed, "a rescan")
            ticker.do("fire 2")
        assert recorder.values() == [(0,), (1,)]
        for feature in ("perf events", "process connector"):
            assert daemon.log().count(f"{feature}: ") == 1


def test_file_with_two_names_is_found_by_either(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copy(ticker_program, first)
    os.link(first, second)
    with Client(daemon.target) as client, Ticker(first) as one:
        wait_for(lambda: client.list_probes(f":{first}::tick").probes, "the first name to be seen")
        with Ticker(second) as other:
            for name in (first, second):
                with Recorder(daemon.target, f":{name}::tick(arg0)") as recorder:
                    assert len(recorder.armed()) == 1
                    one.do("fire 1")
                    other.do("fire 1")
                assert sorted(event.pid for event in recorder.events) == sorted([one.pid, other.pid])
