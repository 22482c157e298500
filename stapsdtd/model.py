"""The frozen data types that flow between the stages, in DESIGN's vocabulary; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

Vaddr = NewType("Vaddr", int)
"""An address as in the ELF file's program headers, before relocation."""

FileOffset = NewType("FileOffset", int)
"""A byte position in a file; uprobes are placed by these."""


@dataclass(frozen=True, slots=True)
class Constant:
    """The note itself gives the argument's value: `-4@$5`."""

    value: int


@dataclass(frozen=True, slots=True)
class Register:
    """The argument is in a general register.

    name: the full-width register in the architecture's own spelling (`rax` for `%eax` too).
    first_bit: the value's lowest bit in it; 8 for `%ah`, otherwise 0.
    """

    name: str
    first_bit: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """The argument is in the process's memory at base + index * scale + displacement: `-8(%rbp)`, `8(%rbp,%rcx,4)`.

    base and index are full-width registers. symbol: its address is added, as in `NBuffers(%rip)`; once resolved, the
    displacement includes its distance from the site, and base is the program counter.
    """

    base: str | None
    displacement: int = 0
    index: str | None = None
    scale: int = 1
    symbol: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """The argument is the address of a symbol, `$NBuffers`, plus displacement. base is as in Memory."""

    base: str | None
    displacement: int = 0
    symbol: str | None = None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The argument cannot be fetched; reason is for users."""

    reason: str


Operand = Constant | Register | Memory | Address | Unavailable


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a site: `-4@%esi` is text, size 4 (bytes), signed, and a Register operand.

    size and signed describe the value, whatever the operand's own width.
    """

    text: str
    size: int
    signed: bool
    is_float: bool
    operand: Operand


@dataclass(frozen=True, slots=True)
class Site:
    """A place in an object where a probe can fire. semaphore_offset is None if the note has no semaphore.

    nop_bytes: length of the nop there.
    """

    provider: str
    name: str
    site_offset: FileOffset
    semaphore_offset: FileOffset | None
    function: str | None
    arguments: tuple[Argument, ...]
    nop_bytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """An unusable note; provider and name are empty if they could not be read."""

    provider: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReadOnlySegment:
    """A segment mapped without write permission, so that memory has the same contents as the file."""

    vaddr: Vaddr
    offset: FileOffset
    size: int


@dataclass(frozen=True, slots=True)
class ParsedObject:
    """An ELF file's probes.

    build_id is lower-case hex; architecture is as named in `arch`. lacks_symbols: operands refer to symbols that were
    stripped from the file, which its debug file may have.
    """

    architecture: str
    build_id: str | None
    sites: tuple[Site, ...]
    problems: tuple[Problem, ...]
    lacks_symbols: bool = False
    read_only: tuple[ReadOnlySegment, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """A version of a file as reported by fstat. A file is parsed again only if any of these changes."""

    dev: int
    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Object:
    """An ELF file with probes that some process maps executable. path is as in the first process's maps."""

    key: ObjectKey
    path: str
    parsed: ParsedObject


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """Identifies a process even if its pid is reused. start_ticks: clock ticks since boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """An executable line of /proc/PID/maps. dev is encoded as st_dev; path lacks the kernel's decorations."""

    start: int
    end: int
    file_offset: FileOffset
    dev: int
    inode: int
    path: str


@dataclass(frozen=True, slots=True)
class Probe:
    """`provider:name` in an object, with its sites there and the processes that map it."""

    object: Object
    provider: str
    name: str
    sites: tuple[Site, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Capture:
    """How to capture an argument: as the integer that the note declares, or as the string it points to.

    max_bytes: the string's maximum length in bytes; None for the engine's default.
    """

    index: int
    is_string: bool = False
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SiteCapture:
    """A site and what to capture when it fires. The event's values are in the order of captures."""

    site: Site
    captures: tuple[Capture, ...]
