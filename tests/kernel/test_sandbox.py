"""What a parsing process may do, and that nothing it does reaches the daemon."""

from __future__ import annotations

import glob
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

from stapsdtd.elf import parse_object
from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.model import ParsedObject
from stapsdtd.sandbox.parser import SandboxedParser
from stapsdtd.sandbox.processes import COMMAND, NOBODY, Worker, Zygote, worker_ids
from tests.support import TARGETS, children, is_dead, require, wait_for
from tests.unit.test_elf_hostile import many_notes

pytestmark = pytest.mark.kernel

_HOSTILE = (sys.executable, str(TARGETS / "sandboxed.py"))
_SLOW_SECONDS = 60.0
"""A file that takes longer ends its worker, which any file does when a host is slow."""
_LIBSTDCXX = "/usr/lib/x86_64-linux-gnu/libstdc++.so.6"
_PROGRAMS = (
    "/usr/lib/postgresql/*/bin/postgres",
    "/usr/lib/jvm/*/lib/server/libjvm.so",
    "/usr/lib/*/libstdc++.so.6",
    "/usr/lib/*/libc.so.6",
    "/usr/bin/python3",
    "/usr/bin/bash",
    "/etc/passwd",
)


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


@pytest.fixture
def sandbox() -> Iterator[SandboxedParser]:
    with closing(SandboxedParser(deadline_seconds=60, slow_seconds=_SLOW_SECONDS)) as parser:
        yield parser


@pytest.fixture
def forked() -> list[int]:
    """All workers of the hostile zygote there were."""
    return []


@pytest.fixture
def deadline_seconds() -> float:
    """For a file of the hostile parser."""
    return 30


@pytest.fixture
def ask(forked: list[int], deadline_seconds: float, tmp_path: Path) -> Iterator[Callable[[str], ParsedObject]]:
    class HostileZygote(Zygote):
        def __init__(self) -> None:
            super().__init__(command=_HOSTILE)

        def fork(self) -> Worker:
            worker = super().fork()
            forked.append(worker.pid)
            return worker

    def ask(command: str) -> ParsedObject:
        path = tmp_path / command
        path.write_text(command)
        return parse(hostile, str(path))

    with closing(
        SandboxedParser(HostileZygote, deadline_seconds=deadline_seconds, slow_seconds=_SLOW_SECONDS)
    ) as hostile:
        yield ask


def parse(parser: SandboxedParser, path: str) -> ParsedObject:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return parser.parse(descriptor, os.getpid())
    finally:
        os.close(descriptor)


def open_files(pid: int) -> set[str]:
    found = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found


def zygote() -> int:
    """Return the one of this process, which runs one sandbox at a time."""
    (pid,) = [pid for pid in children() if command_line(pid)[: len(COMMAND)] == COMMAND]
    return pid


def command_line(pid: int) -> tuple[str, ...]:
    return tuple(Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0"))


def status_of(pid: int) -> dict[str, list[str]]:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return {name: value.split() for name, value in (line.split(":", 1) for line in file)}


def in_process(path: str) -> ParsedObject | str:
    with open(path, "rb") as file:
        try:
            return parse_object(file)
        except ObjectUnreadableError as error:
            return str(error)


def sandboxed(parser: SandboxedParser, path: str) -> ParsedObject | str:
    try:
        return parse(parser, path)
    except ObjectUnreadableError as error:
        return str(error)


def test_says_the_same_as_the_parser_itself(sandbox: SandboxedParser) -> None:
    paths = [path for pattern in _PROGRAMS for path in glob.glob(pattern)]
    assert paths
    for path in paths:
        assert sandboxed(sandbox, path) == in_process(path), path


def test_says_the_same_of_broken_files(sandbox: SandboxedParser, tmp_path: Path) -> None:
    """What a wrong file needs, numpy's messages or another module, is not to be had by then either."""
    require(os.path.exists(_LIBSTDCXX), "libstdc++")
    original, path, dice = Path(_LIBSTDCXX).read_bytes(), tmp_path / "broken", random.Random(1)
    ends = len(original) - 64 * 40
    for _ in range(150):
        image = bytearray(original)
        for _ in range(dice.randint(1, 12)):
            at = dice.randrange(64) if dice.random() < 0.3 else dice.randrange(ends, len(image))
            image[at] = dice.choice([0, 1, 0x7F, 0xFF, dice.randrange(256)])
        path.write_bytes(image[: dice.choice([len(image), len(image), dice.randrange(len(image))])])
        assert sandboxed(sandbox, str(path)) == in_process(str(path))


def test_four_hundred_thousand_notes(sandbox: SandboxedParser, tmp_path: Path) -> None:
    path = tmp_path / "many"
    path.write_bytes(many_notes(400_000).build())
    assert parse(sandbox, str(path)) == in_process(str(path))


def test_status(sandbox: SandboxedParser, caplog: pytest.LogCaptureFixture) -> None:
    parse(sandbox, sys.executable)
    (worker,) = children(zygote())
    for pid in (zygote(), worker):
        status = status_of(pid)
        assert (*map(int, {*status["Uid"]}), *map(int, {*status["Gid"]})) == worker_ids()
        assert status["Groups"] == []
        for which in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[which][0], 16) == 0
        assert status["NoNewPrivs"] == ["1"]
        assert status["Threads"] == ["1"]
        assert os.stat(f"/proc/{pid}/maps").st_uid == 0  # as of what is not dumpable
        assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2", "3"]
        assert {os.readlink(f"/proc/{pid}/fd/{standard}") for standard in (0, 1, 2)} == {os.devnull}
        for namespace in ("net", "ipc", "uts"):
            assert os.readlink(f"/proc/{pid}/ns/{namespace}") != os.readlink(f"/proc/self/ns/{namespace}")
    assert status_of(worker)["Seccomp"] == ["2"]
    limits = Path(f"/proc/{worker}/limits").read_text(encoding="ascii")
    for what in ("file size", "processes", "core file size", "locked memory"):
        assert re.search(rf"^Max {what} +0 +0 ", limits, re.MULTILINE)
    for what, most in (("address space", 1 << 30), ("open files", 16), ("cpu time", 60)):
        found = re.search(rf"^Max {what} +([0-9]+) +\1 ", limits, re.MULTILINE)
        assert found is not None
        assert int(found[1]) <= most
    assert not caplog.records


