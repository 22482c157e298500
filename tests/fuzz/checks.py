"""What holds of every file: it is refused as unreadable, or all that is said of it can be passed on."""

from __future__ import annotations

import errno
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import BinaryIO

import numpy as np

from stapsdtd.api import convert
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.armed import ArmedObject, ArmedSite
from stapsdtd.capture.bpf.constants import ReadOnlyFile
from stapsdtd.capture.bpf.operands import encode_value
from stapsdtd.capture.bpf.slots import Slot
from stapsdtd.capture.bpf.subjects import source_of
from stapsdtd.capture.ftrace.executor import Executor
from stapsdtd.elf import parse_object
from stapsdtd.elf.container import MAX_SECTIONS
from stapsdtd.elf.nops import nop_at
from stapsdtd.elf.notes import MAX_ARGUMENTS
from stapsdtd.elf.sites import MAX_NOTES
from stapsdtd.errors import ObjectUnreadableError, TracefsRejectedError
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.kernel.places import UPROBE_EVENTS
from stapsdtd.kernel.probe_events import ProbeEvent
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import (
    LONGEST_NOP_BYTES,
    MAX_ARGUMENTS_BYTES,
    MAX_BUILD_ID_BYTES,
    MAX_FUNCTION_NAME_BYTES,
    MAX_NAME_BYTES,
    SEMAPHORE_BYTES,
    Address,
    Argument,
    Capture,
    Constant,
    Memory,
    Object,
    ObjectKey,
    Operand,
    ParsedObject,
    Probe,
    Register,
    Site,
    SiteCapture,
    Unavailable,
)
from stapsdtd.plan.events import group_sites
from stapsdtd.plan.steps import Define
from stapsdtd.plan.values import Value
from stapsdtd.runtime.fair_thread import finish
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.processor import seconds_beyond

MAX_SECONDS = 2.0
"""Of processor time for one file; ten times of what any of them should take."""

KNOWN: dict[str, str] = {}
"""Bugs by what the checks say of them, each of which has a strict xfail in `tests.unit.test_elf_fuzz`."""

_MAX_SIZE = 1 << 20
_OPERAND = struct.Struct("=QI12B16x")
_TAKES, _KINDS = frozenset(layout.Take), frozenset(layout.OperandKind)
_ESCAPED = 4
"""A byte that is no UTF-8 becomes four characters."""

_GROUP = "stapsdtd_1_2_3"
_KEY = ObjectKey(1, 2, 3, 4)
_DESCRIPTOR = 7
_FILE = f"/proc/self/fd/{_DESCRIPTOR}"

_PLACE = r"/proc/self/fd/7:0x[0-9a-f]{1,16}(?:\(0x[0-9a-f]{1,16}\))?"
_REGISTER = r"%[a-z][a-z0-9_]{0,9}"
_MEMORY = rf"(?:[+-][0-9]{{1,19}}\({_REGISTER}\)|@0x[0-9a-f]{{1,16}})"
_FETCHED = "|".join(
    (
        r"\\0:u(?:8|16|32|64)",
        rf"{_REGISTER}:u64",
        rf"{_MEMORY}:u(?:8|16|32|64)",
        rf"{_MEMORY}:ustring",
        rf"\+0\((?:{_REGISTER}|{_MEMORY})\):ustring",
    )
)
PLACE = re.compile(_PLACE, re.ASCII)
BPF_DEFINITION = re.compile(rf"p:{_GROUP}/g0_1_2_3 {_PLACE}", re.ASCII)
FTRACE_DEFINITION = re.compile(
    rf"p:{_GROUP}/e[0-9]+_1_2_3 {_PLACE} site=\\[0-9]{{1,4}}:u32 comm=\$comm(?: [qdwbs][0-9]{{1,3}}=(?:{_FETCHED}))*",
    re.ASCII,
)
REMOVAL = re.compile(rf"-:{_GROUP}/[eg][0-9]+_1_2_3", re.ASCII)


_DEFINITION = re.compile(f"{BPF_DEFINITION.pattern}|{FTRACE_DEFINITION.pattern}|{REMOVAL.pattern}", re.ASCII)

_MOST_PLANNED = 400
"""Sites of an object whose definitions are looked at."""


