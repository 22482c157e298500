from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

from stapsdtd.provider import STRING, ArgType
from tests.support import require

pytestmark = pytest.mark.kernel

TRACEFS = "/sys/kernel/tracing"
GROUP = f"provtest_{os.getpid()}"
INTEGERS = [type_ for type_ in ArgType if type_ is not STRING]
REGISTERS = ("di", "si", "dx", "cx", "r8", "r9")

# A program that evaluates each line it is sent and prints the result; and so does a child it forks.
PROGRAM = """
import os, sys
from stapsdtd.provider import *

def serve(requests, answers):
    for request in requests:
        print(repr(eval(request, globals())), file=answers, flush=True)

def fork():
    global child_requests, child_answers
    requests, child_requests = os.pipe()
    child_answers, answers = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(child_requests)
        os.close(child_answers)
        serve(open(requests), open(answers, "w"))
        os._exit(0)
    os.close(requests)
    os.close(answers)
    child_requests, child_answers = open(child_requests, "w"), open(child_answers)
    return child

def in_child(request):
    print(request, file=child_requests, flush=True)
    return eval(child_answers.readline())

def reap(child):
    child_requests.close()
    return os.waitpid(child, 0)[1]

def descriptor():
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if os.path.lexists(path) and os.readlink(path).startswith("/memfd:libstapsdt:"):
            return int(number)

serve(sys.stdin, sys.stdout)
"""


