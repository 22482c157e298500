"""Selectors of kernel functions, `fbt:MODULE:FUNCTION:entry` or `:return`, among those of probes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stapsdtd.client import Probe

PROVIDER, ENTRY, RETURN = "fbt", "entry", "return"
_PARTS = 4


def is_function(probe: Probe) -> bool:
    """Report whether a probe is at kernel functions. Files have paths."""
    return probe.provider == PROVIDER and "/" not in probe.path


def functions_of(selectors: Iterable[str]) -> tuple[str, ...]:
    """Return the functions that selectors choose from, as a subscription names them."""
    found: dict[str, None] = {}
    for selector in selectors:
        parts = selector.partition("(")[0].split(":")
        if parts[0] == PROVIDER and len(parts) == _PARTS:
            _, module, function, _ = parts
            found[f"{module}:{function or '*'}" if module else function or "*"] = None
    return tuple(found)