def test_another_user() -> None:
    with closing(SandboxedParser(partial(Zygote, ids=(12345, 23456)))) as sandbox:
        parse(sandbox, sys.executable)
        status = status_of(zygote())
    assert set(status["Uid"]) == {"12345"}
    assert set(status["Gid"]) == {"23456"}


def test_may_do_nothing(ask: Callable[[str], ParsedObject]) -> None:
    outcomes = {problem.name: problem.reason for problem in ask("try").problems}
    assert outcomes.pop("start a thread") == "RuntimeError"
    assert len(outcomes) > 20
    assert {what: how for what, how in outcomes.items() if how != "EPERM"} == {}
    assert not os.path.exists("/tmp/sandboxed")


def test_rights_are_gone_before_the_filter_too() -> None:
    """Two locks on each door."""
    script = f"""
import sys, runpy
from stapsdtd.sandbox import lockdown
names = runpy.run_path({str(TARGETS / "sandboxed.py")!r})
tries, outcome = names["attempts"](), names["_outcome"]
assert not lockdown.drop_rights({NOBODY}, {NOBODY})
for what in sys.argv[1:]:
    print(outcome(tries[what]))
"""
    expected = {
        "read a file": "EACCES",
        "read itself": "EACCES",
        "create a file": "EACCES",
        "list a directory": "EACCES",
        "become root": "EPERM",
        "kill its parent": "EPERM",
        "mount": "EPERM",
        "execute": "EACCES",
    }
    done = subprocess.run([sys.executable, "-c", script, *expected], check=True, capture_output=True, text=True)
    assert dict(zip(expected, done.stdout.split(), strict=True)) == expected


@pytest.mark.parametrize(
    ("command", "because", "attempts", "deadline_seconds"),
    [
        ("hang", "took longer than 3 s", 1, 3),
        ("drip", "took longer than 3 s", 1, 3),
        ("crash", "was ended by SIGSEGV", 2, 30),
        ("leave", "ended", 2, 30),
        ("garbage", "said nonsense: an answer of 18446744073709551615 bytes", 1, 30),
        ("wrong", "said nonsense", 1, 30),
        ("eat", "not enough memory to read it", 1, 30),
        ("eat small", "not enough memory to read it", 1, 30),
        ("raise", "the parser failed: KeyError: 'defect'", 1, 30),
    ],
)
def test_a_file_costs_itself(  # noqa: PLR0917 - fixtures
    ask: Callable[[str], ParsedObject],
    forked: list[int],
    command: str,
    because: str,
    attempts: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ObjectUnreadableError, match=because):
        ask(command)
    assert len(forked) == attempts
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == (0 if because.startswith("not enough") else 1)
    assert ask("try").problems


def test_a_worker_that_read_others_before_is_not_believed_to_be_the_files_fault(
    ask: Callable[[str], ParsedObject], forked: list[int]
) -> None:
    ask("try")
    with pytest.raises(ObjectUnreadableError, match="nonsense"):
        ask("garbage")
    assert len(forked) == 2


@pytest.mark.parametrize("times", [1, 2])
def test_killed_in_the_middle_of_a_file(sandbox: SandboxedParser, tmp_path: Path, times: int) -> None:
    path = tmp_path / "many"
    path.write_bytes(many_notes(100_000).build())
    parse(sandbox, sys.executable)
    found = list[ParsedObject | str]()
    before = children(zygote())
    thread = threading.Thread(target=lambda: found.append(sandboxed(sandbox, str(path))))
    os.chmod(path, 0o666)  # so that the file gets a worker of its own
    thread.start()
    killed: set[int] = set()
    for _ in range(times):
        (worker,) = wait_for(lambda: children(zygote()) - before - killed, "a worker")
        wait_for(lambda: str(path) in open_files(worker), "it to have the file")  # noqa: B023 - called here
        os.kill(worker, signal.SIGKILL)
        killed.add(worker)
    thread.join()
    assert found == [in_process(str(path)) if times == 1 else "the process that parsed it was ended by SIGKILL"]


