"""Chooses how kernel functions are attached to.

    few     fentry, fexit    a program for each, which costs a call least, but takes the verifier some 0.1 s
    many    kprobe.multi     one link to all entries
    others  kprobes          an event for each; also for returns of many, and functions of modules

Cost of a call on Linux 6.12 with a program that counts: fentry 0.27 us, kprobe.multi 0.33, a kprobe 0.42; fexit 0.35, a
kretprobe 0.70, for which there may be no room (kernel/places.py).
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

from stapsdtd.errors import KernelFeatureError
from stapsdtd.functions.attaching import FENTRY, KPROBE, MULTI
from stapsdtd.kernel.function_events import FunctionEvent
from stapsdtd.kernel.function_links import (
    FENTRY_TYPE,
    FEXIT_TYPE,
    FunctionLink,
    link_call,
    link_entries,
    missed_entries,
)
from stapsdtd.kernel.host_calls import BPF_PROG_LOAD
from stapsdtd.kernel.own_programs import OwnProgram
from stapsdtd.kernel.perf import online_cpus
from stapsdtd.kernel.places import FunctionPlace, Place

MOST_AT_ONCE = 8
"""Programs that are verified for what is attached at once, while other subscriptions wait to be armed."""

MOST_PROGRAMS = 64
"""At a time, of some 100 KB each."""


MakeFunctionEvent = Callable[[OwnProgram, str, Sequence[Place | FunctionPlace], int], FunctionEvent]
"""See `FunctionEvent`, without tracefs."""


class Programs(Protocol):
    """See `kernel.Loaded`."""

    def program_of_call(self, function: str, *, is_return: bool) -> int: ...

    def program_of_entries(self) -> int: ...

    def program_of_kprobes(self) -> int: ...

    def wait_for_hits(self) -> None: ...


class Part(NamedTuple):
    """Functions that are attached together. way: FENTRY, MULTI or KPROBE. positions: theirs among all of them."""

    way: str
    positions: Sequence[int]


class FunctionLinks:
    """Called from one thread, but for the links that it makes."""

    def __init__(
        self, programs: Programs, ways: Callable[[], Collection[str]], make_event: MakeFunctionEvent | None = None
    ) -> None:
        """ways: names of those that this host has. make_event: None where the kernel does not tell what kprobes skip,
        so that they need no program of their own.
        """
        self._programs = programs
        self.wait_for_hits = programs.wait_for_hits
        self._ways = ways
        self._make_event = make_event
        self._of_kprobes: OwnProgram | None = None
        self._of_calls: list[FunctionLink] = []
        self._refused: set[str] = set()
        self._loaded: defaultdict[FunctionPlace, list[Future[int]]] = defaultdict(list)
        self._of_entries: OwnProgram | None = None

    def parts(self, places: Sequence[FunctionPlace], attached: Mapping[str, str]) -> list[Part]:
        """Partition functions that are to be attached, and load programs for single ones.

        attached: the ways of functions to which something is attached already, at either end. What the program takes
        for a call's frame is the same for fentry and fexit, and for all other ways; see take_arguments() in
        bpf/stapsdt.bpf.c.
        """
        self._of_calls = [link for link in self._of_calls if not link.is_gone]
        ways = set(self._ways()) - self._refused
        room = MOST_PROGRAMS - len(self._of_calls) if FENTRY in ways else 0
        if KPROBE in ways:
            room = min(room, MOST_AT_ONCE)
        of_kernel = [position for position, place in enumerate(places) if not place.module]
        single = [position for position in of_kernel if attached.get(places[position].function) == FENTRY]
        free = [position for position in of_kernel if places[position].function not in attached]
        room -= len(single)
        if len(free) <= room:
            single += free
        elif KPROBE not in ways:
            only = [position for position in free if MULTI not in ways or places[position].is_return]
            single += only[: max(room, 0)]
        parts = [Part(FENTRY, [position]) for position in single]
        # a link may name a function once
        left = {places[each].function: each for each in reversed(of_kernel) if each not in single}
        entries = [each for each in of_kernel if left.get(places[each].function) == each and not places[each].is_return]
        if entries and MULTI in ways:
            parts.append(Part(MULTI, entries))
        self._load([places[part.positions[0]] for part in parts if part.way == FENTRY])
        taken = {position for part in parts for position in part.positions}
        return parts + [Part(KPROBE, [position]) for position in range(len(places)) if position not in taken]

    def _load(self, places: Sequence[FunctionPlace]) -> None:
        """Load programs on several CPUs at once."""
        if places:
            with ThreadPoolExecutor(min(len(places), len(online_cpus())), "stapsdtd-verify") as pool:
                for place in places:
                    load = partial(self._programs.program_of_call, place.function, is_return=place.is_return)
                    self._loaded[place].append(pool.submit(load))

    def link(self, way: str, places: Sequence[FunctionPlace], cookies: Sequence[int]) -> FunctionLink:
        """Return what is to be armed for a part. way: FENTRY or MULTI. Raises OSError."""
        if way in self._refused:
            reason = f"the kernel refuses the program for {way}; see 'stapsdt doctor'"
            raise BPF_PROG_LOAD.refused(places[0].function, errno.EOPNOTSUPP, reason)
        try:
            return self._link_of_entries(places, cookies) if way == MULTI else self._link_of_call(places[0], cookies[0])
        except KernelFeatureError as error:
            if way == MULTI:
                # that is none of the functions' fault
                self._refused.add(way)
            raise _not_loaded(places[0], error) from error

    def event(self, name: str, places: Sequence[Place | FunctionPlace], cookie: int) -> FunctionEvent | None:
        """Return a kprobe's event with a program for those that are attached together; None if that is of no use.

        Raises OSError and TracefsRejectedError.
        """
        if self._make_event is None:
            return None
        try:
            self._of_kprobes = self._of_kprobes or OwnProgram(self._programs.program_of_kprobes())
        except KernelFeatureError as error:
            raise _not_loaded(places[0], error) from error
        return self._make_event(self._of_kprobes, name, places, cookie)

    def forget_unused(self) -> None:
        """Free programs that were loaded for what is attached by now, or was refused. Events and links keep theirs."""
        loaded = [each for place in list(self._loaded) for each in self._loaded.pop(place)]
        for descriptor in (each.result() for each in loaded if not each.exception()):
            os.close(descriptor)
        for program in (self._of_kprobes, self._of_entries):
            if program is not None:
                program.release()
        self._of_kprobes = self._of_entries = None

    def _link_of_call(self, place: FunctionPlace, cookie: int) -> FunctionLink:
        program = OwnProgram(self._loaded[place].pop().result())
        attach = partial(link_call, attach_type=FEXIT_TYPE if place.is_return else FENTRY_TYPE, cookie=cookie)
        link = FunctionLink(program, attach, self._programs.wait_for_hits)
        self._of_calls.append(link)
        return link

    def _program_of_entries(self) -> OwnProgram:
        """Return a program for a link, that of an earlier one if the kernel refused to attach that."""
        if self._of_entries is not None and self._of_entries.users > 1:
            self._of_entries.release()
            self._of_entries = None
        self._of_entries = self._of_entries or OwnProgram(self._programs.program_of_entries())
        return self._of_entries.shared()

    def _link_of_entries(self, places: Sequence[FunctionPlace], cookies: Sequence[int]) -> FunctionLink:
        attach = partial(link_entries, functions=[place.function for place in places], cookies=cookies)
        program = self._program_of_entries()
        return FunctionLink(program, attach, self._programs.wait_for_hits, missed_entries)


def _not_loaded(place: Place | FunctionPlace, error: KernelFeatureError) -> OSError:
    reason = f"{error.reason}; {error.remedy}" if error.remedy else error.reason
    subject = place.function if isinstance(place, FunctionPlace) else place.path
    return BPF_PROG_LOAD.refused(subject, errno.EOPNOTSUPP, reason)
