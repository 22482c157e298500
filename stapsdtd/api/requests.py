"""Checks requests and converts them to the model. Functions raise InvalidArgumentError unless they say otherwise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from stapsdtd.api import cgroup_scope
from stapsdtd.api.clauses import OfScope, parse_clauses
from stapsdtd.api.texts import RequestTexts
from stapsdtd.catalog.selector_text import probe_name
from stapsdtd.catalog.selectors import Selector, normalized
from stapsdtd.config import Limits
from stapsdtd.config.request_limits import MAX_FILES, MAX_PATH_BYTES, MAX_PIDS, MAX_SCOPE_VALUES, check_count
from stapsdtd.errors import InvalidArgumentError, NoMatchError, NotArmedError
from stapsdtd.model import NO_PLACE
from stapsdtd.query.nodes import wrong_comm
from stapsdtd.sessions.spec import SubscriptionSpec
from stapsdtd.sessions.subscription import SiteState, SiteStatus
from stapsdtd.subscribe_options import Scope, SubscribeOptions
from stapsdtd.v1 import stapsdt_pb2 as pb

_MAX_SHOWN_CHARACTERS = 80


def parse_pids(field: str, pids: Collection[int]) -> frozenset[int]:
    check_count(field, len(pids), MAX_PIDS)
    wrong = [pid for pid in pids if pid <= 0]
    if wrong:
        raise InvalidArgumentError(field, f"{wrong[0]} is not a process id", value=wrong[0])
    return frozenset(pids)


def parse_files(field: str, paths: Sequence[str]) -> tuple[str, ...]:
    if len(paths) > MAX_FILES:
        raise InvalidArgumentError(field, f"there are {len(paths)} paths, more than the {MAX_FILES} allowed")
    for path in paths:
        if not path.startswith("/"):
            raise InvalidArgumentError(field, f"{path[:_MAX_SHOWN_CHARACTERS]!r} is not an absolute path", value=path)
        if "\0" in path or len(path.encode()) > MAX_PATH_BYTES:
            raise InvalidArgumentError(field, f"{path[:_MAX_SHOWN_CHARACTERS]!r} cannot be a path", value=path)
    return tuple(dict.fromkeys(paths))


def spec_of(
    request: pb.SubscribeRequest,
    limits: Limits,
    texts: RequestTexts,
    hierarchy: cgroup_scope.Hierarchy,
    names_of: cgroup_scope.NamesOf | None,
) -> SubscriptionSpec:
    """Validate a request and fill in defaults.

    Raises InvalidArgumentError, and KernelFeatureError if a cgroup or container is named on a host without the
    unified hierarchy. Finding containers is slow on a host with many cgroups.
    """
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
    for name in ("uids", "execnames"):
        check_count(f"scope.{name}", len(getattr(request.scope, name)), MAX_SCOPE_VALUES)
    wanted_of_hits = OfScope(
        options.uids,
        [_execname(name) for name in options.execnames],
        cgroup_scope.of_cgroups(hierarchy, "scope.cgroups", options.cgroups),
        cgroup_scope.of_containers(hierarchy, names_of, "scope.containers", options.containers),
    )
    return SubscriptionSpec(
        parse_clauses(request, texts, wanted_of_hits),
        scope,
        _within("lease_seconds", options.lease_seconds, limits.default_lease_seconds, limits.max_lease_seconds),
        _within("queue_bytes", options.queue_bytes, limits.default_queue_bytes, limits.max_queue_bytes),
        _within(
            "kernel_buffer_kib",
            options.kernel_buffer_kib,
            limits.default_kernel_buffer_kib,
            limits.max_kernel_buffer_kib,
        ),
        excluded_probes=_excluded_probes(texts.selectors(options.exclude, "exclude")),
    )


def _excluded_probes(selectors: Sequence[Selector]) -> frozenset[tuple[str, str]]:
    for each in selectors:
        if each.is_glob or each.module.text or each.function.text or each.captures is not None:
            raise InvalidArgumentError("exclude", f"{each.text}: a probe is excluded as provider:name", 0, each.text)
    return frozenset((normalized(each.provider.text), normalized(each.name.text)) for each in selectors)


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
            raise _not_armed(len(latest), failed)


def _not_armed(count: int, failed: Sequence[SiteStatus]) -> NotArmedError:
    status = failed[0]
    site, path = status.site, status.object.path
    place = f"in {path}" if site.site_offset == NO_PLACE else f"at {path}+{site.site_offset:#x}"
    probe = probe_name(site.provider, site.name)
    return NotArmedError(count, len(failed), probe, place, status.reason or status.state.value)


def _execname(name: str) -> bytes:
    encoded = name.encode()
    reason = wrong_comm(encoded) if name else "a name is empty"
    if reason is not None:
        raise InvalidArgumentError("scope.execnames", reason, value=name)
    return encoded


def _within(field: str, value: int, default: int, limit: int) -> int:
    if value > limit:
        raise InvalidArgumentError(field, f"{value} is more than the {limit} that this server allows")
    return value or min(default, limit)
