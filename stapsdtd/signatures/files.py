"""Files of signatures, in TOML. Each holds what is known of one provider.

    provider = "postgresql"
    source = "PostgreSQL's documentation, Dynamic Tracing"
    versions = "10 to 18"

    [enums.lwlock_mode]
    0 = "EXCLUSIVE"
    1 = "SHARED"

    [[notes]]
    probes = "sort__*"
    text = "..."

    [[probes]]
    name = "lwlock__acquire"
    text = "A lightweight lock was acquired."
    arguments = ["string tranche", "enum(lwlock_mode) mode"]
    ends_with = "lwlock__release"

An argument is a type and a name. The types are string, string(LENGTH) with the name of the argument that has the
length in bytes, pointer, integer, int8 to int64, uint8 to uint64, bool, float, duration(UNIT) with ns, us, ms or s,
enum(NAME) and flags(NAME). Without `arguments`, they are not known. A name may be a glob, for probes that have no entry
of their own, and have several entries, for versions whose arguments differ. Probes that fire at each line, call or
object of a program are `frequent = true`: selectors with globs leave them out. Those that begin what may fail without
an end, and never within another of the same thread, are `latest = true`: an end belongs to the latest.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path

import msgspec

from stapsdtd.errors import StapsdtdError
from stapsdtd.globs import matches
from stapsdtd.signatures.model import Declared, Kind, Signature

OWN_FILES = Path("/etc/stapsdtd/signatures.d")
"""Where the host's own files are."""

_DATA = "data"
_DECLARED = re.compile(r"([a-z]+)(8|16|32|64)?(?:\((\w+)\))?\s+([A-Za-z_]\w*)")
_UNITS_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_RESERVED = re.compile(r"arg\d+")
"""What captures name arguments by position."""


class SignatureFileError(StapsdtdError):
    """A file of signatures is wrong. key: `probes[3].arguments[0]`, or empty if it is the whole file."""

    def __init__(self, path: str, key: str, reason: str) -> None:
        super().__init__(f"{path}: {f'{key}: ' if key else ''}{reason}")
        self.path = path
        self.key = key
        self.reason = reason


class _Note(msgspec.Struct, forbid_unknown_fields=True):
    probes: str
    text: str


class _Probe(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    text: str
    arguments: list[str] | None = None
    ends_with: str = ""
    frequent: bool = False
    latest: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    provider: str
    source: str
    versions: str
    probes: list[_Probe]
    notes: list[_Note] = []
    enums: dict[str, dict[int, str]] = {}
    flags: dict[str, dict[int, str]] = {}


def shipped_providers() -> frozenset[str]:
    """Return the providers of which the package has a file."""
    names = (entry.name for entry in files(__package__).joinpath(_DATA).iterdir())
    return frozenset(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def read_shipped(provider: str) -> tuple[Signature, ...]:
    name = f"{provider}.toml"
    return read_signatures(name, files(__package__).joinpath(_DATA, name).read_text(encoding="utf-8"))


def read_file(path: Path) -> tuple[Signature, ...]:
    """Raises SignatureFileError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else "is not UTF-8"
        raise SignatureFileError(str(path), "", reason) from error
    return read_signatures(str(path), text)


def read_signatures(path: str, text: str) -> tuple[Signature, ...]:
    """Return the signatures of a file's text, in its order. Raises SignatureFileError, which names the key at fault."""
    try:
        file = msgspec.convert(tomllib.loads(text), _File, strict=False)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SignatureFileError(path, "", str(error)) from error
    except msgspec.ValidationError as error:
        reason, _, key = str(error).partition(" - at `$")
        raise SignatureFileError(path, key.rstrip("`").removeprefix("."), reason) from error
    names = {probe.name for probe in file.probes}
    return tuple(_signatures(path, file, names))


def _signatures(path: str, file: _File, names: set[str]) -> Iterator[Signature]:
    for number, probe in enumerate(file.probes):
        key = f"probes[{number}]"
        if probe.ends_with and probe.ends_with not in names:
            raise SignatureFileError(path, f"{key}.ends_with", f"the file has no probe {probe.ends_with}")
        arguments = None
        if probe.arguments is not None:
            arguments = tuple(
                _declared(path, f"{key}.arguments[{index}]", text, file) for index, text in enumerate(probe.arguments)
            )
            _check_names(path, f"{key}.arguments", arguments)
        notes = tuple((note.probes, note.text) for note in file.notes if matches(probe.name, note.probes))
        yield Signature(
            file.provider,
            probe.name,
            probe.text,
            arguments,
            notes,
            probe.ends_with,
            file.source,
            file.versions,
            probe.frequent,
            probe.latest,
        )


def _declared(path: str, key: str, text: str, file: _File) -> Declared:
    match = _DECLARED.fullmatch(text.strip())
    if match is None:
        raise SignatureFileError(path, key, f"{text!r} is not a type and a name, such as 'string query'")
    word, bits, parameter, name = match.groups()
    if word in {"int", "uint"} and bits and not parameter:
        return Declared(name, Kind.INTEGER, text, size=int(bits) // 8)
    kind = next((kind for kind in Kind if kind.value == word), None)
    if kind is None or bits:
        raise SignatureFileError(path, key, f"{word}{bits or ''} is no type; they are {', '.join(_type_names())}")
    if kind is Kind.STRING:
        return Declared(name, kind, text, length=parameter or "")
    tables: dict[Kind, Mapping[str, Mapping[int, str]]] = {Kind.ENUM: file.enums, Kind.FLAGS: file.flags}
    if kind in tables:
        if parameter not in tables[kind]:
            table = "enums" if kind is Kind.ENUM else "flags"
            raise SignatureFileError(path, key, f"the file has no table [{table}.{parameter or 'NAME'}]")
        return Declared(name, kind, text, labels=tables[kind][parameter])
    if kind is Kind.DURATION:
        if parameter not in _UNITS_NS:
            raise SignatureFileError(
                path, key, f"a duration's unit is one of {', '.join(_UNITS_NS)}, as in duration(ms)"
            )
        return Declared(name, kind, text, unit_ns=_UNITS_NS[parameter])
    if parameter:
        raise SignatureFileError(path, key, f"{word} takes nothing in parentheses")
    return Declared(name, kind, text)


def _type_names() -> list[str]:
    return [*(kind.value for kind in Kind), "int8 to int64", "uint8 to uint64"]


def _check_names(path: str, key: str, arguments: tuple[Declared, ...]) -> None:
    names = [declared.name for declared in arguments]
    for declared in arguments:
        if names.count(declared.name) > 1:
            raise SignatureFileError(path, key, f"two arguments are named {declared.name}")
        if _RESERVED.fullmatch(declared.name):
            raise SignatureFileError(
                path, key, f"{declared.name} means an argument by its position; choose another name"
            )
        lengths = [other for other in arguments if other.name == declared.length and other.kind is Kind.INTEGER]
        if declared.length and not lengths:
            raise SignatureFileError(path, key, f"{declared.text}: no integer argument is named {declared.length}")
