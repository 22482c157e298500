"""Who a client is, and what that allows: from a connection's peer through a role to rights."""

from __future__ import annotations

import grp
import logging
import pwd
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
"""User ids, None for everybody."""

_log = logging.getLogger("stapsdtd.access")

_RECORDS_PER_SECOND = 20

_BUCKETS = 1000
"""With more clients than that, those are forgotten that were quiet for a second."""

NO_USERS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection, as the kernel or a certificate says.

    listener: the address that it came to. uid, groups and pid are None or empty but on unix sockets; names are empty
    but with TLS: the certificate's common name and subject alternative names.
    """

    listener: str
    uid: int | None = None
    groups: frozenset[int] = frozenset()
    pid: int | None = None
    names: tuple[str, ...] = ()
    listener_role: str | None = None

    @property
    def client(self) -> str:
        """Connections of equal clients share subscriptions and quotas."""
        if self.uid is not None:
            return f"uid {self.uid}"
        return f"certificate {self.names[0]}" if self.names else self.listener


@dataclass(frozen=True, slots=True)
class Rights:
    """list, trace: of whose processes that is allowed. manage: other clients' subscriptions too.

    trace_restriction: why nothing may be traced, where the role alone would allow it.
    """

    client: str
    role: str
    list: Users = None
    trace: Users = None
    manage: bool = False
    quotas: Quotas = NO_QUOTAS
    trace_restriction: str = ""

    def may_use(self, subscription: Subscription) -> bool:
        """Whether a subscription is this one's business.

        A client may come with less than it subscribed with: by another listener, or without a group.
        """
        is_own = subscription.client.name == self.client and self.covers(subscription.spec.owners)
        return self.manage or is_own

    def check_list(self) -> None:
        """Raises AccessDeniedError for who may list nothing at all."""
        if self.list == NO_USERS:
            raise AccessDeniedError(f"the role {self.role} does not allow to list probes")

    def check_trace(self, pids: Iterable[int]) -> None:
        """Raises AccessDeniedError for who may trace nothing at all, or not one of these processes."""
        if self.trace == NO_USERS:
            raise AccessDeniedError(
                f"the role {self.role} does not allow to trace"
                + (self.trace_restriction and f" with this server's engine: {self.trace_restriction}")
            )
        for pid in pids:
            # whether there is such a process is not to be told either
            if self.trace is not None and not belongs(pid, self.trace):
                allowed = ", ".join(map(str, sorted(self.trace)))
                raise AccessDeniedError(
                    f"the role {self.role} does not allow to trace process {pid}, only those with the rights of uid "
                    f"{allowed} and no others"
                )

    def covers(self, users: Users) -> bool:
        """Whether all of these users' processes may be traced."""
        return self.trace is None or (users is not None and users <= self.trace)


@dataclass(frozen=True, slots=True)
class _OfWhom:
    users: Users
    own: bool

    def of(self, peer: Peer) -> Users:
        own = {peer.uid} if self.own and peer.uid is not None else NO_USERS
        return None if self.users is None else self.users | own


