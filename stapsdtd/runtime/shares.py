"""How much processor time clients take of the threads that all share, and which of them has to wait.

    work ──► charge ──► account: cleared at the client's share of a processor, which may be a second's worth behind
                           └── beyond that, and while others want the daemon: the client's next work waits

So a client that is alone gets all, and one that asks for much gets its share beside others, whose work goes on.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

DEFAULT_SHARE = 0.25
LOOK_SECONDS = 0.1
"""After so long, whoever waits is to look again whether others still want the daemon."""
_MOST_BEHIND_SECONDS = 1.0
_WANTS_SECONDS = 1.0
"""For so long after its last work a client counts as one that wants the daemon."""
_KEPT_ACCOUNTS, _KEPT_SECONDS = 256, 600.0
"""Beyond so many, those that were idle for so long are closed."""
OTHERS = "others"


@dataclass(slots=True)
class Taken:
    """What clients took. seconds: by kind of work. waited: seconds that calls were held up. refused: calls and
    connections.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    waited: float = 0.0
    refused: int = 0
    frames: int = 0

    def add(self, other: Taken) -> None:
        for work, seconds in other.seconds.items():
            self.seconds[work] += seconds
        self.waited += other.waited
        self.refused += other.refused
        self.frames += other.frames


@dataclass(slots=True, eq=False)
class _Account:
    """cleared_at: when the client's share will have made up for what it took. apart_cleared_at: the same of work that
    is not put off but lost. last: when it took something.
    """

    share: float = DEFAULT_SHARE
    taken: Taken = field(default_factory=Taken)
    subscriptions: int = 0
    cleared_at: float = 0.0
    apart_cleared_at: float = 0.0
    last: float = float("-inf")


class Shares:
    """Any thread may call the methods. clock: in seconds; cpu_clock: of the calling thread's work."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self.cpu_clock = cpu_clock
        self._lock = threading.Lock()
        self._accounts: dict[str, _Account] = {}
        self._of_others = Taken()

    def set_share(self, client: str, share: float) -> None:
        with self._lock:
            self._account(client).share = share

    def began(self, client: str) -> None:
        """Count a subscription of a client's, which wants the daemon as long as it has any."""
        with self._lock:
            self._account(client).subscriptions += 1

    def ended(self, client: str) -> None:
        with self._lock:
            self._account(client).subscriptions -= 1

    def charge(self, client: str, work: str, seconds: float, *, is_apart: bool = False) -> None:
        """is_apart: of work that goes on whoever is behind: no other work waits for it, and debts have an end."""
        with self._lock:
            account, now = self._account(client), self._clock()
            account.taken.seconds[work] += seconds
            if is_apart:
                cleared_at = max(account.apart_cleared_at, now) + seconds / account.share
                account.apart_cleared_at = min(cleared_at, now + 2 * _MOST_BEHIND_SECONDS)
            else:
                account.cleared_at = max(account.cleared_at, now) + seconds / account.share
            account.last = now

    @contextmanager
    def charged(self, client: str, work: str) -> Iterator[None]:
        """Charge what the calling thread does inside."""
        begin = self.cpu_clock()
        try:
            yield
        finally:
            self.charge(client, work, self.cpu_clock() - begin)

    def count_refused(self, client: str) -> None:
        with self._lock:
            self._account(client).taken.refused += 1

    def count_frames(self, client: str, count: int) -> None:
        with self._lock:
            self._account(client).taken.frames += count

    def count_waited(self, client: str, seconds: float) -> None:
        with self._lock:
            self._account(client).taken.waited += seconds

    def seconds_to_wait(self, client: str, *, is_apart: bool = False) -> float:
        """Return for how long a client's work is to wait; 0 if it is its turn."""
        with self._lock:
            account = self._accounts.get(client)
            now = self._clock()
            if account is None:
                return 0.0
            cleared_at = account.apart_cleared_at if is_apart else account.cleared_at
            if cleared_at <= now + _MOST_BEHIND_SECONDS:
                return 0.0
            if not any(
                other.subscriptions or now - other.last < _WANTS_SECONDS
                for other in self._accounts.values()
                if other is not account
            ):
                return 0.0
            return cleared_at - now - _MOST_BEHIND_SECONDS

    def taken(self, connected: Iterable[str]) -> dict[str, Taken]:
        """Return what each connected client took, and what all others ever did as that of OTHERS."""
        shown = set(connected)
        with self._lock:
            for client, account in self._accounts.items():
                if client not in shown:
                    self._of_others.add(account.taken)
                    account.taken = Taken()
            found = {client: account.taken for client, account in self._accounts.items() if client in shown}
            return {client: deepcopy(taken) for client, taken in found.items()} | {OTHERS: deepcopy(self._of_others)}

    def _account(self, client: str) -> _Account:
        account = self._accounts.get(client)
        if account is None:
            if len(self._accounts) >= _KEPT_ACCOUNTS:
                self._close_idle()
            account = self._accounts[client] = _Account()
        return account

    def _close_idle(self) -> None:
        now = self._clock()
        for client, account in list(self._accounts.items()):
            if not account.subscriptions and now > max(account.cleared_at, account.last + _KEPT_SECONDS):
                self._of_others.add(account.taken)
                del self._accounts[client]


@dataclass(frozen=True, slots=True)
class Toll:
    """What a thread charges clients for its turns. work: the kind. waits: a client that is behind gets no turn.
    is_apart: see `Shares.charge`.
    """

    shares: Shares
    work: str
    waits: bool = True
    is_apart: bool = False

    def charge(self, client: str, seconds: float) -> None:
        self.shares.charge(client, self.work, seconds, is_apart=self.is_apart)

    def seconds_to_wait(self, client: str) -> float:
        return self.shares.seconds_to_wait(client, is_apart=self.is_apart) if self.waits else 0.0
