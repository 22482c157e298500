"""The opener of perf events (systemd/opener.c), run for real: what it opens, and what it does not do."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stapsdtd.capture.names import Owner
from stapsdtd.client import Client, Feature, SiteState, SubscribeOptions
from stapsdtd.elf import parse_object
from stapsdtd.kernel import libbpf, perf
from stapsdtd.kernel.perf import ALL_CPUS, ALL_PROCESSES, MappingRing, online_cpus
from stapsdtd.kernel.perf_opener import REPLY, REQUEST, VERSION, Kind, OpenerSilentError, PerfDeniedError, PerfOpener
from stapsdtd.kernel.places import Place
from stapsdtd.kernel.probe_events import ProbeEvent
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.kernel.uprobe_links import are_supported
from tests.openers import DENIED, OpenerSocket, build, listening, start
from tests.support import TICKER, TIME_FACTOR, Daemon, Recorder, Ticker, require, running_daemon, wait_for
from tests.units import capabilities, with_capabilities

pytestmark = pytest.mark.kernel

_PROGRAM_KPROBE = 2
_KERNEL_THREAD = 2
_AFTER_IT = re.compile(r"^(\w+)\(", re.MULTILINE)
_ALLOWED = {"recvmsg", "perf_event_open", "sendmsg", "close", "exit_group"}

perf_only = pytest.mark.skipif(are_supported(), reason="this kernel arms without perf events, since Linux 6.6")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("opener"))


class Asking:
    """A connection with a process of the opener."""

    def __init__(self, program: Path, *command: str) -> None:
        """command: runs it, in place of the unit's capabilities."""
        self.socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20 * TIME_FACTOR)
        with its:
            self.process = (
                subprocess.Popen([*command, str(program)], stdin=its.fileno(), stderr=subprocess.PIPE)
                if command
                else start(program, its, subprocess.PIPE)
            )

    def answer(self) -> tuple[int, list[int]]:
        """Return an errno and descriptors."""
        error, descriptors = self._message()
        if not error:
            assert self._message() == (0, [])
        return error, descriptors

    def _message(self) -> tuple[int, list[int]]:
        message, descriptors, flags, _ = socket.recv_fds(self.socket, 100, 9)
        assert not flags & socket.MSG_CTRUNC
        version, error = REPLY.unpack(message)
        assert version == VERSION
        return error, descriptors

    def ask(self, kind: int, pid: int, cpu: int, tracepoint: int = 0) -> tuple[int, list[int]]:
        self.socket.send(REQUEST.pack(VERSION, kind, pid, cpu, tracepoint))
        return self.answer()

    def opened(self, kind: int, pid: int, cpu: int, tracepoint: int = 0) -> int:
        """Return the errno, of which the descriptor was closed."""
        error, descriptors = self.ask(kind, pid, cpu, tracepoint)
        assert len(descriptors) == (error == 0)
        for each in descriptors:
            os.close(each)
        return error

    def end(self) -> tuple[int, str]:
        """Return its exit status and what it said."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        _, said = self.process.communicate(timeout=20 * TIME_FACTOR)
        self.socket.close()
        return self.process.returncode, said.decode()


@pytest.fixture
def asking(program: Path) -> Iterator[Asking]:
    asking = Asking(program)
    yield asking
    asking.end()


@pytest.fixture
def event(ticker_program: Path, tracefs: Tracefs) -> Iterator[int]:
    """The id of a uprobe event."""
    with defined(tracefs, ticker_program, "opened") as made:
        yield made._id


@contextlib.contextmanager
def defined(tracefs: Tracefs, ticker_program: Path, name: str) -> Iterator[ProbeEvent]:
    with open(ticker_program, "rb") as file:
        sites = parse_object(file).sites
    places = [Place(str(ticker_program), site.site_offset, site.semaphore_offset) for site in sites]
    trial = libbpf.load_trial(_PROGRAM_KPROBE, 0)
    try:
        made = ProbeEvent(tracefs, trial, f"{Owner.this_process().group}/{name}", places[:1], 0)
        try:
            yield made
        finally:
            made.remove()
    finally:
        os.close(trial)


@pytest.mark.vm
def test_each_kind_is_opened(asking: Asking, event: int) -> None:
    cpu = online_cpus()[0]
    assert asking.opened(Kind.TRACEPOINT, os.getpid(), ALL_CPUS, event) == 0
    assert asking.opened(Kind.TRACEPOINT, ALL_PROCESSES, cpu, event) == 0
    # it has no memory, so this arms nothing; the daemon links its program there
    assert asking.opened(Kind.TRACEPOINT, _KERNEL_THREAD, ALL_CPUS, event) == 0
    has_kprobes = os.path.exists("/sys/bus/event_source/devices/kprobe/type")
    assert asking.opened(Kind.KPROBE_TRIAL, ALL_PROCESSES, cpu) == (0 if has_kprobes else errno.ENODEV)
    assert asking.end() == (0, "")


@pytest.mark.vm
def test_a_ring_reports_mappings(asking: Asking) -> None:
    """Of all CPUs, so that it does not matter where the program runs."""
    rings = []
    for cpu in online_cpus():
        error, (descriptor,) = asking.ask(Kind.MAPPINGS, ALL_PROCESSES, cpu)
        assert error == 0
        rings.append((descriptor, mmap.mmap(descriptor, 65 * mmap.PAGESIZE)))
    assert asking.end() == (0, "")
    # which outlives the opener
    with subprocess.Popen(["true"]) as mapping:
        mapping.wait()
    found = [
        record
        for _, memory in rings
        for record in perf.mapping_records(perf.RingBuffer(memory).take())
        if isinstance(record, perf.Mapped) and record.pid == mapping.pid
    ]
    assert any(os.path.basename(record.path) in {"true", "coreutils"} for record in found), found
    for descriptor, memory in rings:
        memory.close()
        os.close(descriptor)


@pytest.mark.vm
def test_what_was_opened_arms_until_it_is_closed(asking: Asking, event: int, ticker: Ticker) -> None:
    assert ticker.semaphore == 0
    error, (descriptor,) = asking.ask(Kind.TRACEPOINT, ticker.pid, ALL_CPUS, event)
    assert error == 0
    assert ticker.semaphore == 1
    asking.process.kill()
    asking.process.wait()
    assert ticker.semaphore == 1
    os.close(descriptor)
    assert ticker.semaphore == 0


@pytest.mark.parametrize(
    "request_",
    [
        (0, -1, 0, 0),
        (4, -1, 0, 0),
        (0xFFFFFFFF, -1, 0, 0),
        # of no process, of none and of no CPU, of one process on one CPU
        (Kind.TRACEPOINT, 0, -1, 1000),
        (Kind.TRACEPOINT, -1, -1, 1000),
        (Kind.TRACEPOINT, 1, 0, 1000),
        (Kind.TRACEPOINT, -2, 0, 1000),
        (Kind.TRACEPOINT, -0x80000000, -1, 1000),
        (Kind.TRACEPOINT, 0x7FFFFFFF, -1, 1000),
        (Kind.TRACEPOINT, -1, -2, 1000),
        (Kind.TRACEPOINT, -1, 0x7FFFFFFF, 1000),
        # what is not an event's: every function of the kernel, ftrace's own records, none at all
        (Kind.TRACEPOINT, -1, 0, 0),
        (Kind.TRACEPOINT, -1, 0, 1),
        (Kind.TRACEPOINT, -1, 0, 31),
        (Kind.TRACEPOINT, -1, 0, 0x10000),
        (Kind.TRACEPOINT, -1, 0, 1 << 32 | 1000),
        (Kind.TRACEPOINT, -1, 0, 0xFFFFFFFFFFFFFFFF),
        (Kind.MAPPINGS, 1, -1, 0),
        (Kind.MAPPINGS, -1, -1, 0),
        (Kind.MAPPINGS, -1, 0, 1000),
        (Kind.KPROBE_TRIAL, 1, -1, 0),
        (Kind.KPROBE_TRIAL, -1, 0, 1000),
    ],
)
def test_invalid_requests(asking: Asking, request_: tuple[int, int, int, int], event: int) -> None:
    assert asking.ask(*request_) == (errno.EINVAL, [])
    # it goes on
    assert asking.opened(Kind.TRACEPOINT, os.getpid(), ALL_CPUS, event) == 0


def test_what_is_not_there_is_the_kernels_to_say(asking: Asking, event: int) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert asking.opened(Kind.TRACEPOINT, gone.pid, ALL_CPUS, event) == errno.ESRCH
    assert asking.opened(Kind.TRACEPOINT, ALL_PROCESSES, 0xFFFF, event) in {errno.ENODEV, errno.EINVAL}
    assert asking.opened(Kind.TRACEPOINT, os.getpid(), ALL_CPUS, 0xFFFF) == errno.EINVAL


def test_many_requests_at_once_are_answered_in_their_order(asking: Asking, event: int) -> None:
    pids = [os.getpid(), 0, _KERNEL_THREAD, 0x7FFFFFFF] * 8
    for pid in pids:
        asking.socket.send(REQUEST.pack(VERSION, Kind.TRACEPOINT, pid, ALL_CPUS, event))
    for pid in pids:
        error, descriptors = asking.answer()
        assert (error, len(descriptors)) == ((0, 1) if pid in {os.getpid(), _KERNEL_THREAD} else (errno.EINVAL, 0))
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize(
    "message",
    [
        REQUEST.pack(VERSION, Kind.MAPPINGS, -1, 0, 0)[:-1],
        REQUEST.pack(VERSION, Kind.MAPPINGS, -1, 0, 0) + b"\0",
        REQUEST.pack(VERSION, Kind.MAPPINGS, -1, 0, 0) * 1000,
        b"\0",
        REQUEST.pack(VERSION + 1, Kind.MAPPINGS, -1, 0, 0),
        REQUEST.pack(0, Kind.MAPPINGS, -1, 0, 0),
    ],
    ids=["short", "long", "huge", "one byte", "a later version", "none"],
)
def test_who_breaks_the_protocol_is_disconnected(asking: Asking, message: bytes) -> None:
    asking.socket.send(message)
    with contextlib.suppress(ConnectionResetError):
        assert asking.socket.recv(100) == b""
    assert asking.end() == (2, "")


def test_descriptors_are_not_taken(asking: Asking) -> None:
    ours, theirs = os.pipe()
    request = REQUEST.pack(VERSION, Kind.MAPPINGS, ALL_PROCESSES, 0, 0)
    socket.send_fds(asking.socket, [request], [theirs] * 50)
    os.close(theirs)
    assert asking.end() == (2, "")
    assert os.read(ours, 1) == b""
    os.close(ours)


def test_a_client_that_does_not_read_leaves_nothing_open(asking: Asking, event: int, ticker: Ticker) -> None:
    for _ in range(4):
        asking.socket.send(REQUEST.pack(VERSION, Kind.TRACEPOINT, ticker.pid, ALL_CPUS, event))
    wait_for(lambda: ticker.semaphore == 1, "a request to be served")
    asking.socket.close()
    assert asking.process.wait(20 * TIME_FACTOR) == 0
    wait_for(lambda: ticker.semaphore == 0, "what was sent to be closed")


def test_only_root_is_served(program: Path) -> None:
    code = """