@dataclass(frozen=True, slots=True)
class _Holders:
    """A role, with its names looked up."""

    role: Role
    uids: frozenset[int]
    gids: frozenset[int]
    list: _OfWhom
    trace: _OfWhom

    def has(self, peer: Peer) -> bool:
        if peer.listener_role is not None:
            return self.role.name == peer.listener_role
        if self.role.everybody or peer.uid in self.uids or peer.groups & self.gids:
            return True
        return not set(peer.names).isdisjoint(self.role.certificates)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, and what it may."""

    call: str
    peer: Peer
    rights: Rights
    refusals: Counter[Refused] = field(default_factory=Counter, compare=False)

    def note(self, level: int, result: str, **more: object) -> None:
        """Leave a record of a decision."""
        whose = fields(client=self.rights.client, pid=self.peer.pid, role=self.rights.role, **more)
        _log.log(level, "%s %s", self.call, result, extra=whose)

    @contextmanager
    def noting_refusals(self) -> Iterator[None]:
        try:
            yield
        except (AccessDeniedError, LimitReachedError) as error:
            self.note_refusal(error)
            raise

    def note_refusal(self, reason: object, **more: object) -> None:
        self.refusals["call"] += 1
        self.note(logging.WARNING, "refused", reason=reason, **more)


class Gate:
    """Where calls come in: whose they are, and whether that client makes too many. Runs on the API's event loop.

    policy may be replaced at any time, and counts from the next call on. refusals: how often somebody was refused; any
    thread may read that.
    """

    def __init__(self, find: Callable[[str], Peer], policy: Policy) -> None:
        self._find = find
        self.policy = policy
        self._requests: dict[str, TokenBucket] = {}
        self._records = TokenBucket(_RECORDS_PER_SECOND)
        self.refusals: Counter[Refused] = Counter()

    def enter(self, call: str, address: str) -> Caller:
        """address: as gRPC names the peer. Raises AccessDeniedError and LimitReachedError."""
        peer = self._find(address)
        try:
            rights = self.policy.rights(peer)
            self._count(peer.client, rights.quotas.max_requests_per_second)
        except (AccessDeniedError, LimitReachedError) as error:
            self.note_refusal("call", call, peer, error)
            raise
        return Caller(call, peer, rights, self.refusals)

    def note_refusal(self, kind: Refused, what: str, peer: Peer, reason: Exception) -> None:
        """Count it, and leave a record unless there are too many: who is refused may ask again at once."""
        self.refusals[kind] += 1
        if self._records.take(1):
            _log.warning("%s refused", what, extra=fields(client=peer.client, pid=peer.pid, reason=reason))

    def _count(self, client: str, per_second: int | None) -> None:
        """Raises LimitReachedError."""
        if per_second is not None and not self._bucket(client, per_second).take(1):
            raise LimitReachedError(f"{client} makes more than {per_second} requests a second; try again later")

    def _bucket(self, client: str, per_second: int) -> TokenBucket:
        if len(self._requests) > _BUCKETS:
            self._requests = {name: bucket for name, bucket in self._requests.items() if not bucket.is_full}
        known = self._requests.get(client)
        if known is None or known.per_second != per_second:
            known = self._requests[client] = TokenBucket(per_second)
        return known


def revoked() -> AccessDeniedError:
    return AccessDeniedError("the server's policy changed, and does not allow this any more")


class Policy:
    """The roles of a configuration. Raises InvalidArgumentError for users and groups that the host does not have.

    restriction: why the engine cannot trace for those who may not trace everybody; empty where it can.
    """

    def __init__(self, roles: Sequence[Role], restriction: str = "") -> None:
        self._restriction = restriction
        # who has a role by name comes before who has one as anybody has
        self._holders = [_looked_up(role) for role in sorted(roles, key=lambda role: role.everybody)]

    def rights(self, peer: Peer) -> Rights:
        """Raises AccessDeniedError where no role is for the peer."""
        for holders in self._holders:
            if holders.has(peer):
                role, trace = holders.role, holders.trace.of(peer)
                restriction = self._restriction if trace is not None and trace != NO_USERS else ""
                return Rights(
                    peer.client,
                    role.name,
                    holders.list.of(peer),
                    NO_USERS if restriction else trace,
                    role.manage,
                    role.quotas,
                    restriction,
                )
        raise AccessDeniedError(f"no role of this server is for {peer.client}")

    @property
    def restricted(self) -> list[str]:
        """Names of the roles that the engine cannot serve."""
        if not self._restriction:
            return []
        return [holders.role.name for holders in self._holders if set(holders.role.trace).isdisjoint({"all", "none"})]

    def rights_or_none(self, peer: Peer) -> Rights | None:
        try:
            return self.rights(peer)
        except AccessDeniedError:
            return None


def _looked_up(role: Role) -> _Holders:
    def users(what: str, names: Sequence[str]) -> frozenset[int]:
        return frozenset(_ids(f"roles.{role.name}.{what}", names, lambda name: pwd.getpwnam(name).pw_uid, "user"))

    def of_whom(what: str, wanted: tuple[str, ...]) -> _OfWhom:
        named = [name for name in wanted if name not in {"all", "own", "none"}]
        return _OfWhom(None if "all" in wanted else users(what, named), "own" in wanted)

    return _Holders(
        role,
        users("users", role.users),
        frozenset(_ids(f"roles.{role.name}.groups", role.groups, lambda name: grp.getgrnam(name).gr_gid, "group")),
        of_whom("list", role.list),
        of_whom("trace", role.trace),
    )


def _ids(key: str, names: Sequence[str], look_up: Callable[[str], int], kind: str) -> list[int]:
    found = []
    for name in names:
        try:
            found.append(int(name) if name.isdecimal() else look_up(name))
            if found[-1] >= _NO_ID:
                raise InvalidArgumentError(key, f"{name} is more than the number of any {kind}")
        except KeyError as error:
            if name != _OWN_GROUP:
                raise InvalidArgumentError(key, f"there is no {kind} {name!r} on this host") from error
    return found


_NO_ID = (1 << 32) - 1
"""(uid_t)-1, which the kernel takes for nobody."""

_OWN_GROUP = "stapsdt"
"""Its role is built in, and a host need not have it."""
