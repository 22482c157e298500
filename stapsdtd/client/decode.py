"""Reads answers: protobuf messages as the client's frozen data. Pure; the unknown is a ProtocolError."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from stapsdtd.client import model
from stapsdtd.client.errors import ProtocolError
from stapsdtd.v1 import stapsdt_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_T = TypeVar("_T")

_SITE_STATES: dict[int, model.SiteState] = {
    pb.SiteStatus.STATE_ARMED: model.SiteState.ARMED,
    pb.SiteStatus.STATE_DISARMED: model.SiteState.DISARMED,
    pb.SiteStatus.STATE_REFUSED: model.SiteState.REFUSED,
}
_LOSS_STAGES: dict[int, model.LossStage] = {
    pb.Loss.STAGE_KERNEL_BUFFER: model.LossStage.KERNEL_BUFFER,
    pb.Loss.STAGE_QUEUE: model.LossStage.QUEUE,
    pb.Loss.STAGE_DECODE: model.LossStage.DECODE,
    pb.Loss.STAGE_QUOTA: model.LossStage.QUOTA,
}
_END_REASONS: dict[int, model.EndReason] = {
    pb.End.REASON_UNSUBSCRIBED: model.EndReason.UNSUBSCRIBED,
    pb.End.REASON_SERVER_STOPPING: model.EndReason.SERVER_STOPPING,
    pb.End.REASON_LEASE_EXPIRED: model.EndReason.LEASE_EXPIRED,
    pb.End.REASON_ACCESS_REVOKED: model.EndReason.ACCESS_REVOKED,
}


def server_info(info: pb.GetServerInfoResponse) -> model.ServerInfo:
    return model.ServerInfo(
        version=info.version,
        engine=info.engine,
        kernel_release=info.kernel_release,
        machine=info.machine,
        pid=info.pid,
        subscriptions=info.subscriptions,
        processes=info.processes,
        objects=info.objects,
        probes=info.probes,
        features=tuple(_feature(each) for each in info.features),
        limits=model.Limits(
            max_lease_seconds=info.limits.max_lease_seconds,
            max_queue_bytes=info.limits.max_queue_bytes,
            max_kernel_buffer_kib=info.limits.max_kernel_buffer_kib,
            max_selectors=info.limits.max_selectors,
            max_string_bytes=info.limits.max_string_bytes,
        ),
        access=_access(info.access) if info.HasField("access") else None,
    )


def _access(each: pb.Access) -> model.Access:
    return model.Access(
        each.client, each.role, each.manage, _users(each.list), _users(each.trace), each.trace_restriction
    )


def _users(each: pb.Users) -> tuple[int, ...] | None:
    return None if each.everybody else tuple(each.uids)


def probe_listing(listing: pb.ListProbesResponse) -> model.ProbeListing:
    return model.ProbeListing(
        probes=tuple(map(probe, listing.probes)),
        processes=tuple(
            model.Process(
                pid=each.pid,
                comm=each.comm,
                command_line=tuple(each.command_line),
                user=each.user,
                started_ns=each.started_ns,
                cgroup=each.cgroup or None,
                container_id=each.container_id or None,
                namespace_pid=each.namespace_pid or each.pid,
            )
            for each in listing.processes
        ),
        problems=tuple(model.Problem(each.path, each.provider, each.name, each.reason) for each in listing.problems),
        sites_left_out=listing.sites_left_out,
    )


def probe(each: pb.Probe) -> model.Probe:
    return model.Probe(
        provider=each.provider,
        name=each.name,
        path=each.path,
        build_id=each.build_id or None,
        architecture=each.architecture,
        pids=tuple(each.pids),
        sites=tuple(map(_site, each.sites)),
    )


def watch_message(change: pb.WatchProbesResponse) -> model.WatchMessage:
    match change.change:
        case pb.WatchProbesResponse.CHANGE_ADDED:
            return model.ProbeAdded(probe(change.probe))
        case pb.WatchProbesResponse.CHANGE_REMOVED:
            return model.ProbeRemoved(probe(change.probe))
        case pb.WatchProbesResponse.CHANGE_SNAPSHOT_COMPLETE:
            return model.SnapshotComplete()
        case unknown:
            raise ProtocolError(f"the server sent a change of probes {unknown}, which this client does not know")


def subscription_info(each: pb.Subscription) -> model.SubscriptionInfo:
    return model.SubscriptionInfo(
        id=each.subscription_id,
        selectors=tuple(each.selectors),
        scope=model.Scope(
            tuple(each.scope.pids),
            tuple(each.scope.exclude_pids),
            tuple(each.scope.uids),
            tuple(each.scope.execnames),
            tuple(each.scope.cgroups),
            tuple(each.scope.containers),
            each.scope.include_clients,
        ),
        created_ns=each.created_ns,
        streaming=each.streaming,
        lease_left_ms=each.lease_left_ms,
        account=account(each.account),
        where=each.where,
    )


def account(each: pb.Account) -> model.Account:
    return model.Account(
        fired=each.fired,
        delivered=each.delivered,
        filtered=each.filtered,
        lost_kernel_buffer=each.lost_kernel_buffer,
        lost_queue=each.lost_queue,
        lost_decode=each.lost_decode,
        lost_quota=each.lost_quota,
        in_flight=each.in_flight,
        sites=each.sites,
    )


def site_statuses(sites: Iterable[pb.SiteStatus]) -> tuple[model.SiteStatus, ...]:
    return tuple(
        model.SiteStatus(
            state=_known(_SITE_STATES, each.state, "state of a site"),
            site_id=each.site_id,
            provider=each.provider,
            name=each.name,
            path=each.path,
            offset=each.offset,
            reason=each.reason,
        )
        for each in sites
    )


def described_sites(descriptions: pb.Descriptions) -> tuple[model.DescribedSite, ...]:
    found = []
    for description in descriptions.probes:
        described = probe(description.probe)
        captures = tuple(
            model.CapturedArgument(each.index, each.is_string, each.missing) for each in description.captures
        )
        found += [model.DescribedSite(described, site, captures) for site in described.sites]
    return tuple(found)


def _feature(each: pb.Feature) -> model.Feature:
    return model.Feature(each.name, each.available, each.detail, each.remedy, each.required)


def loss(each: pb.Loss) -> model.Loss:
    return model.Loss(_known(_LOSS_STAGES, each.stage, "stage of loss"), each.count, each.total)


def end(each: pb.End) -> model.End:
    return model.End(_known(_END_REASONS, each.reason, "reason for an end"), account(each.account))


def _site(each: pb.Site) -> model.Site:
    return model.Site(
        site_id=each.site_id,
        offset=each.offset,
        semaphore_offset=each.semaphore_offset if each.HasField("semaphore_offset") else None,
        function=each.function or None,
        arguments=tuple(map(_argument, each.arguments)),
        refused=each.refused,
    )


def _argument(each: pb.Argument) -> model.Argument:
    return model.Argument(each.text, each.size, each.signed, each.is_float, _operand(each))


def _operand(argument: pb.Argument) -> model.Operand:
    match argument.WhichOneof("operand"):
        case "constant":
            return model.Constant(argument.constant)
        case "register":
            return model.Register(argument.register.name, argument.register.first_bit)
        case "memory":
            memory = argument.memory
            return model.Memory(
                memory.base or None, memory.displacement, memory.index or None, memory.scale or 1, memory.symbol or None
            )
        case "address":
            address = argument.address
            return model.Address(address.base or None, address.displacement, address.symbol or None)
        case "unavailable":
            return model.Unavailable(argument.unavailable)
        case None:
            raise ProtocolError(f"the server sent an operand that this client does not know: {argument.text}")


def _known(table: Mapping[int, _T], number: int, what: str) -> _T:
    if number not in table:
        raise ProtocolError(f"the server sent a {what} {number}, which this client does not know")
    return table[number]
