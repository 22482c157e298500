"""What a subscription knows from its stream so far, and when a broken stream is opened again; no I/O.

The stream asks for `next_seq` each time it is opened. The server keeps events until its queue needs the room,
so a stream that broke and is opened again goes on with the event after the last one that was read: nothing is
doubled, and what fell out of the queue meanwhile comes as a Loss.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stapsdtd.client import decode
from stapsdtd.client.errors import (
    Call,
    LimitReachedError,
    ProtocolError,
    ServerUnavailableError,
    StillSubscribedError,
    from_rpc_error,
)
from stapsdtd.client.events import event_batch
from stapsdtd.client.model import (
    Account,
    DescribedSite,
    Descriptions,
    Encoding,
    End,
    LossStage,
    Message,
    SiteState,
    SiteStatus,
    Status,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from stapsdtd.v1 import stapsdt_pb2 as pb

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_REFUSED_SECONDS = 10.0
"""A server's limit is of requests a second, so who has waited that long shares it with others that ask all the time."""


class SubscriptionState:
    """The part that the sync and the async subscription share.

    id, engine, lease_seconds: as the server answered.
    described: what the site_ids of events and column batches stand for, as far as the stream told.
    lost: events lost so far, by stage.
    account: final once the stream ended; None before unsubscribe() and the End.
    end: the stream's last message, None before it came.
    still_disarming: whether unsubscribe() returned before the kernel was done with it.
    next_seq: where the next stream begins.
    """

    def __init__(self, response: pb.SubscribeResponse) -> None:
        self.id: str = response.subscription_id
        self.engine: str = response.engine
        self.lease_seconds: int = response.lease_seconds
        self.described: dict[int, DescribedSite] = {}
        self.lost: dict[LossStage, int] = dict.fromkeys(LossStage, 0)
        self.account: Account | None = None
        self.end: End | None = None
        self.still_disarming = False
        self.next_seq = 1
        self._sites: dict[int, SiteStatus] = {}
        self._armed_ever: set[int] = set()
        self._update(decode.site_statuses(response.sites))

    @property
    def sites(self) -> tuple[SiteStatus, ...]:
        """Every site that matches now, armed or refused."""
        return tuple(self._sites.values())

    @property
    def sites_armed(self) -> int:
        """How many different sites were armed so far, those included whose object is gone."""
        return len(self._armed_ever)

    def _read(self, response: pb.StreamResponse, encoding: Encoding) -> tuple[Message, ...]:
        match response.WhichOneof("payload"):
            case "descriptions":
                sites = decode.described_sites(response.descriptions)
                self.described.update((each.site.site_id, each) for each in sites)
                return (Descriptions(sites),)
            case "columns" if encoding is Encoding.ROWS:
                batch = event_batch(response.columns, self.described)
                self.next_seq = response.columns.next_seq
                return (batch,)
            case "columns":
                from stapsdtd.client.columns import column_batch  # noqa: PLC0415 (numpy costs 50 ms)

                batches = tuple(column_batch(block, self.described) for block in response.columns.blocks)
                self.next_seq = response.columns.next_seq
                return batches
            case "loss":
                loss = decode.loss(response.loss)
                self.lost[loss.stage] = loss.total
                return (loss,)
            case "status":
                status = Status(decode.site_statuses(response.status.sites))
                self._update(status.sites)
                return (status,)
            case "end":
                self.end = decode.end(response.end)
                self.account = self.end.account
                return (self.end,)
            case _:
                raise ProtocolError("the server sent a message of a kind that this client does not know")

    def _unsubscribed(self, response: pb.UnsubscribeResponse) -> Account:
        self.still_disarming = response.still_disarming
        account = decode.account(response.account)
        if self.end is None:
            self.account = account
        return account

    def _update(self, sites: tuple[SiteStatus, ...]) -> None:
        for each in sites:
            if each.state is SiteState.ARMED:
                self._armed_ever.add(each.site_id)
            if each.state is SiteState.DISARMED:
                self._sites.pop(each.site_id, None)
            else:
                self._sites[each.site_id] = each


class Retry:
    """Opens a stream again for as long as the server keeps the subscription without one: its lease."""

    def __init__(self, call: Call, lease_seconds: int) -> None:
        self._call = call
        self._lease_seconds = lease_seconds
        self._deadline: float | None = None
        self._pause = _FIRST_PAUSE_SECONDS

    def succeeded(self) -> None:
        self._deadline = None
        self._pause = _FIRST_PAUSE_SECONDS

    def after(self, error: grpc.RpcError) -> tuple[float, ServerUnavailableError | None]:
        """Seconds to wait before the next attempt, and the error if it is the first since a success.

        Raises the error as a ClientError when another attempt is of no use.
        """
        cause = from_rpc_error(error, self._call)
        now = time.monotonic()
        first = self._deadline is None
        if self._deadline is None:
            self._deadline = now + self._lease_seconds
        if not isinstance(cause, ServerUnavailableError) or now >= self._deadline:
            raise cause from error
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        return pause, cause if first else None


class RefusedUnsubscribe:
    """Calls Unsubscribe again where the server refused it since this client asks too often: it would stay armed."""

    def __init__(self, call: Call, lease_seconds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._deadline = clock() + min(_REFUSED_SECONDS, call.timeout_seconds or _REFUSED_SECONDS)
        self._pause = _FIRST_PAUSE_SECONDS

    def after(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next attempt. Raises the error as a ClientError when another is of no use."""
        cause = from_rpc_error(error, self._call)
        if not isinstance(cause, LimitReachedError):
            raise cause from error
        if self._clock() + self._pause > self._deadline:
            lease = f"its lease ends it {self._lease_seconds} s after its stream closed"
            raise StillSubscribedError(cause.code, cause.details, f"{cause}; it stays armed until {lease}") from error
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        return pause


def closed_without_end() -> ProtocolError:
    return ProtocolError("the server closed the stream without an End")
