"""What glibc's malloc is told, and that it does it: in processes of their own, since it cannot be untold."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading

import pytest

from stapsdtd.kernel.allocator import Trimmer, glibc, limit_arenas
from tests.support import require, wait_for

ARENAS = """
import ctypes, sys, threading
from stapsdtd.kernel.allocator import glibc, limit_arenas
libc = ctypes.CDLL(None)
if sys.argv[1] == "bound":
    limit_arenas(glibc())
libc.malloc.restype = ctypes.c_void_p
barrier = threading.Barrier(8)
def allocate():
    barrier.wait()
    libc.malloc(1000)
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
stdout = ctypes.c_void_p.in_dll(libc, "stdout")
libc.malloc_info(0, stdout)
libc.fflush(stdout)
"""

TRIMMED = """
import ctypes, time
from stapsdtd.kernel.allocator import Trimmer, glibc
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def anonymous_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
blocks = [libc.malloc(4096) for _ in range(20_000)]
for block in blocks:
    ctypes.memset(block, 1, 4096)
full = anonymous_kib()
for number, block in enumerate(blocks):
    if number % 50:
        libc.free(block)
assert anonymous_kib() > full - 8192, "free() gave it back by itself"
trimmer = Trimmer(glibc(), pause_seconds=0.01, cpu_clock=time.monotonic)
deadline = time.monotonic() + 20
while anonymous_kib() > full - 60_000:
    assert time.monotonic() < deadline, "nothing was given back"
    time.sleep(0.01)
trimmer.close()
"""


class FakeGlibc:
    def __init__(self) -> None:
        self.options: dict[int, int] = {}
        self.trims = 0

    def mallopt(self, option: int, value: int) -> int:
        self.options[option] = value
        return 1

    def malloc_trim(self, pad: int) -> int:
        assert pad == 0
        self.trims += 1
        return 1


def run(program: str, *arguments: str) -> str:
    require(glibc(), "glibc")
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(("is_bound", "arenas"), [(True, range(1, 3)), (False, range(3, 10))])
def test_threads_share_two_arenas(is_bound: bool, arenas: range) -> None:
    assert run(ARENAS, "bound" if is_bound else "not").count("<heap nr=") in arenas


def test_what_is_free_between_blocks_in_use_is_given_back() -> None:
    run(TRIMMED)


def test_blocks_of_a_megabyte_are_mapped_whatever_was_freed_before() -> None:
    libc = FakeGlibc()
    limit_arenas(libc)
    assert libc.options == {-8: 2, -1: 16 << 20, -3: 1 << 20}


def test_idle_process_is_trimmed_once_when_it_has_come_to_rest() -> None:
    libc = FakeGlibc()
    asked: list[int] = []
    trims: list[int] = []

    def cpu_seconds() -> float:
        """Of 3 busy pauses, and then none."""
        asked.append(min(len(asked), 3))
        trims.append(libc.trims)
        return asked[-1]

    trimmer = Trimmer(libc, pause_seconds=0.001, cpu_clock=cpu_seconds)
    wait_for(lambda: len(asked) > 10, "ten pauses")
    trimmer.close()
    assert trims[:7] == [0, 0, 1, 2, 3, 4, 4]
    assert libc.trims == 4


def test_trimming_ends() -> None:
    libc = FakeGlibc()
    trimmer = Trimmer(libc, pause_seconds=0.001, cpu_clock=itertools.count().__next__)
    wait_for(lambda: libc.trims > 2, "it to be trimmed")
    trimmer.close()
    trims = libc.trims
    assert not any(thread.name == "stapsdtd-trimmer" for thread in threading.enumerate())
    assert libc.trims == trims
