from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

import stapsdtd
from stapsdtd.provider import Probe, Provider, library
from stapsdtd.provider.architecture import of_this_process
from stapsdtd.provider.argtypes import Declaration
from stapsdtd.provider.image import build_image


@pytest.fixture
def provider() -> Iterator[Provider]:
    """Named for this process and test, so that what it maps can be told from others'."""
    provider = Provider("provider_under_test")
    yield provider
    provider.unload()
    assert mappings() == []
    assert descriptors() == []


def mappings() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return [line.split()[1] for line in maps if "/memfd:libstapsdt:provider_under_test " in line]


def descriptors() -> list[int]:
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the one that listed them
            continue
        if target == "/memfd:libstapsdt:provider_under_test (deleted)":
            found.append(number)
    return found


def trace(probe: Probe) -> None:
    """What the kernel does for a tracer, but for the breakpoint."""
    probe.site.semaphore.value += 1


def test_enabled_is_the_semaphore(provider: Provider) -> None:
    one, other = provider.probe("one"), provider.probe("other")

    def enabled() -> tuple[bool, bool]:
        return one.enabled, other.enabled

    assert enabled() == (False, False)
    provider.load()
    assert enabled() == (False, False)
    trace(one)
    assert enabled() == (True, False)
    provider.unload()
    assert enabled() == (False, False)


def test_segments_have_the_rights_of_a_library(provider: Provider) -> None:
    provider.probe("probe")
    provider.load()
    assert mappings() == ["r--p", "r-xp", "rw-p"]


def test_every_arity_is_called(provider: Provider) -> None:
    probes = [provider.probe(f"probe{arity}", *[int] * arity) for arity in range(7)]
    provider.load()
    for arity, probe in enumerate(probes):
        trace(probe)
        probe.fire(*[-(2**63)] * arity)


def test_the_file_cannot_be_cut_under_the_mapping(provider: Provider) -> None:
    provider.probe("probe")
    provider.load()
    (fd,) = descriptors()
    assert os.get_inheritable(fd) is False
    writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        for attack in (lambda: os.ftruncate(writable, 0), lambda: os.pwrite(writable, b"\xcc", 0x1000)):
            with pytest.raises(PermissionError):
                attack()
    finally:
        os.close(writable)


def test_a_kernel_that_does_not_know_the_newest_flag(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    memfd_create = os.memfd_create

    def old_memfd_create(name: str, flags: int) -> int:
        if flags & library.MFD_NOEXEC_SEAL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return memfd_create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_memfd_create)
    provider.probe("probe")
    provider.load()
    assert len(descriptors()) == 1


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Have the kernel refuse to open anything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_refused_memfd_is_an_oserror(provider: Provider) -> None:
    probe = provider.probe("probe")
    with no_more_descriptors(), pytest.raises(OSError, match="Too many open files"):
        provider.load()
    assert not provider.loaded
    probe.fire()


def test_a_refused_reload_leaves_what_is_loaded(provider: Provider) -> None:
    probe = provider.probe("probe")
    provider.load()
    trace(probe)
    with no_more_descriptors(), pytest.raises(OSError, match="Too many open files"):
        provider.reload()
    assert probe.enabled
    assert provider.loaded
    assert (len(mappings()), len(descriptors())) == (3, 1)


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_refused_mapping_leaves_nothing(provider: Provider, refused: int) -> None:
    image = build_image(provider.name, [Declaration("probe", ())], of_this_process())
    segments = list(image.segments)
    # every kernel refuses a length of 0; the first mapping ends with the last segment
    if refused == 0:
        segments[-1] = replace(segments[-1], offset=0, size=0)
    else:
        segments[refused] = replace(segments[refused], size=0)
    with pytest.raises(OSError, match="mmap of a memfd: Invalid argument"):
        library.load(provider.name, replace(image, segments=tuple(segments)), [0])
    assert (mappings(), descriptors()) == ([], [])


def test_unload_takes_everything_away_at_once(provider: Provider) -> None:
    provider.probe("probe")
    for _ in range(300):
        provider.load()
        assert (len(mappings()), len(descriptors())) == (3, 1)
        provider.unload()
        provider.unload()
        assert (mappings(), descriptors()) == ([], [])


