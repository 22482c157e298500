"""The span that `stapsdt latency` and `stapsdt spans` ask for: two probes, and what they have in common."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from stapsdtd.catalog.selector_text import parts_of
from stapsdtd.cli import options, signatures
from stapsdtd.cli.aggregates import keys
from stapsdtd.cli.function_selectors import end_of, entry_of
from stapsdtd.cli.signature_captures import meant
from stapsdtd.cli.signatures import Keys
from stapsdtd.cli.unmatched import Wanted
from stapsdtd.subscribe_options import Aggregate, Span, SubscribeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stapsdtd.cli.known_signatures import Known
    from stapsdtd.client import AsyncClient
    from stapsdtd.signatures import Declared

_OF_START = "start."
_NAME_END = "name it after that, as END"


@dataclass(frozen=True, slots=True)
class Pair:
    """Which hits to pair.

    end: empty for the probe that the start's signature names. min_open: after how many seconds starts are shown that
    have no end yet; 0 for never.
    """

    start: str
    end: str
    key: tuple[str, ...] = ()
    start_where: str = ""
    nested: bool = False
    latest: bool = False
    timeout: float | None = None
    min_open: float = 0.0

    def start_probe(self, known: Known) -> tuple[str, str] | None:
        """Return the provider and the name of the start, if its signature is known."""
        found = meant(self.start, known)
        return found[1] if found else None

    def known_end(self, known: Known) -> Pair:
        """Return the pair with its end, which belongs to the latest start if that is known of it.

        Raises click.UsageError if the end is neither given nor known.
        """
        if self.nested and self.latest:
            raise click.UsageError("--nested and --latest exclude each other")
        if not (self.key or self.nested or self.latest) and self._is_latest(known):
            return replace(self, latest=True).known_end(known)
        if self.end:
            return self
        if of_functions := end_of(self.start):
            return replace(self, end=of_functions)
        found = meant(self.start, known)
        ends = {signature.ends_with for signature in known.of(*found[1])} if found else set()
        if len(ends) != 1 or found is None or not (end := ends.pop()):
            advice = f"write {entry}, whose return ends it" if (entry := entry_of(self.start)) else _NAME_END
            raise click.UsageError(f"which probe ends {self.start} is not known: {advice}")
        selector, _ = found
        # the last part of a selector is the probe's name
        parts, _ = parts_of(selector.text, "start")
        return replace(self, end=selector.text[: parts[-1].column] + end)

    def _is_latest(self, known: Known) -> bool:
        found = meant(self.start, known)
        signatures = known.of(*found[1]) if found else ()
        return bool(signatures) and all(each.latest for each in signatures)

    async def wanted(
        self,
        client: AsyncClient,
        given: SubscribeOptions,
        known: Known,
        aggregate: Aggregate | None = None,
        *,
        is_named: bool = True,
    ) -> Wanted:
        """Return what to subscribe to, with names of arguments replaced, and for events with what signatures capture.

        is_named: use signatures. Raises click.UsageError.
        """
        pair = self.known_end(known)
        if not is_named:
            span = pair.made(pair.start, pair.start_where, pair.key)
            (start,) = signatures.as_given([pair.start])
            return Wanted(signatures.as_given([pair.end]), given, aggregate, span, start)
        of_start = replace(given, where=pair.start_where, fields=())
        start, of_start = await signatures.resolve_start(client, pair.start, of_start, known)
        ends, of_end = await signatures.resolve(client, [pair.end], given, known)
        meanings: list[Declared | None] = []
        if aggregate is not None:
            (start,), ends = signatures.as_given([pair.start]), signatures.as_given([pair.end])
            keys = await pair.keys(client, aggregate.by, given, known)
            aggregate, meanings = replace(aggregate, by=keys.texts), keys.meanings
        key = (await _by_position(client, [pair.start, pair.end], pair.key, given, known)).texts
        return Wanted(ends, of_end, aggregate, pair.made(start.text, of_start.where, key), start, meanings)

    def made(self, start: str, start_where: str, key: Sequence[str]) -> Span:
        return Span(
            start_selectors=[start],
            start_where=start_where,
            key=key,
            nested=self.nested,
            latest=self.latest,
            timeout_ms=round((self.timeout or 0) * 1000),
            report_open_ms=round(self.min_open * 1000),
        )

    async def keys(self, client: AsyncClient, by: Sequence[str], given: SubscribeOptions, known: Known) -> Keys:
        """Replace names of arguments in keys, of which those of the start begin with `start.`."""
        of_start = [key.removeprefix(_OF_START) for key in by if key.startswith(_OF_START)]
        of_end = [key for key in by if not key.startswith(_OF_START)]
        starts = await _by_position(client, [self.start], of_start, given, known)
        ends = await _by_position(client, [self.end], of_end, given, known)
        starting = zip(map(key_of_start, of_start, starts.texts), starts.meanings, strict=True)
        ending = zip(ends.texts, ends.meanings, strict=True)
        pairs = [next(starting if key.startswith(_OF_START) else ending) for key in by]
        return Keys([text for text, _ in pairs], [meaning for _, meaning in pairs])


def key_of_start(key: str, text: str) -> str:
    """Return what the server takes for a key, written behind `start.`, whose names became text.

    Raises click.UsageError for a string whose length is another argument: a key has one argument of a start.
    """
    if text.startswith("str(") and not key.lstrip().startswith("str("):
        first = text.removeprefix("str(").partition(",")[0]
        raise click.UsageError(
            f"--by {_OF_START}{key}: its length is another argument, and a key has one argument of START; "
            f"write {key}, if END has that, too, or {_OF_START}{first}:str[64]"
        )
    return f"{_OF_START}{text}"


async def _by_position(
    client: AsyncClient, selectors: Sequence[str], keys: Sequence[str], wanted: SubscribeOptions, known: Known
) -> Keys:
    if not keys:
        return Keys([], [])
    return signatures.keys_by_position(keys, await signatures.fitting(client, selectors, wanted, known))


def pair_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add START, END and the options of a span. The command receives them as `pair`."""

    @functools.wraps(command)
    def with_pair(
        *args: Any,
        start: str,
        end: str | None,
        key: tuple[str, ...],
        start_where: str,
        nested: bool,
        latest: bool,
        timeout: float | None,
        **parameters: Any,
    ) -> Any:
        return command(*args, pair=Pair(start, end or "", key, start_where, nested, latest, timeout), **parameters)

    wrapped: Callable[..., Any] = with_pair
    for option in (
        click.option(
            "--timeout",
            type=options.Seconds(min=0.001, max=options.MAX_SECONDS),
            metavar="SECONDS",
            help="A start waits no longer for its end.",
        ),
        click.option(
            "--latest",
            is_flag=True,
            help="An end belongs to the latest start, which replaces one that waits: for what may fail without an end. "
            "Known of some probes, such as postgresql:query__start.",
        ),
        click.option(
            "--nested",
            is_flag=True,
            help="An end belongs to the last start that has none yet, as of recursive calls, rather than to the first.",
        ),
        click.option(
            "--start-where", metavar="EXPR", default="", help="Only starts that satisfy EXPR. --where is for ends."
        ),
        click.option(
            "--key",
            multiple=True,
            metavar="KEY,...",
            callback=keys,
            help="What an end has in common with its start, such as arg0. By default, the thread. Repeatable.",
        ),
        click.argument("end", metavar="[END]", required=False, shell_complete=options.complete_selector),
        click.argument("start", metavar="START", shell_complete=options.complete_selector),
    ):
        wrapped = option(wrapped)
    return wrapped
