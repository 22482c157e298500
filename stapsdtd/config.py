"""Settings of the daemon, from its command line and the file of --config (TOML)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from stapsdtd.addresses import LOOPBACK_HOSTS
from stapsdtd.errors import InvalidArgumentError

DEFAULT_LISTEN = "unix:/run/stapsdtd/stapsdtd.sock"
ENGINES = ("auto", "bpf", "ftrace")

_T = TypeVar("_T")
_ADDRESS = re.compile(r"unix:(?P<path>/.+|[^/:@\0].*)|tcp:(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:]+):(?P<port>[0-9]{1,5})")

_KIND = re.compile(r"[\w.+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may ask for, and what they get where they ask for nothing; the totals are of all clients."""

    default_lease_seconds: int = 30
    max_lease_seconds: int = 3600
    default_queue_bytes: int = 16 << 20
    max_queue_bytes: int = 256 << 20
    default_kernel_buffer_kib: int = 4096
    max_kernel_buffer_kib: int = 65536
    max_selectors: int = 256
    max_subscriptions: int = 256
    max_total_queue_bytes: int = 4 << 30
    max_total_kernel_buffer_mib: int = 2048
    max_connections: int = 1024


@dataclass(frozen=True, slots=True)
class Quotas:
    """What each client may have at once, and a second; None is no bound of its own.

    max_foreign_hits_per_second: what its probes may cost processes that it does not see.
    """

    max_connections: int | None = None
    max_subscriptions: int | None = None
    max_sites: int | None = None
    max_queue_bytes: int | None = None
    max_events_per_second: int | None = None
    max_requests_per_second: int | None = None
    max_foreign_hits_per_second: int | None = None


NO_QUOTAS = Quotas()


@dataclass(frozen=True, slots=True)
class Role:
    """Who has it, by name, and what that allows.

    users, groups: of the host. certificates: common names or subject alternative names. everybody: it is also for who
    has no other role. list, trace: of whose processes that is allowed: names of users, "own", "all" or "none". manage:
    all subscriptions are seen, streamed and ended like own ones.
    """

    name: str
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    everybody: bool = False
    list: tuple[str, ...] = ("own",)
    trace: tuple[str, ...] = ("own",)
    manage: bool = False
    quotas: Quotas = NO_QUOTAS


OPERATOR = Role("operator", ("root",), ("stapsdt",), list=("all",), trace=("all",), manage=True)
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
"""The roles there are where the file says nothing of them."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. client_authority signs the certificates that clients must have."""

    certificate: str
    key: str
    client_authority: str