def test_reload_takes_in_what_was_declared_since(provider: Provider) -> None:
    first = provider.probe("first")
    provider.load()
    second = provider.probe("second", int)
    second.fire(1)
    assert not second.enabled
    trace(first)
    for _ in range(300):
        provider.reload()
        assert (first.enabled, second.enabled) == (False, False)
        trace(first)
        trace(second)
        assert (first.enabled, second.enabled) == (True, True)
        second.fire(1)
        assert (len(mappings()), len(descriptors())) == (3, 1)


def test_whoever_is_in_a_stub_keeps_the_library(provider: Provider) -> None:
    probe = provider.probe("probe", int)
    provider.load()
    site = probe.site
    provider.unload()
    assert mappings() == ["r--p", "r-xp", "rw-p"]
    assert site.semaphore.value == 0
    site.stub(1)
    del site
    assert mappings() == []


def test_probes_outlive_their_provider() -> None:
    provider = Provider("provider_under_test")
    probe = provider.probe("probe")
    provider.load()
    del provider
    gc.collect()
    trace(probe)
    assert probe.enabled
    probe.fire()
    del probe
    assert mappings() == []
    assert descriptors() == []


def test_a_descriptor_that_somebody_else_closed_is_not_closed_again(provider: Provider) -> None:
    probe = provider.probe("probe")
    provider.load()
    (fd,) = descriptors()
    trace(probe)
    mine = os.open("/dev/null", os.O_RDONLY)
    try:
        os.dup2(mine, fd)
        assert probe.enabled
        probe.fire()
        provider.unload()
        os.fstat(fd)
    finally:
        os.close(mine)
        os.close(fd)
    provider.load()
    os.close(*descriptors())
    provider.unload()


def test_two_providers_of_one_name_are_two_libraries(provider: Provider) -> None:
    provider.probe("probe")
    provider.load()
    same = Provider("provider_under_test")
    probe = same.probe("probe")
    with same:
        trace(probe)
        assert not provider.probes[0].enabled
        assert len(descriptors()) == 2


# Threads fire into libraries that go while they do; a mistake here is a segmentation fault.
_THREADS = """
import faulthandler, sys, threading
from stapsdtd.provider import Provider
faulthandler.enable()
sys.setswitchinterval(1e-6)
provider = Provider("threads")
probe = provider.probe("probe", str, int)
stop = threading.Event()
fired = [0] * 4
def fire(number):
    while not stop.is_set():
        if probe.enabled:
            probe.fire("text", 1)
            fired[number] += 1
threads = [threading.Thread(target=fire, args=(number,)) for number in range(len(fired))]
for thread in threads:
    thread.start()
rounds = 0
while rounds < 500 or not all(fired):
    rounds += 1
    provider.load()
    probe.site.semaphore.value = 1
    provider.reload()
    probe.site.semaphore.value = 1
    provider.unload()
stop.set()
for thread in threads:
    thread.join()
assert not any("libstapsdt:threads" in line for line in open("/proc/self/maps"))
print("alive")
"""


def test_threads_may_fire_while_another_unloads() -> None:
    done = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("alive\n", "", 0)


def test_it_needs_nothing_but_the_standard_library() -> None:
    program = "import sys, stapsdtd.provider; print(*sorted(name for name in sys.modules if 'stapsdtd' in name))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.path.dirname(stapsdtd.__path__[0])},
    )
    names = done.stdout.split()
    assert "stapsdtd.provider.library" in names
    assert [name for name in names if not name.startswith("stapsdtd.provider")] == ["stapsdtd"]


def test_a_child_unloads_for_itself(provider: Provider) -> None:
    probe = provider.probe("probe")
    provider.load()
    trace(probe)
    child = os.fork()
    if child == 0:
        provider.unload()
        os._exit(len(mappings()) + len(descriptors()) + probe.enabled)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert probe.enabled
    assert (len(mappings()), len(descriptors())) == (3, 1)


def test_the_unloaded_site_is_never_enabled() -> None:
    assert library.UNLOADED.semaphore.value == 0
    assert ctypes.sizeof(library.UNLOADED.semaphore) == 2
    library.UNLOADED.stub(1, b"2")
