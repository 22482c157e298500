"""The daemon's settings, from its command line and the file of --config, which `file` reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from stapsdtd.addresses import DEFAULT_ADDRESS, LOOPBACK_HOSTS, WrongAddressError, matched
from stapsdtd.errors import InvalidArgumentError

ENGINES = ("auto", "bpf", "ftrace")

# What the file may contain. Errors quote the descriptions.
Count = Annotated[int, Meta(ge=1, description="a whole number above 0")]
Flag = Annotated[bool, Meta(description="true or false")]
Text = Annotated[str, Meta(description="a string")]
Texts = Annotated[tuple[str, ...], Meta(description="an array of strings")]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits and defaults for what clients ask for. The totals are over all clients."""

    default_lease_seconds: Count = 30
    max_lease_seconds: Count = 3600
    default_queue_bytes: Count = 16 << 20
    max_queue_bytes: Count = 256 << 20
    default_kernel_buffer_kib: Count = 4096
    max_kernel_buffer_kib: Count = 65536
    max_selectors: Count = 256
    max_subscriptions: Count = 256
    max_total_queue_bytes: Count = 4 << 30
    max_total_kernel_buffer_mib: Count = 2048
    max_connections: Count = 1024


@dataclass(frozen=True, slots=True)
class Quotas:
    """Each client's limits. None: no limit beyond those of Limits.

    max_foreign_hits_per_second: hits of its probes in processes that it may not trace. max_cpu_percent: of one
    processor, for what the daemon does on its behalf while others want it, too.
    """

    max_connections: Count | None = None
    max_subscriptions: Count | None = None
    max_sites: Count | None = None
    max_queue_bytes: Count | None = None
    max_events_per_second: Count | None = None
    max_requests_per_second: Count | None = None
    max_foreign_hits_per_second: Count | None = None
    max_cpu_percent: Count = 25


NO_QUOTAS = Quotas()


@dataclass(frozen=True, slots=True)
class Role:
    """Whom a role is for, and what it allows.

    users, groups: of the host. certificates: common names or subject alternative names. everybody: also for anyone who
    has no other role. list, trace: whose processes' probes may be listed and traced: names of users, or "own", "all" or
    "none". manage: may see, stream and end everybody's subscriptions. functions: may trace kernel functions, as root
    may.
    """

    name: str
    users: Texts = ()
    groups: Texts = ()
    certificates: Texts = ()
    everybody: Flag = False
    list: Texts = ("own",)
    trace: Texts = ("own",)
    manage: Flag = False
    functions: Flag = False
    quotas: Quotas = NO_QUOTAS


OPERATOR = Role(
    "operator",
    ("root",),
    ("stapsdt",),
    list=("all",),
    trace=("all",),
    manage=True,
    quotas=Quotas(max_cpu_percent=100),
)
USER = Role(
    "user",
    everybody=True,
    quotas=Quotas(
        max_connections=32,
        max_subscriptions=16,
        max_sites=5_000,
        max_queue_bytes=256 << 20,
        max_events_per_second=500_000,
        max_requests_per_second=50,
        max_foreign_hits_per_second=100_000,
    ),
)
"""The built-in roles, unless the file redefines them."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files. client_authority: signs the certificates that clients must present."""

    certificate: Text
    key: Text
    client_authority: Text


