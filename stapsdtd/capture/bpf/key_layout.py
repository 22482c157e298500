"""What is at which place of the keys that the program makes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberPart:
    is_signed: bool


@dataclass(frozen=True, slots=True)
class TextPart:
    """words: of the key, which the text does not fill. max_bytes: of a text that was not cut."""

    words: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class BytesPart:
    """size: of the bytes, which begin at a word."""

    size: int

    @property
    def words(self) -> int:
        return (self.size + 7) // 8


@dataclass(frozen=True, slots=True)
class CgroupPart:
    """The id of a cgroup. is_container: whose container is meant."""

    is_container: bool


@dataclass(frozen=True, slots=True)
class FixedPart:
    """The same at all hits of the site, so that it is not in the kernel's key.

    value: None if it is unavailable, or the sink's to tell.
    """

    value: int | None


Part = NumberPart | TextPart | BytesPart | CgroupPart | FixedPart


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """What keys mean that the program makes at a site.

    site_id: 0 unless the site is part of the key. is_signed: the value, of which None says that there is none.
    """

    site_id: int
    parts: tuple[Part, ...]
    is_signed: bool | None

    @property
    def fixed_key(self) -> tuple[int | None, ...]:
        """Return the key of all hits, if all parts are fixed."""
        return tuple(part.value for part in self.parts if isinstance(part, FixedPart))
