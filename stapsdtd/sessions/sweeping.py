"""Removes starts of spans that no end can come for, where the daemon pairs.

A client may have as many of them in memory as its queues are large, in 512 clauses that wait for the same processes. So
a process is looked at once for all clauses of a client, and the client's turns do not keep others from theirs.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from functools import partial
from itertools import islice

from stapsdtd.capture.engine import Engine
from stapsdtd.kernel import procfs
from stapsdtd.runtime.fair_thread import FairThread, Queue
from stapsdtd.runtime.futures import finished, once_done
from stapsdtd.runtime.logs import fields
from stapsdtd.runtime.slices import Turn
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.pairing import Pairing
from stapsdtd.spans.span import Thread

_log = logging.getLogger(__name__)

_MAX_LOOKS = 500
"""Each takes some 20 us."""
_THREADS_PER_STEP = 8192


class EndedThreads:
    """Looks for threads that have ended although spans wait for them. Hits of theirs may still be on their way."""

    def __init__(self, max_looks: int = _MAX_LOOKS) -> None:
        """max_looks: how many processes' threads are looked at in a call."""
        self._max_looks = max_looks
        self._looked_at = 0

    def of(self, pairings: Sequence[Pairing]) -> Generator[None, None, list[set[Thread]]]:
        """Return, in steps, the threads that have ended of those that each pairing waits for.

        Each call looks at some processes, and the next one at others, if there are very many.
        """
        waiting: list[set[Thread]] = []
        numbers: set[int] = set()
        for pairing in pairings:
            threads = yield from pairing.waiting()
            waiting.append(threads)
            for some in _some_at_a_time(threads):
                numbers.update(thread.pid for thread in some)
                yield
        # a thread that begins from here on is not waited for
        pids = sorted(numbers)
        begin = bisect_right(pids, self._looked_at) if len(pids) > self._max_looks else 0
        looked_at = (pids[begin:] + pids[:begin])[: self._max_looks]
        self._looked_at = looked_at[-1] if looked_at else 0
        alive: dict[int, set[int]] = {}
        turn = Turn()
        for pid in looked_at:
            alive[pid] = _live_threads(pid)
            if turn.is_over:
                yield
                turn.begin()
        found = []
        for threads in waiting:
            ended: set[Thread] = set()
            for some in _some_at_a_time(threads):
                ended.update(each for each in some if each.pid in alive and each.tid not in alive[each.pid])
                yield
            found.append(ended)
        return found


def _some_at_a_time(threads: Iterable[Thread]) -> Iterator[list[Thread]]:
    left = iter(threads)
    while some := list(islice(left, _THREADS_PER_STEP)):
        yield some


def _live_threads(pid: int) -> set[int]:
    threads = set(procfs.thread_ids(pid))
    # a main thread that ended is listed as long as there are others
    stat = procfs.stat(pid)
    return threads - {pid} if stat is None or stat.state in procfs.DEAD else threads


class Sweeping:
    """`begin` is called by one thread."""

    def __init__(self, engine: Engine, thread: FairThread) -> None:
        """thread: works, each client in its turn."""
        self._engine = engine
        self._thread = thread
        self._of_clients: dict[str, tuple[EndedThreads, Future[None]]] = {}

    def begin(self, client: str, clauses: Sequence[Clause]) -> None:
        """Sweep all clauses of a client that pair in the daemon, unless that is still going on."""
        ended, running = self._of_clients.get(client, (EndedThreads(), None))
        if running is not None and not running.done():
            return
        self._of_clients[client] = ended, self._take_turns(client, self._sweep(client, ended, clauses))

    def keep_only(self, clients: AbstractSet[str]) -> None:
        """Forget the other clients."""
        for client in self._of_clients.keys() - clients:
            del self._of_clients[client]

    def _sweep(self, client: str, ended: EndedThreads, clauses: Sequence[Clause]) -> Generator[None, None, None]:
        pairs = [(clause, clause.pairing) for clause in clauses if clause.pairing is not None]
        found = yield from ended.of([pairing for _, pairing in pairs])
        for (clause, pairing), threads in zip(pairs, found, strict=True):
            now_ns = time.monotonic_ns()
            if threads or (yield from pairing.has_late(now_ns)):
                # the last hits may be on their way
                settled = clause.settled(self._engine.collect(clause.key))
                self._once_settled(client, settled, clause.swept(threads, now_ns))
                yield

    def _once_settled(self, client: str, settled: Future[int], steps: Generator[None, None, None]) -> None:
        def remove(done: Future[int]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._take_turns(client, steps)

        once_done(settled, remove)

    def _take_turns(self, client: str, steps: Generator[None, None, None]) -> Future[None]:
        try:
            running = self._thread.take_turns(Queue(client), steps, f"spans of {client}")
        except RuntimeError:
            # it is stopping, and so is the daemon
            return finished()
        running.add_done_callback(partial(_log_error, client))
        return running


def settled_spans(clauses: Sequence[Clause]) -> Generator[None, None, None]:
    """Count starts without an end to come, in steps, once all hits were delivered."""
    pairs = [(clause, clause.pairing) for clause in clauses if clause.pairing is not None]
    found = yield from EndedThreads().of([pairing for _, pairing in pairs])
    for (clause, _), threads in zip(pairs, found, strict=True):
        yield from clause.swept(threads, time.monotonic_ns())


def _log_error(client: str, done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()):
        _log.error("spans could not be looked through", exc_info=error, extra=fields(client=client))
