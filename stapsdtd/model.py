"""The frozen data types that flow between the stages, in docs/design.md's vocabulary; no I/O.

Annotations bound what a file can say. `elf` keeps to these bounds, and `sandbox.codec` holds its untrusted workers to
them: a field added to ParsedObject, or to a type within it, needs no other edit to cross between the two.

Of a file with 100,000 probes there are as many sites. These, and what they consist of, refer to nothing that could
refer to them, so the garbage collector does not look at them: it would stop all threads for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Annotated, NewType

from msgspec import Meta, Struct

Vaddr = NewType("Vaddr", int)
"""An address as in the ELF file's program headers, before relocation."""

FileOffset = NewType("FileOffset", int)
"""A byte position in a file; uprobes are placed by these."""

NO_PLACE = FileOffset(0)
"""Of a note that cannot be used. A file begins with its header, so that no site is there."""

MAX_NAME_BYTES = 512
MAX_ARGUMENTS_BYTES = 4096
MAX_FUNCTION_NAME_BYTES = 4096
MAX_PROBLEMS = 100
"""Notes of an object that cannot be used and are told, each with its reason. The others are counted."""
MAX_STRING_BYTES = 4096
MAX_BUILD_ID_BYTES = 64
LONGEST_NOP_BYTES = 15
SEMAPHORE_BYTES = 2

_ESCAPED = 4
"""A byte that is not valid UTF-8 becomes an escape of four."""

MAX_REASON_BYTES = _ESCAPED * MAX_ARGUMENTS_BYTES + 512
"""A reason may quote an argument's text."""

# Lengths of strings are in bytes of UTF-8, and patterns match the whole string.
Name = Annotated[str, Meta(min_length=1, max_length=_ESCAPED * MAX_NAME_BYTES)]
MaybeName = Annotated[str, Meta(max_length=_ESCAPED * MAX_NAME_BYTES)]
FunctionName = Annotated[str, Meta(min_length=1, max_length=_ESCAPED * MAX_FUNCTION_NAME_BYTES)]
ArgumentText = Annotated[str, Meta(min_length=1, max_length=_ESCAPED * MAX_ARGUMENTS_BYTES)]
Reason = Annotated[str, Meta(min_length=1, max_length=MAX_REASON_BYTES)]
RegisterName = Annotated[str, Meta(pattern=r"[A-Za-z0-9_]{1,16}")]
ArchitectureName = Annotated[str, Meta(pattern=r"[A-Za-z0-9_.-]{1,64}")]
BuildId = Annotated[str, Meta(pattern=rf"([0-9a-f]{{2}}){{1,{MAX_BUILD_ID_BYTES}}}")]
Displacement = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
SemaphoreOffset = Annotated[FileOffset, Meta(ge=SEMAPHORE_BYTES, multiple_of=SEMAPHORE_BYTES)]


class Constant(Struct, frozen=True, gc=False):
    """The note itself gives the argument's value: `-4@$5`; a signed or unsigned number of 64 bits."""

    value: Annotated[int, Meta(ge=-(1 << 63))]


class Register(Struct, frozen=True, gc=False):
    """The argument is in a general register.

    name: the full-width register in the architecture's own spelling (`rax` for `%eax` too).
    first_bit: the value's lowest bit in it; 8 for `%ah`, otherwise 0.
    """

    name: RegisterName
    first_bit: Annotated[int, Meta(ge=0, le=8, multiple_of=8)] = 0


class Memory(Struct, frozen=True, gc=False):
    """The argument is in the process's memory at base + index * scale + displacement: `-8(%rbp)`, `8(%rbp,%rcx,4)`.

    base and index are full-width registers. symbol: its address is added, as in `NBuffers(%rip)`; once resolved, the
    displacement includes its distance from the site, and base is the program counter.
    """

    base: RegisterName | None
    displacement: Displacement = 0
    index: RegisterName | None = None
    scale: Annotated[int, Meta(ge=1, le=8)] = 1
    symbol: ArgumentText | None = None


class Address(Struct, frozen=True, gc=False):
    """The argument is the address of a symbol, `$NBuffers`, plus displacement. base is as in Memory."""

    base: RegisterName | None
    displacement: Displacement = 0
    symbol: ArgumentText | None = None


class Unavailable(Struct, frozen=True, gc=False):
    """The argument cannot be fetched; reason is for users."""

    reason: Reason


