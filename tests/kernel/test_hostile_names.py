"""Names of files, processes and probes that were chosen to do harm."""

from __future__ import annotations

import json
import os
import platform
import pty
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import pytest

from stapsdtd.catalog.selector_text import parts_of
from stapsdtd.client import Client, Probe, Value
from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import links
from tests.support import (
    COMMANDS,
    TICKER,
    Daemon,
    Recorder,
    Ticker,
    compile_once,
    require,
    stapsdt,
    stapsdt_command,
    wait_for,
)

pytestmark = pytest.mark.kernel

PATHS = {
    "newline": b"evil\n7f0000000000-7f0000001000 r-xp 00000000 fe:00 1 usr",
    "blanks": b" evil  a ",
    "quotes": b"evil'\"`$(x)",
    "colon": b"evil:tick(arg0)",
    "backslash": rb"evil\x\\n",
    "escaped newline": rb"evil\012a",
    "tab": b"evil\t\ta",
    "no UTF-8": b"evil\xff\xfe\xed\xa0\x80",
    "terminal": b"evil\x1b[31m\r\x07\x7f\x9b2J",
    "line separators": "evil\x85\u2028\u202eb\x0b\x0c\x1c".encode(),
    "deleted": b"evil (deleted)",
    "deleted twice": b"evil (deleted) (deleted)",
    "definition": b"evil\np:evil2,sh :0x0",
    "long": b"evil" + b"x" * 251,
}
COMMS = {
    "terminal": b"evil\x1b[31m\r\x7f",
    "newline": b"evil\nVmRSS: 1",
    "running": b"evil) R 1 (",
    "zombie": b"e) Z 1 1 1 1 (",
    "no UTF-8": b"evil\xff\xfe\xed\xa0\x80",
    "cut": "evil☃☃☃☃".encode(),
    "empty": b"",
    "path": b"../../evil",
    "quotes": b"evil'\"`$(x)",
    "escape": rb"evil\n\012",
}
NAMES = (
    b"plain", b"a\nb", b" a b ", b"'\"`$(x)", b"a:b", b"(arg0:str)", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[2J", b"\r\n",
    b"\t", b"\x7f", "\u202e\u2028\x85".encode(), b"%s%n", b"*[!a]?", b"../../x", b"\\n\\", b"{}", b"-__-",
    b"p:e/f /bin/sh:0x0\np:evil/h", b":0x0\n-:evil/h\n", b"x" * 508,
)  # fmt: skip
LONG_NAME = b"evil" + b"x" * 10_000

FATES = ("exists", "is deleted later", "was deleted before")
DELETING = ("sh", "-c", 'exec 9<"$0" && rm "$0" && exec /proc/self/fd/9')

with_one_engine = pytest.mark.parametrize("engine", ["bpf"], indirect=True)


def text(raw: bytes) -> str:
    """How bytes are shown that were to be text."""
    return raw.decode(errors="backslashreplace")


def pattern(name: str) -> str:
    """A glob for what no selector can say."""
    return re.sub(r"[^ -~]|[:(*?\[]", "?", name)


def expected_probes() -> list[tuple[str, str]]:
    """What `hostile_program` fires, the n-th with n as its argument: each name as a provider's and as a probe's."""
    return [names for name in NAMES for names in ((text(b"evil" + name), "n"), ("evil", text(b"evil" + name)))]


def _bytes(raw: bytes) -> str:
    return ",".join(map(str, raw + b"\0"))


def _probe(number: int, provider: bytes, name: bytes) -> str:
    """What sys/sdt.h makes of a probe whose names are identifiers."""
    lines = (
        "1: nop", '.pushsection .note.stapsdt,"","note"', ".balign 4", ".4byte 3f-2f, 5f-4f, 3", '2: .asciz "stapsdt"',
        "3: .balign 4", "4: .8byte 1b, 0, 0", f".byte {_bytes(provider)}", f".byte {_bytes(name)}",
        '.asciz "-4@%%edi"', "5: .balign 4", ".popsection",
    )  # fmt: skip
    return f'__asm__ volatile ({json.dumps(chr(10).join(lines))} :: "D"({number}));'


SOURCE = """
#include <stdio.h>
#include <sys/prctl.h>

int main(int argc, char **argv)
{
	char line[100];

	prctl(PR_SET_NAME, argv[1]);
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		PROBES
		puts("fired 0");
		fflush(stdout);
	}
	return 0;
}
"""


@pytest.fixture(scope="module")
def hostile_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first argument becomes its command name; it fires all its probes once for each line it reads."""
    require(platform.machine() == "x86_64", "an x86-64 machine")
    folder = tmp_path_factory.mktemp("hostile")
    raw = [names for name in NAMES for names in ((b"evil" + name, b"n"), (b"evil", b"evil" + name))]
    raw += [(LONG_NAME, b"n"), (b"evil", LONG_NAME)]
    probes = "\n".join(_probe(number, *names) for number, names in enumerate(raw))
    (folder / "hostile.c").write_text(SOURCE.replace("PROBES", probes))
    return compile_once(folder / "hostile.c", folder / "hostile", ["gcc", "-O2"])


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target) as client:
        yield client


def armed_at(tracefs: Tracefs, daemon: Daemon) -> list[int]:
    """The file offsets of all definitions that stand in uprobe_events in the daemon's name, and of its links."""
    contents = []
    # the kernel lists them page by page, and leaves some out if others are removed meanwhile
    for _ in range(3):
        with open(tracefs.path("uprobe_events"), "rb") as file:
            contents.append(file.read())
    assert b"evil" not in b"".join(contents)
    owner = rf"\d+_{daemon.pid}_\d+"
    definition = re.compile(
        rf"p:stapsdtd_{owner}/[eg]\d+_{owner} /proc/self/fd/\d+:0x([0-9a-f]{{16}})(?:\(0x[0-9a-f]+\))?"
        r"(?: site=\\\d+:u32 comm=\$comm(?: [qd]\d+=%[a-z]+:u\d\d)*)?".encode()
    )
    lines = {line for content in contents for line in content.split(b"\n") if b"_%d_" % daemon.pid in line}
    found = [definition.fullmatch(line) for line in lines]
    assert None not in found, lines
    linked = [offset for link in links(daemon.pid) for offset in link.offsets]
    return sorted([*linked, *(int(match[1], 16) for match in found if match)])


@pytest.fixture(autouse=True)
def _nothing_else_is_written(tracefs: Tracefs, daemon: Daemon) -> Iterator[None]:
    """The kernel's error_log has what it refused."""
    before = tracefs.read("error_log").count("evil")
    yield
    wait_for(lambda: not armed_at(tracefs, daemon), "everything to be disarmed")
    assert tracefs.read("error_log").count("evil") <= before


@pytest.fixture(params=FATES)
def fate(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tickers(client: Client, ticker_program: Path, tmp_path: Path, fate: str) -> Iterator[dict[str, Ticker]]:
    """One of each hostile path."""
    with ExitStack() as stack:
        found = {}
        for name, raw in PATHS.items():
            path = Path(shutil.copy(ticker_program, tmp_path / os.fsdecode(raw)))
            command = (*DELETING, path) if fate == "was deleted before" else (path,)
            ticker = found[name] = stack.enter_context(Ticker(*command))
            if fate == "is deleted later":
                assert tick_of(client, ticker).pids == (ticker.pid,)
                path.unlink()
            assert path.exists() == (fate == "exists")
        yield found


def tick_of(client: Client, ticker: Ticker) -> Probe:
    (probe,) = client.list_probes(f"{TICKER}:tick", pids=[ticker.pid]).probes
    return probe


@with_one_engine
def test_programs_are_listed_under_their_names(client: Client, tickers: dict[str, Ticker], tmp_path: Path) -> None:
    right = {name: text(os.fsencode(tmp_path) + b"/" + raw) for name, raw in PATHS.items()}
    listed = {name: tick_of(client, ticker).path for name, ticker in tickers.items()}
    assert listed == right


@pytest.mark.parametrize(("engine", "fate"), [("bpf", "exists"), ("ftrace", "was deleted before")], indirect=True)
def test_programs_are_traced(
    client: Client, daemon: Daemon, tracefs: Tracefs, tickers: dict[str, Ticker], fate: str
) -> None:
    probes = {name: tick_of(client, ticker) for name, ticker in tickers.items()}
    selectors = [f":{pattern(probe.path)}::tick(arg0)" for probe in probes.values()]
    with Recorder(daemon.target, *selectors) as recorder:
        assert armed_at(tracefs, daemon) == [probe.sites[0].offset for probe in probes.values()]
        assert all(ticker.do("fire 2") for ticker in tickers.values())
    # another developer's tests may have raised them too
    wait_for(lambda: not any(ticker.semaphore for ticker in tickers.values()), "the semaphores to fall")
    told: dict[tuple[int, str, str], list[Value]] = {}
    for event in recorder.events:
        told.setdefault((event.pid, event.comm, event.probe.path), []).extend(event.values)
    comms = {name: "9" if fate == "was deleted before" else text(raw[:15]) for name, raw in PATHS.items()}
    assert told == {(tickers[name].pid, comms[name], probes[name].path): [0, 1] for name in PATHS}


def test_processes_are_told_and_chosen_by_their_names(client: Client, daemon: Daemon, hostile_program: Path) -> None:
    selector = f"evil:{hostile_program}::evilplain"
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(Ticker(hostile_program, os.fsdecode(raw))) for name, raw in COMMS.items()
        }
        pids = sorted(process.pid for process in processes.values())
        listing = client.list_probes("evil:evilplain", pids=pids, details=True)
        assert [probe.pids for probe in listing] == [tuple(pids)]
        assert [process.pid for process in listing.processes] == pids
        recorders = {
            name: stack.enter_context(Recorder(daemon.target, selector, where=f"comm == '{escaped(raw[:15])}'"))
            for name, raw in COMMS.items()
        }
        for process in processes.values():
            process.do("fire")
        for name, recorder in recorders.items():
            recorder.finish()
            told = [(event.pid, event.comm) for event in recorder.events]
            assert told == [(processes[name].pid, text(COMMS[name][:15]))]


def escaped(raw: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in raw)


@pytest.fixture
def hostile(hostile_program: Path) -> Iterator[Ticker]:
    with Ticker(hostile_program, "evil") as process:
        yield process


@with_one_engine
def test_probes_are_listed_under_their_names(client: Client, hostile: Ticker) -> None:
    probes = client.list_probes("evil*:*", pids=[hostile.pid])
    assert [(probe.provider, probe.name) for probe in probes] == expected_probes()
    for provider, name in expected_probes():
        selector = f"{pattern(provider)}:{pattern(name)}"
        assert (provider, name) in [(probe.provider, probe.name) for probe in client.list_probes(selector)]


@with_one_engine
def test_names_of_10_000_characters_cost_their_notes(client: Client, hostile: Ticker, hostile_program: Path) -> None:
    listing = client.list_probes("evil*:*", pids=[hostile.pid], details=True)
    problems = [problem for problem in listing.problems if problem.path == str(hostile_program)]
    assert [(each.provider[:8], each.name[:8]) for each in problems] == [("evilxxxx", "n"), ("evil", "evilxxxx")]
    assert {problem.reason for problem in problems} == {"provider or name is longer than 512 bytes"}
    assert max(len(problem.provider) + len(problem.name) for problem in problems) <= 520


def test_probes_fire_under_their_names(
    client: Client, daemon: Daemon, tracefs: Tracefs, hostile: Ticker, hostile_program: Path
) -> None:
    sites = [probe.sites[0].offset for probe in client.list_probes("evil*:*", pids=[hostile.pid])]
    with Recorder(daemon.target, f"evil*:{hostile_program}::*") as recorder:
        assert armed_at(tracefs, daemon) == sorted(sites)
        hostile.do("fire")
    fired = [(event.probe.provider, event.probe.name, event.values) for event in recorder.events]
    assert fired == [(*names, (number,)) for number, names in enumerate(expected_probes())]


def listed(daemon: Daemon, selector: str) -> list[dict[str, str]]:
    """Records of probes, without those of notes that cannot be used."""
    records = stapsdt(daemon.target, "list", selector, "--json").stdout.split("\n")[:-1]
    return [record for record in map(json.loads, records) if "unusable" not in record]


def selected(client: Client, selector: str) -> set[tuple[str, str, str]]:
    with client.subscribe([selector]) as subscription:
        return {(site.path, site.provider, site.name) for site in subscription.sites}


def test_each_probe_is_selected_by_what_list_tells(
    client: Client, daemon: Daemon, hostile: Ticker, hostile_program: Path
) -> None:
    records = listed(daemon, f"evil*:{hostile_program}::*")
    assert [(each["provider"], each["name"]) for each in records] == expected_probes()
    for each in records:
        assert selected(client, each["selector"]) == {(each["path"], each["provider"], each["name"])}
    (parenthesis,) = (each for each in records if each["name"] == "evil(arg0:str)")
    with Recorder(daemon.target, parenthesis["selector"]) as recorder:
        hostile.do("fire")
    assert [event.probe.name for event in recorder.events] == ["evil(arg0:str)"]


@with_one_engine
def test_each_file_is_selected_by_what_list_tells(client: Client, daemon: Daemon, crowd: Crowd) -> None:
    crowd.appear()
    records = listed(daemon, crowd.selector.removesuffix("*") + "evilplain")
    assert len(records) == len(PATHS) + 1
    for each in records:
        assert selected(client, each["selector"]) == {(each["path"], "evil", "evilplain")}


class Crowd:
    """A process of each hostile path, and one of each hostile name, all of them with the hostile probes."""

    def __init__(self, folder: Path, program: Path) -> None:
        self._stack = ExitStack()
        self._folder = folder
        self._program = program
        self._processes: dict[Ticker, str] = {}
        self.selector = f"evil*:{folder}/*::*"
        self.sites = (len(PATHS) + 1) * len(expected_probes())

    def appear(self) -> None:
        for path in PATHS.values():
            self._add(self._folder / os.fsdecode(path), b"evil")
        for comm in COMMS.values():
            self._add(self._folder / "program", comm)

    def _add(self, path: Path, comm: bytes) -> None:
        if not path.exists():
            shutil.copy(self._program, path)
        self._processes[self._stack.enter_context(Ticker(path, os.fsdecode(comm)))] = text(comm[:15])

    def fire(self) -> Counter[tuple[int, str, str, str]]:
        """Answer how often which pid and comm fired which provider's and name's probe."""
        for process in self._processes:
            process.do("fire")
        return Counter(
            (process.pid, comm, *names) for process, comm in self._processes.items() for names in expected_probes()
        )

    def vanish(self) -> None:
        self._stack.close()
        self._processes.clear()


@pytest.fixture
def crowd(tmp_path: Path, hostile_program: Path) -> Iterator[Crowd]:
    crowd = Crowd(tmp_path, hostile_program)
    yield crowd
    crowd.vanish()


def assert_plain(lines: list[str], fields: int | None = None) -> None:
    """Nothing in them that a terminal would obey, and no more columns than there are to be."""
    for line in lines:
        parts = line.split("\t")
        assert fields is None or len(parts) == fields, line
        assert all(part.isprintable() for part in parts), line


def on_terminal(*command: str) -> str:
    """What a command prints on a terminal without partition_by_page_offset."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "dumb"}) as process:
        os.close(theirs)
        told = b""
        # EIO is a terminal's end
        with suppress(OSError):
            while chunk := os.read(ours, 1 << 16):
                told += chunk
        os.close(ours)
    assert process.returncode == 0
    return told.decode()


@with_one_engine
def test_list_is_plain(daemon: Daemon, crowd: Crowd) -> None:
    crowd.appear()
    told = stapsdt(daemon.target, "list", crowd.selector)
    lines = told.stdout.split("\n")
    assert_plain(lines[:-1], fields=6)
    assert len(lines) == crowd.sites + 1
    assert_plain(told.stderr.split("\n"), fields=1)
    assert told.stderr.count("\n") == 1
    names = Counter((record["provider"], record["name"]) for record in listed(daemon, crowd.selector))
    assert names == dict.fromkeys(expected_probes(), len(PATHS) + 1)
    assert_plain(on_terminal(*stapsdt_command(daemon.target, "list", crowd.selector)).split("\r\n"), fields=1)


class Following:
    """A command that goes on until it is interrupted."""

    def __init__(self, daemon: Daemon, *arguments: str) -> None:
        # as bytes, since Python would make a newline of a carriage return
        self._process = subprocess.Popen(
            stapsdt_command(daemon.target, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def begin(self) -> str:
        """Answer what it says first on standard error."""
        assert self._process.stderr is not None
        return self._process.stderr.readline().decode()

    def read(self, count: int) -> list[str]:
        assert self._process.stdout is not None
        return [self._process.stdout.readline().decode().removesuffix("\n") for _ in range(count)]

    def end(self) -> tuple[str, str]:
        """Interrupt it; answer the rest of its output and of its errors."""
        self._process.send_signal(signal.SIGINT)
        out, err = self._process.communicate(timeout=30)
        assert self._process.returncode == 0
        return out.decode(), err.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@with_one_engine
def test_watch_is_plain(daemon: Daemon, crowd: Crowd) -> None:
    with Following(daemon, "watch", crowd.selector) as watch:
        assert watch.begin().startswith("stapsdt: 0 probes now; waiting")
        crowd.appear()
        added = watch.read(crowd.sites)
        crowd.vanish()
        removed = watch.read(crowd.sites)
        assert watch.end() == ("", "")
    assert_plain(added + removed, fields=7)
    assert {line[:3] for line in added} == {"+\te", '+\t"'}
    assert {line[:3] for line in removed} == {"-\te", '-\t"'}


@with_one_engine
def test_trace_is_plain(daemon: Daemon, tracefs: Tracefs, crowd: Crowd) -> None:
    crowd.appear()
    with Following(daemon, "trace", crowd.selector) as trace:
        refused = f"{2 * (len(PATHS) + 1)} sites refused"
        assert trace.begin() == f"stapsdt: {crowd.sites} sites armed, {refused}; Ctrl-C stops\n"
        assert len(armed_at(tracefs, daemon)) == crowd.sites
        fired = crowd.fire()
        lines, summary = trace.end()
    assert_plain(lines.split("\n") + summary.split("\n"), fields=1)
    assert lines.count("\n") == fired.total()


@pytest.mark.parametrize("engine", ["ftrace"], indirect=True)
def test_trace_as_json_is_right(daemon: Daemon, tracefs: Tracefs, crowd: Crowd) -> None:
    crowd.appear()
    with Following(daemon, "trace", crowd.selector, "--json") as trace:
        wait_for(lambda: streams(daemon), "the subscription")
        assert len(armed_at(tracefs, daemon)) == crowd.sites
        fired = crowd.fire()
        lines, _ = trace.end()
    events = map(json.loads, lines.split("\n")[:-1])
    assert Counter((each["pid"], each["comm"], each["provider"], each["name"]) for each in events) == fired


def streams(daemon: Daemon) -> int:
    with Client(daemon.target) as client:
        return sum(found.streaming for found in client.subscriptions())


def test_log_is_plain(client: Client, daemon: Daemon, ticker_program: Path, tracefs: Tracefs, tmp_path: Path) -> None:
    """Of a site that the kernel refuses, since another tool armed it with another semaphore."""
    forged = "2026-01-01 00:00:00,000 WARNING stapsdtd.daemon: forged \x1b[31m"
    path = Path(shutil.copy(ticker_program, tmp_path / f"evil\n{forged}"))
    group = f"stapsdtest_{os.getpid()}"
    with Ticker(path) as ticker:
        site = tick_of(client, ticker).sites[0]
        place = f"/proc/{ticker.pid}/exe:{site.offset:#x}({(site.semaphore_offset or 0) + 2:#x})"
        tracefs.append_definition(f"p:{group}/other {place}")
        try:
            tracefs.write(f"events/{group}/other/enable", "1")
            traced = stapsdt(daemon.target, "trace", f"{TICKER}:tick", "--pid", str(ticker.pid), check=False)
        finally:
            tracefs.write(f"events/{group}/other/enable", "0")
            tracefs.append_definition(f"-:{group}/other")
    assert traced.returncode == 1
    assert "1 site refused" in traced.stderr
    assert_plain(traced.stderr.split("\n"), fields=1)
    log = daemon.log()
    assert "forged" in log
    assert not [line for line in log.split("\n") if line.startswith(forged[:10]) or "\x1b" in line]


@with_one_engine
def test_completion_offers_nothing_that_a_shell_obeys(daemon: Daemon, hostile: Ticker) -> None:
    assert hostile.semaphore == 0
    line = "stapsdt trace evil:"
    asked = {"_STAPSDT_COMPLETE": "bash_complete", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_WORD": ""}

    def offered() -> list[str]:
        command = [COMMANDS / "stapsdt"]
        environment = os.environ | asked | {"STAPSDT_SERVER": daemon.target}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split("\n")

    found = wait_for(lambda: [word for word in offered() if word], "an answer in time")
    assert "evilplain" in found
    evaluated = subprocess.check_output(["bash", "-c", f"printf '%s\\0' {' '.join(found)}"], text=True, cwd="/")
    words = evaluated.split("\0")[:-1]
    assert sorted(parts_of(word, "")[0][0].text for word in words) == sorted(
        name for provider, name in expected_probes() if provider == "evil"
    )
