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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from msgspec import Meta, ValidationError, convert

from stapsdtd.config import (
    OPERATOR,
    USER,
    Config,
    FilesystemSettings,
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
    """Read the file. Raises InvalidArgumentError, which names the offending key, and OSError."""
    with open(path, "rb") as file:
        try:
            found = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(path, f"is not TOML: {error}") from error
    table = _Table("", found, "setting")
    config = Config(
        table.read("listen", _listeners, Config().listeners),
        table.settings(Config, "engine").get("engine", Config().engine),
        table.read("limits", partial(_whole, Limits, "limit"), Limits()),
        table.read("roles", _roles, Config().roles),
        table.read("metrics", _metrics, None),
        table.read("filesystems", _filesystems, FilesystemSettings()),
    )
    table.finish()
    return validated(config)


class _Table:
    """A TOML table; keys that nothing reads are an error. path: its own full key, the prefix of its keys in errors."""

    def __init__(self, path: str, value: Any, noun: str) -> None:
        if not isinstance(value, dict):
            raise InvalidArgumentError(path, "must be a table")
        self.path = path
        self._left: dict[str, Any] = dict(value)
        self._noun = noun
        self._known: list[str] = []

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def read(self, name: str, reader: Callable[[str, Any], _T], otherwise: _T) -> _T:
        self._known.append(name)
        return reader(self.key(name), self._left.pop(name)) if name in self._left else otherwise

    def settings(self, kind: type, *names: str, **types: Any) -> dict[str, Any]:
        """Return the given values of these fields of a dataclass, by default all. types: of keys other than fields."""
        hints = get_type_hints(kind, include_extras=True)
        wanted = {name: hints[name] for name in names or hints} | types
        self._known += wanted
        return {
            name: _converted(self.key(name), self._left.pop(name), hint)
            for name, hint in wanted.items()
            if name in self._left
        }

    def finish(self) -> None:
        if self._left:
            raise InvalidArgumentError(
                self.key(min(self._left)), f"is no {self._noun}; there are {', '.join(sorted(self._known))}"
            )


def _converted(key: str, value: Any, hint: Any) -> Any:
    try:
        return convert(value, hint)
    except ValidationError as error:
        annotated = hint if hasattr(hint, "__metadata__") else get_args(hint)[0]
        raise InvalidArgumentError(key, f"must be {annotated.__metadata__[0].description}, not {value!r}") from error


def _whole(kind: type[_T], noun: str, key: str, value: Any) -> _T:
    """Return a dataclass whose fields are the keys of the table."""
    table = _Table(key, value, noun)
    made = kind(**table.settings(kind))
    table.finish()
    return made


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
    return _made_listener(given, tls=Tls(**files) if files else None)


def _made_listener(given: dict[str, Any], **more: Any) -> Listener:
    if "mode" in given:
        given["mode"] = int(given["mode"], 8)
    return Listener(**{"address": "", **more, **given})


def _metrics(key: str, value: Any) -> Listener:
    table = _Table(key, value, "setting of metrics")
    given = table.settings(Listener, "owner", "group", mode=_Mode, listen=Text)
    table.finish()
    return _made_listener(given, address=given.pop("listen", ""), mode=0o660)


def _filesystems(key: str, value: Any) -> FilesystemSettings:
    settings = _whole(FilesystemSettings, "setting of file systems", key, value)
    for kind in settings.arm:
        if not _KIND.fullmatch(kind):
            raise InvalidArgumentError(f"{key}.arm", f"{kind!r} is no kind of file system as mountinfo has it")
    return settings


def _roles(key: str, value: Any) -> tuple[Role, ...]:
    """Return the roles in the file, then the built-in ones it does not redefine."""
    table = _Table(key, value, "role")
    found = tuple(_role(table.key(name), name, entry) for name, entry in value.items())
    names = {role.name for role in found}
    return found + tuple(role for role in (OPERATOR, USER) if role.name not in names)


def _role(key: str, name: str, value: Any) -> Role:
    table = _Table(key, value, "setting of a role")
    start = next((role for role in (OPERATOR, USER) if role.name == name), Role(name))
    quotas = replace(start.quotas, **table.settings(Quotas))
    names = ("users", "groups", "certificates", "everybody", "manage")
    given = table.settings(Role, *names, list=_Processes, trace=_Processes)
    table.finish()
    whose = {name: (given[name],) for name in ("list", "trace") if isinstance(given.get(name), str)}
    return replace(start, quotas=quotas, **given | whose)
