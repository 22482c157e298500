"""Checks requests and converts them to the model. Functions raise InvalidArgumentError unless they say otherwise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from stapsdtd.api import cgroup_scope
from stapsdtd.api.aggregations import parse_aggregation
from stapsdtd.api.spans import divided, parse_span
from stapsdtd.catalog import selectors
from stapsdtd.config import Limits
from stapsdtd.errors import InvalidArgumentError, NoMatchError, NotArmedError
from stapsdtd.model import BuiltIn
from stapsdtd.query.expression import Cgroup, Condition
from stapsdtd.query.nodes import wrong_comm
from stapsdtd.query.parse import parse
from stapsdtd.query.scope import combined
from stapsdtd.sessions.spec import SubscriptionSpec
from stapsdtd.sessions.subscription import SiteState, SiteStatus
from stapsdtd.subscribe_options import Scope, SubscribeOptions
from stapsdtd.v1 import stapsdt_pb2 as pb

_MAX_PIDS = 4096
_MAX_FILES = 1000
_MAX_PATH_BYTES = 4096
_MAX_SHOWN_CHARACTERS = 80


def parse_selectors(texts: Sequence[str], limits: Limits) -> tuple[selectors.Selector, ...]:
    if len(texts) > limits.max_selectors:
        raise InvalidArgumentError("selectors", f"there are {len(texts)}, more than the {limits.max_selectors} allowed")
    return tuple(map(selectors.parse, texts))


def parse_pids(field: str, pids: Collection[int]) -> frozenset[int]:
    if len(pids) > _MAX_PIDS:
        raise InvalidArgumentError(field, f"there are {len(pids)}, more than the {_MAX_PIDS} allowed")
    wrong = [pid for pid in pids if pid <= 0]
    if wrong:
        raise InvalidArgumentError(field, f"{wrong[0]} is not a process id")
    return frozenset(pids)


def parse_files(field: str, paths: Sequence[str]) -> tuple[str, ...]:
    if len(paths) > _MAX_FILES:
        raise InvalidArgumentError(field, f"there are {len(paths)} paths, more than the {_MAX_FILES} allowed")
    for path in paths:
        if not path.startswith("/"):
            raise InvalidArgumentError(field, f"{path!r} is not an absolute path")
        if "\0" in path or len(path.encode()) > _MAX_PATH_BYTES:
            raise InvalidArgumentError(field, f"{path[:_MAX_SHOWN_CHARACTERS]!r} cannot be a path")
    return tuple(dict.fromkeys(paths))


def spec_of(request: pb.SubscribeRequest, limits: Limits, hierarchy: cgroup_scope.Hierarchy) -> SubscriptionSpec:
    """Validate a request and fill in defaults.

    Raises InvalidArgumentError, and KernelFeatureError if a cgroup or container is named on a host without the
    unified hierarchy. Finding containers is slow on a host with many cgroups.
    """
    if not request.selectors:
        raise InvalidArgumentError("selectors", "at least one is needed, such as postgresql:query__start")
    options = SubscribeOptions.of(request.scope, request)
    if options.follow and not options.pids:
        raise InvalidArgumentError("scope.follow", "scope.pids must name the processes to follow")
    if options.files and options.expected_files:
        raise InvalidArgumentError("expected_files", "probes in other files than files names are not traced")
    scope = replace(
        Scope.of(options),
        pids=parse_pids("scope.pids", options.pids),
        exclude_pids=parse_pids("scope.exclude_pids", options.exclude_pids),
    )
    parsed = parse_selectors(request.selectors, limits)
    of_scope = _OfScope(
        options.uids,
        [_execname(name) for name in options.execnames],
        cgroup_scope.of_cgroups(hierarchy, "scope.cgroups", options.cgroups),
        cgroup_scope.of_containers(hierarchy, "scope.containers", options.containers),
    )
    of_hits, of_pairs = divided(parse(options.where, hierarchy.find) if options.where.strip() else None)
    aggregation = parse_aggregation(request, parsed, hierarchy.find)
    return SubscriptionSpec(
        parsed,
        scope,
        _within("lease_seconds", options.lease_seconds, limits.default_lease_seconds, limits.max_lease_seconds),
        _within("queue_bytes", options.queue_bytes, limits.default_queue_bytes, limits.max_queue_bytes),
        _within(
            "kernel_buffer_kib",
            options.kernel_buffer_kib,
            limits.default_kernel_buffer_kib,
            limits.max_kernel_buffer_kib,
        ),
        options.where,
        of_scope.and_also(of_hits),
        built_ins=_parse_fields(options.fields),
        aggregation=aggregation,
        span=parse_span(request, limits, hierarchy.find, of_scope.and_also, of_pairs=of_pairs, aggregation=aggregation),
    )


@dataclass(frozen=True, slots=True)
class _OfScope:
    """What a scope requires of each hit."""

    uids: Sequence[int]
    execnames: Sequence[bytes]
    cgroups: Sequence[Cgroup]
    containers: Sequence[Cgroup]

    def and_also(self, where: Condition | None) -> Condition | None:
        return combined(where, self.uids, self.execnames, self.cgroups, self.containers)


def _parse_fields(names: Sequence[str]) -> tuple[BuiltIn, ...]:
    known = {each.value: each for each in BuiltIn if each is not BuiltIn.ELAPSED}
    for name in names:
        if name not in known:
            raise InvalidArgumentError("fields", f"{name!r} is not one of {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


def check_armed(request: pb.SubscribeRequest, statuses: Sequence[SiteStatus]) -> None:
    """Check that the sites that matched at first are what the request requires.

    Raises NoMatchError and NotArmedError.
    """
    if request.require_match and not statuses:
        raise NoMatchError
    if request.all_or_nothing:
        latest = {each.site_id: each for each in statuses}
        failed = [each for each in latest.values() if each.state in {SiteState.REFUSED, SiteState.ARMING}]
        if failed:
            raise NotArmedError(f"{len(failed)} of {len(latest)} sites are not armed, such as {_why_not(failed[0])}")


def _why_not(status: SiteStatus) -> str:
    site = status.site
    reason = status.reason or status.state.value
    return f"{site.provider}:{site.name} at {status.object.path}+{site.site_offset:#x}: {reason}"


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
