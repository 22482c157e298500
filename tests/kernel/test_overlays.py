"""One file that is seen through overlays is armed once, and each hit of it is delivered once."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Client
from tests.support import TICKER, Daemon, Recorder, Ticker

pytestmark = pytest.mark.kernel


@pytest.fixture
def layer(tmp_path: Path, ticker_program: Path) -> Path:
    """A lower directory, whose name has what mount options and mountinfo escape, with the program in it."""
    folder = tmp_path / r"lo wer"
    (folder / "bin").mkdir(parents=True)
    shutil.copy(ticker_program, folder / "bin" / "ticker")
    return folder


def options(layer: Path, folder: Path) -> str:
    for name in ("upper", "work", "merged"):
        (folder / name).mkdir(parents=True)
    return f"lowerdir={layer},upperdir={folder / 'upper'},workdir={folder / 'work'}"


@contextmanager
def overlay(layer: Path, folder: Path) -> Iterator[Path]:
    merged = folder / "merged"
    subprocess.run(["mount", "-t", "overlay", "-o", options(layer, folder), "none", str(merged)], check=True)
    try:
        yield merged
    finally:
        subprocess.run(["umount", "-l", str(merged)], check=True)


def test_each_hit_comes_once(daemon: Daemon, layer: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        merged = [stack.enter_context(overlay(layer, tmp_path / f"mount{number}")) for number in range(2)]
        bound = tmp_path / "bound"
        bound.mkdir()
        subprocess.run(["mount", "--bind", str(merged[0] / "bin"), str(bound)], check=True)
        stack.callback(subprocess.run, ["umount", "-l", str(bound)], check=True)
        programs = [layer / "bin" / "ticker", *(each / "bin" / "ticker" for each in merged), bound / "ticker"]
        tickers = [stack.enter_context(Ticker(program)) for program in programs]
        private = tmp_path / "private"
        script = (
            f"mount -t overlay -o '{options(layer, private)}' none '{private}/merged'"
            f" && exec '{private}/merged/bin/ticker'"
        )
        tickers.append(stack.enter_context(Ticker("unshare", "-m", "sh", "-c", script)))
        pids = sorted(ticker.pid for ticker in tickers)
        with Client(daemon.target) as client:
            (probe,) = client.list_probes(f"{TICKER}:ticker::tick", pids=pids)
            assert sorted(set(probe.pids) & set(pids)) == pids
        with Recorder(daemon.target, f"{TICKER}:ticker::tick(arg0)", pids=pids) as recorder:
            assert len(recorder.armed()) == 1
            for ticker in tickers:
                assert ticker.do("fire 3") == 1
        assert sorted(event.pid for event in recorder.events) == sorted(pids * 3)


def test_file_that_was_copied_up_is_another(daemon: Daemon, layer: Path, tmp_path: Path) -> None:
    with overlay(layer, tmp_path / "mount") as merged, Ticker(layer / "bin" / "ticker") as lower:
        # writing to it makes a copy in the upper layer
        with open(merged / "bin" / "ticker", "ab") as file:
            file.write(b"\0")
        with Ticker(merged / "bin" / "ticker") as upper:
            with Recorder(daemon.target, f"{TICKER}:ticker::tick(arg0)", pids=[lower.pid, upper.pid]) as recorder:
                assert len(recorder.armed()) == 2
                lower.do("fire 2")
                upper.do("fire 3")
            assert sorted(event.pid for event in recorder.events) == sorted([lower.pid] * 2 + [upper.pid] * 3)


def test_overlay_of_another_user_namespace_is_believed_in_nothing(daemon: Daemon, layer: Path, tmp_path: Path) -> None:
    """Whoever is root there alone may claim any layers; the kernel says which file it is, and where that lies."""
    folder = tmp_path / "rootless"
    script = (
        f"mount -t overlay -o '{options(layer, folder)}' none '{folder}/merged' && exec '{folder}/merged/bin/ticker'"
    )
    with (
        Ticker(layer / "bin" / "ticker") as lower,
        Ticker("unshare", "-U", "-r", "-m", "sh", "-c", script) as rootless,
    ):
        pids = sorted([lower.pid, rootless.pid])
        with Client(daemon.target) as client:
            (probe,) = client.list_probes(f"{TICKER}:ticker::tick", pids=pids)
            assert sorted(probe.pids) == pids
        with Recorder(daemon.target, f"{TICKER}:ticker::tick(arg0)", pids=pids) as recorder:
            assert len(recorder.armed()) == 1
            for ticker in (lower, rootless):
                assert ticker.do("fire 3") == 1
        assert sorted(event.pid for event in recorder.events) == sorted(pids * 3)
