"""Who a client is, and what it may do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stapsdtd.config import NO_QUOTAS, Quotas
from stapsdtd.errors import AccessDeniedError
from stapsdtd.kernel.ownership import belongs
from stapsdtd.sessions.spec import SubscriptionSpec
from stapsdtd.sessions.subscription import Subscription

Users = frozenset[int] | None
"""User ids; None means everybody."""

NO_USERS: frozenset[int] = frozenset()


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
    functions: whether it may trace kernel functions, whose arguments and memory may be anybody's.
    trace_restriction: why nothing may be traced although the role would allow it, or empty.
    """

    client: str
    role: str
    list: Users = None
    trace: Users = None
    manage: bool = False
    functions: bool = False
    quotas: Quotas = NO_QUOTAS
    trace_restriction: str = ""

    def may_use(self, subscription: Subscription) -> bool:
        """Report whether the client may read and end a subscription.

        Its rights may be fewer than when it subscribed: it may use another listener, or have left a group.
        """
        spec = subscription.spec
        is_own = subscription.client.name == self.client and self.allow(spec)
        return is_own or (self.manage and self._allow_functions(spec))

    def allow(self, spec: SubscriptionSpec) -> bool:
        """Report whether the client may have such a subscription."""
        return self.covers(spec.owners) and self._allow_functions(spec)

    def _allow_functions(self, spec: SubscriptionSpec) -> bool:
        return self.functions or not spec.has_functions

    def check_list(self) -> None:
        """Raises AccessDeniedError if nothing may be listed."""
        if self.list == NO_USERS:
            raise AccessDeniedError(f"role {self.role} does not allow listing probes", "list")

    def check_files(self) -> None:
        """Raises AccessDeniedError if files cannot be named by a client that is nobody's on this host."""
        if self.list is not None:
            raise AccessDeniedError(
                f"role {self.role} does not allow naming files: it does not list everybody's probes, and "
                f"{self.client} is no user whose right to read them could be checked",
                "list",
                "files",
            )

    def check_trace(self, pids: Iterable[int]) -> None:
        """Raises AccessDeniedError if nothing may be traced, or not every one of these processes."""
        if self.trace == NO_USERS:
            raise AccessDeniedError(
                f"role {self.role} does not allow tracing"
                + (self.trace_restriction and f" with this server's engine: {self.trace_restriction}"),
                "trace",
            )
        for pid in pids:
            # the answer must not reveal whether the process exists
            if self.trace is not None and not belongs(pid, self.trace):
                allowed = ", ".join(map(str, sorted(self.trace)))
                raise AccessDeniedError(
                    f"role {self.role} does not allow tracing process {pid}, only those with the rights of uid "
                    f"{allowed} and no others",
                    "trace",
                    "scope.pids",
                    value=pid,
                )

    def check_functions(self) -> None:
        """Raises AccessDeniedError if kernel functions may not be traced."""
        if not self.functions:
            raise AccessDeniedError(
                f"role {self.role} does not allow tracing kernel functions, which may handle anybody's data; root may,"
                " and roles that trace everybody's processes and have functions = true",
                "functions",
                "functions",
            )

    def covers(self, users: Users) -> bool:
        """Report whether all of these users' processes may be traced."""
        return self.trace is None or (users is not None and users <= self.trace)


def revoked(right: str) -> AccessDeniedError:
    return AccessDeniedError("the server's policy changed and no longer allows this", right)
