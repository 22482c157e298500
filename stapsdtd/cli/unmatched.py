"""Say which selectors match no probe yet, and what they may have meant."""

from __future__ import annotations

import asyncio
import shlex
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from stapsdtd.catalog.selector_text import as_part, head_of, parts_of, probe_name
from stapsdtd.catalog.selectors import normalized, parse
from stapsdtd.cli import frequent
from stapsdtd.cli.function_selectors import PROVIDER, functions_of
from stapsdtd.cli.habits import of_bpftrace, of_others
from stapsdtd.cli.known_signatures import own_folder
from stapsdtd.cli.moved_text import MovedTexts, moved_lines
from stapsdtd.cli.render import plural, print_stderr
from stapsdtd.cli.silence import conditions
from stapsdtd.client import ClientError, InventoryState, NotFoundError, SiteState
from stapsdtd.runtime.text import escape
from stapsdtd.signatures import Catalog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from stapsdtd.catalog.selectors import Selector
    from stapsdtd.cli.signature_captures import Resolved
    from stapsdtd.client import AsyncClient, AsyncSubscription, MovedText, Probe, Problem, ServerInfo, SiteStatus
    from stapsdtd.signatures import Declared
    from stapsdtd.subscribe_options import Aggregate, Span, SubscribeOptions

_SUGGESTIONS = 3
_SIMILARITY = 0.75
_SHOWN_FILES = 3
_SCAN_SECONDS = 60.0
"""At most, until a command starts all the same."""
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A selector that matches no probe. reason: what is missing. nearest: what may have been meant, closest first."""

    selector: str
    reason: str
    nearest: tuple[str, ...] = ()

    def __str__(self) -> str:
        *others, last = self.nearest or ("",)
        meant = f"{', '.join(others)} or {last}" if others else last
        return escape(f"{self.selector}: {self.reason}" + (f"; did you mean {meant}?" if meant else ""))

    def as_record(self) -> dict[str, object]:
        return {"selector": self.selector, "reason": self.reason, "nearest": list(self.nearest)}


@dataclass(frozen=True, slots=True)
class Hints:
    """selectors: those that match nothing. hidden: what the client's role does not show, or empty. unusable: why files
    that a command is going to map cannot be armed before it does. evaluated_late: why parts of the filter are not
    evaluated at the hit. added_late: why the server adds up hits itself, with the numbers of sites. shared_files: which
    other processes run, too, that pay for their hits though only those of followed ones are wanted. left_out: which
    frequent probes are, as a sentence, or empty. conditions: when probes fire that selectors name. moved: processes
    that execute copies of the probes' text.
    """

    selectors: tuple[Unmatched, ...] = ()
    hidden: str = ""
    unusable: Mapping[str, str] = field(default_factory=dict)
    evaluated_late: Mapping[str, str] = field(default_factory=dict)
    added_late: Mapping[str, int] = field(default_factory=dict)
    shared_files: Sequence[str] = ()
    left_out: str = ""
    conditions: Sequence[str] = ()
    moved: Sequence[MovedText] = ()

    @property
    def lines(self) -> list[str]:
        unusable = [
            escape(f"{path}: not armed before it is mapped: {reason}") for path, reason in self.unusable.items()
        ]
        late = [
            escape(f"the server evaluates {text} after the hit, for every event: {reason}")
            for text, reason in self.evaluated_late.items()
        ]
        # where a filter is late, nothing else matters
        adding = [] if late else [escape(added_late(reason, sites)) for reason, sites in self.added_late.items()]
        hidden = [self.hidden] if self.hidden else []
        left_out = [self.left_out] if self.left_out else []
        return [
            *map(str, self.selectors),
            *hidden,
            *left_out,
            *unusable,
            *late,
            *adding,
            *self._shared,
            *map(escape, [*self.conditions, *moved_lines(self.moved)]),
        ]

    @property
    def _shared(self) -> list[str]:
        if not self.shared_files:
            return []
        *shown, rest = *self.shared_files[:_SHOWN_FILES], len(self.shared_files) - _SHOWN_FILES
        more = f" and {plural(rest, 'more file')}" if rest > 0 else ""
        return [f"whoever else runs {escape(', '.join(map(str, shown)))}{more} pays for hits there, too, until the end"]


def added_late(reason: str, sites: int) -> str:
    """Say that the server adds up hits itself."""
    return f"each hit of {plural(sites, 'site')} is sent to the server, which adds them up: {reason}"


class NothingMatchesError(ClientError):
    """No probe matches, and the command is not to wait for one."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a command subscribes to. start: of the span, if there is one. meanings: of keys, if known."""

    selectors: Sequence[Resolved]
    options: SubscribeOptions
    aggregate: Aggregate | None = None
    span: Span | None = None
    start: Resolved | None = None
    meanings: Sequence[Declared | None] = ()

    @property
    def all_selectors(self) -> list[Resolved]:
        return [*([self.start] if self.start else []), *self.selectors]

    @property
    def texts(self) -> list[str]:
        """The selectors that others are part of."""
        return [selector.text for selector in self.all_selectors if not selector.is_part]


