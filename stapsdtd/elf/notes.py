r"""Decode the contents of `.note.stapsdt`.

    Displaying notes found in: .note.stapsdt
      Owner                Data size        Description
      stapsdt              0x00000046       NT_STAPSDT (SystemTap probe descriptors)
        Provider: postgresql
        Name: transaction__start
        Location: 0x00000000001d5e5b, Base: 0x0000000000792ea0, Semaphore: 0x0000000000885986
        Arguments: 4@48(%rbx)

A note is three 32-bit words (sizes of owner and descriptor, type 3), the owner `stapsdt\0`, and the descriptor:
location, base and semaphore as words of the target, then provider, name and arguments, each NUL-terminated. Owner and
descriptor are padded to 4 bytes, which their sizes do not include (systemtap's wiki, UserSpaceProbeImplementation).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from stapsdtd.arch import parse_arguments
from stapsdtd.elf.container import ByteOrder
from stapsdtd.model import MAX_ARGUMENTS_BYTES, MAX_NAME_BYTES, Argument, Vaddr

STAPSDT_OWNER = b"stapsdt\0"
NT_STAPSDT = 3

MAX_ARGUMENTS = 128
MAX_DISTINCT_ARGUMENTS_BYTES = 4 << 20
"""Over all notes of an object. Parsed arguments take about 40 times their text; libjvm.so has 5 KB of text."""


class UnusableNoteError(Exception):
    """A note cannot be used. provider and name are empty if unknown."""

    def __init__(self, reason: str, provider: str = "", name: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.provider = provider
        self.name = name


class RawNote(NamedTuple):
    owner: bytes
    kind: int
    descriptor: bytes


class Addresses(NamedTuple):
    """Addresses as in the note, before adjusting for prelink. semaphore_vaddr is 0 if there is none."""

    location_vaddr: Vaddr
    base_vaddr: Vaddr
    semaphore_vaddr: Vaddr


class Texts(NamedTuple):
    provider: str
    name: str
    arguments: tuple[Argument, ...]


def iter_notes(data: bytes, byte_order: ByteOrder, alignment: int = 4) -> Iterator[RawNote]:
    """Yield all notes of a section or segment, whatever their owner. Raises UnusableNoteError at a truncated one."""
    header = struct.Struct(f"{byte_order}III")
    mask = alignment - 1
    position, end = 0, len(data)
    while end - position >= header.size:
        owner_size, descriptor_size, kind = header.unpack_from(data, position)
        owner_at = position + header.size
        descriptor_at = owner_at + owner_size + mask & ~mask
        descriptor_end = descriptor_at + descriptor_size
        if descriptor_end > end:
            raise UnusableNoteError(f"the note at byte {position} of {end} is truncated: ignoring the notes after it")
        yield RawNote(data[owner_at : owner_at + owner_size], kind, data[descriptor_at:descriptor_end])
        position = descriptor_end + mask & ~mask
    if data[position:].strip(b"\0"):
        raise UnusableNoteError(f"the note at byte {position} of {end} is truncated")


class DescriptorReader:
    """Decodes the descriptors of one object. Equal strings are parsed once and share memory."""

    def __init__(self, architecture: str, word_bytes: int, byte_order: ByteOrder) -> None:
        self._architecture = architecture
        self._addresses = struct.Struct(f"{byte_order}{'QQQ' if word_bytes == 8 else 'III'}")
        self._names: dict[bytes, str] = {}
        self._arguments: dict[bytes, tuple[Argument, ...]] = {}
        self._arguments_bytes = 0

    def addresses(self, descriptor: bytes) -> Addresses:
        if len(descriptor) < self._addresses.size:
            raise UnusableNoteError(f"a descriptor of {len(descriptor)} bytes is too short for its three addresses")
        return Addresses(*self._addresses.unpack_from(descriptor))

    def texts(self, descriptor: bytes) -> Texts:
        # anything after the third NUL is padding that some tools include in the size
        parts = descriptor[self._addresses.size :].split(b"\0", 3)
        if len(parts) < 4:
            complete = [self._name(part) for part in parts[:-1]]
            field = ("provider", "name", "argument string")[len(complete)]
            raise UnusableNoteError(f"the {field} is not NUL-terminated", *complete)
        provider, name, arguments, _ = parts
        if not provider or not name:
            missing = "name" if provider else "provider"
            raise UnusableNoteError(f"the {missing} is empty", self._name(provider), self._name(name))
        if max(len(provider), len(name)) > MAX_NAME_BYTES:
            raise UnusableNoteError(
                f"provider or name is longer than {MAX_NAME_BYTES} bytes",
                self._name(provider),
                self._name(name),
            )
        texts = self._name(provider), self._name(name)
        parsed = self._arguments.get(arguments)
        if parsed is None:
            parsed = self._parse(arguments, *texts)
        return Texts(*texts, parsed)

    def _name(self, raw: bytes) -> str:
        name = self._names.get(raw)
        if name is None:
            name = self._names.setdefault(raw, _decode(raw[:MAX_NAME_BYTES]))
        return name

    def _parse(self, raw: bytes, provider: str, name: str) -> tuple[Argument, ...]:
        if len(raw) > MAX_ARGUMENTS_BYTES:
            raise UnusableNoteError(f"{len(raw)} bytes of arguments, more than {MAX_ARGUMENTS_BYTES}", provider, name)
        self._arguments_bytes += len(raw)
        if self._arguments_bytes > MAX_DISTINCT_ARGUMENTS_BYTES:
            raise UnusableNoteError("the object has too many different argument strings", provider, name)
        parsed = parse_arguments(_decode(raw), self._architecture)
        if len(parsed) > MAX_ARGUMENTS:
            raise UnusableNoteError(f"{len(parsed)} arguments, more than {MAX_ARGUMENTS}", provider, name)
        self._arguments[raw] = parsed
        return parsed


def _decode(raw: bytes) -> str:
    """Escape invalid UTF-8, since protobuf strings cannot contain surrogates."""
    return raw.decode("utf-8", "backslashreplace")
