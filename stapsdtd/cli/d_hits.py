"""Hits of a D program, made of events."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from stapsdtd.cli.function_selectors import is_function
from stapsdtd.query.d.machine import Hit
from stapsdtd.query.d.probes import probe_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stapsdtd.cli.d_probes import Meant
    from stapsdtd.client import DescribedSite, Event
    from stapsdtd.client.messages import CapturedArgument
    from stapsdtd.query.d.captured import Place
    from stapsdtd.query.d.needs import Needs
    from stapsdtd.query.d.nodes import Clause


class ProbeIds:
    """Numbers probes as they are met, as DTrace's ID column does."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, str, str, str], int] = {
            ("dtrace", "", "", name): number for number, name in enumerate(("BEGIN", "END", "ERROR"), 1)
        }

    def id_of(self, *probe: str) -> int:
        provider, module, function, name = probe
        return self._ids.setdefault((provider, module, function, name), len(self._ids) + 1)


class Hits:
    """meant: what the descriptions of each clause mean, by `id` of the clause. needs: what is captured for them."""

    def __init__(
        self,
        clauses: Sequence[Clause],
        meant: Mapping[int, Sequence[Meant]],
        needs: Needs,
        described: Mapping[int, DescribedSite],
    ) -> None:
        """described: the subscription's sites, by id; more are added to it."""
        self._needs = needs
        self._clauses = clauses
        self._meant = meant
        self._described = described
        self._ids = ProbeIds()
        self._matching: dict[tuple[int, int], tuple[Clause, ...]] = {}
        self._captured: dict[int, list[tuple[CapturedArgument, list[Place]]]] = {}
        self._probes: dict[tuple[int, int], tuple[int, str, str, str, str]] = {}
        # from the server's CLOCK_MONOTONIC to this host's
        self._ahead_ns: int | None = None

    def matching(self, event: Event) -> tuple[Clause, ...]:
        """Return the clauses that an event is a hit of, in the order of the program."""
        key = event.site.site_id, event.pid
        if key not in self._matching:
            self._matching[key] = tuple(
                clause
                for clause in self._clauses
                if any(each.matches(event.probe, event.site, event.pid) for each in self._meant[id(clause)])
            )
        return self._matching[key]

    def hit(self, event: Event) -> Hit:
        arguments: dict[int, int | None] = {}
        strings: dict[int, str | None] = {}
        memory: dict[Place, bytes | None] = {}
        missing: dict[int | Place, str] = {}
        fields: dict[str, int] = {}
        captured = zip(self._captures(event.site.site_id), event.values, strict=True)
        for position, ((capture, places), value) in enumerate(captured):
            if capture.field:
                if isinstance(value, int):
                    fields[capture.field] = value
            elif capture.is_string:
                strings[capture.index] = value if isinstance(value, str) else None
            elif capture.is_buffer:
                for place in places:
                    memory[place] = value[place.start : place.end] if isinstance(value, bytes) else None
            else:
                arguments[capture.index] = value if isinstance(value, int) else None
                if isinstance(value, float):
                    missing[capture.index] = "a floating-point number, which D has none of"
            if value is None and not capture.field:
                reason = event.unavailable.get(position, capture.missing)
                keys: Sequence[int | Place] = places or [capture.index]
                missing.update(dict.fromkeys(keys, reason))
        return Hit(
            *self._probe(event),
            pid=event.pid,
            tid=event.tid,
            uid=fields.get("uid"),
            gid=fields.get("gid"),
            cpu=event.cpu,
            execname=event.comm,
            timestamp=self.timestamp(event),
            walltimestamp=event.time_ns,
            arguments=arguments,
            strings=strings,
            memory=memory,
            missing=missing,
        )

    def timestamp(self, event: Event) -> int:
        """Return when an event fired, by this host's CLOCK_MONOTONIC. Where the server runs on another host, the clocks
        of both are compared once, since they may be set later.
        """
        if event.monotonic_ns is None or self._ahead_ns is None:
            here_ns = event.time_ns - (time.time_ns() - time.monotonic_ns())
            if event.monotonic_ns is None:
                return here_ns
            self._ahead_ns = here_ns - event.monotonic_ns
        return event.monotonic_ns + self._ahead_ns

    def _captures(self, site_id: int) -> list[tuple[CapturedArgument, list[Place]]]:
        """Return what a site captures, of buffers with the places that they have."""
        if (known := self._captured.get(site_id)) is None:
            buffers = iter(self._needs.buffers)
            known = self._captured[site_id] = []
            for capture in self._described[site_id].captures:
                # those of arguments that the site has, in the order of the capture list
                buffer = (
                    next((each for each in buffers if each[0] == capture.index), None) if capture.is_buffer else None
                )
                places = [place for place in self._needs.memory if (place.argument, place.end) == buffer]
                known.append((capture, places))
        return known

    def _probe(self, event: Event) -> tuple[int, str, str, str, str]:
        """Return the id, provider, module, function and name of an event's probe."""
        key = event.site.site_id, event.pid
        if (known := self._probes.get(key)) is None:
            probe, function = event.probe, event.site.function or ""
            module = os.path.basename(probe.path)
            name = probe_name(probe.name)
            number = self._ids.id_of(probe.provider, module, function, name)
            provider = probe.provider if is_function(probe) else f"{probe.provider}{event.pid}"
            known = self._probes[key] = number, provider, module, function, name
        return known

    def own(self, provider: str, name: str) -> Hit:
        """Return a moment of the program itself."""
        return Hit(
            self._ids.id_of(provider, "", "", name),
            provider,
            "",
            "",
            name,
            pid=os.getpid(),
            tid=os.getpid(),
            uid=os.getuid(),
            gid=os.getgid(),
            execname="stapsdt",
            timestamp=time.monotonic_ns(),
            walltimestamp=time.time_ns(),
        )
