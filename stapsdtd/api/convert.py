"""Model to protobuf, and requests to the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

from stapsdtd.api import cgroup_scope
from stapsdtd.api.access import Rights, Users
from stapsdtd.arch import why_foreign
from stapsdtd.capture.engine import LossStage
from stapsdtd.catalog import selectors
from stapsdtd.config import Limits
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.events.columns import Strings, ValueColumn
from stapsdtd.kernel import cgroups
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.identity import ProcessIdentity
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import Address, Argument, Constant, Memory, Object, Probe, Register, Site, Unavailable
from stapsdtd.query.parse import parse, wrong_comm
from stapsdtd.query.scope import combined
from stapsdtd.sessions.log import Entry, Numbered
from stapsdtd.sessions.subscription import (
    Account,
    EndReason,
    KnownSite,
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
        raise InvalidArgumentError(field, f"{wrong[0]} is no process id")
    return frozenset(pids)


def spec_of(request: pb.SubscribeRequest, limits: Limits) -> SubscriptionSpec:
    """Check a request and fill in defaults.

    Raises InvalidArgumentError, and KernelFeatureError where a cgroup or container is named on a host without the
    unified hierarchy. To look for containers takes long where there are many cgroups.
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


def _within(field: str, asked: int, default: int, most: int) -> int:
    if asked > most:
        raise InvalidArgumentError(field, f"{asked} is more than the {most} that this server allows")
    return asked or min(default, most)


def probe(found: Probe, nops: NopRewriting) -> pb.Probe:
    """nops: what this host's kernel does to some sites, which are told to be refused."""
    message = _probe(found.object, found.provider, found.name, found.sites)
    message.pids.extend(found.pids)
    foreign = why_foreign(found.object.parsed.architecture)
    for told, site in zip(message.sites, found.sites, strict=True):
        told.refused = foreign or nops.why_not(site.nop_bytes) or ""
    return message


def _probe(found: Object, provider: str, name: str, sites: Iterable[Site]) -> pb.Probe:
    return pb.Probe(
        provider=provider,
        name=name,
        path=found.path,
        build_id=found.parsed.build_id or "",
        architecture=found.parsed.architecture,
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
            # an unsigned constant of 64 bits keeps its bits
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
    for found in objects:
        for problem in found.parsed.problems:
            yield pb.Problem(path=found.path, provider=problem.provider, name=problem.name, reason=problem.reason)


def feature(found: Feature) -> pb.Feature:
    return pb.Feature(
        name=found.name,
        available=found.available,
        detail=found.detail,
        remedy=found.remedy,
        required=found.required,
    )


def access(found: Rights) -> pb.Access:
    return pb.Access(
        client=found.client,
        role=found.role,
        manage=found.manage,
        list=_users(found.list),
        trace=_users(found.trace),
        trace_restriction=found.trace_restriction,
    )


def _users(found: Users) -> pb.Users:
    return pb.Users(everybody=True) if found is None else pb.Users(uids=sorted(found))


def limits(found: Limits) -> pb.Limits:
    return pb.Limits(
        max_lease_seconds=found.max_lease_seconds,
        max_queue_bytes=found.max_queue_bytes,
        max_kernel_buffer_kib=found.max_kernel_buffer_kib,
        max_selectors=found.max_selectors,
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


def account(found: Account) -> pb.Account:
    return pb.Account(
        fired=found.fired,
        delivered=found.delivered,
        filtered=found.filtered,
        lost_kernel_buffer=found.lost_kernel_buffer,
        lost_queue=found.lost_queue,
        lost_decode=found.lost_decode,
        lost_quota=found.lost_quota,
        in_flight=found.in_flight,
        sites=found.sites,
    )


def subscription(found: Subscription, *, streaming: bool, lease_left_seconds: float) -> pb.Subscription:
    scope = found.spec.scope
    return pb.Subscription(
        subscription_id=found.id,
        selectors=[selector.text for selector in found.spec.selectors],
        scope=pb.Scope(
            pids=sorted(scope.pids),
            exclude_pids=sorted(scope.exclude_pids),
            uids=scope.uids,
            execnames=scope.execnames,
            cgroups=scope.cgroups,
            containers=scope.containers,
            include_clients=scope.include_clients,
        ),
        where=found.spec.where,
        created_ns=found.created_ns,
        streaming=streaming,
        lease_left_ms=int(lease_left_seconds * 1000),
        account=account(found.account()),
    )


def descriptions(sites: dict[int, KnownSite]) -> pb.Descriptions:
    """One description for each site, since sites of one probe may differ in their arguments."""
    message = pb.Descriptions()
    for number, known in sites.items():
        site = known.capture.site
        described = _probe(known.object, site.provider, site.name, [site])
        described.sites[0].site_id = number
        captures = (
            pb.CapturedArgument(index=capture.index, is_string=capture.is_string, missing=known.why_missing(position))
            for position, capture in enumerate(known.capture.captures)
        )
        message.probes.append(pb.Description(probe=described, captures=captures))
    return message


def columns(entry: Entry, realtime_offset_ns: int) -> pb.Columns:
    blocks = (_block(numbered, realtime_offset_ns) for numbered in entry.blocks)
    return pb.Columns(blocks=blocks, next_seq=entry.next_seq)


def _block(numbered: Numbered, realtime_offset_ns: int) -> pb.ColumnBlock:
    block = numbered.block
    return pb.ColumnBlock(
        count=len(block),
        seq=_bytes(numbered.seq, "<u8"),
        time_ns=_bytes(block.time_ns + realtime_offset_ns, "<i8"),
        pid=_bytes(block.pid, "<i4"),
        tid=_bytes(block.tid, "<i4"),
        cpu=_bytes(block.cpu, "<u2"),
        comm=block.comm.tobytes(),
        site_id=_bytes(block.site_id, "<u4"),
        values=map(_column, block.values),
    )


def _column(column: ValueColumn) -> pb.Column:
    unavailable = b"" if column.unavailable is None else column.unavailable.astype("u1").tobytes()
    if isinstance(column, Strings):
        return pb.Column(
            type=pb.Column.TYPE_BYTES if column.is_raw else pb.Column.TYPE_STRING,
            data=column.data,
            ends=_bytes(column.ends, "<u4"),
            unavailable=unavailable,
        )
    kind, type_code = _NUMBER_COLUMNS[column.layout]
    return pb.Column(type=kind, data=_bytes(column.data, type_code), unavailable=unavailable)


_NUMBER_COLUMNS = {
    "signed": (pb.Column.TYPE_SIGNED, "<i8"),
    "unsigned": (pb.Column.TYPE_UNSIGNED, "<u8"),
    "float": (pb.Column.TYPE_FLOAT, "<f8"),
}


def _bytes(column: npt.NDArray[Any], type_code: str) -> bytes:
    return column.astype(type_code, copy=False).tobytes()