Operand = Constant | Register | Memory | Address | Unavailable


class Argument(Struct, frozen=True, gc=False):
    """One argument of a site: `-4@%esi` is text, size 4 (bytes), signed, and a Register operand.

    size and signed describe the value, whatever the operand's own width.
    """

    text: ArgumentText
    size: Annotated[int, Meta(ge=0, le=1 << 20)]
    signed: bool
    is_float: bool
    operand: Operand

    @property
    def characters(self) -> int | None:
        """Return how many bytes of text the value is itself; 0 if it neither is text nor points to any.

        None if it points to text wherever it is as wide as a pointer.
        """
        return None


class Site(Struct, frozen=True, gc=False):
    """A place in an object where a probe can fire. semaphore_offset is None if the note has no semaphore.

    nop_bytes: length of the nop there. refused: why no kernel can arm it.
    """

    provider: Name
    name: Name
    site_offset: Annotated[FileOffset, Meta(ge=0)]
    semaphore_offset: SemaphoreOffset | None
    function: FunctionName | None
    arguments: tuple[Argument, ...]
    nop_bytes: Annotated[int, Meta(ge=1, le=LONGEST_NOP_BYTES)]
    refused: Reason | None = None

    def __hash__(self) -> int:
        # sites that differ differ in these, and dictionaries of thousands of sites are made while a client waits
        return hash((self.provider, self.name, self.site_offset, self.semaphore_offset, self.function))


@dataclass(frozen=True, slots=True)
class Problem:
    """An unusable note; provider and name are empty if they could not be read.

    duplicates: the offset of the site whose first note is used in its place; None if its hits are nobody's.
    """

    provider: MaybeName
    name: MaybeName
    reason: Reason
    duplicates: Annotated[FileOffset, Meta(ge=0)] | None = None

    @property
    def is_nameless(self) -> bool:
        """Report whether selectors cannot name it."""
        return not (self.provider and self.name)


@dataclass(frozen=True, slots=True)
class ReadOnlySegment:
    """A segment mapped without write permission, so that memory has the same contents as the file."""

    vaddr: Annotated[Vaddr, Meta(ge=0)]
    offset: Annotated[FileOffset, Meta(ge=0)]
    size: Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class ParsedObject:
    """An ELF file's probes.

    build_id is lower-case hex; architecture is as named in `arch`. lacks_symbols: operands refer to symbols that were
    stripped from the file, which its debug file may have. problems_left_out: how many there are beyond problems.
    """

    architecture: ArchitectureName
    build_id: BuildId | None
    sites: tuple[Site, ...]
    problems: tuple[Problem, ...]
    lacks_symbols: bool = False
    read_only: tuple[ReadOnlySegment, ...] = ()
    problems_left_out: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0

    @cached_property
    def providers(self) -> frozenset[str]:
        return frozenset(site.provider for site in self.sites)

    @cached_property
    def probe_count(self) -> int:
        """How many names its sites have."""
        return len({(site.provider, site.name) for site in self.sites})

    def prepare(self) -> None:
        """Find out what threads that all share ask for, which takes 0.1 s in a file of 500,000 sites."""
        _ = self.all_providers, self.probe_count

    @cached_property
    def unusable(self) -> tuple[Site, ...]:
        """Notes that cannot be used, as far as their names are known: of each name the first, as a site that is refused
        and has no place.
        """
        return _without_place(self.problems)

    @cached_property
    def refused(self) -> tuple[Site, ...]:
        """Those that are refused to whoever asks for them. Duplicates are not: all hits are those of their site."""
        return _without_place(each for each in self.problems if each.duplicates is None)

    @cached_property
    def duplicates(self) -> dict[tuple[str, str, FileOffset], str]:
        """Why notes are not used beside the first ones of their sites, by provider, name and offset of these."""
        return {
            (each.provider, each.name, each.duplicates): each.reason
            for each in self.problems
            if each.duplicates is not None
        }

    @cached_property
    def all_providers(self) -> frozenset[str]:
        """The providers of sites and of notes that cannot be used."""
        return self.providers.union(site.provider for site in self.unusable)


def _without_place(problems: Iterable[Problem]) -> tuple[Site, ...]:
    reasons: dict[tuple[str, str], str] = {}
    for each in problems:
        if not each.is_nameless:
            reasons.setdefault((each.provider, each.name), each.reason)
    return tuple(
        Site(provider, name, NO_PLACE, None, None, (), 1, reason) for (provider, name), reason in reasons.items()
    )


