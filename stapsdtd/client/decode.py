"""Decodes responses into the client's frozen data, without I/O. Unknown enum values raise ProtocolError."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from stapsdtd.client import messages, probes, server
from stapsdtd.client.errors import ProtocolError
from stapsdtd.client.events import text_of
from stapsdtd.subscribe_options import Scope
from stapsdtd.v1 import stapsdt_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_T = TypeVar("_T")

_SITE_STATES: dict[int, messages.SiteState] = {
    pb.SiteStatus.STATE_ARMING: messages.SiteState.ARMING,
    pb.SiteStatus.STATE_ARMED: messages.SiteState.ARMED,
    pb.SiteStatus.STATE_DISARMING: messages.SiteState.DISARMING,
    pb.SiteStatus.STATE_DISARMED: messages.SiteState.DISARMED,
    pb.SiteStatus.STATE_REFUSED: messages.SiteState.REFUSED,
}
_INVENTORY_STATES: dict[int, server.InventoryState] = {
    pb.Inventory.STATE_OFF: server.InventoryState.OFF,
    pb.Inventory.STATE_SCANNING: server.InventoryState.SCANNING,
    pb.Inventory.STATE_CURRENT: server.InventoryState.CURRENT,
    pb.Inventory.STATE_FAILED: server.InventoryState.FAILED,
}
_LOSS_STAGES: dict[int, messages.LossStage] = {
    pb.Loss.STAGE_KERNEL_BUFFER: messages.LossStage.KERNEL_BUFFER,
    pb.Loss.STAGE_QUEUE: messages.LossStage.QUEUE,
    pb.Loss.STAGE_DECODE: messages.LossStage.DECODE,
    pb.Loss.STAGE_QUOTA: messages.LossStage.QUOTA,
    pb.Loss.STAGE_TABLE_FULL: messages.LossStage.TABLE_FULL,
    pb.Loss.STAGE_MISSED: messages.LossStage.MISSED,
    pb.Loss.STAGE_FILTER: messages.LossStage.FILTER,
}
_END_REASONS: dict[int, messages.EndReason] = {
    pb.End.REASON_UNSUBSCRIBED: messages.EndReason.UNSUBSCRIBED,
    pb.End.REASON_SERVER_STOPPING: messages.EndReason.SERVER_STOPPING,
    pb.End.REASON_LEASE_EXPIRED: messages.EndReason.LEASE_EXPIRED,
    pb.End.REASON_ACCESS_REVOKED: messages.EndReason.ACCESS_REVOKED,
    pb.End.REASON_PROCESSES_ENDED: messages.EndReason.PROCESSES_ENDED,
}


def server_info(info: pb.GetServerInfoResponse) -> server.ServerInfo:
    return server.ServerInfo(
        version=info.version,
        engine=info.engine,
        kernel_release=info.kernel_release,
        machine=info.machine,
        pid=info.pid,
        subscriptions=info.subscriptions,
        processes=info.processes,
        objects=info.objects,
        probes=info.probes,
        features=tuple(map(_feature, info.features)),
        limits=server.Limits(
            max_lease_seconds=info.limits.max_lease_seconds,
            max_queue_bytes=info.limits.max_queue_bytes,
            max_kernel_buffer_kib=info.limits.max_kernel_buffer_kib,
            max_selectors=info.limits.max_selectors,
            max_string_bytes=info.limits.max_string_bytes,
        ),
        access=_access(info.access) if info.HasField("access") else None,
        arming=server.Arming(info.arming.waiting, info.arming.running, info.arming.running_ms / 1000),
        inventory=_inventory(info.inventory) if info.HasField("inventory") else None,
    )


def _inventory(message: pb.Inventory) -> server.Inventory:
    return server.Inventory(
        _lookup(_INVENTORY_STATES, message.state, "inventory state"),
        message.files,
        message.probes,
        message.scanned_ns,
        message.problem,
    )


def _access(message: pb.Access) -> server.Access:
    return server.Access(
        message.client,
        message.role,
        message.manage,
        _users(message.list),
        _users(message.trace),
        message.trace_restriction,
        message.functions,
    )


def _users(message: pb.Users) -> tuple[int, ...] | None:
    return None if message.everybody else tuple(message.uids)


def probe_listing(listing: pb.ListProbesResponse) -> probes.ProbeListing:
    return probes.ProbeListing(
        probes=tuple(map(probe, listing.probes)),
        processes=tuple(
            probes.Process(
                pid=process.pid,
                comm=process.comm,
                command_line=tuple(process.command_line),
                user=process.user,
                started_ns=process.started_ns,
                cgroup=process.cgroup or None,
                container_id=process.container_id or None,
                container_name=process.container_name or None,
                namespace_pid=process.namespace_pid or process.pid,
            )
            for process in listing.processes
        ),
        problems=tuple(
            probes.Problem(problem.path, problem.provider, problem.name, problem.reason) for problem in listing.problems
        ),
        sites_left_out=listing.sites_left_out,
        files_left_out=listing.files_left_out,
        problems_left_out=listing.problems_left_out,
        moved=tuple(
            probes.MovedText(
                pid=each.pid,
                comm=each.comm,
                uid=each.uid,
                path=each.path,
                memory=each.memory,
                first_offset=each.first_offset,
                last_offset=each.last_offset,
                sites=each.sites,
            )
            for each in listing.moved
        ),
    )


def probe(message: pb.Probe) -> probes.Probe:
    return probes.Probe(
        provider=message.provider,
        name=message.name,
        path=message.path,
        build_id=message.build_id or None,
        architecture=message.architecture,
        pids=tuple(message.pids),
        sites=tuple(map(_site, message.sites)),
    )


def watch_message(change: pb.WatchProbesResponse) -> probes.WatchMessage:
    match change.change:
        case pb.WatchProbesResponse.CHANGE_ADDED:
            return probes.ProbeAdded(probe(change.probe))
        case pb.WatchProbesResponse.CHANGE_REMOVED:
            return probes.ProbeRemoved(probe(change.probe))
        case pb.WatchProbesResponse.CHANGE_SNAPSHOT_COMPLETE:
            return probes.SnapshotComplete()
        case unknown:
            raise ProtocolError(f"the server sent change {unknown} of probes, which this client does not know")


def subscription_info(message: pb.Subscription) -> server.SubscriptionInfo:
    return server.SubscriptionInfo(
        id=message.subscription_id,
        selectors=tuple(message.selectors),
        scope=Scope.of(message.scope),
        created_ns=message.created_ns,
        streaming=message.streaming,
        lease_left_ms=message.lease_left_ms,
        account=account(message.account),
        where=message.where,
        added_late=added_late(message.added_late),
        clauses=tuple(
            server.ClauseInfo(clause.tag, tuple(clause.selectors), clause.where, account(clause.account))
            for clause in message.clauses
        ),
    )


def added_late(messages: Iterable[pb.LateAggregation]) -> dict[str, int]:
    """Return the reasons, each with the number of sites of all clauses that it concerns."""
    sites: Counter[str] = Counter()
    for late in messages:
        sites[late.reason] += late.sites
    return dict(sites)


def clause_accounts(messages: Iterable[pb.ClauseAccount]) -> dict[str, server.Account]:
    return {message.tag: account(message.account) for message in messages}


def account(message: pb.Account) -> server.Account:
    return server.Account(
        fired=message.fired,
        delivered=message.delivered,
        filtered=message.filtered,
        lost_kernel_buffer=message.lost_kernel_buffer,
        lost_queue=message.lost_queue,
        lost_decode=message.lost_decode,
        lost_quota=message.lost_quota,
        in_flight=message.in_flight,
        sites=message.sites,
        aggregated=message.aggregated,
        lost_table_full=message.lost_table_full,
        lost_missed=message.lost_missed,
        lost_filter=message.lost_filter,
        undecided=message.undecided,
        valueless=message.valueless,
        spans=server.SpanAccount(
            starts=message.spans.starts,
            paired=message.spans.paired,
            nested=message.spans.nested,
            died=message.spans.died,
            timed_out=message.spans.timed_out,
            table_full=message.spans.table_full,
            open=message.spans.open,
            unmatched=message.spans.unmatched,
        ),
    )


def site_statuses(sites: Iterable[pb.SiteStatus]) -> tuple[messages.SiteStatus, ...]:
    return tuple(
        messages.SiteStatus(
            state=_lookup(_SITE_STATES, site.state, "site state"),
            site_id=site.site_id,
            provider=site.provider,
            name=site.name,
            path=site.path,
            offset=site.offset,
            reason=site.reason,
            armed_after_ns=site.armed_after_ns,
            tag=site.tag,
            function=site.function,
        )
        for site in sites
    )


def clock_changes(status: pb.Status) -> Iterable[messages.ClockChange]:
    return (
        messages.ClockChange(each.time_ns, each.monotonic_ns, each.by_ns, each.suspended_ns)
        for each in status.clock_changes
    )


def described_sites(descriptions: pb.Descriptions, tag: str) -> tuple[messages.DescribedSite, ...]:
    described: list[messages.DescribedSite] = []
    for description in descriptions.probes:
        decoded = probe(description.probe)
        captures = _captures(description.captures)
        described += [messages.DescribedSite(decoded, site, captures, tag) for site in decoded.sites]
    return tuple(described)


def _captures(captures: Iterable[pb.CapturedArgument]) -> tuple[messages.CapturedArgument, ...]:
    return tuple(
        messages.CapturedArgument(
            capture.index,
            capture.is_string,
            capture.missing,
            capture.is_hex,
            capture.field,
            capture.of_start,
            capture.is_buffer,
        )
        for capture in captures
    )


def open_spans(message: pb.OpenSpans, tag: str) -> messages.OpenSpans:
    spans = tuple(
        messages.OpenSpan(
            each.begin_ns,
            each.waiting_ns,
            each.pid,
            each.tid,
            tuple(map(_value, each.key)),
            tuple(map(_value, each.values)),
            each.begin_monotonic_ns if each.HasField("begin_monotonic_ns") else None,
        )
        for each in message.spans
    )
    return messages.OpenSpans(spans, message.count, _captures(message.captures), tag)


def _value(message: pb.Value) -> messages.Value:
    match message.WhichOneof("kind"):
        case "signed":
            return message.signed
        case "unsigned":
            return message.unsigned
        case "float":
            return message.float
        case "string":
            text = text_of(message.string)
            return messages.CutText(text) if message.truncated else text
        case "raw":
            return message.raw
        case _:
            return None


def open_by_tag(accounts: Iterable[pb.ClauseAccount]) -> dict[str, messages.OpenSpans]:
    """Return the spans of clauses that were open at the end, without clauses that had none."""
    return {each.tag: open_spans(each.open, each.tag) for each in accounts if each.HasField("open")}


def _feature(message: pb.Feature) -> server.Feature:
    return server.Feature(message.name, message.available, message.detail, message.remedy, message.required)


def loss(message: pb.Loss, tag: str) -> messages.Loss:
    return messages.Loss(_lookup(_LOSS_STAGES, message.stage, "loss stage"), message.count, message.total, tag)


def end(message: pb.End) -> messages.End:
    reason = _lookup(_END_REASONS, message.reason, "end reason")
    return messages.End(
        reason, account(message.account), clause_accounts(message.clauses), open_by_tag(message.clauses)
    )


def _site(message: pb.Site) -> probes.Site:
    return probes.Site(
        site_id=message.site_id,
        offset=message.offset,
        semaphore_offset=message.semaphore_offset if message.HasField("semaphore_offset") else None,
        function=message.function or None,
        arguments=tuple(map(_argument, message.arguments)),
        refused=message.refused,
    )


def _argument(message: pb.Argument) -> probes.Argument:
    return probes.Argument(message.text, message.size, message.signed, message.is_float, _operand(message))


def _operand(argument: pb.Argument) -> probes.Operand:
    match argument.WhichOneof("operand"):
        case "constant":
            return probes.Constant(argument.constant)
        case "register":
            return probes.Register(argument.register.name, argument.register.first_bit)
        case "memory":
            memory = argument.memory
            return probes.Memory(
                memory.base or None, memory.displacement, memory.index or None, memory.scale or 1, memory.symbol or None
            )
        case "address":
            address = argument.address
            return probes.Address(address.base or None, address.displacement, address.symbol or None)
        case "unavailable":
            return probes.Unavailable(argument.unavailable)
        case None:
            raise ProtocolError(f"the server sent an operand of a kind that this client does not know: {argument.text}")


def _lookup(table: Mapping[int, _T], value: int, name: str) -> _T:
    if value not in table:
        raise ProtocolError(f"the server sent {name} {value}, which this client does not know")
    return table[value]
