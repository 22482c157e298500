"""`stapsdt doctor [RUNTIME] PID|PATH`: which probes a process or a file has, and whether they can be used from here.

ok       process 4711: /usr/lib/jvm/…/libjvm.so has 535 probes of hotspot and hotspot_jni: …
missing  condition: hotspot:method__entry: the JVM fires it only with -XX:+DTraceMethodProbes, and process 4711 was …
         start it with that, or with -XX:+ExtendedDTraceProbes for all of these; both slow it down
ok       access: you may trace process 4711
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from stapsdtd.cli.check import Check
from stapsdtd.cli.jvm_switches import Switches, switches_of
from stapsdtd.cli.known_signatures import catalog
from stapsdtd.cli.render import abbreviate, plural
from stapsdtd.cli.runtimes import NO_NOTES, RUNTIMES, Runtime, files_of, has_runtime, runtime_of
from stapsdtd.cli.silence import conditions
from stapsdtd.client import Client, ClientError, SubscribeOptions

if TYPE_CHECKING:
    from stapsdtd.cli.options import Server
    from stapsdtd.client import Probe
    from stapsdtd.signatures import Catalog

_TIMEOUT_SECONDS = 10.0
_SHOWN_PROBES = 8
_MAX_BYTES = 1 << 20
"""Of a command line, and of an environment."""
_NOTHING = "stapsdt-doctor:nothing"
"""A selector that no probe has, for which nothing is armed."""
_SWITCH = re.compile(r"-XX:\+(\w+)")


@dataclass(frozen=True, slots=True)
class Asked:
    """What `doctor` is asked about. runtime: empty if it is not told. pid: of a process; None for a file, path."""

    runtime: str = ""
    pid: int | None = None
    path: str = ""

    @property
    def has_target(self) -> bool:
        return self.pid is not None or bool(self.path)


def asked(words: Sequence[str]) -> Asked:
    """Return what words are about: RUNTIME, PID or PATH, or RUNTIME and one of these. Raises click.UsageError."""
    runtimes, rest = [each for each in words if each in RUNTIMES], [each for each in words if each not in RUNTIMES]
    if len(runtimes) > 1 or len(rest) > 1:
        first = " ".join(["stapsdt doctor", *runtimes[:1], *rest[:1]])
        raise click.UsageError(f"one runtime, and one process or file, at a time; type: {first}")
    runtime = runtimes[0] if runtimes else ""
    if not rest:
        return Asked(runtime)
    (word,) = rest
    if word.isdecimal():
        return Asked(runtime, pid=int(word))
    if "/" in word:
        return Asked(runtime, path=word)
    if (found := shutil.which(word)) is not None:
        return Asked(runtime, path=found)
    known = ", ".join(RUNTIMES)
    raise click.UsageError(
        f"{word} is no runtime ({known}), no pid, no path with a slash, and no program in $PATH; "
        f"type: stapsdt doctor {runtime or 'python'} PID, or stapsdt doctor ./{word}"
    )


def check_target(target: Asked, server: Server) -> list[Check]:
    """Return what there is to tell of a process or a file."""
    with Client(server.address, tls=server.tls, timeout_seconds=_TIMEOUT_SECONDS) as client:
        if target.pid is None:
            return list(_of_file(client, target))
        return list(_Process(client, target.pid, target.runtime).checks())


def _of_file(client: Client, target: Asked) -> Iterator[Check]:
    path = os.path.abspath(target.path)
    if (problem := _why_no_program(path)) is not None:
        yield problem
        return
    name = target.runtime or runtime_of(os.path.realpath(path)) or ""
    runtime = RUNTIMES.get(name)
    found: list[Probe] = []
    real = os.path.realpath(path)
    # what lies near another program is not its own
    for file in files_of(runtime, path) if runtime and has_runtime(runtime, [path, real]) else [real]:
        try:
            found += _own(client.list_probes(files=[file]), runtime)
        except ClientError as error:
            if not str(error).endswith(NO_NOTES):
                yield Check(file, False, False, f"cannot be checked: {error}", "")
                return
        if found:
            # Debian's python3 has a copy of what its library has
            break
    if not found:
        yield _lacking(path, target.path, path, [path, real], runtime)
        return
    yield from _probes(path, found)
    for condition in conditions(catalog(), _names(found)):
        yield Check("condition", True, False, condition, "")


def _why_no_program(path: str) -> Check | None:
    """Return why a file cannot be asked about, or None."""
    try:
        with open(path, "rb") as file:
            first = file.read(4)
    except FileNotFoundError:
        remedy = "name one that exists; a container's is /proc/PID/root/PATH, with the pid of a process in it"
        return Check(path, False, False, "there is no such file", remedy)
    except IsADirectoryError:
        return Check(path, False, False, "it is a directory", "name the program or the library in it")
    except OSError as error:
        return Check(path, False, False, f"you may not read it: {error.strerror}", "run this as root")
    if first.startswith(b"#!"):
        remedy = "name the program that it runs, or the pid of a process that does"
        return Check(path, False, False, "it is a script, and scripts have no probes of their own", remedy)
    if first != b"\x7fELF":
        return Check(path, False, False, "it is no ELF file", "name a program or a library")
    return None


class _Process:
    def __init__(self, client: Client, pid: int, runtime: str) -> None:
        self._client = client
        self._pid = pid
        self._name = f"process {pid}"
        self._program = ""
        with suppress(OSError):
            self._program = os.readlink(f"/proc/{pid}/exe")
        self._runtime_name = runtime or runtime_of(self._program) or ""

    def checks(self) -> Iterator[Check]:
        if (problem := self._why_none()) is not None:
            yield problem
            return
        try:
            listed = list(self._client.list_probes(pids=[self._pid]))
        except ClientError as error:
            yield Check(self._name, False, False, f"its probes cannot be listed: {error}", "")
            return
        if not self._runtime_name:
            providers = {probe.provider for probe in listed}
            told = (name for name, each in RUNTIMES.items() if providers.intersection(each.providers))
            self._runtime_name = next(told, "")
        runtime = RUNTIMES.get(self._runtime_name)
        access = self._access()
        if probes := _own(listed, runtime):
            yield from _probes(self._name, probes)
            yield from self._conditions(catalog(), probes)
        elif listed or access.available:
            files = [self._program, *_mapped_files(self._pid)]
            yield _lacking(self._name, str(self._pid), self._program, files, runtime)
        else:
            detail = "its probes are not shown to you"
            yield Check(self._name, False, False, detail, "run this as root, or as the user whose process it is")
        yield access
        yield from self._files()

    def _why_none(self) -> Check | None:
        """Return why there is no process to ask about, or None."""
        status = _status(self._pid)
        if status is None:
            remedy = (
                "see 'ps -e' for those that run; one in a container has another pid here, which 'stapsdt list' shows"
            )
            return Check(self._name, False, False, "there is no such process", remedy)
        if (leader := int(status.get("Tgid", self._pid))) != self._pid:
            return Check(
                self._name, False, False, f"it is a thread of process {leader}", f"type: stapsdt doctor {leader}"
            )
        if "VmSize" not in status:
            detail = "it has no program: a thread of the kernel, or a process that has ended"
            return Check(self._name, False, False, detail, "name a process that runs one")
        return None

    def _access(self) -> Check:
        """Ask the server whether this process may be traced, by a subscription to nothing."""
        try:
            with self._client.subscribe(_NOTHING, SubscribeOptions(pids=[self._pid])) as subscription:
                subscription.unsubscribe()
        except ClientError as error:
            return Check("access", False, False, str(error), self._remedy())
        return Check("access", True, False, f"you may trace {self._name}", "")

    def _remedy(self) -> str:
        whole = "run this as root, or ask for a role that traces everybody's processes (docs/access.md)"
        real = (_status(self._pid) or {}).get("Uid", "").split()[:1]
        with suppress(OSError):
            # whom the kernel takes for the owner of a process that may not be inspected
            if real and os.stat(f"/proc/{self._pid}").st_uid != int(real[0]):
                return f"it is not dumpable, as after setuid or with capabilities, so only root may inspect it: {whole}"
        return whole

    def _conditions(self, known: Catalog, probes: Sequence[Probe]) -> Iterator[Check]:
        """Yield when probes fire, and whether a JVM was started so that they do."""
        switches = self._switches() if self._runtime_name == "java" else None
        for condition in conditions(known, _names(probes)):
            needed = _SWITCH.search(condition)
            if needed is None or switches is None:
                yield Check("condition", True, False, condition, "")
            elif needed[1] in switches.on:
                yield Check("condition", True, False, f"{condition}, with which {self._name} was started", "")
            elif switches.is_all:
                remedy = "start it with that, or with -XX:+ExtendedDTraceProbes for all of these; both slow it down"
                yield Check("condition", False, False, f"{condition}, and {self._name} was started without it", remedy)
            else:
                remedy = f"see what it uses: jcmd {self._pid} VM.flags"
                yield Check("condition", False, False, f"{condition}; {self._name} has options in files", remedy)

    def _switches(self) -> Switches | None:
        """Return with which switches a JVM was started, None if that is not shown to this user."""
        try:
            line, environment = (_strings(f"/proc/{self._pid}/{name}") for name in ("cmdline", "environ"))
        except OSError:
            return None
        return switches_of(line, dict(each.partition("=")[::2] for each in environment))

    def _files(self) -> Iterator[Check]:
        with suppress(OSError):
            own, others = (os.readlink(f"/proc/{pid}/ns/mnt") for pid in ("self", self._pid))
            if own != others:
                where = f"/proc/{self._pid}/root"
                detail = (
                    f"{self._name} has another mount namespace, as in a container: its paths are not those here; "
                    f"use --pid {self._pid}, or --file {where}{self._program or '/PATH'}"
                )
                yield Check("files", True, False, detail, "")


def _own(probes: Iterable[Probe], runtime: Runtime | None) -> list[Probe]:
    return [probe for probe in probes if runtime is None or probe.provider in runtime.providers]


def _names(probes: Iterable[Probe]) -> list[tuple[str, str]]:
    return [(probe.provider, probe.name) for probe in probes]


def _probes(name: str, probes: Sequence[Probe]) -> Iterator[Check]:
    """Yield what each file has, and which of that cannot be armed."""
    for path in dict.fromkeys(probe.path for probe in probes):
        in_file = [probe for probe in probes if probe.path == path]
        providers = " and ".join(sorted({probe.provider for probe in in_file}))
        shown = abbreviate(sorted({probe.name for probe in in_file}), _SHOWN_PROBES)
        of_file = path if path == name else f"{path} has"
        detail = f"{'it has' if path == name else of_file} {plural(len(in_file), 'probe')} of {providers}: {shown}"
        yield Check(name, True, False, detail, "")
        refused = {probe.name: site.refused for probe in in_file for site in probe.sites if site.refused}
        if refused:
            reason = next(iter(refused.values()))
            detail = (
                f"{plural(len(refused), 'probe')} of {path} cannot be armed, such as {next(iter(refused))}: {reason}"
            )
            yield Check(name, False, False, detail, "")


def _lacking(name: str, target: str, program: str, files: Sequence[str], runtime: Runtime | None) -> Check:
    """target: what the user named. files: the program, and what else it maps as far as that is known."""
    where = program or "its program"
    if runtime is not None and not has_runtime(runtime, files):
        detail = f"{where} has no probes of {runtime.providers[0]}: by the names of its files, it is another program"
        return Check(name, False, False, detail, f"ask without the runtime: stapsdt doctor {target}")
    if runtime is None:
        detail = f"{where} has no probes"
        return Check(name, False, False, detail, "for a library of it, name that: stapsdt doctor PATH")
    return Check(
        name, False, False, f"{where} has no probes of {runtime.providers[0]}: {runtime.cause}", runtime.remedy
    )


def _status(pid: int) -> dict[str, str] | None:
    """Return the fields of /proc/PID/status, None if there is no such process."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except OSError:
        return None


def _mapped_files(pid: int) -> Iterator[str]:
    with suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        yield from (line.rstrip("\n") for line in maps if "/" in line)


def _strings(path: str) -> list[str]:
    with open(path, "rb") as file:
        return file.read(_MAX_BYTES).decode(errors="replace").removesuffix("\0").split("\0")
