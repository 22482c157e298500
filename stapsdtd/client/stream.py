"""The state of a subscription's stream, and when to reopen a broken one; no I/O.

Each time the stream is opened, it asks for `positions`. The server keeps delivered events until it needs their room, so
a reopened stream resumes after the last event that was read: without duplicates, and with a Loss for events that were
discarded meanwhile.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stapsdtd.client import decode
from stapsdtd.client.errors import (
    AllRefusedError,
    Call,
    LimitReachedError,
    ProtocolError,
    ServerUnavailableError,
    StillSubscribedError,
    from_rpc_error,
)
from stapsdtd.client.events import event_batch
from stapsdtd.client.messages import (
    ClockChange,
    DescribedSite,
    Descriptions,
    Encoding,
    End,
    LossStage,
    Message,
    OpenSpans,
    SiteState,
    SiteStatus,
    Status,
)
from stapsdtd.client.server import Account
from stapsdtd.client.snapshots import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import grpc

    from stapsdtd.v1 import stapsdt_pb2 as pb

_FIRST_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 1.0
_UNSUBSCRIBE_SECONDS = 10.0
"""The quota is per second, so a client refused for this long shares it with others that use it up all the time."""


class SubscriptionState:
    """The state that blocking and asyncio subscriptions share.

    id, engine, lease_seconds: from the server's response.
    described: the sites described on the stream so far, by site_id.
    lost: events of all clauses lost so far, by stage.
    account: the sum of all clauses. None until unsubscribe() returns or the End arrives; final after the End.
    end: the stream's last message, None until it arrives.
    still_disarming: whether unsubscribe() returned before everything was disarmed.
    unusable_files: why expected files cannot be used, by path.
    evaluated_late: why parts of the filter are evaluated by the server rather than at the hit, by their text.
    added_late: why the server adds hits up itself, each reason with the number of sites that it concerns.
    appeared: how long after the server noticed them objects were armed, in nanoseconds, by path; without those of the
        beginning.
    positions: the number, of an event or a snapshot, from which the next stream starts, for each clause by its tag.
    clause_accounts: as account, of each clause by its tag.
    open_spans: those that were open at the end, by the tag of their clause, from when the account is there.
    """

    def __init__(self, response: pb.SubscribeResponse, functions: Mapping[str, Sequence[str]]) -> None:
        """functions: of the clauses' aggregations, if they have one, by tag."""
        self._snapshots = {tag: SnapshotReader(of_clause, tag) for tag, of_clause in functions.items()}
        self.id: str = response.subscription_id
        self.engine: str = response.engine
        self.lease_seconds: int = response.lease_seconds
        self.unusable_files: dict[str, str] = {file.path: file.reason for file in response.unusable_files}
        self.evaluated_late: dict[str, str] = {late.text: late.reason for late in response.evaluated_late}
        self.added_late: dict[str, int] = decode.added_late(response.added_late)
        self.appeared: dict[str, int] = {}
        self.described: dict[int, DescribedSite] = {}
        self.account: Account | None = None
        self.end: End | None = None
        self.still_disarming = False
        self.positions: dict[str, int] = dict.fromkeys(functions, 1)
        self.clause_accounts: dict[str, Account] = {}
        self.open_spans: dict[str, OpenSpans] = {}
        self._lost: dict[tuple[str, LossStage], int] = {}
        self._sites: dict[int, SiteStatus] = {}
        self._ever_armed: dict[int, SiteStatus] = {}
        self._has_events = False
        self._clock_told_ns = 0
        self._update(decode.site_statuses(response.sites))

    @property
    def next_seq(self) -> int:
        """The position of a subscription that has only one clause."""
        (position,) = self.positions.values()
        return position

    @property
    def lost(self) -> dict[LossStage, int]:
        return {
            stage: sum(total for (_, lost_in), total in self._lost.items() if lost_in is stage) for stage in LossStage
        }

    @property
    def sites(self) -> tuple[SiteStatus, ...]:
        """All sites that match now, armed or refused."""
        return tuple(self._sites.values())

    @property
    def armed_so_far(self) -> tuple[SiteStatus, ...]:
        """All sites that were armed, including those whose object is gone."""
        return tuple(self._ever_armed.values())

    @property
    def sites_armed(self) -> int:
        """The number of distinct sites armed so far, including those whose object is gone, and those of which events
        came before the server said that they are armed.
        """
        # a site is described before its first event
        fired = self.described.keys() if self._has_events else ()
        return len(self._ever_armed.keys() | fired)

    def _read(self, response: pb.StreamResponse, encoding: Encoding) -> tuple[Message, ...]:
        tag = response.tag
        match response.WhichOneof("payload"):
            case "descriptions":
                sites = decode.described_sites(response.descriptions, tag)
                self.described.update((described.site.site_id, described) for described in sites)
                return (Descriptions(sites),)
            case "columns" if encoding is Encoding.ROWS:
                self._has_events = True
                batch = event_batch(response.columns, self.described)
                self.positions[tag] = response.columns.next_seq
                return (batch,)
            case "columns":
                from stapsdtd.client.columns import column_batches  # noqa: PLC0415 (numpy costs 50 ms)

                self._has_events = True
                batches = column_batches(response.columns, self.described)
                self.positions[tag] = response.columns.next_seq
                return batches
            case "snapshot":
                snapshot = self._snapshots[tag].read(response.snapshot)
                if snapshot is None:
                    return ()
                self.positions[tag] = snapshot.number + 1
                return (snapshot,)
            case "open":
                return (decode.open_spans(response.open, tag),)
            case "loss":
                loss = decode.loss(response.loss, tag)
                self._lost[tag, loss.stage] = loss.total
                return (loss,)
            case "status":
                status = Status(decode.site_statuses(response.status.sites))
                self._update(status.sites)
                self.appeared |= {site.path: site.armed_after_ns for site in status.sites if site.armed_after_ns}
                changes = self._new_clock_changes(response.status)
                return (*changes, status) if status.sites else changes
            case "end":
                self.end = decode.end(response.end)
                self.account, self.clause_accounts = self.end.account, dict(self.end.clauses)
                self.open_spans = dict(self.end.open)
                return (self.end,)
            case _:
                raise ProtocolError("the server sent a message of a type that this client does not know")

    def _new_clock_changes(self, status: pb.Status) -> tuple[ClockChange, ...]:
        """Return those that no stream has told of yet."""
        changes = tuple(each for each in decode.clock_changes(status) if each.monotonic_ns > self._clock_told_ns)
        if changes:
            self._clock_told_ns = changes[-1].monotonic_ns
        return changes

    def _unsubscribed(self, response: pb.UnsubscribeResponse) -> Account:
        self.still_disarming = response.still_disarming
        account = decode.account(response.account)
        if self.end is None:
            self.account, self.clause_accounts = account, decode.clause_accounts(response.clauses)
            self.open_spans = decode.open_by_tag(response.clauses)
        return account

    def _check_refused(self) -> None:
        """Raises AllRefusedError if sites match, and all of them are refused now."""
        if self._sites and all(site.state is SiteState.REFUSED for site in self._sites.values()):
            raise AllRefusedError([site.reason for site in self._sites.values()])

    def _resume_at(self, from_seq: int | Mapping[str, int] | None) -> None:
        """Begin the next stream there; see `messages` of the subscriptions."""
        if isinstance(from_seq, int):
            from_seq = dict.fromkeys(self.positions, from_seq)
        self.positions |= from_seq or {}
        for snapshots in self._snapshots.values():
            snapshots.restart()

    def _update(self, sites: tuple[SiteStatus, ...]) -> None:
        for site in sites:
            if site.state is SiteState.ARMED:
                self._ever_armed[site.site_id] = site
            if site.state is SiteState.DISARMED:
                self._sites.pop(site.site_id, None)
            else:
                self._sites[site.site_id] = site


