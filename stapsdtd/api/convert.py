"""Converts the model to protobuf, and requests to the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stapsdtd.api import cgroup_scope
from stapsdtd.api.access import Rights, Users
from stapsdtd.arch import why_foreign
from stapsdtd.capture.engine import LossStage
from stapsdtd.catalog import selectors
from stapsdtd.config import Limits
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.kernel import cgroups
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.identity import ProcessIdentity
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import Address, Argument, Constant, Memory, Object, Probe, Register, Site, Unavailable
from stapsdtd.query.parse import parse, wrong_comm
from stapsdtd.query.scope import combined
from stapsdtd.sessions.sink import Account
from stapsdtd.sessions.site_ids import KnownSite
from stapsdtd.sessions.subscription import (
    EndReason,
    Scope,
    SiteState,
    SiteStatus,
    Subscription,
    SubscriptionSpec,
)
from stapsdtd.v1 import stapsdt_pb2 as pb

_MAX_PIDS = 4096

_STATES = {
    SiteState.ARMED: pb.SiteStatus.STATE_ARMED,
    SiteState.DISARMED: pb.SiteStatus.STATE_DISARMED,
    SiteState.REFUSED: pb.SiteStatus.STATE_REFUSED,
}
END_REASONS = {
    EndReason.UNSUBSCRIBED: pb.End.REASON_UNSUBSCRIBED,
    EndReason.SERVER_STOPPING: pb.End.REASON_SERVER_STOPPING,
    EndReason.LEASE_EXPIRED: pb.End.REASON_LEASE_EXPIRED,
    EndReason.ACCESS_REVOKED: pb.End.REASON_ACCESS_REVOKED,
}
LOSS_STAGES = {
    LossStage.KERNEL_BUFFER: pb.Loss.STAGE_KERNEL_BUFFER,
    LossStage.DECODE: pb.Loss.STAGE_DECODE,
    LossStage.QUEUE: pb.Loss.STAGE_QUEUE,
    LossStage.QUOTA: pb.Loss.STAGE_QUOTA,
}


def parse_selectors(texts: Sequence[str], limits: Limits) -> tuple[selectors.Selector, ...]:
    if len(texts) > limits.max_selectors:
        raise InvalidArgumentError("selectors", f"there are {len(texts)}, more than the {limits.max_selectors} allowed")
    return tuple(map(selectors.parse, texts))


def parse_pids(field: str, pids: Sequence[int]) -> frozenset[int]:
    if len(pids) > _MAX_PIDS:
        raise InvalidArgumentError(field, f"there are {len(pids)}, more than the {_MAX_PIDS} allowed")
    wrong = [pid for pid in pids if pid <= 0]
    if wrong:
        raise InvalidArgumentError(field, f"{wrong[0]} is not a process id")
    return frozenset(pids)


def spec_of(request: pb.SubscribeRequest, limits: Limits) -> SubscriptionSpec:
    """Validate a request and fill in defaults.

    Raises InvalidArgumentError, and KernelFeatureError if a cgroup or container is named on a host without the
    unified hierarchy. Finding containers is slow on a host with many cgroups.
    """
    if not request.selectors:
        raise InvalidArgumentError("selectors", "at least one is needed, such as postgresql:query__start")
    scope = Scope(
        parse_pids("scope.pids", request.scope.pids),
        parse_pids("scope.exclude_pids", request.scope.exclude_pids),
        tuple(request.scope.uids),
        tuple(request.scope.execnames),
        tuple(request.scope.cgroups),
        tuple(request.scope.containers),
        request.scope.include_clients,
    )
    return SubscriptionSpec(
        parse_selectors(request.selectors, limits),
        scope,
        _within("lease_seconds", request.lease_seconds, limits.default_lease_seconds, limits.max_lease_seconds),
        _within("queue_bytes", request.queue_bytes, limits.default_queue_bytes, limits.max_queue_bytes),
        _within(
            "kernel_buffer_kib",
            request.kernel_buffer_kib,
            limits.default_kernel_buffer_kib,
            limits.max_kernel_buffer_kib,
        ),
        request.where,
        combined(
            parse(request.where, cgroups.find) if request.where.strip() else None,
            scope.uids,
            [_execname(name) for name in scope.execnames],
            cgroup_scope.of_cgroups("scope.cgroups", scope.cgroups),
            cgroup_scope.of_containers("scope.containers", scope.containers),
        ),
    )


def _execname(name: str) -> bytes:
    encoded = name.encode()
    reason = wrong_comm(encoded) if name else "a name is empty"
    if reason is not None:
        raise InvalidArgumentError("scope.execnames", reason)
    return encoded


def _within(field: str, value: int, default: int, limit: int) -> int:
    if value > limit:
        raise InvalidArgumentError(field, f"{value} is more than the {limit} that this server allows")
    return value or min(default, limit)


def probe(probe: Probe, nops: NopRewriting) -> pb.Probe:
    """Convert a probe. nops: the nops that this host's kernel rewrites, whose sites are marked as refused."""
    message = _probe(probe.object, probe.provider, probe.name, probe.sites)
    message.pids.extend(probe.pids)
    foreign = why_foreign(probe.object.parsed.architecture)
    for site_message, site in zip(message.sites, probe.sites, strict=True):
        site_message.refused = foreign or nops.why_not(site.nop_bytes) or ""
    return message


