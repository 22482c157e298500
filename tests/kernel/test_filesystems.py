"""Files whose file systems may never reply: they cost who maps them, and nobody else waits."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Client, RequestFailedError, SiteState, SubscribeOptions
from stapsdtd.kernel import procfs
from tests.kernel.test_cold import begin, cold, fire_again
from tests.kernel.test_overlays import overlay
from tests.support import TARGETS, TICKER, Daemon, Recorder, Ticker, compile_target, require, running_daemon, wait_for
from tests.users import ANNE, public_folder

pytestmark = [pytest.mark.kernel, pytest.mark.apart]

_KIND = "fuse.slowfiles"
_ARMINGS = 5
_PATIENCE_SECONDS = 5.0
_TRY_SECONDS = 25.0
_LISTERS = 8
_MAPPER = ("/usr/bin/python3", str(TARGETS / "mapper.py"))


class SlowFiles:
    """A mounted tests/targets/slow_files.c."""

    def __init__(self, folder: Path, program: Path, source: Path) -> None:
        self._point = folder / "slow"
        self._control = folder / "control"
        self._point.mkdir()
        self.path = self._point / "file"
        options = "allow_other,subtype=slowfiles,attr_timeout=0,entry_timeout=0"
        self._server = subprocess.Popen(
            [program, source, self._control, "-f", "-o", options, self._point], stderr=subprocess.DEVNULL
        )
        wait_for(lambda: f" {self._point} ".encode() in Path("/proc/self/mountinfo").read_bytes(), "the mount")

    def hang(self, *operations: str) -> None:
        self._control.write_text(" ".join(operations))

    def forget(self) -> None:
        """What the kernel has of the file, and nobody maps in."""
        with open(self.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """What still waits for the server fails."""
        subprocess.run(["umount", "-l", str(self._point)], check=True)
        self._server.kill()
        self._server.wait()


@pytest.fixture(scope="session")
def slow_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(os.path.exists("/dev/fuse"), "/dev/fuse")
    require(os.path.exists("/usr/include/fuse3/fuse.h"), "libfuse3-dev")
    flags = ("-I/usr/include/fuse3", "-D_FILE_OFFSET_BITS=64", "-lfuse3", "-lpthread")
    return compile_target("slow_files.c", tmp_path_factory.mktemp("slow") / "slow_files", *flags)


@pytest.fixture
def slow(tmp_path: Path, slow_program: Path, ticker_program: Path) -> Iterator[SlowFiles]:
    files = SlowFiles(tmp_path, slow_program, ticker_program)
    try:
        yield files
    finally:
        # first, since whoever is to end may wait for it
        files.hang()
        files.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as made:
        yield made


@contextmanager
def released_at_last(slow: SlowFiles, seconds: float = 30) -> Iterator[None]:
    """Whoever waits for the server, this process too, does so no longer than that."""
    timer = threading.Timer(seconds, slow.hang)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def start_a_program() -> float:
    begin = time.monotonic()
    subprocess.run(["/bin/true"], check=True)
    return time.monotonic() - begin


@contextmanager
def everything(daemon: Daemon) -> Iterator[None]:
    """Root subscribes to it, and does not read what others on this machine fire meanwhile."""
    with Client(daemon.target) as client:
        subscription = client.subscribe(["*:*"], SubscribeOptions(lease_seconds=600, queue_bytes=1 << 20))
        assert any(site.state is SiteState.ARMED for site in subscription.sites)
        yield
        subscription.unsubscribe()


class Armings:
    """How long it takes Anne to have her program's probe armed."""

    def __init__(self, daemon: Daemon, program: Path) -> None:
        with ANNE.connecting(daemon.target) as door:
            self._client = Client(door)
            self._client.info()
        self._selector = f"{TICKER}:{program}::tick"

    def __call__(self) -> float:
        seconds = []
        for _ in range(_ARMINGS):
            begin = time.monotonic()
            subscription = self._client.subscribe([self._selector])
            seconds.append(time.monotonic() - begin)
            assert [site.state for site in subscription.sites] == [SiteState.ARMED]
            subscription.unsubscribe()
        return max(seconds)

    def close(self) -> None:
        self._client.close()