@asynccontextmanager
async def subscribed(
    client: AsyncClient, wanted: Wanted, stop: asyncio.Event
) -> AsyncIterator[tuple[AsyncSubscription, Hints]]:
    """Subscribe to events or an aggregation, and find out why selectors match nothing yet. stop: waits no longer.

    Raises NothingMatchesError if the options require a match and there is none.
    """
    selectors = wanted.all_selectors
    options = replace(wanted.options, functions=functions_of(each.text for each in selectors))
    try:
        subscription = await _subscribe(client, wanted, options)
        if options.follow and _missing(selectors, subscription.sites, options) and await _is_scanning(client):
            # what it lacks may be installed, and is to be armed before the first process maps it
            await subscription.unsubscribe()
            await _until_scanned(client, stop)
            subscription = await _subscribe(client, wanted, options)
    except NotFoundError:
        if not options.require_match:
            raise
        hints = await _hints(client, selectors, (), options)
        raise NothingMatchesError("; ".join(hints.lines)) from None
    async with subscription:
        # hints may take longer than the lease
        subscription.open_stream()
        hints, moved = await asyncio.gather(
            _hints(client, selectors, subscription.sites, options), MovedTexts(client, wanted.texts, options).look()
        )
        yield (
            subscription,
            replace(
                hints,
                unusable=subscription.unusable_files,
                evaluated_late=subscription.evaluated_late,
                added_late=subscription.added_late,
                shared_files=_shared_files(subscription, options),
                conditions=_conditions(selectors, subscription.sites),
                moved=moved,
                left_out=frequent.hint(options.exclude, _providers(selectors, subscription.sites)),
            ),
        )


async def _subscribe(client: AsyncClient, wanted: Wanted, options: SubscribeOptions) -> AsyncSubscription:
    texts = [selector.text for selector in wanted.selectors]
    if wanted.aggregate is None:
        return await client.subscribe(texts, options, wanted.span)
    return await client.aggregate(texts, wanted.aggregate, options, wanted.span)


def _shared_files(subscription: AsyncSubscription, options: SubscribeOptions) -> tuple[str, ...]:
    """Return the files that are patched in all processes, since any that is followed may execute or load them."""
    armed = (site.path for site in subscription.sites if site.state is SiteState.ARMED)
    return tuple(dict.fromkeys(armed)) if options.follow else ()


def _conditions(selectors: Sequence[Resolved], sites: Sequence[SiteStatus]) -> list[str]:
    """Return what is known of when the probes fire that selectors name without globs."""
    named = [selector for each in selectors if not (selector := parse(each.text)).name.is_glob]
    probes = [
        (site.provider, site.name)
        for site in sites
        if any(each.matches_provider(site.provider) and each.matches_name(site.name) for each in named)
    ]
    return conditions(Catalog(own_folder()), probes)


def _providers(selectors: Sequence[Resolved], sites: Sequence[SiteStatus]) -> set[str]:
    """Return the providers that selectors name, or that sites have."""
    named = (parse(each.text).provider for each in selectors)
    return {normalized(site.provider) for site in sites} | {each.text for each in named if not each.is_glob}


async def _is_scanning(client: AsyncClient) -> bool:
    inventory = (await client.info()).inventory
    return inventory is not None and inventory.state is InventoryState.SCANNING


async def _until_scanned(client: AsyncClient, stop: asyncio.Event) -> None:
    """Wait until the server knows what is installed; not for ever."""
    print_stderr("the server still looks for installed files, which may have the probes: waiting for it")
    deadline = time.monotonic() + _SCAN_SECONDS
    while await _is_scanning(client) and not stop.is_set():
        if time.monotonic() >= deadline:
            print_stderr("it still does: the first hits in files that it does not know may be missed")
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LOOK_SECONDS)


