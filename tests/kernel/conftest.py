"""Real kernel: every test in this folder is marked, needs root, and must leave nothing in tracefs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from stapsdtd.capture.names import Owner
from stapsdtd.client import Client
from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import own
from tests.support import (
    TICKER,
    TIME_FACTOR,
    Daemon,
    Ticker,
    compile_target,
    is_failure,
    require,
    running_daemon,
    shared_folder,
    wait_for,
)

_LONGEST = (
    "killed", "sandbox", "install", "podman", "access", "ground_truth", "clients", "faults", "named_files", "openjdk",
)  # fmt: skip
"""What pytest-xdist begins with, since it takes long: none is then left for one process at the end."""

_CHURN_SECONDS = 24.0
_CHURN_SEED = 12


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--churn-seconds", type=float, default=_CHURN_SECONDS, help="how long test_churn.py takes, for both engines"
    )
    parser.addoption(
        "--churn-seed",
        type=int,
        default=_CHURN_SEED,
        help="what test_churn.py does; ./dev soak does something else each time",
    )


def churn_options(config: pytest.Config) -> tuple[float, int]:
    """Seconds and seed, also where pytest met this file too late to take options for it."""
    return config.getoption("--churn-seconds", _CHURN_SECONDS), config.getoption("--churn-seed", _CHURN_SEED)


def pytest_report_header(config: pytest.Config) -> str:
    seconds, seed = churn_options(config)
    return f"churn: --churn-seconds={seconds:g} --churn-seed={seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest. The churn takes as long as it is told to, whatever the limit of others is."""
    longest = [f"test_{name}.py" for name in _LONGEST]
    items.sort(key=lambda item: longest.index(item.path.name) if item.path.name in longest else len(longest))
    for item in items:
        if item.path.name == "test_churn.py":
            item.add_marker(pytest.mark.timeout(churn_options(config)[0] + 120))


@pytest.fixture(scope="session", autouse=True)
def tracefs() -> Tracefs:
    require(os.geteuid() == 0, "root")
    try:
        return Tracefs.locate()
    except KernelFeatureError as error:
        require(None, str(error))
        raise


def _left(tracefs: Tracefs) -> set[str]:
    """What daemons that live no more have left; another developer's living one is none of our business."""
    names = {group for group, _ in tracefs.uprobe_events()} | set(tracefs.instances())
    return {name for name in names if (owner := Owner.of(name)) and owner.is_dead()}


@pytest.fixture(autouse=True)
def _nothing_left(tracefs: Tracefs) -> Iterator[None]:
    before = _left(tracefs)
    yield
    # what others' daemons leave, the next that they start removes
    wait_for(lambda: _left(tracefs) <= before, "nothing to be left in tracefs")


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what is compiled for all tests of the run, whichever of pytest-xdist's processes they are in."""
    folder = shared_folder(tmp_path_factory) / "compiled"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAPSDTD_COMPILED", str(folder))
        yield


@pytest.fixture(params=["bpf", "ftrace"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class SharedDaemons:
    """A daemon of each engine, started when a test first asks for it.

    Each test has to leave it as it was: alive, idle, and without an error in its log. Where one does not, that test
    fails, and the next gets another daemon.
    """

    def __init__(self, folder: Path, tracefs: Tracefs, *options: str) -> None:
        self._folder = folder
        self._tracefs = tracefs
        self._options = options
        self._running: dict[str, tuple[Daemon, ExitStack]] = {}

    def _start(self, engine: str) -> Daemon:
        if engine not in self._running:
            folder = Path(tempfile.mkdtemp(prefix=f"{engine}-", dir=self._folder))
            stack = ExitStack()
            daemon = stack.enter_context(running_daemon(folder, "--engine", engine, *self._options))
            self._running[engine] = daemon, stack
        return self._running[engine][0]

    @contextmanager
    def lent(self, engine: str) -> Iterator[Daemon]:
        daemon = self._start(engine)
        said = len(daemon.log())
        try:
            yield daemon
            self._check(daemon, said)
        except BaseException:
            _, stack = self._running.pop(engine)
            stack.close()
            raise

    def _check(self, daemon: Daemon, said: int) -> None:
        assert daemon.process.poll() is None, daemon.log()
        with Client(daemon.target) as client:
            # the last words of a client that is gone may be on their way
            wait_for(lambda: not client.subscriptions(), "the test's subscriptions to end")
        wait_for(lambda: not self._attached(daemon), "what the test had attached to be removed", seconds=60)
        log = daemon.log()[said:]
        assert "Traceback" not in log, log
        assert not list(filter(is_failure, log.splitlines())), log

    def _attached(self, daemon: Daemon) -> list[str]:
        return [name for name in own(self._tracefs, daemon.pid) if "/" in name]

    def close(self) -> None:
        with ExitStack() as everything:
            for _, stack in self._running.values():
                everything.push(stack)


@pytest.fixture(scope="session")
def lasting_daemons(tmp_path_factory: pytest.TempPathFactory, tracefs: Tracefs) -> Iterator[SharedDaemons]:
    """For the whole run. Guests have the host's files over 9p."""
    folder = tmp_path_factory.mktemp("lasting")
    config = folder / "stapsdtd.toml"
    config.write_text('[filesystems]\narm = ["9p"]\n')
    with closing(SharedDaemons(folder, tracefs, "--config", str(config))) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def shared_daemons(
    tmp_path_factory: pytest.TempPathFactory, tracefs: Tracefs, lasting_daemons: SharedDaemons
) -> Iterator[SharedDaemons]:
    """For a module; for the whole run where a start takes longer than most tests."""
    if TIME_FACTOR > 1:
        yield lasting_daemons
        return
    with closing(SharedDaemons(tmp_path_factory.mktemp("daemons"), tracefs)) as daemons:
        yield daemons


@pytest.fixture
def daemon(engine: str, shared_daemons: SharedDaemons) -> Iterator[Daemon]:
    """One that the tests of a module share."""
    with shared_daemons.lent(engine) as started:
        yield started


@pytest.fixture
def own_daemon(tmp_path: Path, engine: str, lasting_daemons: SharedDaemons) -> Iterator[Daemon]:
    """For a test that kills it, fills its buffers, whose size is the largest so far, or measures what it holds."""
    if TIME_FACTOR > 1:
        with lasting_daemons.lent(engine) as started:
            yield started
        return
    with running_daemon(tmp_path, "--engine", engine) as started:
        yield started


@pytest.fixture(scope="session")
def ticker_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("targets") / "ticker"
    return compile_target("ticker.c", output, f"-DPROVIDER={TICKER}", "-ldl", "-lpthread")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_target("library.c", tmp_path_factory.mktemp("targets") / "library.so", "-shared", "-fPIC")


@pytest.fixture
def ticker(ticker_program: Path) -> Iterator[Ticker]:
    with Ticker(ticker_program) as running:
        yield running