def test_killed_while_idle(sandbox: SandboxedParser) -> None:
    parse(sandbox, sys.executable)
    (worker,) = children(zygote())
    os.kill(worker, signal.SIGKILL)
    assert parse(sandbox, sys.executable) == in_process(sys.executable)


def test_the_zygote_is_killed(sandbox: SandboxedParser) -> None:
    parse(sandbox, sys.executable)
    killed = zygote()
    (worker,) = children(killed)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: is_dead(worker), "its worker to end")
    assert parse(sandbox, sys.executable) == in_process(sys.executable)
    assert zygote() != killed


def test_stopping_signals_are_for_the_daemon(sandbox: SandboxedParser) -> None:
    parse(sandbox, sys.executable)
    (worker,) = children(zygote())
    for pid in (zygote(), worker):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    parse(sandbox, sys.executable)
    assert children(zygote()) == {worker}


def test_files_of_two_owners_never_meet(sandbox: SandboxedParser, tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(Path(sys.executable).read_bytes())

    def workers_after(user: int, mode: int = 0o755) -> set[int]:
        os.chown(path, user, user)
        os.chmod(path, mode)
        parse(sandbox, str(path))
        return children(zygote())

    (of_root,) = workers_after(0)
    both = workers_after(1000)
    assert len(both) == 2
    assert workers_after(0) == workers_after(1000) == both
    # anybody may have written to it now
    assert not workers_after(1000, 0o777) <= both
    last = workers_after(2000)
    assert len(last) == 2
    assert of_root not in last
    with open(path, "rb") as file:
        path.unlink()
        sandbox.parse(file.fileno(), os.getpid())
    assert children(zygote()) == last


def test_it_ends_with_the_daemon(tmp_path: Path) -> None:
    script = """
import os, sys
from functools import partial
from stapsdtd.sandbox.parser import SandboxedParser
from stapsdtd.sandbox.processes import Zygote
parser = SandboxedParser(partial(Zygote, command=sys.argv[2:]))
print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
parser.parse(os.open(sys.argv[1], os.O_RDONLY), os.getpid())
"""
    path = tmp_path / "hang"
    path.write_text("hang")
    with subprocess.Popen([sys.executable, "-c", script, str(path), *_HOSTILE], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        zygote = int(daemon.stdout.readline())
        (worker,) = wait_for(lambda: children(zygote), "the worker")
        daemon.kill()
    wait_for(lambda: not os.path.exists(f"/proc/{zygote}") and not os.path.exists(f"/proc/{worker}"), "both to end")


_PARSE = """
import os, logging, sys
logging.basicConfig(format="%(message)s")
from stapsdtd.sandbox.parser import SandboxedParser
parser = SandboxedParser()
zygote = int(open(f"/proc/self/task/{os.getpid()}/children").read())
print(len(parser.parse(os.open(sys.argv[1], os.O_RDONLY), os.getpid()).architecture))
parser.close()
print(os.path.exists(f"/proc/{zygote}"))
"""


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups"], ""),
        # as few capabilities as the daemon has
        (["setpriv", "--inh-caps=-all", "--bounding-set=-all,+setuid,+setgid", "--no-new-privs"], ""),
        (["setpriv", "--inh-caps=-all", "--bounding-set=-all,+dac_read_search", "--no-new-privs"], "user"),
        # a host that lets nobody have user namespaces
        (
            ["unshare", "--user", "--map-root-user", "sh", "-c",
             'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --inh-caps=-all --bounding-set=-all "$0" "$@"'],
            "user, capability bound, namespaces",
        ),
    ],
)  # fmt: skip
def test_with_fewer_rights(command: list[str], missing: str, tmp_path: Path) -> None:
    """What cannot be had is left out, and told; and all processes end."""
    program = [sys.executable, "-c", _PARSE, sys.executable]
    done = subprocess.run([*command, *program], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "6\nFalse\n"
    told = f"the parser's sandbox lacks what is unavailable on this host: {missing}\n"
    assert done.stderr == (told if missing else "")


@pytest.mark.parametrize("command", [(sys.executable, "-c", "import sys; sys.exit(1)"), ("/bin/cat",)])
def test_a_sandbox_that_does_not_start(command: tuple[str, ...]) -> None:
    with closing(SandboxedParser(partial(Zygote, command=command))) as sandbox:
        for because in ("its process ended", "does not start"):
            with pytest.raises(OSError, match=because):
                parse(sandbox, sys.executable)


def test_a_descriptor_is_not_kept(sandbox: SandboxedParser) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(10):
        parse(sandbox, sys.executable)
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 2
    (worker,) = children(zygote())
    assert len(os.listdir(f"/proc/{worker}/fd")) == 4


def test_the_command_is_isolated() -> None:
    assert COMMAND[1] == "-I"
