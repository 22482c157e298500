"""Settings of the daemon, from its command line and the file of --config (TOML)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from typing import Any

from stapsdtd.errors import InvalidArgumentError

DEFAULT_LISTEN = "unix:/run/stapsdtd/stapsdtd.sock"
ENGINES = ("auto", "bpf", "ftrace")


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may ask for, and what they get where they ask for nothing."""

    default_lease_seconds: int = 30
    max_lease_seconds: int = 3600
    default_queue_bytes: int = 32 << 20
    max_queue_bytes: int = 256 << 20
    default_kernel_buffer_kib: int = 4096
    max_kernel_buffer_kib: int = 65536
    max_selectors: int = 256
    max_subscriptions: int = 256


@dataclass(frozen=True, slots=True)
class Config:
    """listen is a gRPC address, `unix:PATH`; engine one of ENGINES."""

    listen: str = DEFAULT_LISTEN
    engine: str = "auto"
    limits: Limits = field(default_factory=Limits)


def load(path: str) -> dict[str, Any]:
    """Read a file into Config's fields. Raises InvalidArgumentError with the key that is wrong, and OSError."""
    with open(path, "rb") as file:
        try:
            found = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(path, f"is not TOML: {error}") from error
    limits = found.pop("limits", {})
    unknown = found.keys() - {"listen", "engine"}
    if unknown:
        raise InvalidArgumentError(min(unknown), "is no setting; there are listen, engine and [limits]")
    if not isinstance(limits, dict):
        raise InvalidArgumentError("limits", "must be a table")
    settings: dict[str, Any] = {key: _text(key, value) for key, value in found.items()}
    if limits:
        settings["limits"] = _limits(limits)
    return settings


def validated(config: Config) -> Config:
    """Raise InvalidArgumentError for values that cannot be used."""
    if config.engine not in ENGINES:
        raise InvalidArgumentError("engine", f"{config.engine!r} is not one of {', '.join(ENGINES)}")
    if not config.listen.startswith("unix:") or not config.listen.removeprefix("unix:"):
        raise InvalidArgumentError("listen", f"{config.listen!r} is not of the form unix:PATH")
    return config


def _limits(table: dict[str, Any]) -> Limits:
    known = {entry.name for entry in fields(Limits)}
    for key, value in table.items():
        if key not in known:
            raise InvalidArgumentError(f"limits.{key}", f"is no limit; there are {', '.join(sorted(known))}")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise InvalidArgumentError(f"limits.{key}", f"must be a whole number above 0, not {value!r}")
    return Limits(**table)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgumentError(key, f"must be a text, not {value!r}")
    return value
