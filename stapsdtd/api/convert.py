"""Converts the model to protobuf."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from stapsdtd.api.parts import serialized
from stapsdtd.api.rights import Rights, Users
from stapsdtd.arch import why_foreign
from stapsdtd.config import Limits
from stapsdtd.inventory.inventory import InventoryState, InventoryStatus
from stapsdtd.kernel import procfs
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.identity import ProcessIdentity
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import (
    MAX_STRING_BYTES,
    Address,
    Argument,
    Constant,
    Memory,
    Object,
    Probe,
    Problem,
    Register,
    Site,
    Unavailable,
)
from stapsdtd.procs.moved_text import Moved
from stapsdtd.runtime.fair_thread import Backlog
from stapsdtd.v1 import stapsdt_pb2 as pb

_INVENTORY_STATES = {
    InventoryState.OFF: pb.Inventory.STATE_OFF,
    InventoryState.SCANNING: pb.Inventory.STATE_SCANNING,
    InventoryState.CURRENT: pb.Inventory.STATE_CURRENT,
    InventoryState.FAILED: pb.Inventory.STATE_FAILED,
}


def inventory(status: InventoryStatus) -> pb.Inventory:
    return pb.Inventory(
        state=_INVENTORY_STATES[status.state],
        files=status.files,
        probes=status.probes,
        scanned_ns=int(status.scanned_at * 1_000_000_000),
        problem=status.problem,
    )


def probe(probe: Probe, nops: NopRewriting) -> Generator[None, None, bytes]:
    """Serialize a probe in steps. nops: those that this host's kernel rewrites, whose sites are marked as refused."""
    head = _probe(probe.object, probe.provider, probe.name, ())
    head.pids.extend(probe.pids)
    foreign = why_foreign(probe.object.parsed.architecture)

    def site_message(site: Site) -> pb.Site:
        message = _site(site)
        message.refused = site.refused or foreign or nops.why_not(site.nop_bytes) or ""
        return message

    sites = yield from serialized(pb.Probe.SITES_FIELD_NUMBER, probe.sites, site_message)
    return head.SerializeToString() + sites


def _probe(obj: Object, provider: str, name: str, sites: Iterable[Site]) -> pb.Probe:
    return pb.Probe(
        provider=provider,
        name=name,
        path=obj.path,
        build_id=obj.parsed.build_id or "",
        architecture=obj.parsed.architecture,
        sites=map(_site, sites),
    )


def site_of_probe(obj: Object, site: Site) -> pb.Probe:
    """Convert one site of a probe."""
    return _probe(obj, site.provider, site.name, [site])


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


def process(identity: ProcessIdentity, container_name: str) -> pb.Process:
    return pb.Process(
        pid=identity.pid,
        comm=identity.comm,
        command_line=identity.command_line,
        user=identity.user,
        started_ns=identity.started_ns,
        cgroup=identity.cgroup,
        container_id=identity.container_id,
        container_name=container_name,
        namespace_pid=identity.namespace_pid,
    )


def moved_text(pid: int, uid: int, path: str, text: Moved) -> pb.MovedText:
    offsets = [site.site_offset for site in text.sites]
    return pb.MovedText(
        pid=pid,
        comm=procfs.comm(pid).decode(errors="backslashreplace"),
        uid=uid,
        path=path,
        memory=text.memory,
        first_offset=min(offsets),
        last_offset=max(offsets),
        sites=len(offsets),
    )


def problem(obj: Object, problem: Problem) -> pb.Problem:
    return pb.Problem(path=obj.path, provider=problem.provider, name=problem.name, reason=problem.reason)


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
        functions=rights.functions,
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
