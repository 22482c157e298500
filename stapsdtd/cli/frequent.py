"""Probes that fire at each line, call or object of a program: only who names them, or --all, has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stapsdtd.catalog.selectors import parse
from stapsdtd.cli.known_signatures import own_folder
from stapsdtd.cli.render import abbreviate
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.signatures import Catalog

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stapsdtd.catalog.selectors import Selector

_SHOWN = 4


def left_out(selectors: Sequence[str]) -> list[str]:
    """Return the frequent probes that selectors mean by globs alone, as provider:name. No selectors mean everything."""
    parsed = list(_parsed(selectors or ("*:*",)))
    known = Catalog(own_folder())
    return [
        f"{provider}:{name}"
        for provider in sorted(known.providers())
        if (meant := [each for each in parsed if each.name.is_glob and each.matches_provider(provider)])
        for name in known.frequent(provider)
        if any(each.matches_name(name) for each in meant)
        and not any(
            each.matches_name(name) for each in parsed if not each.name.is_glob and each.matches_provider(provider)
        )
    ]


def _parsed(selectors: Iterable[str]) -> Iterator[Selector]:
    for text in selectors:
        try:
            yield parse(text)
        except InvalidArgumentError:
            # the server says what is wrong with it
            continue


def hint(excluded: Iterable[str], providers: Iterable[str]) -> str:
    """Say which probes are left out of providers that have others; empty if none is."""
    having = set(providers)
    shown = [each for each in excluded if each.partition(":")[0] in having]
    if not shown:
        return ""
    return f"left out, since they fire at each line or call: {abbreviate(shown, _SHOWN)}; name them, or use --all"
