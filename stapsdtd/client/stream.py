"""The state of a subscription's stream; no I/O.

Each time the stream is opened, it asks for `positions`. The server keeps delivered events until it needs their room, so
a reopened stream resumes after the last event that was read: without duplicates, and with a Loss for events that were
discarded meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from stapsdtd.client import decode
from stapsdtd.client.errors import (
    AllRefusedError,
    CallCancelledError,
    NotFoundError,
    ProtocolError,
    ServerStoppedError,
)
from stapsdtd.client.events import event_batch
from stapsdtd.client.known_sites import KnownSites
from stapsdtd.client.messages import (
    ClockChange,
    DescribedSite,
    Descriptions,
    Encoding,
    End,
    EndReason,
    Event,
    EventBatch,
    LossStage,
    Message,
    OpenSpans,
    Resubscribed,
    SiteState,
    SiteStatus,
    Status,
)
from stapsdtd.client.restarts import Resubscription
from stapsdtd.client.retries import Failure, StreamRetry
from stapsdtd.client.server import Account
from stapsdtd.client.snapshot_reader import SnapshotReader
from stapsdtd.v1 import stapsdt_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import grpc

    from stapsdtd.subscribe_options import Aggregate


class SubscriptionState:
    """The state that blocking and asyncio subscriptions share.

    id, engine, lease_seconds: from the server's response.
    described: the sites described on the stream so far, by site_id.
    lost: events of all clauses lost so far, by stage; also before restarts.
    account: the sum of all clauses, since the last restart. None until unsubscribe() returns or the End arrives; final
        after the End.
    end: the stream's last message, None until it arrives.
    restarts: those of the server after which the client subscribed again.
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

    def __init__(
        self,
        request: pb.SubscribeRequest,
        response: pb.SubscribeResponse,
        target: str,
        aggregates: Mapping[str, Aggregate | None],
    ) -> None:
        """aggregates: of the clauses, if they have one, by tag."""
        self._again = Resubscription(request, is_local=target.startswith("unix"))
        self._snapshots = {tag: SnapshotReader(aggregate, tag) for tag, aggregate in aggregates.items()}
        self.appeared: dict[str, int] = {}
        self.described: dict[int, DescribedSite] = {}
        self.restarts: list[Resubscribed] = []
        self._lost_before: Counter[LossStage] = Counter()
        self._sites = KnownSites()
        self._has_events = False
        self._is_unsubscribed = False
        self._begin(response)

    def _begin(self, response: pb.SubscribeResponse) -> None:
        """Begin with what the server responded, at first or after it was restarted."""
        self._again.begin(response)
        self.id: str = response.subscription_id
        self.engine: str = response.engine
        self.lease_seconds: int = response.lease_seconds
        self.unusable_files: dict[str, str] = {file.path: file.reason for file in response.unusable_files}
        self.evaluated_late: dict[str, str] = {late.text: late.reason for late in response.evaluated_late}
        self.added_late: dict[str, int] = decode.added_late(response.added_late)
        self.account: Account | None = None
        self.end: End | None = None
        self.still_disarming = False
        self.positions: dict[str, int] = dict.fromkeys(self._snapshots, 1)
        self.clause_accounts: dict[str, Account] = {}
        self.open_spans: dict[str, OpenSpans] = {}
        self._lost: dict[tuple[str, LossStage], int] = {}
        self._sites.begin(decode.site_statuses(response.sites))
        self._clock_told_ns = 0
        self._ended_ns = 0
        self._forgotten: NotFoundError | None = None

    def _begin_again(self, response: pb.SubscribeResponse) -> Resubscribed:
        """Begin after the server was restarted."""
        restart = Resubscribed(self._ended_ns, time.time_ns(), self.account, self.clause_accounts)
        self.restarts.append(restart)
        self._lost_before.update(self._lost_since_restart())
        for tag, snapshots in self._snapshots.items():
            snapshots.begin_again(self.clause_accounts.get(tag))
        self._begin(response)
        return restart

    def _has_ended(self) -> bool:
        return self.end is not None

    def _is_left(self) -> bool:
        """Report whether the caller has unsubscribed."""
        return self._is_unsubscribed

    def _all_ended(self) -> End:
        """End, since all processes that were asked for ended while the server was not there."""
        self._begin_again(pb.SubscribeResponse(engine=self.engine, lease_seconds=self.lease_seconds))
        self.account = decode.account(pb.Account())
        self.end = End(EndReason.PROCESSES_ENDED, self.account)
        return self.end

    def _ended_before(self) -> End:
        """Return how the subscription ended that is not made again. Raises NotFoundError if it is not known."""
        if self.end is None:
            raise self._forgotten or AssertionError("it is gone")
        return self.end

    def _stopped(self, retry: StreamRetry) -> Failure:
        """Return what the end of a stream means that the caller does not want. Raises ProtocolError."""
        if not self.is_down:
            raise ProtocolError("the server closed the stream without an End")
        self._again.interrupted()
        retry.failed()
        return Failure(told=ServerStoppedError(), is_gone=True)

    def _failed(self, retry: StreamRetry, error: grpc.RpcError, *, resubscribe: bool) -> Failure:
        """Return how to go on. Raises the error as a ClientError if there is no way."""
        self._ended_ns = self._ended_ns or time.time_ns()
        self._again.interrupted()
        try:
            pause, told = retry.after(error, *([CallCancelledError] if resubscribe else []))
        except NotFoundError as gone:
            if not resubscribe or self._is_unsubscribed:
                raise
            self._forgotten = gone
            return Failure(is_gone=True)
        return Failure(pause, told)

    @property
    def total(self) -> Account | None:
        """The account since the beginning, across restarts; None if a part of it is unknown."""
        accounts = [*(restart.account for restart in self.restarts), self.account]
        known = [account for account in accounts if account is not None]
        return sum(known[1:], known[0]) if len(known) == len(accounts) else None

    @property
    def is_down(self) -> bool:
        """Whether the server stopped, or was restarted, and the client has not subscribed again."""
        return self.end is not None and self.end.reason is EndReason.SERVER_STOPPING

    @property
    def next_seq(self) -> int:
        """The position of a subscription that has only one clause."""
        (position,) = self.positions.values()
        return position

    @property
    def lost(self) -> dict[LossStage, int]:
        now = self._lost_since_restart()
        return {stage: self._lost_before[stage] + now[stage] for stage in LossStage}

    def _lost_since_restart(self) -> Counter[LossStage]:
        lost: Counter[LossStage] = Counter()
        for (_, stage), total in self._lost.items():
            lost[stage] += total
        return lost

    @property
    def sites(self) -> tuple[SiteStatus, ...]:
        """All sites that match now, armed or refused."""
        return self._sites.now

    @property
    def armed_so_far(self) -> tuple[SiteStatus, ...]:
        """All sites that were armed, including those whose object is gone."""
        return self._sites.armed_so_far

    @property
    def sites_armed(self) -> int:
        """The number of distinct sites armed so far, including those whose object is gone, and those of which events
        came before the server said that they are armed.
        """
        # a site is described before its first event
        return self._sites.count(self.described if self._has_events else {}, by_place=bool(self.restarts))

    def _taken(self, response: pb.StreamResponse, messages: Sequence[Message]) -> Iterator[Message]:
        """Yield the messages of a response. The next stream begins behind it once the last one is taken."""
        yield from messages[:-1]
        match response.WhichOneof("payload"):
            case "columns":
                self.positions[response.tag] = response.columns.next_seq
            case "snapshot" if messages:
                self.positions[response.tag] = response.snapshot.number + 1
        yield from messages[-1:]

    def _events(self, messages: Iterable[Message]) -> Iterator[Event]:
        """Yield the events of messages. The next stream begins behind the last one that was taken."""
        for message in messages:
            if isinstance(message, EventBatch):
                for event in message.events:
                    self.positions[event.tag] = event.seq + 1
                    yield event
            if isinstance(message, Resubscribed):
                self._check_refused()

    def _read(self, response: pb.StreamResponse, encoding: Encoding) -> tuple[Message, ...]:
        tag = response.tag
        self._ended_ns = 0
        self._again.read(response)
        match response.WhichOneof("payload"):
            case "descriptions":
                sites = decode.described_sites(response.descriptions, tag)
                self.described.update((described.site.site_id, described) for described in sites)
                return (Descriptions(sites),)
            case "columns" if encoding is Encoding.ROWS:
                self._has_events = True
                return (event_batch(response.columns, self.described),)
            case "columns":
                from stapsdtd.client.columns import column_batches  # noqa: PLC0415 (numpy costs 50 ms)

                self._has_events = True
                return column_batches(response.columns, self.described)
            case "snapshot":
                snapshot = self._snapshots[tag].read(response.snapshot)
                return () if snapshot is None else (snapshot,)
            case "open":
                return (decode.open_spans(response.open, tag),)
            case "loss":
                loss = decode.loss(response.loss, tag)
                self._lost[tag, loss.stage] = loss.total
                return (loss,)
            case "status":
                status = Status(decode.site_statuses(response.status.sites))
                self._sites.update(status.sites)
                self.appeared |= {site.path: site.armed_after_ns for site in status.sites if site.armed_after_ns}
                changes = self._new_clock_changes(response.status)
                return (*changes, status) if status.sites else changes
            case "end":
                self.end = decode.end(response.end)
                self.account, self.clause_accounts = self.end.account, dict(self.end.clauses)
                self.open_spans = dict(self.end.open)
                self._ended_ns = time.time_ns()
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
        if self.sites and all(site.state is SiteState.REFUSED for site in self.sites):
            raise AllRefusedError([site.reason for site in self.sites])

    def _resume_at(self, from_seq: int | Mapping[str, int] | None) -> None:
        """Begin the next stream there; see `messages` of the subscriptions."""
        if isinstance(from_seq, int):
            from_seq = dict.fromkeys(self.positions, from_seq)
        self.positions |= from_seq or {}
        for snapshots in self._snapshots.values():
            snapshots.restart()
