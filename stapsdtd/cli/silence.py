"""Say why armed probes may not have fired, where that can be known."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from stapsdtd.catalog.selectors import normalized
from stapsdtd.client import ClientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


async def why_silent(
    client: AsyncClient,
    selectors: Sequence[str],
    sites: Iterable[SiteStatus],
    known: Catalog,
    *,
    has_ended: bool = False,
) -> tuple[str, ...]:
    """Return why sites that were armed may not have fired. has_ended: whether the traced program is known to have."""
    reasons = conditions(known, ((site.provider, site.name) for site in sites))
    # the server may be gone, or the role may not list, which is told otherwise
    with suppress(ClientError):
        if not has_ended and not any(probe.pids for probe in await client.list_probes(selectors)):
            reasons.append("no running program has these probes now")
    return tuple(reasons)