class BrokenError(AssertionError):
    """Something does not hold."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise BrokenError(what)


def known_bug(error: Exception) -> str | None:
    return next((reason for pattern, reason in KNOWN.items() if re.search(pattern, str(error))), None)


class PeakMemory:
    """How much memory was added at the worst moment since it was made."""

    def __init__(self) -> None:
        with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the peak is what is used now
        self._before = _peak_bytes()

    def growth_bytes(self) -> int:
        return _peak_bytes() - self._before


def _peak_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) << 10


def check(file: BinaryIO, max_seconds: float = MAX_SECONDS) -> ParsedObject | None:
    """Parse and check everything; answer what was found, None of a file that is refused."""
    parsed: ParsedObject | None = None

    def parse() -> None:
        nonlocal parsed
        try:
            parsed = parse_object(file)
        except ObjectUnreadableError as error:
            _check_text(str(error), 1 << 12)
            require("memory" not in str(error), f"memory is used up: {error}")

    took = seconds_beyond(max_seconds, parse)
    require(not took, f"parse_object took {took:.1f} s")
    found = parsed
    if found is not None and (found.sites or found.problems):
        took = seconds_beyond(2 * max_seconds, lambda: check_parsed(found, file))
        require(not took, f"the checks took {took:.1f} s")
    return found


def check_parsed(parsed: ParsedObject, file: BinaryIO) -> None:
    _check_text(parsed.architecture, 64)
    build_id = parsed.build_id
    require(
        build_id is None or re.fullmatch(rf"(?:[0-9a-f]{{2}}){{1,{MAX_BUILD_ID_BYTES}}}", build_id),
        f"build-id {build_id!r}",
    )
    require(len(parsed.sites) <= MAX_NOTES, f"{len(parsed.sites)} sites")
    require(len(parsed.problems) <= MAX_NOTES + 2 * MAX_SECTIONS, f"{len(parsed.problems)} problems")
    for problem in parsed.problems:
        _check_text(problem.provider, _ESCAPED * MAX_NAME_BYTES)
        _check_text(problem.name, _ESCAPED * MAX_NAME_BYTES)
        _check_text(problem.reason, 1 << 10)
        require(problem.reason, "a problem without a reason")
    size = file.seek(0, 2)
    argument_tuples: dict[int, tuple[Argument, ...]] = {}
    for site in parsed.sites:
        _check_site(site, parsed.architecture, file, size)
        argument_tuples[id(site.arguments)] = site.arguments
    for argument in set(chain.from_iterable(argument_tuples.values())):
        _check_argument(argument, parsed.architecture)
    _check_messages(parsed)
    _check_definitions(parsed)


def _check_site(site: Site, architecture: str, file: BinaryIO, size: int) -> None:
    for text in (site.provider, site.name):
        require(text, "an empty name")
        _check_text(text, _ESCAPED * MAX_NAME_BYTES)
        require("\0" not in text, f"{text!r} has a NUL")
    require(type(site.site_offset) is int and 0 <= site.site_offset < size, f"site offset {site.site_offset!r}")
    file.seek(site.site_offset)
    require(
        nop_at(architecture, file.read(LONGEST_NOP_BYTES)).length == site.nop_bytes, f"{site.site_offset:#x}: the nop"
    )
    semaphore = site.semaphore_offset
    if semaphore is not None:
        require(type(semaphore) is int and 0 < semaphore <= size - SEMAPHORE_BYTES, f"semaphore offset {semaphore!r}")
        require(semaphore % SEMAPHORE_BYTES == 0, f"semaphore offset {semaphore}")
    if site.function is not None:
        require(site.function, "a function without a name")
        _check_text(site.function, _ESCAPED * MAX_FUNCTION_NAME_BYTES)
    require(len(site.arguments) <= MAX_ARGUMENTS, f"{len(site.arguments)} arguments")


def _check_text(text: str, most: int) -> None:
    require(type(text) is str and len(text) <= most, f"{text[:80]!r} has {len(text)} characters")
    text.encode()


def _check_argument(argument: Argument, architecture: str) -> None:
    _check_text(argument.text, _ESCAPED * MAX_ARGUMENTS_BYTES)
    require(0 <= argument.size <= _MAX_SIZE, f"size {argument.size}")
    require({type(argument.signed), type(argument.is_float)} == {bool}, f"{argument}")
    _check_operand(argument.operand)
    for capture in (Capture(0), Capture(0, is_string=True), Capture(0, is_string=True, max_bytes=16)):
        _check_encoding(source_of(capture, argument, architecture), argument, architecture)


def _check_operand(operand: Operand) -> None:
    match operand:
        case Constant(value):
            require(-(1 << 63) <= value < 1 << 64, f"{operand} has no 64 bits")
        case Register(name, first_bit):
            _check_register(name)
            require(first_bit in {0, 8}, f"{operand}")
        case Memory(base, displacement, index, scale, symbol):
            _check_register(base)
            _check_register(index)
            _check_displacement(displacement)
            require(1 <= scale < 1 << 32, f"scale {scale}")
            _check_text(symbol or "", _ESCAPED * MAX_ARGUMENTS_BYTES)
        case Address(base, displacement, symbol):
            _check_register(base)
            _check_displacement(displacement)
            _check_text(symbol or "", _ESCAPED * MAX_ARGUMENTS_BYTES)
        case Unavailable(reason):
            require(reason, "unavailable without a reason")
            _check_text(reason, _ESCAPED * MAX_ARGUMENTS_BYTES + 200)


def _check_register(name: str | None) -> None:
    require(name is None or re.fullmatch(r"[a-z][a-z0-9_]{0,15}", name), f"register {name!r}")


def _check_displacement(displacement: int) -> None:
    require(-(1 << 63) <= displacement < 1 << 63, f"displacement {displacement} has no 64 bits")


def _check_encoding(source: Value | Constant | Unavailable, argument: Argument, architecture: str) -> None:
    if not isinstance(source, Value):
        return
    row = encode_value(source, argument, architecture)
    require(len(row) == layout.OPERAND.itemsize, f"an operand of {len(row)} bytes")
    _, limit, take, kind, _, _, _, width, left, right, _, _, is_kernel, _ = _OPERAND.unpack(row)
    is_right = take in _TAKES and kind in _KINDS and left < 64 and right < 64 and width in {0, 1, 2, 4, 8}
    require(not is_kernel, f"{argument.text!r} reads the kernel's memory")
    if not is_right or limit > layout.MAX_TEXT + 1:
        raise BrokenError(f"{argument.text!r} is encoded as {np.frombuffer(row, layout.OPERAND)}")
    if argument.is_float and not source.is_text:
        require(argument.size in {4, 8}, f"{argument.text} is read as a float of {argument.size} bytes")


def _check_messages(parsed: ParsedObject) -> None:
    found = Object(_KEY, "/usr/bin/app", parsed)
    probes: dict[tuple[str, str], list[Site]] = defaultdict(list)
    for site in parsed.sites:
        probes[site.provider, site.name].append(site)
    for (provider, name), sites in probes.items():
        message = finish(convert.probe(Probe(found, provider, name, tuple(sites), (1,)), NopRewriting()))
        again = pb.Probe.FromString(message)
        require(again.provider == provider and again.name == name, f"{provider}:{name}")
        require([site.offset for site in again.sites] == [site.site_offset for site in sites], f"{provider}:{name}")
    for problem in parsed.problems:
        convert.problem(found, problem).SerializeToString()


class _Lines(Tracefs):
    """Takes what would be written."""

    def __init__(self) -> None:
        super().__init__("/nonexistent")
        self.lines: list[str] = []

    def append_definition(self, line: str, events_file: str = UPROBE_EVENTS) -> None:
        assert events_file == UPROBE_EVENTS
        self.lines.append(line)

    def read(self, relative: str) -> str:
        if relative.endswith("/id"):
            return "1"
        raise TracefsRejectedError(relative, "", errno.ENOENT, "")


def _check_definitions(parsed: ParsedObject) -> None:
    lines = set(_definitions(parsed))
    wrong = [BrokenError(f"the definition {line!r}") for line in lines if not _DEFINITION.fullmatch(line)]
    for error in sorted(wrong, key=lambda error: known_bug(error) is not None):
        raise error


def _definitions(parsed: ParsedObject) -> Iterator[str]:
    """Through the code of the engines that writes them."""
    file = ReadOnlyFile(_DESCRIPTOR, parsed.read_only)
    armed = ArmedObject(_KEY, "/usr/bin/app", parsed.architecture, _DESCRIPTOR, "", file)
    places = [ArmedSite(armed, site, Slot(0)).place for site in parsed.sites]
    for place in places:
        require(PLACE.fullmatch(str(place)), f"the place {place!r}")
    tracefs = _Lines()
    ProbeEvent(tracefs, 0, f"{_GROUP}/g0_1_2_3", places, 0).remove()
    captures = []
    for site in parsed.sites[:_MOST_PLANNED]:
        indices = range(len(site.arguments))
        captures += [
            SiteCapture(site, tuple(Capture(index) for index in indices)),
            SiteCapture(site, tuple(Capture(index, is_string=True) for index in indices)),
        ]
    for spec in group_sites(f"{_GROUP}_1", _KEY, parsed.architecture, captures):
        try:
            Executor(tracefs, _GROUP).run([Define(spec)], _FILE)
        except TracefsRejectedError:
            continue
    yield from tracefs.lines
