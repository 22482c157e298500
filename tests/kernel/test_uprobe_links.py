"""Links of a program to many places of a file, on the kernel itself."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import pytest

from stapsdtd.capture.bpf.kernel import Loaded, load
from stapsdtd.client import Client
from stapsdtd.elf import parse_object
from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.places import Place
from stapsdtd.kernel.uprobe_links import NoMainThreadError, UprobeLink, are_for_processes, are_supported
from tests.kernel.recovery import BREAKPOINT, NOP
from tests.support import TICKER, Daemon, Ticker, is_dead, mapped_bytes, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.vm]


def linked(ticker_program: Path, loaded: Loaded, *more: Place) -> UprobeLink:
    if loaded.linked_program is None:
        pytest.skip("links to uprobes are there since Linux 6.6")  # the test below says whether this kernel is older
    with open(ticker_program, "rb") as file:
        sites = parse_object(file).sites
    places = [Place(str(ticker_program), site.site_offset, site.semaphore_offset) for site in sites]
    return UprobeLink(loaded.linked_program, [*places, *more], [0] * (len(places) + len(more)))


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    found = load()
    if isinstance(found, KernelFeatureError):
        pytest.skip(str(found))
    return found


def test_they_are_there_since_linux_6_6(loaded: Loaded) -> None:
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    assert are_supported() == (loaded.linked_program is not None) == (release >= (6, 6))


def test_places_are_patched_until_it_is_removed(ticker: Ticker, ticker_program: Path, loaded: Loaded) -> None:
    link = linked(ticker_program, loaded)
    before = len(os.listdir("/proc/self/fd"))
    link.arm(None)
    link.arm(None)
    assert ticker.semaphore == 1
    link.remove()
    assert ticker.semaphore == 0
    assert len(os.listdir("/proc/self/fd")) == before
    link.remove()


def test_one_that_is_refused_patches_nothing(ticker: Ticker, ticker_program: Path, loaded: Loaded) -> None:
    beyond_the_file = Place(str(ticker_program), 1 << 40)
    link = linked(ticker_program, loaded, beyond_the_file)
    with pytest.raises(OSError, match="Invalid argument"):
        link.arm(None)
    assert ticker.semaphore == 0
    with open(ticker_program, "rb") as file:
        for site in parse_object(file).sites:
            assert mapped_bytes(ticker.pid, str(ticker_program), site.site_offset, 1, "x") == NOP


def test_one_process_is_patched_and_another_of_the_same_file_is_not(
    ticker: Ticker, ticker_program: Path, loaded: Loaded
) -> None:
    link = linked(ticker_program, loaded)
    assert are_for_processes()
    before = len(os.listdir("/proc/self/fd"))
    with open(ticker_program, "rb") as file:
        offsets = [site.site_offset for site in parse_object(file).sites]
    with Ticker(ticker_program) as other, Ticker(ticker_program) as third:
        for pid in (ticker.pid, other.pid):
            link.arm(pid)
        assert [each.semaphore for each in (ticker, other, third)] == [1, 1, 0]
        for offset in offsets:
            found = [mapped_bytes(each.pid, str(ticker_program), offset, 1, "x") for each in (ticker, other, third)]
            assert found == [BREAKPOINT, BREAKPOINT, NOP]
        link.unpatch_in(ticker.pid)
        assert [each.semaphore for each in (ticker, other, third)] == [0, 1, 0]
        link.arm(ticker.pid)
        link.remove()
        assert [each.semaphore for each in (ticker, other, third)] == [0, 0, 0]
        for offset in offsets:
            assert mapped_bytes(ticker.pid, str(ticker_program), offset, 1, "x") == NOP
    assert len(os.listdir("/proc/self/fd")) == before


def test_process_that_ended_or_lost_its_main_thread_cannot_be_armed(
    ticker: Ticker, ticker_program: Path, loaded: Loaded
) -> None:
    link = linked(ticker_program, loaded)
    with Ticker(ticker_program) as gone:
        gone.kill()
        with pytest.raises(ProcessLookupError):
            link.arm(gone.pid)
    ticker.begin("leave")
    wait_for(lambda: is_dead(ticker.pid), "the main thread to end")
    with pytest.raises(NoMainThreadError, match=f"main thread of process {ticker.pid} has ended"):
        link.arm(ticker.pid)
    link.remove()


def test_what_remains_of_each_file_is_attached_to_that_file(
    daemon: Daemon, ticker_program: Path, tmp_path: Path
) -> None:
    one, other = (Path(shutil.copy(ticker_program, tmp_path / name)) for name in ("one", "other"))
    with Client(daemon.target) as client, Ticker(one) as first, Ticker(other) as second:
        everything = client.subscribe(f"{TICKER}:*")
        ticks = client.subscribe(f"{TICKER}:tick")
        everything.unsubscribe()
        assert (first.semaphore, second.semaphore) == (1, 1)
        first.do("fire 5")
        second.do("fire 7")
        assert ticks.unsubscribe().fired == 12
