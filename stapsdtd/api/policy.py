"""Maps a peer to the first role of the configuration that applies, and that to rights."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stapsdtd.api.rights import NO_USERS, Peer, Rights, Users
from stapsdtd.config import Role
from stapsdtd.errors import AccessDeniedError, InvalidArgumentError


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
                    (role.functions or peer.uid == 0) and trace is None,
                    role.quotas,
                    restriction,
                )
        raise AccessDeniedError(f"no role of this server applies to {peer.client}", "connect")

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
