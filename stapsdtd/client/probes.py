"""The probes of the server's host, as the client returns them.

Offsets are file offsets in bytes, times are Unix time in nanoseconds, and pids are in the host's pid namespace. Fields
that the server leaves empty because they do not apply are None.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stapsdtd.client.messages import Interruption, Resubscribed

_DELETED = " (deleted)"
"""The kernel's word behind the path of a deleted file or memfd."""


@dataclass(frozen=True, slots=True)
class Constant:
    """The value is given in the note."""

    value: int


@dataclass(frozen=True, slots=True)
class Register:
    """The value is in a register, starting at bit first_bit. name is the full-width register's."""

    name: str
    first_bit: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The value is in the process's memory at base + index * scale + displacement.

    base, index: register names, None if not used.
    symbol: the symbol that the note names, if any; base is the program counter then, and displacement is relative to
    the site.
    """

    base: str | None
    displacement: int
    index: str | None = None
    scale: int = 1
    symbol: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """The value is the address of a symbol: base + displacement."""

    base: str | None
    displacement: int
    symbol: str | None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The value cannot be fetched."""

    reason: str


Operand = Constant | Register | Memory | Address | Unavailable


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a site. text is as in the note, `-4@%esi`; size is in bytes."""

    text: str
    size: int
    signed: bool
    is_float: bool
    operand: Operand


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a probe can fire.

    site_id: identifies the site in a subscription's events; 0 elsewhere.
    refused: in listings, why the server's host never arms the site, or empty.
    """

    site_id: int
    offset: int
    semaphore_offset: int | None
    function: str | None
    arguments: tuple[Argument, ...]
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """`provider:name` in one object. pids: the processes that map the object. build_id: in lower-case hex."""

    provider: str
    name: str
    path: str
    build_id: str | None
    architecture: str
    pids: tuple[int, ...]
    sites: tuple[Site, ...]

    @property
    def module(self) -> str:
        """The file's name, as in a selector."""
        return os.path.basename(self.path.removesuffix(_DELETED))


@dataclass(frozen=True, slots=True)
class Process:
    """A process that maps probes.

    cgroup: the path in the unified hierarchy.
    container_id: id or name of the innermost container. It is not authenticated: anyone who controls part of the cgroup
    tree can imitate a container.
    container_name: what its engine calls it, NAMESPACE/POD/CONTAINER in Kubernetes; None if that is not known.
    namespace_pid: the pid in the process's own pid namespace.
    """

    pid: int
    comm: str
    command_line: tuple[str, ...]
    user: str
    started_ns: int
    cgroup: str | None
    container_id: str | None
    container_name: str | None
    namespace_pid: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A note that cannot be used or, if provider and name are empty, several of which the names are not known."""

    path: str
    provider: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class MovedText:
    """Text of a file in whose place a process executes something else, so that probes there never fire in it.

    memory: what it executes, "anonymous memory" for one. first_offset, last_offset: of the sites that are concerned, in
    the file. sites: how many these are.
    """

    pid: int
    comm: str
    uid: int
    path: str
    memory: str
    first_offset: int
    last_offset: int
    sites: int

    def concerns(self, probe: Probe) -> bool:
        """Report whether the probe has a site there."""
        return (
            probe.path == self.path
            and self.pid in probe.pids
            and any(self.first_offset <= site.offset <= self.last_offset for site in probe.sites)
        )


@dataclass(frozen=True, slots=True)
class ProbeListing:
    """A sequence of probes. processes and problems are filled in with details=True, problems with problems=True, too,
    and moved with moved=True.

    sites_left_out, files_left_out, problems_left_out: the numbers of sites of very large objects, of installed files,
    and of notes that cannot be used, that were left out.
    """

    probes: tuple[Probe, ...]
    processes: tuple[Process, ...]
    problems: tuple[Problem, ...]
    sites_left_out: int = 0
    files_left_out: int = 0
    problems_left_out: int = 0
    moved: tuple[MovedText, ...] = ()

    def __iter__(self) -> Iterator[Probe]:
        return iter(self.probes)

    def __len__(self) -> int:
        return len(self.probes)


@dataclass(frozen=True, slots=True)
class ProbeAdded:
    probe: Probe


@dataclass(frozen=True, slots=True)
class ProbeRemoved:
    probe: Probe


@dataclass(frozen=True, slots=True)
class SnapshotComplete:
    """All probes that existed when the watch began have been sent; changes follow."""


WatchMessage: TypeAlias = "ProbeAdded | ProbeRemoved | SnapshotComplete | Interruption | Resubscribed"
