"""Access control: admits calls, with the rights of the client that makes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from stapsdtd.api.policy import Policy
from stapsdtd.api.rights import Peer, Rights
from stapsdtd.errors import AccessDeniedError, LimitReachedError, MalformedRequestError, UnknownMethodError
from stapsdtd.runtime.logs import fields
from stapsdtd.runtime.shares import LOOK_SECONDS, Shares
from stapsdtd.sessions.token_bucket import TokenBuckets

Refused = Literal["connection", "frames", "call"]

_MOST_WAITING_SECONDS = 2.0
_REFUSALS = AccessDeniedError, LimitReachedError, MalformedRequestError, UnknownMethodError

_log = logging.getLogger("stapsdtd.access")


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that makes a call, and its rights."""

    call: str
    peer: Peer
    rights: Rights
    refusals: Counter[Refused] = field(default_factory=Counter, compare=False)

    def log(self, level: int, result: str, **more: object) -> None:
        """Log a decision."""
        extra = fields(client=self.rights.client, pid=self.peer.pid, role=self.rights.role, **more)
        _log.log(level, "%s %s", self.call, result, extra=extra | {"kind": (self.call, result)})

    @contextmanager
    def recording_refusals(self) -> Iterator[None]:
        try:
            yield
        except _REFUSALS as error:
            self.record_refusal(error)
            raise

    def record_refusal(self, reason: object, **more: object) -> None:
        self.refusals["call"] += 1
        self.log(logging.WARNING, "refused", reason=reason, **more)


class Gate:
    """Admits calls: identifies the client, looks up its rights and limits its rate. Runs on the API's event loop.

    policy may be replaced at any time and applies from the next call on.
    refusals: the number of connections and calls that were refused; any thread may read it.
    """

    def __init__(
        self,
        find_peer: Callable[[str], Peer],
        policy: Policy,
        shares: Shares,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find_peer = find_peer
        self.policy = policy
        self.shares = shares
        self._requests = TokenBuckets(clock)
        self.refusals: Counter[Refused] = Counter()

    def enter(self, call: str, address: str) -> Caller:
        """Admit a call. address: the peer as gRPC names it. Raises AccessDeniedError and LimitReachedError."""
        peer = self._find_peer(address)
        try:
            rights = self.policy.rights(peer)
            self._check_rate(peer.client, rights.quotas.max_requests_per_second)
        except (AccessDeniedError, LimitReachedError) as error:
            self.record_refusal("call", call, peer, error)
            raise
        self.shares.set_share(peer.client, rights.quotas.max_cpu_percent / 100)
        return Caller(call, peer, rights, self.refusals)

    async def wait_for_turn(self, caller: Caller) -> None:
        """Return when a client has not taken more than its share of the daemon's time. Raises LimitReachedError if that
        takes long.
        """
        client, waited = caller.peer.client, 0.0
        while seconds := self.shares.seconds_to_wait(client):
            if waited + seconds > _MOST_WAITING_SECONDS:
                percent = caller.rights.quotas.max_cpu_percent
                error = LimitReachedError(
                    f"{client} takes more than {percent} % of a processor, which its role allows it beside others; "
                    f"try again in {seconds:.0f} s",
                    "max_cpu_percent",
                )
                self.record_refusal("call", caller.call, caller.peer, error)
                raise error
            step = min(seconds, LOOK_SECONDS)
            await asyncio.sleep(step)
            waited += step
            self.shares.count_waited(client, step)

    async def pause(self, caller: Caller) -> None:
        """Hold up a stream of a client that takes more than its share, for a while."""
        if seconds := self.shares.seconds_to_wait(caller.peer.client):
            step = min(seconds, LOOK_SECONDS)
            await asyncio.sleep(step)
            self.shares.count_waited(caller.peer.client, step)

    def record_refusal(self, kind: Refused, operation: str, peer: Peer, reason: Exception) -> None:
        """Count a refusal and log it."""
        self.refusals[kind] += 1
        self.shares.count_refused(peer.client)
        extra = fields(client=peer.client, pid=peer.pid, reason=reason)
        _log.warning("%s refused", operation, extra=extra | {"kind": (operation, "refused")})

    def _check_rate(self, client: str, per_second: int | None) -> None:
        """Raises LimitReachedError."""
        if per_second is not None and not self._requests.take(client, per_second):
            text = f"{client} makes more than {per_second} requests a second; try again later"
            raise LimitReachedError(text, "max_requests_per_second")
