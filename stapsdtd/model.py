"""The plain frozen data that flows between the stages; DESIGN's vocabulary, and no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

Vaddr = NewType("Vaddr", int)
"""An address as the ELF file's program headers give it, before relocation."""

FileOffset = NewType("FileOffset", int)
"""A byte position in a file: what uprobes are addressed by."""


@dataclass(frozen=True, slots=True)
class Constant:
    """The argument's value stands in the note: `-4@$5`."""

    value: int


@dataclass(frozen=True, slots=True)
class Register:
    """The argument is in a general register.

    name: the full-width register's name in the architecture's own spelling (`rax` for `%eax` too).
    first_bit: where the value begins in it; 8 for `%ah`, otherwise 0.
    """

    name: str
    first_bit: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """The argument is in the process's memory at base + index * scale + displacement: `-8(%rbp)`, `8(%rbp,%rcx,4)`.

    base and index are full-width registers. symbol: whose address is to be added, `NBuffers(%rip)`; once it is looked
    up, its distance from the site is in the displacement, and base is the program counter.
    """

    base: str | None
    displacement: int = 0
    index: str | None = None
    scale: int = 1
    symbol: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """The argument is the address of a symbol, `$NBuffers`, or displacement bytes behind it; base as Memory has it."""

    base: str | None
    displacement: int = 0
    symbol: str | None = None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The argument cannot be fetched; reason is fit to be shown to a user."""

    reason: str


Operand = Constant | Register | Memory | Address | Unavailable


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a site: `-4@%esi` is text, size 4 (bytes), signed, and a Register operand.

    size and signed describe the value, whatever the operand's own width is.
    """

    text: str
    size: int
    signed: bool
    is_float: bool
    operand: Operand


@dataclass(frozen=True, slots=True)
class Site:
    """One place in one object where a probe can fire; semaphore_offset is None where the note names none.

    nop_bytes: how long the instruction there is.
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
    """A note that was found and cannot be used; provider and name are empty where they could not be read."""

    provider: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReadOnlySegment:
    """A part of the file that processes have in memory as it is there, since they map it without write permission."""

    vaddr: Vaddr
    offset: FileOffset
    size: int


@dataclass(frozen=True, slots=True)
class ParsedObject:
    """What one ELF file says of its probes.

    build_id is lower-case hex; architecture is a name in `operands`. lacks_symbols: operands name some that the file
    was stripped of, and that its debug file may have.
    """

    architecture: str
    build_id: str | None
    sites: tuple[Site, ...]
    problems: tuple[Problem, ...]
    lacks_symbols: bool = False
    read_only: tuple[ReadOnlySegment, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """One version of one file, as fstat sees it: parsed once while all four stay the same."""

    dev: int
    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Object:
    """An ELF file with probes that some process maps executable. path is what the first process's maps showed."""

    key: ObjectKey
    path: str
    parsed: ParsedObject


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """A process for as long as it lives: a reused pid has another start time (clock ticks since boot)."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """One executable line of /proc/PID/maps; dev as st_dev is, path undecorated."""

    start: int
    end: int
    file_offset: FileOffset
    dev: int
    inode: int
    path: str


@dataclass(frozen=True, slots=True)
class Probe:
    """`provider:name` in an object, with all its sites there and the processes that map it."""

    object: Object
    provider: str
    name: str
    sites: tuple[Site, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Capture:
    """What to take of one argument: its integer as the note declares it, or the string it points to.

    max_bytes: bound of the string's length in bytes, None for the engine's own.
    """

    index: int
    is_string: bool = False
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SiteCapture:
    """A site and what is taken of it when it fires; the order of captures is that of the event's values."""

    site: Site
    captures: tuple[Capture, ...]
