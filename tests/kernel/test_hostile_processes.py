"""Processes that do to themselves what nobody expects, and the probes that they have or map."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stapsdtd.client import Client, SiteState
from stapsdtd.procs.process_maps import MANY_MAPPINGS
from tests.ground_truth import SDT_HEADERS
from tests.support import (
    SYSTEM_PYTHON,
    TARGETS,
    Daemon,
    Recorder,
    Ticker,
    compile_target,
    require,
    running_daemon,
    stapsdt_command,
    wait_for,
)
from tests.users import ANNE, BERT, public_folder

pytestmark = pytest.mark.kernel

_MAPPINGS = 10_000
_PATIENCE_SECONDS = 5.0
_MAP_OFTEN = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_long] * 6
file, size = os.open(sys.argv[1], os.O_RDONLY), os.path.getsize(sys.argv[1])
for _ in range(int(sys.argv[2])):
    for protection in 1 | 4, 1 | 2:  # as a loader does, code and data
        assert libc.mmap(0, size, protection, 2, file, 0) != ctypes.c_void_p(-1).value
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as made:
        yield made


@pytest.fixture
def program(folder: Path, ticker_program: Path) -> Path:
    return Path(shutil.copy(ticker_program, folder / "ticker"))


def of(program: Path, probe: str = "tick(arg0)") -> str:
    return f":{program}::{probe}"


def child_of(pid: int) -> int:
    def found() -> list[int]:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    return wait_for(found, "a child")[0]


class TestExecveUnderPtrace:
    @pytest.mark.parametrize("where", ["exec", "exit"])
    def test_held_process_holds_nobody_else(
        self, folder: Path, program: Path, ticker_program: Path, engine: str, where: str
    ) -> None:
        holder = compile_target("traced_exec.c", folder / "traced_exec", "-lpthread")
        with (
            running_daemon(folder, "--engine", engine) as daemon,
            Ticker(*ANNE.command(holder, where, program, "7")) as holding,
            Ticker(ticker_program) as other,
            Client(daemon.target) as client,
        ):
            held = child_of(holding.pid)
            begin = time.monotonic()
            with Recorder(daemon.target, of(ticker_program), pids=[other.pid, held]) as recorder:
                other.do("fire 3")
            assert recorder.values() == [(0,), (1,), (2,)]
            assert client.list_probes(details=True, pids=[held, other.pid])
            assert time.monotonic() - begin < _PATIENCE_SECONDS
            with Recorder(daemon.target, of(program), pids=[held]) as recorder:
                if where == "exec":
                    # it is traced from its first instruction on
                    wait_for(recorder.armed, "the new program")
                assert holding.do("go on") == 0
            if where == "exec":
                assert recorder.values() == [(number,) for number in range(7)]
            assert {event.pid for event in recorder.events} <= {held}
            assert recorder.finish().lost == 0


class TestNamespacesOfAUsersOwn:
    _UNSHARE = ("unshare", "-Urpf", "--kill-child")

    def test_pids_are_the_hosts_and_hits_their_users(self, folder: Path, program: Path, engine: str) -> None:
        with (
            running_daemon(folder, "--engine", engine) as daemon,
            Ticker(*ANNE.command(*self._UNSHARE, program)) as inside,
            Ticker(*BERT.command(*self._UNSHARE, program)) as berts,
        ):
            pid = child_of(inside.pid)
            assert f"\t{pid}\t1\n" in Path(f"/proc/{pid}/status").read_text()
            with Recorder(daemon.target, of(program)) as recorder:
                inside.do("fire 3")
                berts.do("fire 2")
            assert [event.pid for event in recorder.events] == [pid] * 3 + [child_of(berts.pid)] * 2
            assert all(event.tid == event.pid for event in recorder.events)
            if engine == "bpf":
                # root inside is the user
                with Recorder(daemon.target, of(program), uids=[ANNE.uid]) as recorder:
                    inside.do("fire 3")
                    berts.do("fire 2")
                assert [event.pid for event in recorder.events] == [pid] * 3
            # the scope of a process is by the host's number too, and 1 is not the one inside
            with Recorder(daemon.target, of(program), pids=[pid]) as recorder:
                inside.do("fire 2")
                berts.do("fire 2")
            assert [event.pid for event in recorder.events] == [pid] * 2
            with Recorder(daemon.target, of(program), where="pid == 1") as recorder:
                inside.do("fire 2")
            assert not recorder.events

    def test_root_inside_is_nobody_outside(self, folder: Path, program: Path) -> None:
        with (
            running_daemon(folder, "--engine", "bpf") as daemon,
            Ticker(*ANNE.command(*self._UNSHARE, program)),
            Ticker(*BERT.command(program)),
            Ticker(program),
        ):

            def inside(*arguments: str) -> str:
                command = ANNE.command(*self._UNSHARE, *stapsdt_command(daemon.target, *arguments))
                return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", timeout=60).stdout

            assert json.loads(inside("info", "--json"))["access"]["client"] == f"uid {ANNE.uid}"
            (listed,) = map(json.loads, inside("list", of(program, "tick"), "--json").splitlines())
            with Client(daemon.target) as client:
                (probe,) = client.list_probes(of(program, "tick"))
            assert len(probe.pids) == 3
            assert len(listed["pids"]) == 1


class TestWhatIsNoProgram:
    def test_is_not_listed_and_does_no_harm(self, daemon: Daemon, program: Path) -> None:
        script = (SYSTEM_PYTHON, TARGETS / "odd_mapper.py", program)
        with (
            Client(daemon.target) as client,
            Recorder(daemon.target, of(program)) as recorder,
            Ticker(*ANNE.command(*script)) as odd,
            Ticker(program) as ticker,
        ):
            odd.begin("which")
            # their addresses, which perf tells of, come before the ticker's
            wait_for(recorder.armed, "the ticker")
            ticker.do("fire 2")
            mapped = Path(f"/proc/{odd.pid}/maps").read_text()
            assert "/dev/zero" in mapped
            assert "SYSV" in mapped
            listed = {probe.path for probe in client.list_probes(pids=[odd.pid])}
            assert not {path for path in listed if not os.path.isfile(path)}
            assert str(program) not in listed
        assert recorder.values() == [(0,), (1,)]

    def test_file_mapped_ten_thousand_times(self, daemon: Daemon, program: Path, ticker_program: Path) -> None:
        """While the kernel attached to its probe with a semaphore, nobody on the host could fork for seconds."""
        command = ANNE.command(SYSTEM_PYTHON, "-c", _MAP_OFTEN, program, str(_MAPPINGS))
        with (
            Ticker(ticker_program) as other,
            Ticker(program) as first,
            Client(daemon.target) as client,
            ExitStack() as until_ended,
        ):
            mapping = until_ended.enter_context(Ticker(*command))
            wait_for(lambda: any(mapping.pid in probe.pids for probe in client.list_probes(of(program, ""))), "it", 60)
            with client.subscribe(of(program)) as subscription:
                (refused,) = subscription.sites
                assert refused.state is SiteState.REFUSED
                assert f"process {mapping.pid} maps this file more than {MANY_MAPPINGS:,} times" in refused.reason
                begin = time.monotonic()
                with client.subscribe(of(ticker_program)) as of_other:
                    assert [site.state for site in of_other.sites] == [SiteState.ARMED]
                    subprocess.run(["/bin/true"], check=True)
                assert time.monotonic() - begin < _PATIENCE_SECONDS
                with Recorder(daemon.target, of(ticker_program)) as recorder:
                    other.do("fire 2")
                assert recorder.values() == [(0,), (1,)]
                until_ended.close()
                # it is armed once the process has ended
                wait_for(lambda: first.semaphore == 1, "it to be armed")


@pytest.fixture(scope="module")
def programs32(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    require(os.uname().machine == "x86_64", "x86-64")
    folder = tmp_path_factory.mktemp("i386")
    headers = folder / "include" / "sys"
    headers.mkdir(parents=True)
    for header in SDT_HEADERS.glob("sdt*.h"):
        (headers / header.name).symlink_to(header)
    flags = ("-m32", f"-I{headers.parent}")
    return {
        "ticker": compile_target("ticker.c", folder / "ticker32", *flags, "-ldl", "-lpthread"),
        "longnop": compile_target("longnop.c", folder / "longnop32", *flags, "-DNOP_BYTES=5", "-Wa,-mtune=core2"),
    }


class TestThirtyTwoBits:
    def test_values(self, daemon: Daemon, programs32: dict[str, Path]) -> None:
        program = programs32["ticker"]
        with Ticker(program) as ticker:
            with Recorder(daemon.target, of(program, "tick(arg1,arg2:str)"), pids=[ticker.pid]) as recorder:
                assert ticker.do("fire 3") == 1
            assert recorder.values() == [(0, "tick"), (-1, "tick"), (-2, "tick")]
            assert {event.pid for event in recorder.events} == {ticker.pid}
            with Recorder(daemon.target, of(program, "text(arg0:str,arg1)")) as recorder:
                ticker.do("text thirty-two")
            assert recorder.values() == [("thirty-two", 10)]
            wanted = "values(arg0,arg1,arg2,arg3,arg4,arg5,arg8,arg9)"
            with Recorder(daemon.target, of(program, wanted)) as recorder:
                ticker.do("values")
            assert recorder.values() == [(-8, 0xF8, -1600, 0xF916, -320000, 0xFFFFFF32, 77, -77)]
            assert ticker.semaphore == 0

    def test_long_nop_is_refused_or_harmless(self, daemon: Daemon, programs32: dict[str, Path]) -> None:
        with Ticker(programs32["longnop"]) as running:
            with Recorder(daemon.target, f"longnop:{programs32['longnop']}::*(arg0)") as recorder:
                assert (running.do("leaf 1000"), running.do("fork 20")) == (0, 0)
            states = {site.state for site in recorder.sites}
            assert states in ({SiteState.ARMED}, {SiteState.REFUSED})
            assert len(recorder.events) == (1040 if recorder.armed() else 0)


class TestProcessThatIsNotDumpable:
    def test_root_traces_it_and_its_user_does_not(self, folder: Path, library: Path, engine: str) -> None:
        loaded = Path(shutil.copy(library, folder / "library.so"))
        script = (SYSTEM_PYTHON, TARGETS / "guarded.py", loaded)
        with running_daemon(folder, "--engine", engine) as daemon, Ticker(*ANNE.command(*script)) as anne:
            anne.do("dumpable 0")
            with Recorder(daemon.target, of(loaded, "called(arg0)"), pids=[anne.pid]) as recorder:
                anne.do("call 3")
            assert recorder.values() == [(0,), (1,), (2,)]
            with ANNE.connecting(daemon.target) as door, Client(door) as annes:
                assert anne.pid not in {pid for probe in annes.list_probes() for pid in probe.pids}
