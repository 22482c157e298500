"""Real kernel: every test in this folder is marked, needs root, and must leave nothing in tracefs."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from stapsdtd.capture.names import Owner
from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import TIME_FACTOR, Daemon, Ticker, compile_target, require, running_daemon

_CHURN_SECONDS = 180.0
_CHURN_SEED = random.SystemRandom().randrange(10**6)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--churn-seconds", type=float, default=_CHURN_SECONDS, help="how long test_churn.py takes, for both engines"
    )
    parser.addoption(
        "--churn-seed",
        type=int,
        default=_CHURN_SEED,
        help="what test_churn.py does, by default something else each time",
    )


def churn_options(config: pytest.Config) -> tuple[float, int]:
    """Seconds and seed, also where pytest met this file too late to take options for it."""
    return config.getoption("--churn-seconds", _CHURN_SECONDS), config.getoption("--churn-seed", _CHURN_SEED)


def pytest_report_header(config: pytest.Config) -> str:
    seconds, seed = churn_options(config)
    return f"churn: --churn-seconds={seconds:g} --churn-seed={seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The churn takes as long as it is told to, whatever the limit of others is."""
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
    assert _left(tracefs) <= before


@pytest.fixture(params=["bpf", "ftrace"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def lasting_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Daemon]]:
    """A daemon of each engine that lives for the whole run. Guests have the host's files over 9p."""
    with ExitStack() as stack:

        @cache
        def start(engine: str) -> Daemon:
            folder = tmp_path_factory.mktemp(engine)
            config = folder / "stapsdtd.toml"
            config.write_text('[filesystems]\narm = ["9p"]\n')
            return stack.enter_context(running_daemon(folder, "--engine", engine, "--config", str(config)))

        yield start


@pytest.fixture
def daemon(tmp_path: Path, engine: str, lasting_daemon: Callable[[str], Daemon]) -> Iterator[Daemon]:
    """One for each test, but where a start takes longer than most tests."""
    if TIME_FACTOR > 1:
        yield lasting_daemon(engine)
        return
    with running_daemon(tmp_path, "--engine", engine) as started:
        yield started


@pytest.fixture(scope="session")
def ticker_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_target("ticker.c", tmp_path_factory.mktemp("targets") / "ticker", "-ldl", "-lpthread")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_target("library.c", tmp_path_factory.mktemp("targets") / "library.so", "-shared", "-fPIC")


@pytest.fixture
def ticker(ticker_program: Path) -> Iterator[Ticker]:
    with Ticker(ticker_program) as running:
        yield running
