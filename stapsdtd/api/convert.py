"""Converts the model to protobuf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from stapsdtd.api.rights import Rights, Users
from stapsdtd.arch import why_foreign
from stapsdtd.capture.engine import LossStage
from stapsdtd.config import Limits
from stapsdtd.inventory.inventory import InventoryState, InventoryStatus
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.identity import ProcessIdentity
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import (
    MAX_STRING_BYTES,
    Address,
    Argument,
    BuiltIn,
    Capture,
    Constant,
    Memory,
    Object,
    Probe,
    Register,
    Site,
    StartArgument,
    Unavailable,
)
from stapsdtd.query.expression import Condition
from stapsdtd.query.site_filter import evaluated_late
from stapsdtd.query.text import text_of
from stapsdtd.runtime.fair_thread import Backlog
from stapsdtd.sessions.sink import Account
from stapsdtd.sessions.site_ids import KnownSite
from stapsdtd.sessions.subscription import (
    EndReason,
    SiteState,
    SiteStatus,
    Subscription,
)
from stapsdtd.v1 import stapsdt_pb2 as pb

_STATES = {
    SiteState.ARMING: pb.SiteStatus.STATE_ARMING,
    SiteState.ARMED: pb.SiteStatus.STATE_ARMED,
    SiteState.DISARMING: pb.SiteStatus.STATE_DISARMING,
    SiteState.DISARMED: pb.SiteStatus.STATE_DISARMED,
    SiteState.REFUSED: pb.SiteStatus.STATE_REFUSED,
}
_INVENTORY_STATES = {
    InventoryState.OFF: pb.Inventory.STATE_OFF,
    InventoryState.SCANNING: pb.Inventory.STATE_SCANNING,
    InventoryState.CURRENT: pb.Inventory.STATE_CURRENT,
    InventoryState.FAILED: pb.Inventory.STATE_FAILED,
}
END_REASONS = {
    EndReason.UNSUBSCRIBED: pb.End.REASON_UNSUBSCRIBED,
    EndReason.SERVER_STOPPING: pb.End.REASON_SERVER_STOPPING,
    EndReason.LEASE_EXPIRED: pb.End.REASON_LEASE_EXPIRED,
    EndReason.ACCESS_REVOKED: pb.End.REASON_ACCESS_REVOKED,
    EndReason.PROCESSES_ENDED: pb.End.REASON_PROCESSES_ENDED,
}
LOSS_STAGES = {
    LossStage.KERNEL_BUFFER: pb.Loss.STAGE_KERNEL_BUFFER,
    LossStage.DECODE: pb.Loss.STAGE_DECODE,
    LossStage.QUEUE: pb.Loss.STAGE_QUEUE,
    LossStage.QUOTA: pb.Loss.STAGE_QUOTA,
    LossStage.TABLE_FULL: pb.Loss.STAGE_TABLE_FULL,
}


def inventory(status: InventoryStatus) -> pb.Inventory:
    return pb.Inventory(
        state=_INVENTORY_STATES[status.state],
        files=status.files,
        probes=status.probes,
        scanned_ns=int(status.scanned_at * 1_000_000_000),
        problem=status.problem,
    )


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


def arming(backlog: Backlog, *, is_path_shown: bool) -> pb.Arming:
    return pb.Arming(
        waiting=backlog.waiting,
        running=backlog.running if is_path_shown else "",
        running_ms=int(backlog.seconds * 1000),
    )


def _users(users: Users) -> pb.Users:
    return pb.Users(everybody=True) if users is None else pb.Users(uids=sorted(users))


def limits(limits: Limits) -> pb.Limits:
    return pb.Limits(
        max_lease_seconds=limits.max_lease_seconds,
        max_queue_bytes=limits.max_queue_bytes,
        max_kernel_buffer_kib=limits.max_kernel_buffer_kib,
        max_selectors=limits.max_selectors,
        max_string_bytes=MAX_STRING_BYTES,
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
        armed_after_ns=status.armed_after_ns,
    )


def account(account: Account) -> pb.Account:
    spans = account.spans
    return pb.Account(
        fired=account.fired,
        delivered=account.delivered,
        aggregated=account.aggregated,
        filtered=account.filtered,
        lost_kernel_buffer=account.lost_kernel_buffer,
        lost_queue=account.lost_queue,
        lost_decode=account.lost_decode,
        lost_quota=account.lost_quota,
        lost_table_full=account.lost_table_full,
        in_flight=account.in_flight,
        sites=account.sites,
        spans=pb.SpanAccount(
            starts=spans.starts,
            paired=spans.paired,
            nested=spans.nested,
            died=spans.died,
            timed_out=spans.timed_out,
            table_full=spans.table_full,
            open=spans.open,
            unmatched=spans.unmatched,
        )
        if spans.consumed
        else None,
    )


def subscription(subscription: Subscription, *, streaming: bool, lease_left_seconds: float) -> pb.Subscription:
    scope = asdict(subscription.spec.scope)
    return pb.Subscription(
        subscription_id=subscription.id,
        selectors=[selector.text for selector in subscription.spec.selectors],
        scope=pb.Scope(**scope | {name: sorted(scope[name]) for name in ("pids", "exclude_pids")}),
        where=subscription.spec.where,
        created_ns=subscription.created_ns,
        streaming=streaming,
        lease_left_ms=int(lease_left_seconds * 1000),
        account=account(subscription.account()),
        added_late=added_late(subscription),
    )


def descriptions(sites: dict[int, KnownSite]) -> pb.Descriptions:
    """Describe each site on its own, since sites of one probe may differ in their arguments."""
    message = pb.Descriptions()
    for site_id, known_site in sites.items():
        site = known_site.capture.site
        probe_message = _probe(known_site.object, site.provider, site.name, [site])
        probe_message.sites[0].site_id = site_id
        captures = (
            _captured(capture, known_site.why_missing(position))
            for position, capture in enumerate(known_site.capture.captures)
        )
        message.probes.append(pb.Description(probe=probe_message, captures=captures))
    return message


def _captured(capture: Capture, missing: str) -> pb.CapturedArgument:
    message = pb.CapturedArgument(is_string=capture.is_string, missing=missing, is_hex=capture.is_hex)
    match capture.subject:
        case BuiltIn() as built_in:
            message.field = built_in.value
        case StartArgument(index):
            message.index = index
            message.of_start = True
        case int(index):
            message.index = index
    return message


def late_conditions(predicate: Condition | None, sites: Iterable[Site]) -> list[pb.LateCondition]:
    """Return what of a filter is not evaluated at the hits of these sites."""
    late = evaluated_late(predicate, sites)
    return [pb.LateCondition(text=text_of(condition), reason=reason) for condition, reason in late.items()]


def added_late(subscription: Subscription) -> list[pb.LateAggregation]:
    """Return why hits are not added up where they are."""
    return [pb.LateAggregation(reason=reason, sites=sites) for reason, sites in subscription.added_late().items()]