def check_that_nobody_waits(armings: Armings, before: float) -> None:
    """before: what arming took without a hanging server. Others use this machine too, so it has some tries."""
    assert start_a_program() < _PATIENCE_SECONDS
    deadline = time.monotonic() + _TRY_SECONDS
    while True:
        starts = [start_a_program() for _ in range(20)]
        arming = armings()
        if max(starts) < 0.1 and arming <= 1.5 * before:
            break
        took = f"a program starts in {max(starts)} s, and is armed in {arming} s instead of {before} s"
        assert time.monotonic() < deadline, took


def test_named_file_is_given_up_if_its_server_does_not_reply(
    folder: Path, ticker_program: Path, slow: SlowFiles
) -> None:
    program = Path(shutil.copy(ticker_program, folder / "ticker"))
    with (
        running_daemon(folder, "--engine", "bpf") as daemon,
        Client(daemon.target) as client,
        ANNE.connecting(daemon.target) as door,
        Client(door) as annes,
        released_at_last(slow),
        ThreadPoolExecutor(1) as thread,
    ):
        with pytest.raises(RequestFailedError, match=f"^{slow.path}: the file is on fuse"):
            client.list_probes(files=[str(slow.path)])
        slow.forget()
        slow.hang("getattr", "open", "read")
        waiting = thread.submit(client.list_probes, files=[str(slow.path)])
        assert len(annes.list_probes(f"{TICKER}:tick", files=[str(program)]).probes) == 1
        assert not waiting.done()
        with pytest.raises(RequestFailedError, match=f"^{slow.path}: its file system does not reply$"):
            waiting.result()
        assert len(client.list_probes(f"{TICKER}:tick", files=[str(program)]).probes) == 1
        slow.hang()