def _probe(obj: Object, provider: str, name: str, sites: Iterable[Site]) -> pb.Probe:
    return pb.Probe(
        provider=provider,
        name=name,
        path=obj.path,
        build_id=obj.parsed.build_id or "",
        architecture=obj.parsed.architecture,
        sites=map(_site, sites),
    )


def _site(site: Site) -> pb.Site:
    return pb.Site(
        offset=site.site_offset,
        semaphore_offset=site.semaphore_offset,
        function=site.function or "",
        arguments=map(_argument, site.arguments),
    )


def _argument(argument: Argument) -> pb.Argument:
    message = pb.Argument(text=argument.text, size=argument.size, signed=argument.signed, is_float=argument.is_float)
    match argument.operand:
        case Constant(value):
            # reinterprets unsigned 64-bit constants as signed
            message.constant = (value + (1 << 63)) % (1 << 64) - (1 << 63)
        case Register(name, first_bit):
            message.register.name = name
            message.register.first_bit = first_bit
        case Memory(base, displacement, index, scale, symbol):
            message.memory.CopyFrom(
                pb.MemoryOperand(
                    base=base or "",
                    displacement=displacement,
                    index=index or "",
                    scale=scale if index else 0,
                    symbol=symbol or "",
                )
            )
        case Address(base, displacement, symbol):
            message.address.CopyFrom(pb.AddressOperand(base=base or "", displacement=displacement, symbol=symbol or ""))
        case Unavailable(reason):
            message.unavailable = reason
    return message


def process(identity: ProcessIdentity) -> pb.Process:
    return pb.Process(
        pid=identity.pid,
        comm=identity.comm,
        command_line=identity.command_line,
        user=identity.user,
        started_ns=identity.started_ns,
        cgroup=identity.cgroup,
        container_id=identity.container_id,
        namespace_pid=identity.namespace_pid,
    )


def problems(objects: Iterable[Object]) -> Iterable[pb.Problem]:
    for obj in objects:
        for problem in obj.parsed.problems:
            yield pb.Problem(path=obj.path, provider=problem.provider, name=problem.name, reason=problem.reason)


def feature(feature: Feature) -> pb.Feature:
    return pb.Feature(
        name=feature.name,
        available=feature.available,
        detail=feature.detail,
        remedy=feature.remedy,
        required=feature.required,
    )


def access(rights: Rights) -> pb.Access:
    return pb.Access(
        client=rights.client,
        role=rights.role,
        manage=rights.manage,
        list=_users(rights.list),
        trace=_users(rights.trace),
        trace_restriction=rights.trace_restriction,
    )


def _users(users: Users) -> pb.Users:
    return pb.Users(everybody=True) if users is None else pb.Users(uids=sorted(users))


def limits(limits: Limits) -> pb.Limits:
    return pb.Limits(
        max_lease_seconds=limits.max_lease_seconds,
        max_queue_bytes=limits.max_queue_bytes,
        max_kernel_buffer_kib=limits.max_kernel_buffer_kib,
        max_selectors=limits.max_selectors,
        max_string_bytes=selectors.MAX_STRING_BYTES,
    )


def site_status(status: SiteStatus) -> pb.SiteStatus:
    return pb.SiteStatus(
        state=_STATES[status.state],
        site_id=status.site_id,
        provider=status.site.provider,
        name=status.site.name,
        path=status.object.path,
        offset=status.site.site_offset,
        reason=status.reason,
    )


def account(account: Account) -> pb.Account:
    return pb.Account(
        fired=account.fired,
        delivered=account.delivered,
        filtered=account.filtered,
        lost_kernel_buffer=account.lost_kernel_buffer,
        lost_queue=account.lost_queue,
        lost_decode=account.lost_decode,
        lost_quota=account.lost_quota,
        in_flight=account.in_flight,
        sites=account.sites,
    )


def subscription(subscription: Subscription, *, streaming: bool, lease_left_seconds: float) -> pb.Subscription:
    scope = subscription.spec.scope
    return pb.Subscription(
        subscription_id=subscription.id,
        selectors=[selector.text for selector in subscription.spec.selectors],
        scope=pb.Scope(
            pids=sorted(scope.pids),
            exclude_pids=sorted(scope.exclude_pids),
            uids=scope.uids,
            execnames=scope.execnames,
            cgroups=scope.cgroups,
            containers=scope.containers,
            include_clients=scope.include_clients,
        ),
        where=subscription.spec.where,
        created_ns=subscription.created_ns,
        streaming=streaming,
        lease_left_ms=int(lease_left_seconds * 1000),
        account=account(subscription.account()),
    )


def descriptions(sites: dict[int, KnownSite]) -> pb.Descriptions:
    """Describe each site on its own, since sites of one probe may differ in their arguments."""
    message = pb.Descriptions()
    for site_id, known_site in sites.items():
        site = known_site.capture.site
        probe_message = _probe(known_site.object, site.provider, site.name, [site])
        probe_message.sites[0].site_id = site_id
        captures = (
            pb.CapturedArgument(
                index=capture.index, is_string=capture.is_string, missing=known_site.why_missing(position)
            )
            for position, capture in enumerate(known_site.capture.captures)
        )
        message.probes.append(pb.Description(probe=probe_message, captures=captures))
    return message
