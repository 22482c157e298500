"""Which files are waited for, and which are parsed behind everybody's back. The parsers are a test's own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from stapsdtd.errors import ObjectPendingError, ObjectUnreadableError
from stapsdtd.model import ParsedObject
from stapsdtd.sandbox.parser import SandboxedParser, TooSlowError
from stapsdtd.sandbox.queueing import QueueingParser
from tests.support import descriptors, require, wait_for

SOMEBODY, OTHER = 61_234, 61_235


class Parsers:
    """All of them: what is slow is too slow for whoever gives it seconds. What is held waits to be let go, and nothing
    is parsed unless has_started is set.
    """

    def __init__(self) -> None:
        self.slow: set[int] = set()
        self.calls: list[tuple[int, float | None]] = []
        self.go_on = threading.Semaphore(0)
        self.held = threading.Event()
        self.is_aborted = False
        self.failure: Exception | None = None
        self.has_started = threading.Event()
        self.has_started.set()

    def parse(self, descriptor: int, pid: int, seconds: float | None = None) -> ParsedObject:  # noqa: ARG002
        inode = os.fstat(descriptor).st_ino
        self.calls.append((inode, seconds))
        assert self.has_started.wait(20)
        if inode not in self.slow:
            return ParsedObject("x86-64", None, (), ())
        if seconds is not None:
            raise TooSlowError("it takes longer")
        self.held.set()
        assert self.go_on.acquire(timeout=20)
        if self.failure is not None:
            raise self.failure
        return ParsedObject("slow", None, (), ())

    def abort(self) -> None:
        self.is_aborted = True
        self.failure = OSError(5, "aborted")
        self.go_on.release(100)

    def close(self) -> None:
        pass


@pytest.fixture
def parsers() -> Parsers:
    return Parsers()


@pytest.fixture
def parser(parsers: Parsers) -> Iterator[QueueingParser]:
    made = queueing(parsers)
    yield made
    made.close()


def queueing(parsers: Parsers) -> QueueingParser:
    made = cast("SandboxedParser", parsers)
    return QueueingParser(made, start_parser=lambda: made)


@pytest.fixture
def file(parsers: Parsers, tmp_path: Path) -> Iterator[Callable[..., int]]:
    require(os.geteuid() == 0, "root, who can give files away")
    opened: list[int] = []

    def make(name: str, owner: int = SOMEBODY, *, slow: bool = True) -> int:
        path = tmp_path / name
        path.write_text(name)
        os.chown(path, owner, owner)
        opened.append(os.open(path, os.O_RDONLY))
        if slow:
            parsers.slow.add(path.stat().st_ino)
        return opened[-1]

    yield make
    for descriptor in opened:
        os.close(descriptor)


def pending(parser: QueueingParser, descriptor: int, pid: int = 1) -> None:
    with pytest.raises(ObjectPendingError):
        parser.parse(descriptor, pid)


def at_last(parser: QueueingParser, descriptor: int, pid: int) -> str:
    """Parse what another user's process maps, for which no caller waits long."""
    found: list[ParsedObject] = []

    def is_parsed() -> bool:
        with suppress(ObjectPendingError):
            found.append(parser.parse(descriptor, pid))
        return bool(found)

    wait_for(is_parsed, "the file to be parsed")
    return found[0].architecture


def test_roots_quick_file_is_answered_at_once(parser: QueueingParser, file: Callable[..., int]) -> None:
    assert parser.parse(file("quick", 0, slow=False), 1).architecture == "x86-64"


def test_parsing_another_users_file_goes_on_without_the_caller(
    parser: QueueingParser, parsers: Parsers, file: Callable[..., int]
) -> None:
    done: list[set[int]] = []
    parser.on_done = done.append
    parsers.has_started.clear()
    quick = file("quick", slow=False)
    pending(parser, quick, 7)
    assert parser.parsed({0, OTHER}).done()
    parsed = parser.parsed({SOMEBODY})
    assert not parsed.done()
    parsers.has_started.set()
    parsed.result(20)
    assert done == [{7}]
    assert parser.parse(quick, 7).architecture == "x86-64"
    assert parsers.calls == [(os.fstat(quick).st_ino, 0.25)]


def test_roots_slow_file_can_be_waited_for(parser: QueueingParser, parsers: Parsers, file: Callable[..., int]) -> None:
    assert parser.parsed({0}).done()
    slow = file("root's", 0)
    pending(parser, slow)
    parsed = parser.parsed({0})
    assert parsers.held.wait(20)
    assert not parsed.done()
    parsers.go_on.release()
    parsed.result(20)
    assert parser.parse(slow, 1).architecture == "slow"


def test_roots_file_waits_for_no_other(parser: QueueingParser, parsers: Parsers, file: Callable[..., int]) -> None:
    pending(parser, file("slow"))
    assert parsers.held.wait(20)
    slow = file("root's", 0)
    pending(parser, slow)
    begun = (os.fstat(slow).st_ino, None)
    wait_for(lambda: begun in parsers.calls, "root's to be parsed")


def test_sandbox_that_does_not_start_is_waited_for_once(
    parser: QueueingParser, parsers: Parsers, file: Callable[..., int]
) -> None:
    """Starting it forks, which the kernel can hold up for every process on the host."""
    done: list[set[int]] = []
    parser.on_done = done.append
    parsers.has_started.clear()
    first, second = file("first", slow=False), file("second", slow=False)
    pending(parser, first, 1)
    pending(parser, second, 2)
    of_root = file("root's", 0, slow=False)
    pending(parser, of_root, 1)
    parsed = parser.parsed({0})
    assert not parsed.done()
    # for the others the quick parser was not even asked
    assert [seconds for _, seconds in parsers.calls if seconds] == [0.25]
    parsers.has_started.set()
    wait_for(lambda: sorted(map(sorted, done)) == [[1], [1], [2]], "all to be parsed")
    parsed.result(20)
    for descriptor in (first, second, of_root):
        assert parser.parse(descriptor, 1).architecture == "x86-64"
    assert at_last(parser, file("third", slow=False), 3) == "x86-64"