class Target:
    """A process that runs PROGRAM."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def __call__(self, expression: str) -> str:
        """The repr of the value that the expression has there."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().rstrip("\n")

    def close(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0


@dataclass
class Tracer:
    """An own tracefs instance, and uprobes of this test's own group in it; it leaves none of them behind."""

    name: str
    events: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.instance = f"{TRACEFS}/instances/{GROUP}_{self.name}"
        os.mkdir(self.instance)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for event in self.events:
            self.enable(event, False)
            write(f"{TRACEFS}/uprobe_events", f"-:{GROUP}/{event}")
        os.rmdir(self.instance)

    def define(self, event: str, probe: Site, fetches: str = "") -> None:
        place = f"{probe.path}:{probe.location:#x}({probe.semaphore:#x})"
        write(f"{TRACEFS}/uprobe_events", f"p:{GROUP}/{event} {place} {fetches}")
        self.events.append(event)

    def enable(self, event: str, enable: bool = True) -> None:
        write(f"{self.instance}/events/{GROUP}/{event}/enable", "1" if enable else "0")

    def arm(self, event: str, probe: Site, fetches: str = "") -> None:
        self.define(event, probe, fetches)
        self.enable(event)

    def lines(self) -> list[tuple[int, str]]:
        """Process id and fetched arguments of each hit so far."""
        with open(f"{self.instance}/trace", encoding="utf-8", errors="surrogateescape") as trace:
            hits = (re.match(r"\s*.*-(\d+)\s+\[\d+\].*?: \w+: \(0x[0-9a-f]+\) ?(.*)", line) for line in trace)
            return [(int(hit[1]), hit[2]) for hit in hits if hit]


@dataclass(frozen=True)
class Site:
    path: str
    location: int
    semaphore: int
    arguments: str


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def sites(pid: int) -> dict[str, Site]:
    """The probes of the provider's library as a tool finds them: by its executable mapping."""
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        (line,) = (line for line in maps if "memfd:libstapsdt:" in line and " r-xp " in line)
    path = f"/proc/{pid}/map_files/{line.split()[0]}"
    found = {}
    with open(path, "rb") as file:
        section = ELFFile(file).get_section_by_name(".note.stapsdt")
        assert isinstance(section, NoteSection)
        for note in section.iter_notes():
            raw: bytes = note["n_descdata"]
            location, _base, semaphore = (int.from_bytes(raw[at : at + 8], "little") for at in (0, 8, 16))
            _provider, name, arguments, _ = raw[24:].split(b"\0")
            found[name.decode()] = Site(path, location, semaphore, arguments.decode())
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    if not os.access(f"{TRACEFS}/uprobe_events", os.W_OK) and os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tracefs", "nodev", TRACEFS], check=False, capture_output=True)
    require(os.access(f"{TRACEFS}/uprobe_events", os.W_OK), "root with tracefs and uprobes")
    yield
    with open(f"{TRACEFS}/uprobe_events", encoding="utf-8") as events:
        assert f":{GROUP}/" not in events.read()
    assert not [name for name in os.listdir(f"{TRACEFS}/instances") if name.startswith(GROUP)]


@pytest.fixture
def target() -> Iterator[Target]:
    with contextlib.closing(Target()) as running:
        running("(provider := Provider('myapp'))")
        yield running


@pytest.fixture
def tracer(request: pytest.FixtureRequest) -> Iterator[Tracer]:
    with Tracer(re.sub(r"\W", "_", request.node.name)[:40]) as running:
        yield running


def declare(target: Target, name: str, *types: str) -> None:
    target(f"({name} := provider.probe({name!r}, {', '.join(types)}))")


@pytest.mark.vm
def test_enabled_follows_the_tracer(target: Target, tracer: Tracer) -> None:
    declare(target, "one")
    declare(target, "other")
    target("provider.load()")
    seen = []
    for enable in (None, True, False, True, False):
        if enable is None:
            tracer.define("one", sites(target.pid)["one"])
        else:
            tracer.enable("one", enable)
        seen.append((target("one.enabled"), target("other.enabled")))
        target("one.fire()")
    assert seen == [("False", "False"), *[("True", "False"), ("False", "False")] * 2]
    assert tracer.lines() == [(target.pid, "")] * 2


def test_enabled_until_the_last_tracer_is_gone(target: Target, tracer: Tracer) -> None:
    declare(target, "one")
    target("provider.load()")
    site = sites(target.pid)["one"]
    tracer.arm("first", site)
    tracer.arm("second", site)
    assert target("one.enabled") == "True"
    tracer.enable("first", False)
    assert target("one.enabled") == "True"
    tracer.enable("second", False)
    assert target("one.enabled") == "False"


@pytest.mark.parametrize("type_", INTEGERS, ids=lambda type_: type_.label)
def test_integers_arrive_as_they_were_fired(target: Target, tracer: Tracer, type_: ArgType) -> None:
    declare(target, "probe", *[type_.name] * 6)
    target("provider.load()")
    kind = f"{'s' if type_.signed else 'u'}{8 * type_.size}"
    tracer.arm(
        "probe",
        sites(target.pid)["probe"],
        " ".join(f"a{position}=%{register}:{kind}" for position, register in enumerate(REGISTERS)),
    )
    values = [type_.low, type_.high, 0, 1, -1 if type_.signed else 2, type_.high // 2]
    rows = [values[turn:] + values[:turn] for turn in range(6)]
    for row in rows:
        target(f"probe.fire(*{row})")
    assert tracer.lines() == [
        (target.pid, " ".join(f"a{position}={value}" for position, value in enumerate(row))) for row in rows
    ]


def test_narrow_integers_fill_the_whole_register(target: Target, tracer: Tracer) -> None:
    """For tools that read registers whole, as those made for libstapsdt may."""
    declare(target, "probe", "INT8", "UINT8", "INT32")
    target("provider.load()")
    tracer.arm("probe", sites(target.pid)["probe"], "a=%di:s64 b=%si:s64 c=%dx:s64")
    target("probe.fire(-128, 255, -2**31)")
    assert tracer.lines() == [(target.pid, f"a=-128 b=255 c={-(2**31)}")]


def test_strings_arrive(target: Target, tracer: Tracer) -> None:
    declare(target, "probe", "int", "str")
    target("provider.load()")
    tracer.arm("probe", sites(target.pid)["probe"], "n=%di:s64 text=+0(%si):ustring")
    fired = {
        "/index": "/index",
        "": "",
        "grün ☂": "grün ☂",
        "cut\0off": "cut",
        "\udcff": "\udcff",
        "x" * 500: "x" * 500,
    }
    for number, text in enumerate(fired):
        target(f"probe.fire({number}, {text!a})")
    target("probe.fire(-1, b'raw')")
    expected = [f'n={number} text="{text}"' for number, text in enumerate(fired.values())]
    assert [line for _, line in tracer.lines()] == [*expected, 'n=-1 text="raw"']


def test_a_child_of_a_traced_program_is_traced(target: Target, tracer: Tracer) -> None:
    declare(target, "probe", "int")
    target("provider.load()")
    tracer.arm("probe", sites(target.pid)["probe"], "n=%di:s64")
    child = int(target("fork()"))
    assert target("in_child('probe.enabled')") == "True"
    target("in_child('probe.fire(1)')")
    target("probe.fire(2)")
    assert tracer.lines() == [(child, "n=1"), (target.pid, "n=2")]
    tracer.enable("probe", False)
    assert target("in_child('probe.enabled')") == "False"
    assert target("probe.enabled") == "False"
    target("in_child('probe.fire(3)')")
    assert len(tracer.lines()) == 2
    assert target(f"reap({child})") == "0"


def test_a_child_forked_before_is_traced_too(target: Target, tracer: Tracer) -> None:
    declare(target, "probe", "int")
    target("provider.load()")
    child = int(target("fork()"))
    assert target("in_child('probe.enabled')") == "False"
    tracer.arm("probe", sites(target.pid)["probe"], "n=%di:s64")
    assert target("in_child('probe.enabled')") == "True"
    target("in_child('probe.fire(1)')")
    target("probe.fire(2)")
    assert tracer.lines() == [(child, "n=1"), (target.pid, "n=2")]
    assert target(f"reap({child})") == "0"
    assert target("probe.enabled") == "True"
    tracer.enable("probe", False)
    assert target("probe.enabled") == "False"


def test_what_the_child_unloads_the_parent_keeps(target: Target, tracer: Tracer) -> None:
    declare(target, "probe", "int")
    target("provider.load()")
    tracer.arm("probe", sites(target.pid)["probe"], "n=%di:s64")
    child = int(target("fork()"))
    target("in_child('provider.unload()')")
    assert target("in_child('probe.enabled')") == "False"
    target("in_child('probe.fire(1)')")
    target("in_child('provider.load()')")
    assert target("in_child('probe.enabled')") == "False"
    target("in_child('probe.fire(2)')")
    assert target("probe.enabled") == "True"
    target("probe.fire(3)")
    assert tracer.lines() == [(target.pid, "n=3")]
    tracer.arm("in_child", sites(child)["probe"], "n=%di:s64")
    target("in_child('probe.fire(4)')")
    assert tracer.lines()[1:] == [(child, "n=4")]
    assert target(f"reap({child})") == "0"


def test_the_parent_may_unload_before_its_child(target: Target, tracer: Tracer) -> None:
    declare(target, "probe", "int")
    target("provider.load()")
    tracer.arm("probe", sites(target.pid)["probe"], "n=%di:s64")
    child = int(target("fork()"))
    target("provider.unload()")
    target("probe.fire(1)")
    assert target("in_child('probe.enabled')") == "True"
    target("in_child('probe.fire(2)')")
    assert tracer.lines() == [(child, "n=2")]
    tracer.enable("probe", False)
    assert target("in_child('probe.enabled')") == "False"
    assert target(f"reap({child})") == "0"


def test_unloading_while_traced(target: Target, tracer: Tracer) -> None:
    declare(target, "probe", "int")
    target("provider.load()")
    tracer.arm("probe", sites(target.pid)["probe"], "n=%di:s64")
    target("probe.fire(1)")
    target("provider.unload()")
    assert target("probe.enabled") == "False"
    target("probe.fire(2)")
    assert tracer.lines() == [(target.pid, "n=1")]


def test_a_hundred_reloads(target: Target, tracer: Tracer) -> None:
    declare(target, "probe", "int")
    target("provider.load()")
    descriptors, inodes = set(), set()
    for turn in range(100):
        site = sites(target.pid)["probe"]
        inodes.add(os.stat(site.path).st_ino)
        descriptors.add(target("descriptor()"))
        if turn % 10 == 0:
            tracer.arm(f"probe{turn}", site, "n=%di:s64")
            assert target("probe.enabled") == "True"
        target(f"probe.fire({turn})")
        # Unloaded first, the descriptor's number comes back with another file behind it.
        target("(provider.unload(), provider.load())" if turn % 20 else "provider.reload()")
        assert target("probe.enabled") == "False"
        target("probe.fire(-1)")
    assert [line for _, line in tracer.lines()] == [f"n={turn}" for turn in range(0, 100, 10)]
    assert len(inodes) == 100
    assert len(descriptors) <= 2


def test_a_program_that_closed_all_descriptors_is_still_traced(target: Target, tracer: Tracer) -> None:
    declare(target, "probe", "int")
    target("provider.load()")
    target("os.closerange(3, 100)")
    tracer.arm("probe", sites(target.pid)["probe"], "n=%di:s64")
    assert target("probe.enabled") == "True"
    target("probe.fire(1)")
    assert tracer.lines() == [(target.pid, "n=1")]
    target("provider.reload()")
    assert target("probe.enabled") == "False"


def test_bpftrace_shows_what_was_fired(target: Target) -> None:
    require(shutil.which("bpftrace") is not None, "bpftrace")
    declare(target, "request__start", "str", "INT32", "INT64")
    target("provider.load()")
    listed = subprocess.run(
        ["bpftrace", "-l", f"usdt:/proc/{target.pid}/fd/{target('descriptor()')}:*"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.rstrip().endswith(":myapp:request__start")
    program = (
        'usdt:*:myapp:request__start { printf("%s %d %ld\\n", str(arg0), (int32)arg1, (int64)arg2); @hits += 1; '
        "if (@hits == 3) { exit() } }"
    )
    command = ["bpftrace", "-p", str(target.pid), "-e", program]
    fired: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tracing:
        assert tracing.stdout is not None
        # The probe is enabled a little before the program runs, so what is fired first may not be seen.
        wait_until(lambda: tracing.poll() is not None or target("request__start.enabled") == "True")
        while tracing.poll() is None:
            fired.append(f"/index {-(2**31) + len(fired)} {-(2**63) + len(fired)}")
            target("request__start.fire({!r}, {}, {})".format(*fired[-1].split()))
        printed = re.findall("^/index .*$", tracing.stdout.read(), re.MULTILINE)
    first = fired.index(printed[0])
    assert printed[:3] == fired[first : first + 3]
    assert target("request__start.enabled") == "False"


def test_a_tracer_of_the_parent_alone_loses_the_child_at_its_first_hit(target: Target, tracer: Tracer) -> None:
    require(shutil.which("perf") is not None, "perf")
    declare(target, "probe")
    target("provider.load()")
    tracer.define("probe", sites(target.pid)["probe"])
    (asked, ask), (answer, answered) = os.pipe(), os.pipe()
    command = ["perf", "stat", "--no-inherit", "-e", f"{GROUP}:probe", "-p", str(target.pid), "-x,"]
    # the semaphore is up before perf counts, which it says only if it is told to begin
    command += ["--delay=-1", f"--control=fd:{asked},{answered}"]
    with (
        open(ask, "wb", buffering=0) as begin,
        open(answer, "rb", buffering=0) as begun,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, pass_fds=[asked, answered]) as perf,
    ):
        assert perf.stderr is not None
        os.close(asked)
        os.close(answered)
        wait_until(lambda: perf.poll() is not None or target("probe.enabled") == "True")
        begin.write(b"enable\n")
        assert begun.read(4) == b"ack\n"
        child = int(target("fork()"))
        assert target("in_child('probe.enabled')") == "True"
        target("in_child('probe.fire()')")
        assert target("in_child('probe.enabled')") == "False"
        assert target("probe.enabled") == "True"
        target("probe.fire()")
        perf.send_signal(signal.SIGINT)
        # behind its messages of being told
        assert perf.stderr.read().splitlines()[-1].startswith("1,")
    assert target("probe.enabled") == "False"
    assert target(f"reap({child})") == "0"


def test_perf_lists_it(target: Target, tmp_path: object) -> None:
    require(shutil.which("perf") is not None, "perf")
    declare(target, "request__start", "str", "INT32")
    target("provider.load()")
    image = f"{tmp_path}/libmyapp.so"
    shutil.copyfile(sites(target.pid)["request__start"].path, image)
    perf = ["perf", "--buildid-dir", str(tmp_path)]
    subprocess.run([*perf, "buildid-cache", "--add", image], check=True, capture_output=True)
    listed = subprocess.run([*perf, "list", "--raw-dump", "sdt"], check=True, capture_output=True, text=True)
    assert "sdt_myapp:request__start" in listed.stdout
