"""Access control: maps a connection's peer to a role, and the role to rights."""

from __future__ import annotations

import grp
import logging
import pwd
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from stapsdtd.config import NO_QUOTAS, Quotas, Role
from stapsdtd.errors import AccessDeniedError, InvalidArgumentError, LimitReachedError
from stapsdtd.kernel.ownership import belongs
from stapsdtd.runtime.logs import fields
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.sessions.token_bucket import TokenBucket

Refused = Literal["connection", "call"]

Users = frozenset[int] | None
"""User ids; None means everybody."""

NO_USERS: frozenset[int] = frozenset()

_log = logging.getLogger("stapsdtd.access")

_LOG_RECORDS_PER_SECOND = 20

_MAX_BUCKETS = 1000
"""Above this number of clients, those that made no request for a second are forgotten."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection, as identified by the kernel or a certificate.

    listener: the address that the client connected to.
    uid, groups, pid: from the kernel; None or empty except on unix sockets.
    names: the certificate's common name and subject alternative names; empty without TLS.
    listener_role: the role that the listener gives to everyone who connects to it, if it does.
    """

    listener: str
    uid: int | None = None
    groups: frozenset[int] = frozenset()
    pid: int | None = None
    names: tuple[str, ...] = ()
    listener_role: str | None = None

    @property
    def client(self) -> str:
        """The identity by which connections share subscriptions and quotas."""
        if self.uid is not None:
            return f"uid {self.uid}"
        return f"certificate {self.names[0]}" if self.names else self.listener


@dataclass(frozen=True, slots=True)
class Rights:
    """What a client may do.

    list, trace: the users whose processes it may list and trace.
    manage: whether it may use other clients' subscriptions too.
    trace_restriction: why nothing may be traced although the role would allow it, or empty.
    """

    client: str
    role: str
    list: Users = None
    trace: Users = None
    manage: bool = False
    quotas: Quotas = NO_QUOTAS
    trace_restriction: str = ""

    def may_use(self, subscription: Subscription) -> bool:
        """Report whether the client may read and end a subscription.

        Its rights may be fewer than when it subscribed: it may use another listener, or have left a group.
        """
        is_own = subscription.client.name == self.client and self.covers(subscription.spec.owners)
        return self.manage or is_own

    def check_list(self) -> None:
        """Raises AccessDeniedError if nothing may be listed."""
        if self.list == NO_USERS:
            raise AccessDeniedError(f"role {self.role} does not allow listing probes")

    def check_files(self) -> None:
        """Raises AccessDeniedError if files cannot be named by a client that is nobody's on this host."""
        if self.list is not None:
            raise AccessDeniedError(
                f"role {self.role} does not allow naming files: it does not list everybody's probes, and "
                f"{self.client} is no user whose right to read them could be checked"
            )

    def check_trace(self, pids: Iterable[int]) -> None:
        """Raises AccessDeniedError if nothing may be traced, or not every one of these processes."""
        if self.trace == NO_USERS:
            raise AccessDeniedError(
                f"role {self.role} does not allow tracing"
                + (self.trace_restriction and f" with this server's engine: {self.trace_restriction}")
            )
        for pid in pids:
            # the answer must not reveal whether the process exists
            if self.trace is not None and not belongs(pid, self.trace):
                allowed = ", ".join(map(str, sorted(self.trace)))
                raise AccessDeniedError(
                    f"role {self.role} does not allow tracing process {pid}, only those with the rights of uid "
                    f"{allowed} and no others"
                )

    def covers(self, users: Users) -> bool:
        """Report whether all of these users' processes may be traced."""
        return self.trace is None or (users is not None and users <= self.trace)


@dataclass(frozen=True, slots=True)
class _UserSet:
    users: Users
    includes_own: bool

    def of(self, peer: Peer) -> Users:
        own = {peer.uid} if self.includes_own and peer.uid is not None else NO_USERS
        return None if self.users is None else self.users | own