def test_parser_that_fails_does_not_end_the_thread(
    parser: QueueingParser, parsers: Parsers, file: Callable[..., int]
) -> None:
    parsers.failure = RuntimeError("a bug")
    parsers.go_on.release()
    slow = file("root's", 0)
    pending(parser, slow)
    parser.parsed({0}).result(20)
    with pytest.raises(OSError, match="the parser failed: a bug"):
        parser.parse(slow, 1)


def test_slow_file_is_known_later(parser: QueueingParser, parsers: Parsers, file: Callable[..., int]) -> None:
    done: list[set[int]] = []
    parser.on_done = done.append
    slow = file("slow")
    pending(parser, slow, 7)
    pending(parser, slow, 8)
    assert at_last(parser, file("quick", slow=False), 9) == "x86-64"
    parsers.go_on.release()
    wait_for(lambda: {7, 8} in done, "the processes to be told")
    assert parser.parse(slow, 7).architecture == "slow"


@pytest.mark.parametrize("failure", [ObjectUnreadableError("broken"), OSError(12, "no memory")])
def test_slow_file_that_cannot_be_read(
    parser: QueueingParser, parsers: Parsers, file: Callable[..., int], failure: Exception
) -> None:
    done: list[set[int]] = []
    parser.on_done = done.append
    parsers.failure = failure
    slow = file("slow")
    pending(parser, slow)
    parsers.go_on.release()
    wait_for(lambda: done, "the end")
    with pytest.raises(type(failure), match=str(failure.args[-1])):
        parser.parse(slow, 1)
    # it may be another time
    pending(parser, slow)


def test_owners_take_turns(parser: QueueingParser, parsers: Parsers, file: Callable[..., int]) -> None:
    many = [file(f"many{number}") for number in range(5)]
    pending(parser, many[0])
    assert parsers.held.wait(20)
    for descriptor in many[1:]:
        pending(parser, descriptor)
    one = file("one", OTHER)
    pending(parser, one)
    done: list[set[int]] = []
    parser.on_done = done.append
    for count in range(1, 4):
        parsers.go_on.release()
        wait_for(lambda count=count: len(done) == count, "the next one")  # type: ignore[misc]
    slow = [inode for inode, seconds in parsers.calls if seconds is None]
    assert slow.index(os.fstat(one).st_ino) <= 2


def test_line_is_bounded(parser: QueueingParser, parsers: Parsers, file: Callable[..., int]) -> None:
    pending(parser, file("first"))
    assert parsers.held.wait(20)
    for number in range(63):
        pending(parser, file(f"file{number}"))
    one_too_many = file("one too many", slow=False)
    pending(parser, one_too_many, 2)
    assert os.fstat(one_too_many).st_ino not in dict(parsers.calls), "nobody waits for it, not even for a moment"
    pending(parser, file("another's", OTHER))
    done: list[set[int]] = []
    parser.on_done = done.append
    parsers.go_on.release(100)
    wait_for(lambda: {1, 2} in done, "the last in the line to be done")
    assert parser.parse(one_too_many, 2).architecture == "x86-64"


def test_patience_shrinks_with_an_owner_of_slow_files(
    parser: QueueingParser, parsers: Parsers, file: Callable[..., int]
) -> None:
    for name, owner in (("one", SOMEBODY), ("two", SOMEBODY), ("three", OTHER)):
        slow = file(name, owner)
        pending(parser, slow)
        wait_for(lambda slow=slow: os.fstat(slow).st_ino in dict(parsers.calls), "it to be tried")  # type: ignore[misc]
    assert [seconds for _, seconds in parsers.calls if seconds is not None] == [0.25, 0.02, 0.25]


def test_close_waits_for_nobody_and_leaves_no_descriptor(parsers: Parsers, file: Callable[..., int]) -> None:
    files = [file(f"file{number}") for number in range(3)]
    before = descriptors(os.getpid())
    parser = queueing(parsers)
    for descriptor in files:
        pending(parser, descriptor)
    assert parsers.held.wait(20)
    parser.close()
    assert parsers.is_aborted
    assert descriptors(os.getpid()) == before


def test_sandbox_that_does_not_start_for_roots_file_is_waited_for(
    parser: QueueingParser, parsers: Parsers, file: Callable[..., int]
) -> None:
    parsers.has_started.clear()
    first = file("root's", 0, slow=False)
    pending(parser, first)
    parsed = parser.parsed({0})
    assert not parsed.done()
    parsers.has_started.set()
    parsed.result(20)
    assert parser.parse(first, 1).architecture == "x86-64"


def test_process_that_asks_while_another_waits_is_told_too(
    parser: QueueingParser, parsers: Parsers, file: Callable[..., int]
) -> None:
    done: list[set[int]] = []
    parser.on_done = done.append
    parsers.has_started.clear()
    quick = file("quick", slow=False)
    is_answered: list[bool] = []

    def ask() -> None:
        try:
            parser.parse(quick, 1)
        except ObjectPendingError:
            is_answered.append(False)
        else:
            is_answered.append(True)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: parsers.calls, "the first to be parsed")
    pending(parser, quick, 2)
    parsers.has_started.set()
    asking.join(20)
    # a busy host may have let it wait too long
    wait_for(lambda: done == ([{2}] if is_answered == [True] else [{1, 2}]), "the other to be told")