class TestServerThatNeverReplies:
    @pytest.mark.parametrize(
        ("is_known", "operations"),
        [(False, "open"), (False, "read"), (False, "getattr open read"), (True, "getattr open read")],
        ids=["open", "read", "all", "all of a file that is known"],
    )
    def test_nobody_waits(
        self, folder: Path, ticker_program: Path, slow: SlowFiles, operations: str, *, is_known: bool
    ) -> None:
        program = Path(shutil.copy(ticker_program, folder / "ticker"))
        with (
            running_daemon(folder, "--engine", "bpf") as daemon,
            Ticker(*ANNE.command(program)),
            Ticker(*_MAPPER) as mapper,
            Client(daemon.target) as client,
            everything(daemon),
            closing(Armings(daemon, program)) as armings,
            released_at_last(slow),
        ):
            before = armings()
            selector = f"{TICKER}:{slow.path}::tick"
            mapper.do(f"map {slow.path}")
            if is_known:
                wait_for(lambda: client.list_probes([selector]), "the probe to be listed")
            slow.forget()
            slow.hang(*operations.split())
            check_that_nobody_waits(armings, before)
            with everything(daemon):
                check_that_nobody_waits(armings, before)
            slow.hang()
            wait_for(lambda: client.list_probes([selector]), "the probe to be listed", 60)

    def test_pages_that_never_come_hold_nobody_up(self, folder: Path, ticker_program: Path, slow: SlowFiles) -> None:
        """Nor does a process that holds the lock of its memory map because of them keep the daemon from others."""
        program = Path(shutil.copy(ticker_program, folder / "ticker"))
        holder = compile_target("lock_holder.c", folder / "lock_holder", "-static", "-lpthread")
        with (
            running_daemon(folder, "--engine", "bpf") as daemon,
            Ticker(*ANNE.command(program)),
            everything(daemon),
            closing(Armings(daemon, program)) as armings,
            released_at_last(slow),
            Ticker(holder, slow.path) as holding,
        ):
            before = armings()
            slow.forget()
            hold_lock(holding, slow)
            check_that_nobody_waits(armings, before)
            with everything(daemon):
                check_that_nobody_waits(armings, before)
            # whoever came later is found, and is not after the holder
            with Ticker(program) as later, Client(daemon.target) as client:
                wait_for(lambda: client.list_probes([f"{TICKER}:::"], pids=[later.pid]), "a later program")
            # what it holds it lets go of when its server replies
            slow.hang()

    def test_inode_behind_a_held_lock_holds_nobody_up(
        self, folder: Path, ticker_program: Path, slow: SlowFiles
    ) -> None:
        """The kernel shows which file a process maps from an overlay as soon as it lets go of its lock."""
        program = Path(shutil.copy(ticker_program, folder / "ticker"))
        layer = folder / "layer"
        layer.mkdir()
        compile_target("lock_holder.c", layer / "lock_holder", "-static", "-lpthread")
        with (
            overlay(layer, folder / "mount") as merged,
            Ticker(*ANNE.command(program)),
            released_at_last(slow),
            Ticker(merged / "lock_holder", slow.path) as holding,
        ):
            slow.forget()
            hold_lock(holding, slow)
            with running_daemon(folder, "--engine", "bpf") as daemon, Client(daemon.target) as client:
                assert "holds the lock of its memory map" in daemon.log()
                assert client.list_probes(f"{TICKER}:{program}::tick").probes
                assert not client.list_probes("lock_holder:::", pids=[holding.pid]).probes
                with closing(Armings(daemon, program)) as armings:
                    assert armings() < _PATIENCE_SECONDS
                slow.hang()
                wait_for(lambda: client.list_probes("lock_holder:::", pids=[holding.pid]).probes, "it to be known")

    def test_command_line_behind_a_held_lock_holds_nobody_up(
        self, folder: Path, ticker_program: Path, slow: SlowFiles
    ) -> None:
        program = Path(shutil.copy(ticker_program, folder / "ticker"))
        holder = compile_target("lock_holder.c", folder / "lock_holder", "-static", "-lpthread")
        with (
            running_daemon(folder, "--engine", "bpf") as daemon,
            Ticker(*ANNE.command(program)),
            Client(daemon.target) as client,
            ANNE.connecting(daemon.target) as door,
            Client(door) as annes,
            released_at_last(slow),
            Ticker(holder, slow.path) as holding,
        ):
            selector = f"{TICKER}:{slow.path}::tick"
            wait_for(lambda: client.list_probes(selector), "it to be listed")
            slow.forget()
            hold_lock(holding, slow)
            # each of these has a thread wait, in which the requests of others would be served
            with ThreadPoolExecutor(_LISTERS) as listers:
                lists = [listers.submit(client.list_probes, selector, details=True) for _ in range(_LISTERS)]
                begin = time.monotonic()
                assert annes.info().processes
                (own,) = annes.list_probes(f"{TICKER}:{program}::tick", details=True).processes
                assert own.command_line == (str(program),)
                for each in lists:
                    (held,) = each.result().processes
                    assert (held.pid, held.comm, held.command_line) == (holding.pid, "lock_holder", ())
                assert time.monotonic() - begin < _PATIENCE_SECONDS
            slow.hang()

    def test_arming_that_waits_for_the_kernel_is_told_and_holds_up_no_request(
        self, folder: Path, ticker_program: Path, slow: SlowFiles
    ) -> None:
        """Every fork on this host waits meanwhile, which no daemon can prevent; so nothing is started here."""
        program = Path(shutil.copy(ticker_program, folder / "ticker"))
        holder = compile_target("lock_holder.c", folder / "lock_holder", "-static", "-lpthread")
        with (
            running_daemon(folder, "--engine", "bpf") as daemon,
            Ticker(*ANNE.command(program)),
            Client(daemon.target) as client,
            ANNE.connecting(daemon.target) as door,
            Client(door) as annes,
            ThreadPoolExecutor(2) as subscribers,
            released_at_last(slow),
            Ticker(holder, slow.path) as holding,
        ):
            held, own = "lock_holder:released", f"{TICKER}:{program}::tick"
            for selector in (held, own):
                wait_for(lambda selector=selector: client.list_probes(selector).probes, selector)  # type: ignore[misc]
            slow.forget()
            hold_lock(holding, slow)
            stuck = subscribers.submit(client.subscribe, held)
            wait_for(lambda: client.info().arming.running == f"arming {holder}", "the arming to wait")
            waiting = subscribers.submit(annes.subscribe, own)
            begin = time.monotonic()
            assert [probe.name for probe in annes.list_probes(own).probes] == ["tick"]
            assert len(client.subscriptions()) >= 1
            # whose path it is she is not told
            assert annes.info().arming.running == ""
            assert time.monotonic() - begin < _PATIENCE_SECONDS
            for subscribing in (stuck, waiting):
                assert [site.state for site in subscribing.result(2 * _PATIENCE_SECONDS).sites] == [SiteState.ARMING]
            assert client.info().arming.seconds > _PATIENCE_SECONDS
            slow.hang()
            wait_for(lambda: [each.account.sites for each in client.subscriptions()] == [1, 1], "both to be armed")
            assert (client.info().arming.running, client.info().arming.waiting) == ("", 0)
            for subscribing in (stuck, waiting):
                subscribing.result().unsubscribe()


