"""Files that shrink, grow, are rewritten, replaced or unlinked while they are read or armed."""

from __future__ import annotations

import io
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from stapsdtd.client import Client, SiteState
from stapsdtd.elf import parse_object
from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import ParsedObject
from stapsdtd.sandbox import protocol
from stapsdtd.sandbox.parser import SandboxedParser
from tests.attached import own
from tests.support import TARGETS, TICKER, Daemon, Recorder, Ticker, descriptors, mapped_bytes, wait_for
from tests.unit.elf_builder import (
    DATA_OFFSET,
    DATA_VADDR,
    SHT_NOTE,
    TEXT_OFFSET,
    TEXT_VADDR,
    Elf,
    Section,
    Symbol,
)

pytestmark = pytest.mark.kernel

_PARSES = 300
_ROUNDS = 4


def image(bits: int = 64, sites: int = 3, shift: int = 0) -> bytes:
    """An object that takes reads of all kinds: a build-id, notes, semaphores, functions, symbols of arguments."""
    elf = Elf(bits=bits, machine=62 if bits == 64 else 3)
    places = [TEXT_VADDR + shift + 0x10 * number for number in range(sites)]
    elf.notes = b"".join(
        elf.note(
            place, b"app", b"probe%d" % number, b"8@counter(%rip) 4@$1", semaphore=DATA_VADDR + 2 * (number + shift + 1)
        )
        for number, place in enumerate(places)
    )
    elf.symbols = [Symbol(b"function%d" % number, place, 8) for number, place in enumerate(places)]
    elf.symbols.append(Symbol(b"counter", DATA_VADDR + 0x40, 8, kind=1, section=2))
    elf.more_sections = [Section(b".note.gnu.build-id", SHT_NOTE, elf.raw_note(bytes(20), b"GNU\0", 3))]
    return elf.build()


IMAGE = image()
NOISE = random.Random(1).randbytes(len(IMAGE))

Change = Callable[[Path], None]


def overwrite(content: bytes, path: Path) -> None:
    """In place and without truncating it, so that nothing in between is ever seen."""
    with open(path, "r+b") as file:
        file.write(content)


def cut(size: int, path: Path) -> None:
    os.truncate(path, size)


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(IMAGE * 3)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(NOISE)
    other.rename(path)


