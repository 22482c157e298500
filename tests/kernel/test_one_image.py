"""Containers of one image: each has an overlay of its own, and the kernel has one inode for the program in all."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Client, SiteState, SiteStatus
from tests.kernel.test_overlays import overlay
from tests.support import TICKER, Daemon, Recorder, Ticker, compile_target, running_daemon, wait_for
from tests.units import capabilities, with_capabilities

pytestmark = pytest.mark.kernel

SELECTOR = f"{TICKER}:ticker::tick(arg0)"
HITS = 200
ROUNDS = 20

# as podman and containerd do: the layers' paths are the host's, and lead nowhere below the container's root
_CONTAIN = """
    mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/u,workdir=$2/w" "$2/m"
    cd "$2/m"
    pivot_root . old
    exec /bin/ticker
"""
_NUMBERS = itertools.count()
_ROOTLESS = ("--user", "--map-root-user")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    folder = tmp_path / "image"
    for name in ("bin", "old"):
        (folder / name).mkdir(parents=True)
    static = ("-static", "-ldl", "-lpthread", "-Wl,--no-warnings")
    compile_target("ticker.c", folder / "bin" / "ticker", f"-DPROVIDER={TICKER}", *static)
    return folder


@contextmanager
def container(image: Path, *namespaces: str, storage: Path | None = None) -> Iterator[Ticker]:
    """A program in a mount namespace of its own, whose root is an overlay of the image.

    storage: where its upper layer is; by default beside the image.
    """
    folder = (storage or image.parent) / f"container{next(_NUMBERS)}"
    for name in ("u", "w", "m"):
        (folder / name).mkdir(parents=True)
    unshare = ("unshare", *namespaces, "--mount", "--propagation", "private")
    with Ticker(*unshare, "sh", "-ec", _CONTAIN, "-", image, folder) as ticker:
        yield ticker


@contextmanager
def containers(image: Path, count: int, *namespaces: str) -> Iterator[list[Ticker]]:
    with ExitStack() as stack:
        yield [stack.enter_context(container(image, *namespaces)) for _ in range(count)]


def fire(tickers: list[Ticker], hits: int = HITS) -> Counter[int]:
    """Have all fire at the same time. Return what is to be delivered, by process."""
    for ticker in tickers:
        ticker.begin(f"fire {hits}")
    for ticker in tickers:
        assert ticker.finish() == 1, "each semaphore is counted up once"
    return Counter({ticker.pid: hits for ticker in tickers})


def delivered(recorder: Recorder) -> Counter[int]:
    return Counter(event.pid for event in recorder.events)


def newest(recorder: Recorder) -> Counter[SiteState]:
    """How many sites were last reported in each state."""
    latest: dict[int, SiteStatus] = {status.site_id: status for status in recorder.statuses}
    return Counter(status.state for status in latest.values())


@pytest.mark.vm
@pytest.mark.parametrize("are_named", [True, False])
def test_each_hit_comes_once(daemon: Daemon, image: Path, are_named: bool) -> None:
    with containers(image, 3) as tickers:
        if not are_named:
            # what is mounted stays
            shutil.rmtree(image)
        with Recorder(daemon.target, SELECTOR) as recorder:
            assert len(recorder.armed()) == 1
            expected = fire(tickers)
        assert delivered(recorder) == expected
        assert not recorder.losses


def test_each_hit_comes_to_the_container_that_is_meant(daemon: Daemon, image: Path) -> None:
    with containers(image, 3) as tickers:
        with (
            Recorder(daemon.target, SELECTOR, pids=[tickers[0].pid, tickers[1].pid]) as two,
            Recorder(daemon.target, SELECTOR, pids=[tickers[2].pid]) as one,
        ):
            for number, ticker in enumerate(tickers):
                assert ticker.do(f"fire {number + 1}")
        assert delivered(two) == {tickers[0].pid: 1, tickers[1].pid: 2}
        assert delivered(one) == {tickers[2].pid: 3}


def test_containers_come_and_go(daemon: Daemon, image: Path) -> None:
    with ExitStack() as stack:
        running = [stack.enter_context(container(image))]
        expected: Counter[int] = Counter()
        with Client(daemon.target) as client, Recorder(daemon.target, SELECTOR) as recorder:
            for _ in range(ROUNDS):
                running.append(stack.enter_context(container(image)))
                expected += fire(running, 10)
                # else nobody may be known to map the file when the other one ends
                assert client.list_probes(SELECTOR.partition("(")[0], pids=[running[-1].pid])
                running.pop(0).kill()
        assert delivered(recorder) == expected
        assert len(recorder.armed()) == 1


def test_rootless_containers_are_armed(daemon: Daemon, image: Path) -> None:
    """What they overlay is on a local file system, whoever says where."""
    with container(image) as rootful, containers(image, 2, *_ROOTLESS) as rootless:
        shutil.rmtree(image)
        with Recorder(daemon.target, SELECTOR) as recorder:
            assert len(recorder.armed()) == 1
            expected = fire([rootful, *rootless])
        assert delivered(recorder) == expected


def test_named_file_is_the_containers_too(daemon: Daemon, image: Path, tmp_path: Path) -> None:
    with overlay(image, tmp_path / "host") as merged:
        program = merged / "bin" / "ticker"
        with containers(image, 2) as tickers:
            with Recorder(daemon.target, SELECTOR, files=[str(program)]) as recorder:
                assert len(recorder.armed()) == 1
                with Ticker(program) as later:
                    expected = fire([*tickers, later])
            assert delivered(recorder) == expected


def test_file_that_is_copied_up_while_it_runs_is_two(daemon: Daemon, image: Path, tmp_path: Path) -> None:
    with overlay(image, tmp_path / "host") as merged, container(image) as other:
        program = merged / "bin" / "ticker"
        with Recorder(daemon.target, SELECTOR) as recorder, Ticker(program) as lower:
            expected = fire([lower, other], 3)
            # the same size and time, in another inode
            program.chmod(0o700)
            with Ticker(program) as upper:
                wait_for(lambda: len(recorder.armed()) == 2, "the copy to be armed")
                expected += fire([lower, other, upper], 5)
        assert delivered(recorder) == expected


class TestWithoutBpf:
    """Where a container's seccomp profile denies bpf(): names of layers are left, and where they fail, caution."""

    @contextmanager
    def unprivileged(self, tmp_path: Path) -> Iterator[Daemon]:
        folder = tmp_path / "daemon"
        folder.mkdir()
        config = folder / "stapsdtd.toml"
        config.write_text('[filesystems]\narm = ["overlay"]\n')
        prefix = with_capabilities(name for name in capabilities() if name != "bpf")
        with running_daemon(folder, "--engine", "ftrace", "--config", str(config), prefix=prefix) as daemon:
            yield daemon

    def test_layers_are_found_by_the_hosts_names(self, image: Path, tmp_path: Path) -> None:
        with containers(image, 3) as tickers, self.unprivileged(tmp_path) as daemon:
            with Recorder(daemon.target, SELECTOR) as recorder:
                assert newest(recorder) == {SiteState.ARMED: 1}
                expected = fire(tickers)
            assert delivered(recorder) == expected

    @pytest.mark.parametrize("namespaces", [(), _ROOTLESS])
    def test_one_of_the_candidates_is_armed(self, image: Path, tmp_path: Path, namespaces: tuple[str, ...]) -> None:
        with containers(image, 3, *namespaces) as tickers:
            shutil.rmtree(image)
            # a daemon that found the layers before they went would not open the file any more
            with self.unprivileged(tmp_path) as daemon, Recorder(daemon.target, SELECTOR) as recorder:
                # on a busy host a file may be opened at the second attempt
                states = {SiteState.ARMED: 1, SiteState.REFUSED: 2}
                wait_for(lambda: newest(recorder) == states, "one to be armed, and the others to be refused")
                refused = [status for status in recorder.statuses if status.state is SiteState.REFUSED]
                for status in refused:
                    assert "it may be the same file as /bin/ticker of process" in status.reason
                    assert "run as root or with CAP_BPF" in status.reason
                expected = fire(tickers)
                wait_for(lambda: delivered(recorder) == expected, "each hit to be delivered once")
                # the next one takes its place
                (pid,) = {int(status.reason.split(" of process ")[1].split(",")[0]) for status in refused}
                (first,) = (ticker for ticker in tickers if ticker.pid == pid)
                tickers.remove(first)
                first.kill()
                wait_for(lambda: len(recorder.armed()) == 2, "another one to be armed")
                expected += fire(tickers)
            assert delivered(recorder) == expected
