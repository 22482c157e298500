"""Say why probes may not have fired, or pairs may be wrong, where that can be known."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from stapsdtd.catalog.selectors import normalized
from stapsdtd.cli.render import plural
from stapsdtd.client import ClientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stapsdtd.cli.command import Run
    from stapsdtd.cli.following import Summary
    from stapsdtd.cli.unmatched import Wanted
    from stapsdtd.client import AsyncClient, SiteStatus
    from stapsdtd.signatures import Catalog


def conditions(known: Catalog, probes: Iterable[tuple[str, str]]) -> list[str]:
    """Return what is known of when probes fire, each given by provider and name: a line for each note."""
    notes = dict.fromkeys(
        (f"{provider}:{pattern}", note)
        for provider, name in sorted({(normalized(provider), normalized(name)) for provider, name in probes})
        for signature in known.of(provider, name)
        for pattern, note in signature.notes
    )
    return [f"{pattern}: {note}" for pattern, note in notes]


async def explained(  # noqa: PLR0917 - what a command knows at its end
    summary: Summary,
    client: AsyncClient,
    wanted: Wanted,
    sites: Sequence[SiteStatus],
    known: Catalog,
    run: Run,
) -> Summary:
    """Return the summary with the reasons why there may be no hits, or wrong pairs. sites: those that were armed."""
    if summary.is_silent:
        return replace(summary, silent=(*summary.silent, *await _why_silent(client, wanted, sites, known, run)))
    if summary.is_all_filtered and run.all_filtered:
        also = " and satisfied --where" if wanted.options.where else ""
        return replace(summary, silent=(f"{run.all_filtered}{also}",))
    spans = summary.spans
    if spans and spans.nested and wanted.span and wanted.span.latest:
        return replace(summary, is_latest=True)
    if spans and spans.paired and spans.nested and wanted.span and not wanted.span.nested:
        return replace(summary, uncertain=_longer(spans.nested))
    return summary


def _longer(nested: int) -> str:
    return (
        f"{plural(nested, 'START')} came while an earlier one waited for its END: if that has none, as of what failed, "
        "its pair lasted until the END of a later one; --latest pairs each END with the latest START"
    )


async def _why_silent(
    client: AsyncClient, wanted: Wanted, sites: Sequence[SiteStatus], known: Catalog, run: Run
) -> list[str]:
    """Return why nothing may have fired."""
    reasons = conditions(known, ((site.provider, site.name) for site in sites))
    if sites:
        # the server may be gone, or the role may not list, which is told otherwise
        with suppress(ClientError):
            if not run.is_command and not any(probe.pids for probe in await client.list_probes(wanted.texts)):
                reasons.append("no running program has these probes now")
        if wanted.span:
            reasons.append("no START fired, and no END: spans that had begun before are not known")
    if wanted.options.pids and not wanted.options.follow:
        reasons.append("what --pid has forked was left out: --follow includes it")
    return reasons