def _missing(selectors: Sequence[Resolved], sites: Sequence[SiteStatus], options: SubscribeOptions) -> list[Selector]:
    """Return the selectors that match none of some sites, and nothing that is left out."""
    probes = {(site.provider, site.name) for site in sites}
    probes |= {(provider, name) for provider, _, name in (each.partition(":") for each in options.exclude)}
    return [
        selector
        for selector in (replace(parse(each.text), text=each.given) for each in selectors if not each.is_part)
        if not any(selector.matches_provider(provider) and selector.matches_name(name) for provider, name in probes)
    ]


async def _hints(
    client: AsyncClient, selectors: Sequence[Resolved], sites: Sequence[SiteStatus], options: SubscribeOptions
) -> Hints:
    missing = _missing(selectors, sites, options)
    if not missing:
        return Hints()
    try:
        listing, info = await client.list_probes(files=options.files, problems=True), await client.info()
        installed = await client.list_probes(installed=True) if not options.files and has_inventory(info) else ()
    except ClientError:
        # the role may not list, or the server may be busy, which is no reason to end the trace
        return Hints()
    hidden, access = "", info.access
    if access is not None and access.list is not None:
        hidden = f"your role, {access.role}, hides other users' processes, which may have such probes"
    return Hints(
        tuple(why_unmatched(selector, listing.probes, installed, listing.problems) for selector in missing), hidden
    )


def has_inventory(info: ServerInfo) -> bool:
    """Report whether the server knows installed files."""
    return info.inventory is not None and info.inventory.state is not InventoryState.OFF


def why_unmatched(
    selector: Selector,
    probes: Iterable[Probe],
    installed: Iterable[Probe] = (),
    problems: Iterable[Problem] = (),
    *,
    where: str = "running program",
) -> Unmatched:
    """Explain why a selector matches none of the probes in running programs, and suggest names that are near.

    installed: those in installed files, if the server knows of any. problems: notes that cannot be used. where: in what
    the probes are.
    """
    running = {(probe.provider, probe.name) for probe in probes}
    known = running | {(probe.provider, probe.name) for probe in installed}
    what = f"no {where} and no installed file" if known - running else f"no {where}"
    providers = {provider for provider, _ in known}
    names = {name for provider, name in known if selector.matches_provider(provider)}
    text = selector.text.removesuffix("()")
    head = head_of(text)
    parts, _ = parts_of(head, "selectors")
    provider, name = head[: parts[1].column - 1] if len(parts) > 1 else head, selector.name.text
    for each in problems:
        if _is_named(selector, (each.provider, each.name)) and selector.matches_module(each.path):
            named = probe_name(each.provider, each.name)
            return Unmatched(text, f"{named} is there, but cannot be used: {each.reason}: a note in {each.path}")
    if selector.provider.text == PROVIDER:
        function = selector.function.text or "FUNCTION"
        return Unmatched(text, f"kernel functions are no static probes: see 'stapsdt kernel info {function}'")
    if (found := of_bpftrace(text)) is not None:
        path, probe = found
        return Unmatched(text, f"write bpftrace's usdt:PATH:PROBE as: {probe} --file {shlex.quote(path)}")
    if (instead := of_others(text)) is not None and text.partition(":")[0] not in {each for each, _ in known}:
        return Unmatched(text, instead)
    if not known:
        return Unmatched(text, f"no {where} has static probes yet")
    as_written = sorted(each for each in known if text in {":".join(each), each[1]})
    if as_written and not any(_is_named(selector, each) for each in as_written):
        near = tuple(probe_name(*each) for each in as_written[:_SUGGESTIONS])
        return Unmatched(text, "this name is a selector of others unless it is in quotes", near)
    if any(_is_named(selector, each) for each in known - running):
        return Unmatched(text, "no running program has it yet, though an installed file does")
    if any(map(selector.matches_name, names)):
        return Unmatched(text, "no such probe in the selected processes, modules and functions yet")
    if not names:
        last = head[parts[-1].column :] or "*"
        near = tuple(f"{each}:{last}" for each in _near(normalized(selector.provider.text), providers))
        return Unmatched(text, f"{what} has a provider {provider} yet", near)
    if name in providers:
        return Unmatched(text, f"{name} is a provider, not a probe", (f"{as_part(name)}:*",))
    return Unmatched(text, "no such probe yet", _near(name, names))


def _is_named(selector: Selector, probe: tuple[str, str]) -> bool:
    return selector.matches_provider(probe[0]) and selector.matches_name(probe[1])


def _near(word: str, words: Iterable[str]) -> tuple[str, ...]:
    by_normalized = {normalized(each): each for each in sorted(words)}
    near = get_close_matches(word, by_normalized, _SUGGESTIONS, _SIMILARITY)
    return tuple(as_part(by_normalized[each]) for each in near)