def test_overlay_hides_no_server(folder: Path, slow: SlowFiles) -> None:
    """In a user namespace of their own, users may overlay what they like; the kernel says what the file is on."""
    for name in ("upper", "work", "merged"):
        (folder / name).mkdir()
    options = f"lowerdir={slow.path.parent},upperdir={folder}/upper,workdir={folder}/work"
    script = f"mount -t overlay -o '{options}' none '{folder}/merged' && exec '{folder}/merged/{slow.path.name}'"
    with (
        running_daemon(folder, "--engine", "bpf") as daemon,
        Ticker("unshare", "-U", "-r", "-m", "sh", "-c", script) as rootless,
        Client(daemon.target) as client,
    ):
        own = f"{TICKER}:::tick"
        wait_for(lambda: client.list_probes(own, pids=[rootless.pid]).probes, "its copy to be listed")
        with client.subscribe(own, SubscribeOptions(pids=[rootless.pid])) as subscription:
            assert [site.state for site in subscription.sites] == [SiteState.REFUSED]
            assert f"the file is on {_KIND}, whose server" in subscription.sites[0].reason


def hold_lock(holding: Ticker, slow: SlowFiles) -> None:
    """holding: lock_holder.c with the file, of which the kernel has nothing in memory."""
    slow.hang("read")
    holding.begin("touch")
    wait_for(lambda: "D" in _states(holding.pid), "a thread to wait for a page")
    slow.hang("read", "direct")
    holding.begin("map")
    wait_for(lambda: _states(holding.pid).count("D") == 2, "a thread to hold the lock")
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["cat", f"/proc/{holding.pid}/cmdline"], check=True, timeout=0.5, capture_output=True)


def _states(pid: int) -> list[str]:
    return [
        Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
        for thread in procfs.thread_ids(pid)
    ]


def test_files_of_fuse_are_listed_and_refused(daemon: Daemon, slow: SlowFiles) -> None:
    with Ticker(slow.path) as ticker, Client(daemon.target) as client:
        selector = f"{TICKER}:{slow.path}::tick"
        (probe,) = wait_for(lambda: client.list_probes([selector]), "the probe to be listed")
        assert ticker.pid in probe.pids
        with Recorder(daemon.target, selector) as recorder:
            (site,) = recorder.sites
            assert site.state is SiteState.REFUSED
            assert _KIND in site.reason
            assert f'[filesystems] arm = ["{_KIND}"]' in site.reason
            assert ticker.do("fire 1") == 0
        assert not recorder.events
    assert recorder.account is not None
    assert recorder.account.fired == 0


def test_files_of_fuse_are_armed_where_the_configuration_says_so(tmp_path: Path, engine: str, slow: SlowFiles) -> None:
    config = tmp_path / "stapsdtd.toml"
    config.write_text(f'[filesystems]\narm = ["{_KIND}"]\n')
    with (
        running_daemon(tmp_path, "--engine", engine, "--config", str(config)) as daemon,
        Ticker(slow.path) as ticker,
        Recorder(daemon.target, f"{TICKER}:{slow.path}::tick") as recorder,
    ):
        wait_for(recorder.armed, "the site to be armed")
        ticker.do("fire 10")
        wait_for(lambda: len(recorder.events) == 10, "the events")


def test_hit_whose_text_never_comes_holds_nobody_up(tmp_path: Path, slow: SlowFiles) -> None:
    """A sleepable program waited here, and with it every detach on the host."""
    program = compile_target("cold.c", tmp_path / "cold")
    with (
        running_daemon(tmp_path, "--engine", "bpf") as daemon,
        cold(program, "again", slow.path) as firing,
        released_at_last(slow),
    ):
        begin(firing)
        with Recorder(daemon.target, f":{program}::again(arg0:str)") as recorder:
            # it has the file open, and no page of it
            slow.forget()
            slow.hang("read")
            began = time.monotonic()
            for _ in range(3):
                fire_again(firing)
            account = recorder.finish()
            assert time.monotonic() - began < _PATIENCE_SECONDS
        assert recorder.values() == [(None,)] * 3
        assert (account.fired, account.delivered) == (3, 3)
        # nobody of the daemon's touched the page either, which would wait until the server replies
        wait_for(lambda: "D" not in _states(daemon.pid), "the daemon to wait for nothing")
        assert start_a_program() < _PATIENCE_SECONDS
        slow.hang()