@dataclass(frozen=True, slots=True)
class _ResolvedRole:
    """A role whose user and group names are resolved to ids."""

    role: Role
    uids: frozenset[int]
    gids: frozenset[int]
    list: _UserSet
    trace: _UserSet

    def applies_to(self, peer: Peer) -> bool:
        if peer.listener_role is not None:
            return self.role.name == peer.listener_role
        if self.role.everybody or peer.uid in self.uids or peer.groups & self.gids:
            return True
        return not set(peer.names).isdisjoint(self.role.certificates)


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that makes a call, and its rights."""

    call: str
    peer: Peer
    rights: Rights
    refusals: Counter[Refused] = field(default_factory=Counter, compare=False)

    def log(self, level: int, result: str, **more: object) -> None:
        """Log a decision."""
        extra = fields(client=self.rights.client, pid=self.peer.pid, role=self.rights.role, **more)
        _log.log(level, "%s %s", self.call, result, extra=extra)

    @contextmanager
    def recording_refusals(self) -> Iterator[None]:
        try:
            yield
        except (AccessDeniedError, LimitReachedError) as error:
            self.record_refusal(error)
            raise

    def record_refusal(self, reason: object, **more: object) -> None:
        self.refusals["call"] += 1
        self.log(logging.WARNING, "refused", reason=reason, **more)


class Gate:
    """Admits calls: identifies the client, looks up its rights and limits its rate. Runs on the API's event loop.

    policy may be replaced at any time and applies from the next call on.
    refusals: the number of connections and calls that were refused; any thread may read it.
    """

    def __init__(
        self, find_peer: Callable[[str], Peer], policy: Policy, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._find_peer = find_peer
        self.policy = policy
        self._clock = clock
        self._requests: dict[str, TokenBucket] = {}
        self._log_records = TokenBucket(_LOG_RECORDS_PER_SECOND, clock)
        self.refusals: Counter[Refused] = Counter()

    def enter(self, call: str, address: str) -> Caller:
        """Admit a call. address: the peer as gRPC names it. Raises AccessDeniedError and LimitReachedError."""
        peer = self._find_peer(address)
        try:
            rights = self.policy.rights(peer)
            self._check_rate(peer.client, rights.quotas.max_requests_per_second)
        except (AccessDeniedError, LimitReachedError) as error:
            self.record_refusal("call", call, peer, error)
            raise
        return Caller(call, peer, rights, self.refusals)

    def record_refusal(self, kind: Refused, operation: str, peer: Peer, reason: Exception) -> None:
        """Count a refusal and log it, within a rate limit: a client that is refused may retry at once."""
        self.refusals[kind] += 1
        if self._log_records.take(1):
            _log.warning("%s refused", operation, extra=fields(client=peer.client, pid=peer.pid, reason=reason))

    def _check_rate(self, client: str, per_second: int | None) -> None:
        """Raises LimitReachedError."""
        if per_second is not None and not self._bucket(client, per_second).take(1):
            raise LimitReachedError(f"{client} makes more than {per_second} requests a second; try again later")

    def _bucket(self, client: str, per_second: int) -> TokenBucket:
        if len(self._requests) > _MAX_BUCKETS:
            self._requests = {name: bucket for name, bucket in self._requests.items() if not bucket.is_full}
        bucket = self._requests.get(client)
        if bucket is None or bucket.per_second != per_second:
            bucket = self._requests[client] = TokenBucket(per_second, self._clock)
        return bucket


def revoked() -> AccessDeniedError:
    return AccessDeniedError("the server's policy changed and no longer allows this")


class Policy:
    """The roles of a configuration. Raises InvalidArgumentError for users and groups that the host does not have.

    restriction: why the engine cannot trace on behalf of clients that may not trace everybody, or empty.
    """

    def __init__(self, roles: Sequence[Role], restriction: str = "") -> None:
        self._restriction = restriction
        # roles that name their members take precedence over those for everybody
        self._roles = [_resolve(role) for role in sorted(roles, key=lambda role: role.everybody)]

    def rights(self, peer: Peer) -> Rights:
        """Return the rights of the first role that applies to the peer. Raises AccessDeniedError if none does."""
        for resolved in self._roles:
            if resolved.applies_to(peer):
                role, trace = resolved.role, resolved.trace.of(peer)
                restriction = self._restriction if trace is not None and trace != NO_USERS else ""
                return Rights(
                    peer.client,
                    role.name,
                    resolved.list.of(peer),
                    NO_USERS if restriction else trace,
                    role.manage,
                    role.quotas,
                    restriction,
                )
        raise AccessDeniedError(f"no role of this server applies to {peer.client}")

    @property
    def restricted(self) -> list[str]:
        """Names of the roles whose members the engine cannot trace for."""
        if not self._restriction:
            return []
        return [resolved.role.name for resolved in self._roles if set(resolved.role.trace).isdisjoint({"all", "none"})]

    def rights_or_none(self, peer: Peer) -> Rights | None:
        try:
            return self.rights(peer)
        except AccessDeniedError:
            return None


def _resolve(role: Role) -> _ResolvedRole:
    def user_ids(key: str, names: Sequence[str]) -> frozenset[int]:
        return frozenset(_ids(f"roles.{role.name}.{key}", names, lambda name: pwd.getpwnam(name).pw_uid, "user"))

    def user_set(key: str, names: tuple[str, ...]) -> _UserSet:
        users = [name for name in names if name not in {"all", "own", "none"}]
        return _UserSet(None if "all" in names else user_ids(key, users), "own" in names)

    return _ResolvedRole(
        role,
        user_ids("users", role.users),
        frozenset(_ids(f"roles.{role.name}.groups", role.groups, lambda name: grp.getgrnam(name).gr_gid, "group")),
        user_set("list", role.list),
        user_set("trace", role.trace),
    )


def _ids(key: str, names: Sequence[str], look_up: Callable[[str], int], kind: str) -> list[int]:
    ids = []
    for name in names:
        try:
            ids.append(int(name) if name.isdecimal() else look_up(name))
            if ids[-1] >= _INVALID_ID:
                raise InvalidArgumentError(key, f"{name} is larger than any {kind} id")
        except KeyError as error:
            if name != _BUILTIN_GROUP:
                raise InvalidArgumentError(key, f"there is no {kind} {name!r} on this host") from error
    return ids


_INVALID_ID = (1 << 32) - 1
"""(uid_t)-1, which the kernel uses for "no user"."""

_BUILTIN_GROUP = "stapsdt"
"""The group of a built-in role, which a host need not have."""
