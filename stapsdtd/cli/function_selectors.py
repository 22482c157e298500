"""Selectors of kernel functions, `fbt:MODULE:FUNCTION:entry` or `:return`, among those of probes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from stapsdtd.catalog.selector_text import parts_of
from stapsdtd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from stapsdtd.client import Probe

PROVIDER, ENTRY, RETURN = "fbt", "entry", "return"
_PARTS = 4
_ELSEWHERE = re.compile(
    r"(?:(?:k|kr|kprobe|kretprobe|kfunc|kretfunc|fentry|fexit):(?:(?P<module>[\w*]+):)?|fbt:{1,2})(?P<name>[\w*?.]+)(?::entry)?"
)


def is_function(probe: Probe) -> bool:
    """Report whether a probe is at kernel functions. Files have paths."""
    return probe.provider == PROVIDER and "/" not in probe.path


def end_of(selector: str) -> str | None:
    """Return the selector of the returns of functions whose entries a selector chooses; None if it chooses others."""
    with suppress(InvalidArgumentError):
        parts, _ = parts_of(selector, "start")
        if len(parts) == _PARTS and parts[0].text == PROVIDER and not parts[0].is_quoted and parts[3].text == ENTRY:
            return selector[: parts[3].column] + RETURN
    return None


def entry_of(text: str) -> str | None:
    """Return the selector of entries of functions, named as other tracers and commands do; None if it is another one.

    kprobe:NAME, kfunc:MODULE:NAME, fbt:NAME or fbt:NAME:entry, ...
    """
    found = _ELSEWHERE.fullmatch(text)
    return f"{PROVIDER}:{found['module'] or ''}:{found['name']}:{ENTRY}" if found else None


def functions_of(selectors: Iterable[str]) -> tuple[str, ...]:
    """Return the functions that selectors choose from, as a subscription names them."""
    found: dict[str, None] = {}
    for selector in selectors:
        # the server says what is wrong with it
        with suppress(InvalidArgumentError):
            parts, _ = parts_of(selector, "selectors")
            # in quotes, it is a program's provider
            if len(parts) == _PARTS and parts[0].text == PROVIDER and not parts[0].is_quoted:
                _, module, function, _ = (part.text for part in parts)
                found[f"{module}:{function or '*'}" if module else function or "*"] = None
    return tuple(found)
