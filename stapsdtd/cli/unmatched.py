"""Say which selectors match no probe yet, and what they may have meant."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from stapsdtd.catalog.selectors import normalized, parse
from stapsdtd.cli.function_selectors import functions_of
from stapsdtd.cli.render import plural
from stapsdtd.client import ClientError, InventoryState, NotFoundError
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from stapsdtd.catalog.selectors import Selector
    from stapsdtd.cli.signature_captures import Resolved
    from stapsdtd.client import AsyncClient, AsyncSubscription, Probe, ServerInfo, SiteStatus
    from stapsdtd.signatures import Declared
    from stapsdtd.subscribe_options import Aggregate, Span, SubscribeOptions

_SUGGESTIONS = 3
_SIMILARITY = 0.75


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
    evaluated at the hit. added_late: why the server adds up hits itself, with the numbers of sites.
    """

    selectors: tuple[Unmatched, ...] = ()
    hidden: str = ""
    unusable: Mapping[str, str] = field(default_factory=dict)
    evaluated_late: Mapping[str, str] = field(default_factory=dict)
    added_late: Mapping[str, int] = field(default_factory=dict)

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
        return [*map(str, self.selectors), *([self.hidden] if self.hidden else []), *unusable, *late, *adding]


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
async def subscribed(client: AsyncClient, wanted: Wanted) -> AsyncIterator[tuple[AsyncSubscription, Hints]]:
    """Subscribe to events or an aggregation, and find out why selectors match nothing yet.

    Raises NothingMatchesError if the options require a match and there is none.
    """
    selectors = wanted.all_selectors
    options = replace(wanted.options, functions=functions_of(each.text for each in selectors))
    try:
        texts = [selector.text for selector in wanted.selectors]
        if wanted.aggregate is None:
            subscription = await client.subscribe(texts, options, wanted.span)
        else:
            subscription = await client.aggregate(texts, wanted.aggregate, options, wanted.span)
    except NotFoundError:
        if not options.require_match:
            raise
        hints = await _hints(client, selectors, (), options.files)
        raise NothingMatchesError("; ".join(hints.lines)) from None
    async with subscription:
        # hints may take longer than the lease
        subscription.open_stream()
        hints = await _hints(client, selectors, subscription.sites, options.files)
        yield (
            subscription,
            replace(
                hints,
                unusable=subscription.unusable_files,
                evaluated_late=subscription.evaluated_late,
                added_late=subscription.added_late,
            ),
        )


async def _hints(
    client: AsyncClient, selectors: Sequence[Resolved], sites: Sequence[SiteStatus], files: Sequence[str]
) -> Hints:
    missing = [
        selector
        for selector in (replace(parse(each.text), text=each.given) for each in selectors if not each.is_part)
        if not any(selector.matches_provider(site.provider) and selector.matches_name(site.name) for site in sites)
    ]
    if not missing:
        return Hints()
    try:
        listing, info = await client.list_probes(files=files), await client.info()
        installed = await client.list_probes(installed=True) if not files and has_inventory(info) else ()
    except ClientError:
        # the role may not list, or the server may be busy, which is no reason to end the trace
        return Hints()
    hidden, access = "", info.access
    if access is not None and access.list is not None:
        hidden = f"your role, {access.role}, hides other users' processes, which may have such probes"
    return Hints(tuple(why_unmatched(selector, listing.probes, installed) for selector in missing), hidden)


def has_inventory(info: ServerInfo) -> bool:
    """Report whether the server knows installed files."""
    return info.inventory is not None and info.inventory.state is not InventoryState.OFF


def why_unmatched(
    selector: Selector, probes: Iterable[Probe], installed: Iterable[Probe] = (), *, where: str = "running program"
) -> Unmatched:
    """Explain why a selector matches none of the probes in running programs, and suggest names that are near.

    installed: those in installed files, if the server knows of any. where: in what the probes are.
    """
    running = {(probe.provider, probe.name) for probe in probes}
    known = running | {(probe.provider, probe.name) for probe in installed}
    what = f"no {where} and no installed file" if known - running else f"no {where}"
    providers = {provider for provider, _ in known}
    names = {name for provider, name in known if selector.matches_provider(provider)}
    text = selector.text.removesuffix("()")
    provider, name = text.partition("(")[0].split(":")[0], selector.name.text
    if not known:
        return Unmatched(text, f"no {where} has static probes yet")
    if any(selector.matches_provider(each) and selector.matches_name(other) for each, other in known - running):
        return Unmatched(text, "no running program has it yet, though an installed file does")
    if any(map(selector.matches_name, names)):
        return Unmatched(text, "no such probe in the selected processes, modules and functions yet")
    if not names:
        near = tuple(f"{each}:{name or '*'}" for each in _near(normalized(provider), providers))
        return Unmatched(text, f"{what} has a provider {provider} yet", near)
    if name in providers:
        return Unmatched(text, f"{name} is a provider, not a probe", (f"{name}:*",))
    return Unmatched(text, "no such probe yet", _near(name, names))


def _near(word: str, words: Iterable[str]) -> tuple[str, ...]:
    by_normalized = {normalized(each): each for each in sorted(words)}
    return tuple(by_normalized[each] for each in get_close_matches(word, by_normalized, _SUGGESTIONS, _SIMILARITY))
