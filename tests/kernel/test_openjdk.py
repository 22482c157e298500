"""OpenJDK's libjvm.so. Where a JVM may lack its compiler and a class to run, its own tools are the programs."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from stapsdtd.client import Client, ProbeListing
from tests.support import Daemon, Recorder, mapped_bytes, notes_in, require, stapsdt, wait_for

pytestmark = pytest.mark.kernel

EVERYTHING = ("hotspot:*", "hotspot_jni:*", "hs_private:*")


@dataclass(frozen=True)
class Java:
    home: Path

    @property
    def libjvm(self) -> str:
        return str(self.home / "lib/server/libjvm.so")

    def run(self, *options: str) -> int:
        """Run a short program to its end; answer its pid."""
        process = subprocess.Popen([self.home / "bin/java", *options, "--list-modules"], stdout=subprocess.DEVNULL)
        assert process.wait(timeout=60) == 0
        return process.pid


class IdleJvm:
    """keytool, which waits for a certificate on standard input."""

    def __init__(self, java: Java) -> None:
        tool = "java.base/sun.security.tools.keytool.Main"
        self._process = subprocess.Popen(
            [java.home / "bin/java", "-m", tool, "-printcert"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def java() -> Java:
    return Java(java_home())


def java_home() -> Path:
    found = sorted(Path("/usr/lib/jvm").glob("java-*-openjdk-*/lib/server/libjvm.so"))
    require(found, "OpenJDK")
    return found[-1].resolve().parents[2]


@pytest.fixture
def idle(java: Java) -> Iterator[IdleJvm]:
    with IdleJvm(java) as running:
        yield running


def list_libjvm(target: str, java: Java, pid: int) -> ProbeListing:
    with Client(target) as client:
        wait_for(lambda: len(client.list_probes(EVERYTHING, pids=[pid])), "libjvm.so to be mapped")
        listing = client.list_probes(EVERYTHING, pids=[pid], details=True)
    assert {probe.path for probe in listing} == {java.libjvm}
    return listing


def code(pid: int, path: str, offsets: list[int]) -> list[int]:
    """The byte that a process has at each offset of a library."""
    return [mapped_bytes(pid, path, offset, 1, "x")[0] for offset in offsets]


def test_all_sites_are_armed_and_disarmed_together(daemon: Daemon, java: Java, idle: IdleJvm) -> None:
    listing = list_libjvm(daemon.target, java, idle.pid)
    assert listing.problems == ()
    offsets = sorted(site.offset for probe in listing for site in probe.sites)
    assert len(offsets) == len(set(offsets)) == notes_in(java.libjvm)
    original = [Path(java.libjvm).read_bytes()[offset] for offset in offsets]
    assert code(idle.pid, java.libjvm, offsets) == original
    for _ in range(2):
        with Recorder(daemon.target, *EVERYTHING, pids=[idle.pid]) as recorder:
            assert sorted(status.offset for status in recorder.armed()) == offsets
            assert len(recorder.statuses) == len(offsets)
            patched = code(idle.pid, java.libjvm, offsets)
            assert not [offset for offset, before, now in zip(offsets, original, patched, strict=True) if before == now]
        assert code(idle.pid, java.libjvm, offsets) == original
        assert recorder.finish().lost == 0


def test_every_class_that_is_loaded_is_told(daemon: Daemon, java: Java, tmp_path: Path) -> None:
    log = tmp_path / "classes"
    with (
        Recorder(daemon.target, "hotspot:class__loaded(arg0:str, arg1, arg3)", kernel_buffer_kib=16384) as recorder,
        IdleJvm(java),
    ):
        wait_for(recorder.armed, "the first JVM's library to be armed")
        # the file is armed now, so the kernel arms a later JVM before that runs
        pid = java.run(f"-Xlog:class+load:file={log}:none")
    # java.lang.Object source: shared objects file
    record = Counter(
        (slashed(name), source.startswith("shared objects file"))
        for name, _, source in (line.partition(" source: ") for line in log.read_text().splitlines())
    )
    told: Counter[tuple[str, bool]] = Counter()
    for event in recorder.events:
        if event.pid == pid:
            # a name is not terminated: its length is an argument of its own
            name, length, is_shared = event.values
            assert isinstance(name, str)
            assert isinstance(length, int)
            told[slashed(name[:length]), bool(is_shared)] += 1
    assert told == record
    assert told.total() > 100
    assert recorder.finish().lost == 0


def test_classes_have_their_names_without_being_asked(daemon: Daemon, java: Java, tmp_path: Path) -> None:
    log = tmp_path / "classes"
    command = [str(java.home / "bin/java"), f"-Xlog:class+load:file={log}:none", "--list-modules"]
    options = ("--file", java.libjvm, "--json", "--buffer", "16384", "-o", str(tmp_path / "events"))
    stapsdt(daemon.target, "trace", "hotspot:class__loaded", *options, "--", *command)
    named = [json.loads(line)["named"] for line in (tmp_path / "events").read_text().splitlines()]
    record = Counter(slashed(line.partition(" source: ")[0]) for line in log.read_text().splitlines())
    assert Counter(slashed(each["class"]) for each in named) == record
    assert {each["shared"] for each in named} <= {True, False}
    assert record.total() > 100


def test_classes_are_counted_by_their_name(daemon: Daemon, java: Java, tmp_path: Path) -> None:
    """Which comes with its length."""
    log = tmp_path / "classes"
    command = [str(java.home / "bin/java"), f"-Xlog:class+load:file={log}:none", "--list-modules"]
    options = ("--by", "class, shared * 1", "--file", java.libjvm, "--json")
    counted = stapsdt(daemon.target, "count", "hotspot:class__loaded", *options, "--", *command)
    record = Counter(slashed(line.partition(" source: ")[0]) for line in log.read_text().splitlines())
    told: Counter[str] = Counter()
    for line in counted.stdout.splitlines():
        if line.startswith('{"key"'):
            row = json.loads(line)
            told[slashed(row["key"][0])] += row["count"]
            assert row["key"][1] in {0, 1}
    assert told == record
    assert record.total() > 100


def test_what_is_known_of_it_fits_every_note(daemon: Daemon, java: Java) -> None:
    done = stapsdt(daemon.target, "list", "--json", "--details", "--file", java.libjvm)
    probes = [json.loads(line) for line in done.stdout.splitlines()]
    known = [probe for probe in probes if probe["provider"] in {"hotspot", "hotspot_jni", "hs_private"}]
    assert len(known) > 400
    assert not [probe["name"] for probe in known if "signature" not in probe]


def slashed(class_name: str) -> str:
    """One spelling: the log has a.b.C$$Lambda/0x1, the probe a/b/C$$Lambda+0x1."""
    return class_name.replace(".", "/").replace("+", "/")


def test_jni_calls_threads_and_the_machines_life_are_told(daemon: Daemon, java: Java, idle: IdleJvm) -> None:
    list_libjvm(daemon.target, java, idle.pid)
    selectors = ("hotspot_jni:FindClass__entry(arg1:str)", "hotspot:thread__start(arg0:str, arg1)", *EVERYTHING)
    with Recorder(daemon.target, *selectors, kernel_buffer_kib=16384) as recorder:
        pid = java.run()
    events = [event for event in recorder.events if event.pid == pid]
    times = Counter(event.probe.name for event in events)

    def values(name: str) -> list[tuple[Any, ...]]:
        return [event.values for event in events if event.probe.name == name]

    assert ("java/lang/String",) in values("FindClass__entry")
    # the JVM's own name for it; a comm would end after 15 bytes
    assert "Reference Handler" in {name[:length] for name, length in values("thread__start")}
    for once in ("vm__init__begin", "vm__init__end", "vm__shutdown", "CreateJavaVM__entry", "DestroyJavaVM__return"):
        assert times[once] == 1, once
    jni = {name.removesuffix("__entry") for name in times if name.endswith("__entry")}
    assert len(jni) > 20
    assert {name: times[f"{name}__entry"] for name in jni} == {name: times[f"{name}__return"] for name in jni}
    assert recorder.finish().lost == 0


def test_methods_are_told_where_the_jvm_was_asked_to(daemon: Daemon, java: Java, idle: IdleJvm) -> None:
    list_libjvm(daemon.target, java, idle.pid)
    with Recorder(
        daemon.target,
        "hotspot:method__entry(arg1:str, arg2, arg3:str, arg4)",
        kernel_buffer_kib=65536,
        queue_bytes=256 << 20,
    ) as recorder:
        quiet = java.run()
        traced = java.run("-XX:+DTraceMethodProbes", "-Xint")
    assert not [event for event in recorder.events if event.pid == quiet]
    methods = {cut(event.values) for event in recorder.events if event.pid == traced}
    assert {("sun/launcher/LauncherHelper", "listModules"), ("java/lang/Object", "<init>")} <= methods
    assert recorder.finish().lost == 0


def cut(values: tuple[Any, ...]) -> tuple[str, str]:
    class_name, class_length, method, method_length = values
    return class_name[:class_length], method[:method_length]