FileId = tuple[int, int, int]
"""Device, inode number and instance of a file: see `ObjectKey`."""


class ObjectKey(Struct, frozen=True, gc=False):
    """A version of a file. A file is parsed again only if any of these changes; `procs.file_keys` determines them.

    dev, inode: of the inode that uprobes compare, if is_certain; else as reported by fstat for a file of an overlay,
    which may be the same inode as another file. instance: see `kernel.inodes.MappedInode`.
    """

    dev: int
    inode: int
    size: int
    mtime_ns: int
    instance: int = 0
    is_certain: bool = True

    @property
    def file(self) -> FileId:
        """Return what all versions of the file have in common."""
        return self.dev, self.inode, self.instance

    @property
    def likeness(self) -> tuple[int, int, int]:
        """Return what is the same for keys of one version of a file, however they were determined.

        Overlays put the number of a layer into the upper bits of its inode numbers (xino in fs/overlayfs).
        """
        return self.inode & 0xFFFFFFFF, self.size, self.mtime_ns

    def may_be(self, other: ObjectKey) -> bool:
        """Report whether the kernel may have one inode for two different keys."""
        return not (self.is_certain and other.is_certain) and self.likeness == other.likeness


@dataclass(frozen=True, slots=True)
class Object:
    """An ELF file with probes that some process maps executable. path is as in the first process's maps.

    is_kernel: it is the kernel or a module, whose name is the path; its sites are functions' entries and returns.
    refused: sites that cannot be armed, and why.
    """

    key: ObjectKey
    path: str
    parsed: ParsedObject
    is_kernel: bool = False
    refused: dict[Site, str] = field(default_factory=dict, compare=False)


class ProcessKey(Struct, frozen=True, gc=False):
    """Identifies a process even if its pid is reused. start_ticks: clock ticks since boot."""

    pid: int
    start_ticks: int


class Mapping(Struct, frozen=True, gc=False):
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


class BuiltIn(StrEnum):
    """What an event may tell of the thread that hit, besides the probe's arguments.

    UID, GID: real ids in the host's user namespace. CGROUP: path in the unified hierarchy. CONTAINER: id or name of the
    container that this cgroup is part of, or empty. ELAPSED: nanoseconds since the start that a span's end belongs to.
    """

    UID = "uid"
    GID = "gid"
    CGROUP = "cgroup"
    CONTAINER = "container"
    ELAPSED = "elapsed"


@dataclass(frozen=True, slots=True)
class StartArgument:
    """An argument, by its index, of the probe that began the span that an event ends."""

    index: int


Subject = int | BuiltIn | StartArgument
"""What a capture captures: an argument of the site, by its index, or something else that an event can tell."""


CapturedSubject = Argument | BuiltIn | StartArgument
"""As `Subject`, with the argument itself."""


@dataclass(frozen=True, slots=True)
class Capture:
    """How to capture an argument: as the integer that the note declares, or as the string or the bytes it points to.

    max_bytes: the string's maximum length, at most MAX_STRING_BYTES; None for the engine's default. Of a buffer, its
    length. is_hex: people want to see the integer in hexadecimal. What is captured is the same.
    """

    subject: Subject
    is_string: bool = False
    max_bytes: int | None = None
    is_hex: bool = field(default=False, compare=False)
    is_buffer: bool = False

    @property
    def is_pointed_to(self) -> bool:
        """Report whether it is what the argument points to."""
        return self.is_string or self.is_buffer


@dataclass(frozen=True, slots=True)
class SiteCapture:
    """A site and what to capture when it fires. The event's values are in the order of captures.

    is_start: a hit begins a span, rather than making an event. listed: if some captures serve to compute other values,
    how many come before these; None if all are delivered as they are.
    """

    site: Site
    # few differ in that alone, and it takes long to hash
    captures: tuple[Capture, ...] = field(hash=False)
    is_start: bool = False
    listed: int | None = None

    def subject(self, position: int) -> CapturedSubject:
        """Return what the capture at a position captures."""
        return self.subject_of(self.captures[position])

    def subject_of(self, capture: Capture) -> CapturedSubject:
        """Return what a capture captures here."""
        subject = capture.subject
        return self.site.arguments[subject] if isinstance(subject, int) else subject