HARMFUL: dict[str, Change] = {
    "cut to 0": partial(cut, 0),
    "cut to 64": partial(cut, 64),
    "cut to half": partial(cut, len(IMAGE) // 2),
    "cut by 1": partial(cut, len(IMAGE) - 1),
    "zeros": partial(overwrite, bytes(len(IMAGE))),
    "ones": partial(overwrite, b"\xff" * len(IMAGE)),
    "noise": partial(overwrite, NOISE),
    "of 32 bits": partial(overwrite, image(bits=32)),
    "other sites": partial(overwrite, image(sites=2, shift=8)),
}
HARMLESS: dict[str, Change] = {"grown": grow, "replaced": replace, "unlinked": os.unlink}


class Changing(io.FileIO):
    """A file that is changed on the disk just before its reads of certain numbers."""

    def __init__(self, path: Path, changes: dict[int, Change]) -> None:
        super().__init__(path)
        self.reads = 0
        self._path = path
        self._changes = changes

    def _count(self) -> None:
        if change := self._changes.get(self.reads):
            change(self._path)
        self.reads += 1

    def read(self, size: int | None = -1, /) -> bytes:
        self._count()
        return super().read(-1 if size is None else size) or b""

    def readinto(self, buffer: Any, /) -> int:
        self._count()
        return super().readinto(buffer) or 0


def unbuffered(raw: Changing) -> BinaryIO:
    return raw


Open = Callable[[Changing], BinaryIO]
OPEN: dict[str, Open] = {"unbuffered": unbuffered, "as the sandbox does": io.BufferedReader}


def outcome(path: Path, open_: Open, changes: dict[int, Change]) -> tuple[ParsedObject | None, int]:
    """What is made of the file, None where it is refused as unreadable, and how many reads that took."""
    path.unlink(missing_ok=True)
    path.write_bytes(IMAGE)
    with Changing(path, changes) as raw:
        file = open_(raw)
        try:
            return parse_object(file), raw.reads
        except ObjectUnreadableError:
            return None, raw.reads


@pytest.fixture(params=OPEN)
def open_(request: pytest.FixtureRequest) -> Open:
    return OPEN[request.param]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "object"


def can_be_passed_on(parsed: ParsedObject) -> bool:
    return protocol.decode(b"".join(protocol.encode(parsed)), len(IMAGE)) == parsed


def test_what_is_changed_is_right(path: Path, open_: Open) -> None:
    parsed, reads = outcome(path, open_, {})
    assert parsed is not None
    assert [(site.name, site.function) for site in parsed.sites] == [(f"probe{n}", f"function{n}") for n in range(3)]
    assert parsed.build_id == bytes(20).hex()
    assert not parsed.problems
    assert reads >= (15 if open_ is unbuffered else 4)


@pytest.mark.parametrize("change", HARMFUL.values(), ids=HARMFUL.keys())
def test_changed_at_every_read(path: Path, open_: Open, change: Change) -> None:
    original, reads = outcome(path, open_, {})
    found = [outcome(path, open_, {number: change})[0] for number in range(reads)]
    assert all(parsed is None or can_be_passed_on(parsed) for parsed in found)
    # each change is one that shows, at the latest when it is there from the beginning
    assert found[0] != original


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_was_opened_is_read(path: Path, open_: Open, change: Change) -> None:
    original, reads = outcome(path, open_, {})
    for number in range(reads):
        assert outcome(path, open_, {number: change})[0] == original


@pytest.mark.parametrize("other", [image(bits=32), image(sites=2, shift=8), NOISE, bytes(len(IMAGE))])
def test_another_file_at_each_read(path: Path, open_: Open, other: bytes) -> None:
    contents = (IMAGE, other)
    for first in range(2):
        changes = {number: partial(overwrite, contents[(first + number) % 2]) for number in range(100)}
        parsed, _ = outcome(path, open_, {**changes})
        assert parsed is None or can_be_passed_on(parsed)


@pytest.fixture
def content(tmp_path: Path) -> Path:
    content = tmp_path / "content"
    content.write_bytes(IMAGE)
    return content


def changing(content: Path, *paths: Path, pause_seconds: float) -> Ticker:
    return Ticker(sys.executable, TARGETS / "changing.py", str(pause_seconds), content, *paths)


def mapper(*paths: Path) -> Ticker:
    return Ticker(sys.executable, TARGETS / "mapper.py", *paths)


def attempt(parser: SandboxedParser, path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return "gone"
    try:
        parsed = parser.parse(descriptor, os.getpid())
    except ObjectUnreadableError:
        return "unreadable"
    finally:
        os.close(descriptor)
    return "with sites" if parsed.sites else "without sites"


def test_sandbox_outlasts_a_storm(path: Path, content: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: Counter[str] = Counter()

    def is_enough() -> bool:
        seen.update(attempt(parser, path) for _ in range(_PARSES // 10))
        return seen.total() - seen["gone"] >= _PARSES and min(seen["with sites"], seen["unreadable"]) > 0

    with closing(SandboxedParser()) as parser:
        with changing(content, path, pause_seconds=0.0005):
            wait_for(is_enough, f"{_PARSES} files and both outcomes")
        descriptor = os.open(content, os.O_RDONLY)
        assert parser.parse(descriptor, os.getpid()) == parse_object(io.BytesIO(IMAGE))
        os.close(descriptor)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "the parser failed" not in caplog.text


def disarmed(recorder: Recorder) -> int:
    return sum(status.state is SiteState.DISARMED for status in recorder.statuses)


@pytest.fixture
def tick(own_daemon: Daemon, ticker: Ticker, ticker_program: Path) -> Callable[[], None]:
    """Lists and traces a program that nothing happens to."""

    def tick() -> None:
        with Client(own_daemon.target) as client:
            assert {probe.name for probe in client.list_probes(pids=[ticker.pid])} == {"tick", "values", "text"}
        with Recorder(own_daemon.target, f"{TICKER}:{ticker_program}::tick(arg0)", pids=[ticker.pid]) as recorder:
            assert ticker.do("fire 5") > 0
        assert recorder.values() == [(number,) for number in range(5)]
        # another developer's tests may have raised it too
        wait_for(lambda: ticker.semaphore == 0, "the semaphore to fall")

    return tick


@pytest.mark.alone
def test_daemon_outlasts_a_storm(
    own_daemon: Daemon, tick: Callable[[], None], content: Path, tmp_path: Path, tracefs: Tracefs
) -> None:
    folder = tmp_path / "storm"
    folder.mkdir()
    paths = [folder / str(number) for number in range(4)]
    tick()
    before = descriptors(own_daemon.pid)
    with (
        changing(content, *paths, pause_seconds=0.05),
        mapper(*paths),
        Recorder(own_daemon.target, f"app:{folder}/*::*") as stormy,
    ):
        for _ in range(_ROUNDS):
            tick()
        wait_for(lambda: len(stormy.armed()) > 12 and disarmed(stormy), "files to be armed, disarmed and armed again")
        tick()
    wait_for(lambda: not own(tracefs, own_daemon.pid), "all to be disarmed")
    with Client(own_daemon.target) as client:
        wait_for(lambda: not client.list_probes(f"app:{folder}/*::*").probes, "the files to be forgotten")
    wait_for(lambda: descriptors(own_daemon.pid) <= before, "the files to be closed")
    tick()


@pytest.mark.parametrize("engine", ["bpf"], indirect=True)
def test_file_rewritten_in_place_is_not_patched_where_its_probe_was(daemon: Daemon, path: Path) -> None:
    """What is there now may be the middle of an instruction, and where the semaphore was any variable.

    The kernel does not put right what was patched so, not even when the probe is disarmed.
    """
    code, data = bytes.fromhex("48b8cccccccccccc"), b"\x39\x30"
    content = bytearray(image(sites=2, shift=8))
    content[TEXT_OFFSET : TEXT_OFFSET + len(code)] = code
    content[DATA_OFFSET + 2 : DATA_OFFSET + 2 + len(data)] = data
    path.write_bytes(image(sites=1))
    inode = path.stat().st_ino
    with Recorder(daemon.target, f"app:{path}::*") as recorder:
        with mapper() as before:
            before.do(f"map {path}")
            (armed,) = wait_for(recorder.armed, "the first content to be armed")
        assert armed.offset == TEXT_OFFSET
        path.write_bytes(content)
        assert path.stat().st_ino == inode
        wait_for(lambda: disarmed(recorder), "the earlier probe to be disarmed")
        with mapper() as after:
            after.do(f"map {path}")
            wait_for(lambda: len(recorder.armed()) == 3, "the other content to be armed")
            assert mapped_bytes(after.pid, str(path), TEXT_OFFSET, len(code), "x") == code
            assert mapped_bytes(after.pid, str(path), DATA_OFFSET + 2, len(data), "w") == data