class StreamRetry:
    """Decides when to reopen a broken stream: until the lease has expired, with growing pauses."""

    def __init__(self, call: Call, lease_seconds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._deadline: float | None = None
        self._pause = _FIRST_PAUSE_SECONDS

    def succeeded(self) -> None:
        self._deadline = None
        self._pause = _FIRST_PAUSE_SECONDS

    def after(self, error: grpc.RpcError) -> tuple[float, ServerUnavailableError | None]:
        """Return the seconds to wait before the next attempt, and the error if it is the first since a success.

        Raises the error as a ClientError if another attempt would not help.
        """
        cause = from_rpc_error(error, self._call)
        now = self._clock()
        is_first = self._deadline is None
        if self._deadline is None:
            self._deadline = now + self._lease_seconds
        if not isinstance(cause, ServerUnavailableError) or now >= self._deadline:
            raise cause from error
        pause, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE_SECONDS)
        return pause, cause if is_first else None


class UnsubscribeRetry:
    """Decides when to repeat an Unsubscribe that exceeded the client's request quota; else the probes stay armed."""

    def __init__(self, call: Call, lease_seconds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._call = call
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._deadline = clock() + min(_UNSUBSCRIBE_SECONDS, call.timeout_seconds or _UNSUBSCRIBE_SECONDS)
        self._pause = _FIRST_PAUSE_SECONDS

    def after(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before the next attempt.

        Raises the error as a ClientError if another attempt would not help.
        """
        cause = from_rpc_error(error, self._call)
        if not isinstance(cause, LimitReachedError):
            raise cause from error
        if self._clock() + self._pause > self._deadline:
            lease = f"its lease expires, {self._lease_seconds} s after its stream closed"
            raise StillSubscribedError(cause.code, cause.details, f"{cause}; it stays armed until {lease}") from error
        pause, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE_SECONDS)
        return pause


def closed_without_end() -> ProtocolError:
    return ProtocolError("the server closed the stream without an End")