@dataclass(frozen=True, slots=True)
class Listener:
    """address: `unix:PATH` or `tcp:HOST:PORT`. owner, group, mode: of the socket; None for the process's own.

    role: of everyone who connects here; None to go by the client's identity. plain: TCP without TLS, on loopback.
    """

    address: Text
    owner: Text | None = None
    group: Text | None = None
    mode: int = 0o666
    role: Text | None = None
    tls: Tls | None = None
    plain: Flag = False

    @property
    def path(self) -> str | None:
        return self.address.removeprefix("unix:") if self.address.startswith("unix:") else None

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Return the parts of a TCP address."""
        host, _, port = self.address.removeprefix("tcp:").rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class FilesystemSettings:
    """arm: types of file systems on which files are armed beside local ones, as named in /proc/PID/mountinfo."""

    arm: Texts = ()


@dataclass(frozen=True, slots=True)
class InventorySettings:
    """Of the files that are installed, whether or not a process maps them.

    system: whether to look where programs and libraries usually are. directories: others, with all below them, whoever
    owns them. max_files: with probes. max_probes: different ones in all of them. state: the directory that keeps it
    across restarts; empty for systemd's, or /var/lib/stapsdtd.
    """

    enabled: Flag = True
    system: Flag = True
    directories: Texts = ()
    max_files: Count = 4096
    max_probes: Count = 20_000
    state: Text = ""


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """Directories in which engines keep the names of containers.

    docker: Docker's data-root. storage: graphroot of Podman and CRI-O. containerd: its state.
    """

    docker: Texts = ("/var/lib/docker",)
    storage: Texts = ("/var/lib/containers/storage",)
    containerd: Texts = ("/run/containerd", "/run/k3s/containerd")


@dataclass(frozen=True, slots=True)
class Config:
    """engine: one of ENGINES. roles: the first that a client has counts. metrics: where Prometheus reads them."""

    listeners: tuple[Listener, ...] = (Listener(DEFAULT_ADDRESS),)
    engine: Text = "auto"
    limits: Limits = field(default_factory=Limits)
    roles: tuple[Role, ...] = (OPERATOR, USER)
    metrics: Listener | None = None
    filesystems: FilesystemSettings = field(default_factory=FilesystemSettings)
    inventory: InventorySettings = field(default_factory=InventorySettings)
    containers: ContainerSettings = field(default_factory=ContainerSettings)


def validated(config: Config) -> Config:
    """Return the config. Raises InvalidArgumentError for values that cannot be used."""
    if config.engine not in ENGINES:
        raise InvalidArgumentError("engine", f"{config.engine!r} is not one of {', '.join(ENGINES)}")
    names = {role.name for role in config.roles}
    for listener in config.listeners:
        _check_listener(listener, names)
    addresses = [listener.address for listener in config.listeners]
    if config.metrics is not None:
        _check_metrics(config.metrics, addresses)
    for address in addresses:
        if addresses.count(address) > 1:
            raise InvalidArgumentError("listen", f"{address} is given twice")
    if not addresses:
        raise InvalidArgumentError("listen", "is empty: give at least one address")
    return config


def _check_listener(listener: Listener, roles: set[str]) -> None:
    match = _matched("listen", listener)
    if listener.role is not None and listener.role not in roles:
        raise InvalidArgumentError("listen.role", f"{listener.role!r} is no role; there are {', '.join(sorted(roles))}")
    if listener.path is not None:
        for key, given in (("plain", listener.plain), ("certificate", listener.tls)):
            if given:
                raise InvalidArgumentError(f"listen.{key}", "is for tcp:HOST:PORT only")
    elif listener.plain and listener.tls:
        raise InvalidArgumentError("listen.plain", f"{listener.address} has a certificate; remove one of the two")
    elif listener.plain:
        if match["host"] not in LOOPBACK_HOSTS:
            raise InvalidArgumentError("listen.plain", f"{listener.address} is no loopback address; use a certificate")
        if listener.role is None:
            raise InvalidArgumentError("listen.role", f"is missing: clients of {listener.address} have no identity")
    elif listener.tls is None:
        raise InvalidArgumentError(
            "listen.certificate", f"is missing for {listener.address}; so are key and client_authority, or plain = true"
        )


def _check_metrics(listener: Listener, others: Sequence[str]) -> None:
    match = _matched("metrics.listen", listener)
    if match["host"] is not None and match["host"] not in LOOPBACK_HOSTS:
        raise InvalidArgumentError("metrics.listen", f"{listener.address} is no loopback address")
    if listener.address in others:
        raise InvalidArgumentError("metrics.listen", f"{listener.address} already serves clients")


def _matched(key: str, listener: Listener) -> re.Match[str]:
    try:
        return matched(listener.address)
    except WrongAddressError as error:
        raise InvalidArgumentError(key, str(error)) from None
