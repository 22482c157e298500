"""What commands make of selectors, filters and keys before they are sent: names of arguments become positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stapsdtd.cli.expanded_selectors import expanded, matched_probes, narrowed
from stapsdtd.cli.named_filter import (
    by_position,
    field_by_position,
    has_names,
    key_by_position,
    key_has_names,
    key_meaning,
)
from stapsdtd.cli.render import print_stderr
from stapsdtd.cli.signature_captures import Resolved, fitting_everywhere, meant, names_in, parsed, with_captures
from stapsdtd.client import ClientError
from stapsdtd.subscribe_options import Aggregate, SubscribeOptions

if TYPE_CHECKING:
    from stapsdtd.cli.known_signatures import Known
    from stapsdtd.client import AsyncClient, Probe
    from stapsdtd.signatures import Declared, Signature


_ALWAYS_TAKEN = 64
"""So few selectors that the server is not asked for its limit."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys by position, and what the values of each mean, as far as they were named."""

    texts: list[str]
    meanings: list[Declared | None]


def as_given(selectors: Iterable[str]) -> tuple[Resolved, ...]:
    """Leave selectors as they were written."""
    return tuple(Resolved(given, given) for given in selectors)


async def resolve(
    client: AsyncClient, selectors: Sequence[str], options: SubscribeOptions, known: Known
) -> tuple[tuple[Resolved, ...], SubscribeOptions]:
    """Give selectors the captures that signatures say, where they have none of their own, or name arguments.

    Names in the options' filter and fields become positions, too. Raises click.UsageError for a name that is not known.
    A signature is not used in a file whose notes contradict it, which is told on standard error.
    """
    probes = await _probes_for(client, selectors, options, known)
    several = [expanded(given, probes, known) for given in selectors]
    fit = _all_fitting(selectors, probes, known)
    where = by_position(options.where, fit)
    fields = [field_by_position(field, fit) for field in options.fields]
    known.tell_contradictions()
    return await _within_limit(client, several), replace(options, where=where, fields=fields)


async def resolve_start(
    client: AsyncClient, given: str, options: SubscribeOptions, known: Known
) -> tuple[Resolved, SubscribeOptions]:
    """Resolve the selector of spans' starts, which all have the same captures. Raises click.UsageError."""
    probes = await _probes_for(client, [given], options, known)
    resolved = with_captures(given, probes, known)
    where = by_position(options.where, _all_fitting([given], probes, known))
    known.tell_contradictions()
    return resolved, replace(options, where=where)


async def resolve_aggregate(
    client: AsyncClient, selectors: Sequence[str], options: SubscribeOptions, aggregate: Aggregate, known: Known
) -> tuple[SubscribeOptions, Aggregate, list[Declared | None]]:
    """Replace names of arguments in the filter, the value and the keys, and return what keys mean.

    Raises click.UsageError as resolve does.
    """
    if not (has_names(options.where) or has_names(aggregate.value) or any(map(key_has_names, aggregate.by))):
        return options, aggregate, []
    fit = await fitting(client, selectors, options, known)
    keys = keys_by_position(aggregate.by, fit)
    value = by_position(aggregate.value, fit, "VALUE")
    where = by_position(options.where, fit)
    return replace(options, where=where), replace(aggregate, by=keys.texts, value=value), keys.meanings


def keys_by_position(keys: Sequence[str], fit: Sequence[Sequence[Signature]]) -> Keys:
    return Keys([key_by_position(key, fit) for key in keys], [key_meaning(key, fit) for key in keys])


async def fitting(
    client: AsyncClient, selectors: Sequence[str], options: SubscribeOptions, known: Known
) -> list[tuple[Signature, ...]]:
    """Return the signatures that each probe of selectors may have."""
    fit = _all_fitting(selectors, await _known_probes(client, selectors, options, known), known)
    known.tell_contradictions()
    return fit


async def _probes_for(
    client: AsyncClient, selectors: Sequence[str], options: SubscribeOptions, known: Known
) -> Sequence[Probe]:
    has_named = has_names(options.where) or any(map(has_names, options.fields))
    depending = [given for given in selectors if "(" not in given or names_in(given) or has_named]
    return await _known_probes(client, depending, options, known)


async def _known_probes(
    client: AsyncClient, selectors: Iterable[str], options: SubscribeOptions, known: Known
) -> Sequence[Probe]:
    """Return the probes with signatures that selectors match, in running programs or else in files."""
    heads = [head for given in selectors for head in _heads(given, known)]
    if not heads:
        return ()
    try:
        running = await client.list_probes(
            heads, options.pids, containers=options.containers, cgroups=options.cgroups, files=options.files
        )
        return tuple(running) or tuple(await client.list_probes(heads, installed=True))
    except ClientError:
        # the role may not list, or the server has no inventory; what is known of the probe is all there is
        return ()


def _heads(given: str, known: Known) -> list[str]:
    """Return selectors of the probes of a selector that may have signatures."""
    selector = parsed(given)
    if selector is None:
        return []
    if not selector.is_glob:
        return [selector.text] if meant(given, known) else []
    providers = [provider for provider in known.providers() if selector.matches_provider(provider)]
    return [narrowed(selector, provider, selector.name.text) for provider in providers]


def _all_fitting(selectors: Iterable[str], probes: Sequence[Probe], known: Known) -> list[tuple[Signature, ...]]:
    """Return the signatures of each probe, none for what is not known."""
    return [fit for given in selectors for fit in _fitting(given, probes, known)]


def _fitting(given: str, probes: Sequence[Probe], known: Known) -> list[tuple[Signature, ...]]:
    selector = parsed(given)
    if selector is None:
        return [()]
    if selector.is_glob:
        found = matched_probes(selector, probes, known)
    else:
        found = [one[1]] if (one := meant(given, known)) else []
    return [fitting_everywhere(selector, probe, probes, known)[0] for probe in found] or [()]


async def _within_limit(client: AsyncClient, several: Sequence[Sequence[Resolved]]) -> tuple[Resolved, ...]:
    """Leave out parts that the server has no room for, the last ones first."""
    resolved = [each for of_one in several for each in of_one]
    parts = [each for each in resolved if each.is_part]
    if len(resolved) <= _ALWAYS_TAKEN:
        return tuple(resolved)
    try:
        limit = (await client.info()).limits.max_selectors
    except ClientError:
        return tuple(each for each in resolved if not each.is_part)
    excess = len(resolved) - limit
    if excess <= 0:
        return tuple(resolved)
    left_out = set(parts[-excess:])
    print_stderr(f"strings of {len(left_out)} probes are shown as numbers: the server takes {limit} selectors")
    return tuple(each for each in resolved if each not in left_out)