import socket, subprocess, sys
ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sys.exit(subprocess.run(["sudo-like", *sys.argv[1:]], executable=sys.argv[1], stdin=its).returncode)
"""
    somebody = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups"]
    command = [*somebody, "/usr/bin/python3", "-c", code, shutil.copy(program, "/tmp")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * TIME_FACTOR)
    finally:
        os.unlink(command[-1])
    assert (done.returncode, done.stderr) == (1, "stapsdtd-opener: the client is not root\n")


def test_it_says_what_starts_it(program: Path) -> None:
    done = subprocess.run([program], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "stapsdtd-opener: standard input is no socket; stapsdtd-opener.socket starts this program\n"


def test_it_needs_its_capability(program: Path) -> None:
    asking = Asking(program, *with_capabilities([]))
    assert asking.opened(Kind.MAPPINGS, ALL_PROCESSES, online_cpus()[0]) in {errno.EACCES, errno.EPERM}
    assert asking.end() == (0, "")


def test_it_needs_no_library(program: Path) -> None:
    headers = subprocess.check_output(["readelf", "--program-headers", "--wide", program], text=True)
    assert "INTERP" not in headers
    assert "DYNAMIC" not in headers


@pytest.mark.parametrize("name", ["getpid", "openat", "execve", "bpf"])
def test_other_system_calls_end_it(tmp_path: Path, name: str) -> None:
    asking = Asking(build(tmp_path, f"-DSTRAY_CALL=__NR_{name}"))
    assert asking.end() == (-signal.SIGSYS, "")


def test_it_makes_no_others_after_its_filter(program: Path, tmp_path: Path) -> None:
    require(shutil.which("strace"), "strace")
    log = tmp_path / "calls"
    asking = Asking(program, "strace", "-o", str(log))
    assert asking.opened(Kind.MAPPINGS, ALL_PROCESSES, online_cpus()[0]) == 0
    assert asking.opened(9, 0, 0) == errno.EINVAL
    assert asking.end() == (0, "")
    before, found, after = log.read_text().partition("prctl(PR_SET_SECCOMP")
    assert found
    assert "recvmsg" not in before
    assert set(_AFTER_IT.findall(after)) == _ALLOWED


# the daemon's side


@pytest.fixture
def opener(tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenerSocket]:
    """An opener for this process, which the kernel denies perf events to."""

    def denied(*_: object) -> int:
        raise PermissionError(errno.EACCES, "perf_event_open: denied")

    with listening(tmp_path / "opener", program) as opener:
        monkeypatch.setattr(perf, "_open_here", denied)
        monkeypatch.setattr(perf, "_opener", PerfOpener(opener.path, 20.0 * TIME_FACTOR))
        yield opener
        perf._opener.close()


def test_rings_are_its_own(opener: OpenerSocket) -> None:
    MappingRing(online_cpus()[0]).close()
    assert perf.way_of_opening() == ", through stapsdtd-opener"
    assert len(opener.processes) == 1


@pytest.mark.vm
def test_what_is_armed_stays_so_without_it_and_a_new_one_arms_more(
    opener: OpenerSocket, ticker: Ticker, ticker_program: Path, tracefs: Tracefs
) -> None:
    with defined(tracefs, ticker_program, "kept") as event, Ticker(ticker_program) as other:
        event.arm(ticker.pid)
        assert (ticker.semaphore, other.semaphore) == (1, 0)
        opener.kill()
        assert (ticker.semaphore, other.semaphore) == (1, 0)
        event.arm(other.pid)
        assert (ticker.semaphore, other.semaphore) == (1, 1)
        assert len(opener.processes) == 2

        opener.close()
        with Ticker(ticker_program) as late:
            with pytest.raises(PerfDeniedError):
                event.arm(late.pid)
            assert (ticker.semaphore, other.semaphore, late.semaphore) == (1, 1, 0)
        event.unpatch_in(other.pid)
        assert (ticker.semaphore, other.semaphore) == (1, 0)
    assert ticker.semaphore == 0


@pytest.mark.vm
def test_killed_under_load(opener: OpenerSocket, ticker: Ticker, ticker_program: Path, tracefs: Tracefs) -> None:
    """Each request is served or refused, and nothing stays open."""
    before = len(os.listdir("/proc/self/fd"))
    refused = 0
    with defined(tracefs, ticker_program, "killed") as event:
        event.arm(ticker.pid)
        event.unpatch_in(ticker.pid)
        for _ in range(30):
            # some before the request, some while it is served
            opener.processes[-1].kill()
            try:
                event.arm(ticker.pid)
                assert ticker.semaphore == 1
            except OpenerSilentError:
                refused += 1
            event.unpatch_in(ticker.pid)
            assert ticker.semaphore == 0
    opener.close()
    perf._opener.close()
    assert refused < 30
    assert len(opener.processes) > 15
    # the listener's as well
    assert len(os.listdir("/proc/self/fd")) <= before


def test_without_one_it_says_what_it_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paranoid = tmp_path / "paranoid"
    monkeypatch.setattr(perf, "_PARANOID", str(paranoid))
    for content, words in [
        ("2\n", ["CAP_PERFMON", "run as root"]),
        ("3\n", ["kernel.perf_event_paranoid = 3", "CAP_SYS_ADMIN", "stapsdtd-opener.socket", "paranoid=2'"]),
        ("4\n", ["kernel.perf_event_paranoid = 4", "CAP_SYS_ADMIN"]),
    ]:
        paranoid.write_text(content)
        text = str(perf._denied("Permission denied"))
        assert "perf_event_open: Permission denied: " in text
        assert all(word in text for word in words), text


# a daemon, where perf events are the only way


def denied_daemon(opener: Sequence[str] = ()) -> list[str]:
    return [*opener, *with_capabilities(capabilities()), *DENIED]


@perf_only
@pytest.mark.vm
@pytest.mark.timeout(240)
def test_a_daemon_has_its_events_opened(tmp_path: Path, program: Path, ticker: Ticker, ticker_program: Path) -> None:
    with (
        listening(tmp_path / "opener", program) as opener,
        running_daemon(tmp_path, prefix=denied_daemon(opener.seen_by())) as daemon,
    ):
        found = mapping_records(daemon)
        assert found.available
        assert found.detail.endswith("through stapsdtd-opener")
        with Recorder(daemon.target, f"{TICKER}:{ticker_program}::tick(arg0)", pids=[ticker.pid]) as recorder:
            ticker.do("fire 2")
            opener.kill()
            ticker.do("fire 2")
            # a new program, whose mapping a ring reports, and that a new process of the opener arms
            with (
                Ticker(ticker_program) as other,
                Recorder(daemon.target, f"{TICKER}:tick(arg0)", pids=[other.pid]) as later,
            ):
                other.do("fire 1")
            opener.close()
            with Ticker(ticker_program) as late:
                assert "systemctl start stapsdtd-opener.socket" in why_refused(daemon, late) or (
                    "it takes CAP_PERFMON" in why_refused(daemon, late)
                )
            ticker.do("fire 1")
        assert later.values() == [(0,)]
        assert len(recorder.values()) == 5


@perf_only
@pytest.mark.vm
@pytest.mark.timeout(600)
def test_an_opener_that_hangs_holds_up_a_daemon_for_a_while(tmp_path: Path, program: Path, ticker: Ticker) -> None:
    with (
        listening(tmp_path / "opener", program, is_hanging=True) as opener,
        running_daemon(tmp_path, prefix=denied_daemon(opener.seen_by())) as daemon,
    ):
        found = mapping_records(daemon)
        assert not found.available
        assert "the opener of perf events does not answer: not within 10 s" in found.detail
        # while it is asked, the site is still being armed; at once after that, the answer is known
        silent = "the opener of perf events does not answer"
        wait_for(lambda: silent in why_refused(daemon, ticker), "the site to be refused", 60)
        opener.go_on()
        wait_for(lambda: not why_refused(daemon, ticker), "it to be asked again", 40)


def mapping_records(daemon: Daemon) -> Feature:
    with Client(daemon.target) as client:
        return next(feature for feature in client.info().features if feature.name == "mapping records")


def why_refused(daemon: Daemon, ticker: Ticker) -> str:
    """Return why a process is not armed; nothing if it is."""
    with Client(daemon.target) as client:
        subscription = client.subscribe(f"{TICKER}:tick", SubscribeOptions(pids=[ticker.pid]))
        (site,) = subscription.sites
        subscription.unsubscribe()
    assert (site.state is SiteState.REFUSED) == bool(site.reason)
    return site.reason
