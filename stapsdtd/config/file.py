"""The file of --config, in TOML.

    listen = "unix:/run/stapsdtd/stapsdtd.sock"
    [limits]
    max_selectors = 256
    [roles.support]
    groups = ["dba"]
    trace = ["postgres"]
    max_sites = 1000

Values are checked against the types of the settings. An error names the full key, the value and what is allowed:
`roles.support.max_sites: must be a whole number above 0, not -1`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from msgspec import Meta, ValidationError, convert

from stapsdtd.config import (
    OPERATOR,
    USER,
    Config,
    ContainerSettings,
    FilesystemSettings,
    InventorySettings,
    Limits,
    Listener,
    Quotas,
    Role,
    Text,
    Tls,
    validated,
)
from stapsdtd.errors import InvalidArgumentError

_T = TypeVar("_T")

_Mode = Annotated[str, Meta(pattern=r"^0?[0-7]{3}\Z", description='a mode such as "0660"')]
_Processes = Annotated[
    tuple[str, ...] | Literal["all", "own", "none"], Meta(description='"all", "own", "none" or an array of users')
]

_KIND = re.compile(r"[\w.+-]+", re.ASCII)


def load(path: str) -> Config:
    """Read the file. Raises InvalidArgumentError, which names the offending key."""
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(path, f"is not TOML: {error}") from error
    except OSError as error:
        reason = f"cannot be read: {error.strerror}; see its owner and mode with 'ls -l'"
        raise InvalidArgumentError(path, reason) from error
    table = _Table("", content, "setting")
    config = Config(
        table.read("listen", _listeners, Config().listeners),
        table.settings(Config, "engine").get("engine", Config().engine),
        table.read("limits", partial(_dataclass, Limits, "limit"), Limits()),
        table.read("roles", _roles, Config().roles),
        table.read("metrics", _metrics, None),
        table.read("filesystems", _filesystems, FilesystemSettings()),
        table.read("inventory", _inventory, InventorySettings()),
        table.read("containers", _containers, ContainerSettings()),
    )
    table.finish()
    return validated(config)


class _Table:
    """A TOML table, in which keys that nothing reads are an error. path: its full key. noun: what a key of it is."""

    def __init__(self, path: str, value: Any, noun: str) -> None:
        if not isinstance(value, dict):
            raise InvalidArgumentError(path, "must be a table")
        self.path = path
        self._unread: dict[str, Any] = dict(value)
        self._noun = noun
        self._valid_keys: list[str] = []

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def read(self, name: str, reader: Callable[[str, Any], _T], default: _T) -> _T:
        """Return a key's value. reader: converts it, given its full key and its value."""
        self._valid_keys.append(name)
        return reader(self.key(name), self._unread.pop(name)) if name in self._unread else default

    def settings(self, kind: type, *names: str, **types: Any) -> dict[str, Any]:
        """Return the values that the table has of a dataclass's fields, by default all. types: of further keys."""
        hints = get_type_hints(kind, include_extras=True)
        wanted = {name: hints[name] for name in names or hints} | types
        self._valid_keys += wanted
        return {
            name: _converted(self.key(name), self._unread.pop(name), hint)
            for name, hint in wanted.items()
            if name in self._unread
        }

    def finish(self) -> None:
        """Raises InvalidArgumentError if there are keys that nothing has read."""
        if self._unread:
            raise InvalidArgumentError(
                self.key(min(self._unread)), f"is no {self._noun}; there are {', '.join(sorted(self._valid_keys))}"
            )


def _converted(key: str, value: Any, hint: Any) -> Any:
    try:
        return convert(value, hint)
    except ValidationError as error:
        annotated = hint if hasattr(hint, "__metadata__") else get_args(hint)[0]
        raise InvalidArgumentError(key, f"must be {annotated.__metadata__[0].description}, not {value!r}") from error


def _dataclass(kind: type[_T], noun: str, key: str, value: Any) -> _T:
    """Return a dataclass whose fields are the keys of the table."""
    table = _Table(key, value, noun)
    settings = kind(**table.settings(kind))
    table.finish()
    return settings


def _listeners(key: str, value: Any) -> tuple[Listener, ...]:
    """Read one address, or an array of addresses and tables."""
    entries = value if isinstance(value, list) else [value]
    return tuple(Listener(entry) if isinstance(entry, str) else _listener(key, entry) for entry in entries)


def _listener(key: str, value: Any) -> Listener:
    if not isinstance(value, dict):
        raise InvalidArgumentError(key, f"must be an address or a table, not {value!r}")
    table = _Table(key, value, "setting of a listener")
    files = {name: path for name, path in table.settings(Tls).items() if path}
    given = table.settings(Listener, "address", "owner", "group", "role", "plain", mode=_Mode)
    table.finish()
    for name in get_type_hints(Tls):
        if files and name not in files:
            raise InvalidArgumentError(f"{key}.{name}", "is missing: TLS takes certificate, key and client_authority")
    return _make_listener(given, tls=Tls(**files) if files else None)


def _make_listener(given: dict[str, Any], **defaults: Any) -> Listener:
    if "mode" in given:
        given["mode"] = int(given["mode"], 8)
    return Listener(**{"address": "", **defaults, **given})


def _metrics(key: str, value: Any) -> Listener:
    table = _Table(key, value, "setting of metrics")
    given = table.settings(Listener, "owner", "group", mode=_Mode, listen=Text)
    table.finish()
    return _make_listener(given, address=given.pop("listen", ""), mode=0o660)


def _filesystems(key: str, value: Any) -> FilesystemSettings:
    settings = _dataclass(FilesystemSettings, "setting of file systems", key, value)
    for kind in settings.arm:
        if not _KIND.fullmatch(kind):
            raise InvalidArgumentError(f"{key}.arm", f"{kind!r} is no type of file system as named in mountinfo")
    return settings


def _inventory(key: str, value: Any) -> InventorySettings:
    settings = _dataclass(InventorySettings, "setting of the inventory", key, value)
    _check_paths(key, directories=settings.directories, state=filter(None, (settings.state,)))
    return settings


def _containers(key: str, value: Any) -> ContainerSettings:
    settings = _dataclass(ContainerSettings, "setting of containers", key, value)
    _check_paths(key, docker=settings.docker, storage=settings.storage, containerd=settings.containerd)
    return settings


def _check_paths(key: str, **paths_by_name: Iterable[str]) -> None:
    for name, paths in paths_by_name.items():
        for path in paths:
            if not path.startswith("/"):
                raise InvalidArgumentError(f"{key}.{name}", f"{path!r} is not an absolute path")


def _roles(key: str, value: Any) -> tuple[Role, ...]:
    """Return the roles in the file, then the built-in ones it does not redefine."""
    table = _Table(key, value, "role")
    roles = tuple(_role(table.key(name), name, entry) for name, entry in value.items())
    names = {role.name for role in roles}
    return roles + tuple(role for role in (OPERATOR, USER) if role.name not in names)


def _role(key: str, name: str, value: Any) -> Role:
    table = _Table(key, value, "setting of a role")
    base = next((role for role in (OPERATOR, USER) if role.name == name), Role(name))
    quotas = replace(base.quotas, **table.settings(Quotas))
    names = ("users", "groups", "certificates", "everybody", "manage", "functions")
    given = table.settings(Role, *names, list=_Processes, trace=_Processes)
    table.finish()
    words = {name: (given[name],) for name in ("list", "trace") if isinstance(given.get(name), str)}
    return replace(base, quotas=quotas, **given | words)