@dataclass(frozen=True, slots=True)
class Listener:
    """address is `unix:PATH` or `tcp:HOST:PORT`. owner, group and mode are the socket's; None is left as it is made.

    role: of everybody who connects here; None where it goes by who that is. plain: TCP without TLS, on loopback.
    """

    address: str
    owner: str | None = None
    group: str | None = None
    mode: int = 0o666
    role: str | None = None
    tls: Tls | None = None
    plain: bool = False

    @property
    def path(self) -> str | None:
        return self.address.removeprefix("unix:") if self.address.startswith("unix:") else None

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Of TCP."""
        host, _, port = self.address.removeprefix("tcp:").rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class FilesystemSettings:
    """arm: on which kinds files are armed beside local ones, as /proc/PID/mountinfo names them."""

    arm: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Config:
    """engine is one of ENGINES. metrics: where Prometheus finds them. Of roles the first counts that somebody has."""

    listeners: tuple[Listener, ...] = (Listener(DEFAULT_LISTEN),)
    engine: str = "auto"
    limits: Limits = field(default_factory=Limits)
    roles: tuple[Role, ...] = (OPERATOR, USER)
    metrics: Listener | None = None
    filesystems: FilesystemSettings = field(default_factory=FilesystemSettings)


def load(path: str) -> Config:
    """Read a file. Raises InvalidArgumentError with the key that is wrong, and OSError."""
    with open(path, "rb") as file:
        try:
            found = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(path, f"is not TOML: {error}") from error
    table = _Table("", found, "setting")
    config = Config(
        table.take("listen", _listeners, Config().listeners),
        table.take("engine", _text, Config().engine),
        table.take("limits", lambda key, value: _numbers(Limits(), key, value), Limits()),
        table.take("roles", _roles, Config().roles),
        table.take("metrics", _metrics, Config().metrics),
        table.take("filesystems", _filesystems, Config().filesystems),
    )
    table.finish()
    return validated(config)


def validated(config: Config) -> Config:
    """Raise InvalidArgumentError for values that cannot be used."""
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
            raise InvalidArgumentError("listen", f"{address} is there twice")
    if not addresses:
        raise InvalidArgumentError("listen", "there is no address to listen on")
    return config


def _check_listener(listener: Listener, roles: set[str]) -> None:
    match = _matched("listen", listener)
    if listener.role is not None and listener.role not in roles:
        raise InvalidArgumentError("listen.role", f"{listener.role!r} is no role; there are {', '.join(sorted(roles))}")
    if listener.path is not None:
        for key, given in (("plain", listener.plain), ("certificate", listener.tls)):
            if given:
                raise InvalidArgumentError(f"listen.{key}", "is for tcp:HOST:PORT alone")
    elif listener.plain and listener.tls:
        raise InvalidArgumentError("listen.plain", f"{listener.address} has a certificate, so it is not plain")
    elif listener.plain:
        if match["host"] not in LOOPBACK_HOSTS:
            raise InvalidArgumentError("listen.plain", f"{listener.address} is no loopback address; use a certificate")
        if listener.role is None:
            raise InvalidArgumentError("listen.role", f"is missing: on {listener.address} nothing tells who connects")
    elif listener.tls is None:
        raise InvalidArgumentError(
            "listen.certificate", f"is missing for {listener.address}; so are key and client_authority, or plain = true"
        )


def _check_metrics(listener: Listener, others: Sequence[str]) -> None:
    match = _matched("metrics.listen", listener)
    if match["host"] is not None and match["host"] not in LOOPBACK_HOSTS:
        raise InvalidArgumentError("metrics.listen", f"{listener.address} is no loopback address")
    if listener.address in others:
        raise InvalidArgumentError("metrics.listen", f"{listener.address} is where clients are served")


def _matched(key: str, listener: Listener) -> re.Match[str]:
    match = _ADDRESS.fullmatch(listener.address)
    if match is None or (match["port"] and int(match["port"]) > 0xFFFF):
        raise InvalidArgumentError(key, f"{listener.address!r} is not of the form unix:PATH or tcp:HOST:PORT")
    return match


class _Table:
    """A table of TOML, of which each key must be taken. path: its own key, in front of those in errors."""

    def __init__(self, path: str, value: Any, kind: str) -> None:
        if not isinstance(value, dict):
            raise InvalidArgumentError(path, "must be a table")
        self.path = path
        self._left: dict[str, Any] = dict(value)
        self._kind = kind
        self._known: list[str] = []

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str, convert: Callable[[str, Any], _T], otherwise: _T) -> _T:
        self._known.append(name)
        return convert(self.key(name), self._left.pop(name)) if name in self._left else otherwise

    def finish(self) -> None:
        if self._left:
            raise InvalidArgumentError(
                self.key(min(self._left)), f"is no {self._kind}; there are {', '.join(sorted(self._known))}"
            )


def _listeners(key: str, value: Any) -> tuple[Listener, ...]:
    """One address, or an array of addresses and tables."""
    entries = value if isinstance(value, list) else [value]
    return tuple(Listener(entry) if isinstance(entry, str) else _listener(key, entry) for entry in entries)


def _listener(key: str, value: Any) -> Listener:
    if not isinstance(value, dict):
        raise InvalidArgumentError(key, f"must be an address or a table, not {value!r}")
    table = _Table(key, value, "setting of a listener")
    parts = {name: table.take(name, _text, "") for name in ("certificate", "key", "client_authority")}
    listener = Listener(
        table.take("address", _text, ""),
        table.take("owner", _text, None),
        table.take("group", _text, None),
        table.take("mode", _mode, Listener("").mode),
        table.take("role", _text, None),
        Tls(**parts) if any(parts.values()) else None,
        table.take("plain", _flag, False),
    )
    table.finish()
    for name, given in parts.items():
        if listener.tls is not None and not given:
            raise InvalidArgumentError(f"{key}.{name}", "is missing: TLS takes certificate, key and client_authority")
    return listener


def _metrics(key: str, value: Any) -> Listener:
    table = _Table(key, value, "setting of metrics")
    listener = Listener(
        table.take("listen", _text, ""),
        table.take("owner", _text, None),
        table.take("group", _text, None),
        table.take("mode", _mode, 0o660),
    )
    table.finish()
    return listener


def _filesystems(key: str, value: Any) -> FilesystemSettings:
    table = _Table(key, value, "setting of file systems")
    settings = FilesystemSettings(table.take("arm", _texts, ()))
    table.finish()
    for kind in settings.arm:
        if not _KIND.fullmatch(kind):
            raise InvalidArgumentError(f"{key}.arm", f"{kind!r} is no kind of file system as mountinfo has it")
    return settings


def _roles(key: str, value: Any) -> tuple[Role, ...]:
    """Those of the file, then the built-in ones that it does not name."""
    table = _Table(key, value, "role")
    found = tuple(_role(table.key(name), name, entry) for name, entry in value.items())
    names = {role.name for role in found}
    return found + tuple(role for role in (OPERATOR, USER) if role.name not in names)


def _role(key: str, name: str, value: Any) -> Role:
    table = _Table(key, value, "setting of a role")
    start = next((role for role in (OPERATOR, USER) if role.name == name), Role(name))
    role = Role(
        name,
        table.take("users", _texts, start.users),
        table.take("groups", _texts, start.groups),
        table.take("certificates", _texts, start.certificates),
        table.take("everybody", _flag, start.everybody),
        table.take("list", _processes, start.list),
        table.take("trace", _processes, start.trace),
        table.take("manage", _flag, start.manage),
        replace(
            start.quotas,
            **{each.name: table.take(each.name, _number, getattr(start.quotas, each.name)) for each in fields(Quotas)},
        ),
    )
    table.finish()
    return role


def _processes(key: str, value: Any) -> tuple[str, ...]:
    if value in ("all", "own", "none"):
        return (value,)
    if not isinstance(value, list):
        raise InvalidArgumentError(key, f'must be "all", "own", "none" or an array of users, not {value!r}')
    return _texts(key, value)


def _numbers(start: Limits, key: str, value: Any) -> Limits:
    table = _Table(key, value, "limit")
    changed: Mapping[str, int] = {
        each.name: table.take(each.name, _number, getattr(start, each.name)) for each in fields(Limits)
    }
    table.finish()
    return replace(start, **changed)


def _number(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InvalidArgumentError(key, f"must be a whole number above 0, not {value!r}")
    return value


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgumentError(key, f"must be true or false, not {value!r}")
    return value


def _mode(key: str, value: Any) -> int:
    if not isinstance(value, str) or not re.fullmatch("0?[0-7]{3}", value):
        raise InvalidArgumentError(key, f'must be a mode such as "0660", not {value!r}')
    return int(value, 8)


def _texts(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise InvalidArgumentError(key, f"must be an array of texts, not {value!r}")
    return tuple(_text(key, each) for each in value)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgumentError(key, f"must be a text, not {value!r}")
    return value
