"""Checks which kernel functions a clause wants to have led to each other. Functions raise InvalidArgumentError."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.functions.chain import MAX_LENGTH, Chain
from stapsdtd.functions.probes import ENTRY, PROVIDER, RETURN
from stapsdtd.model import Object
from stapsdtd.runtime.fair_thread import finish
from stapsdtd.sessions.spec import ClauseSpec, SubscriptionSpec
from stapsdtd.v1 import stapsdt_pb2 as pb

_FIELD = "chain"
_NAME = re.compile(r"(?:(?P<module>[\w-]+):)?(?P<function>[\w.]+)")
_MAX_CHARACTERS = 256


def parse_chain(clause: pb.Clause, functions: Sequence[str]) -> Chain | None:
    """Return the chain of a clause, as it is written; None if it has none. functions: of the request."""
    if not clause.chain:
        return None
    if clause.HasField("span"):
        raise InvalidArgumentError(_FIELD, "it cannot be combined with a span")
    if not functions:
        raise InvalidArgumentError(_FIELD, "it is of kernel functions, and the request names none in `functions`")
    if len(clause.chain) > MAX_LENGTH:
        raise InvalidArgumentError(_FIELD, f"it has {len(clause.chain)} functions; the limit is {MAX_LENGTH}")
    return Chain(tuple(map(_parse, clause.chain)))


def _parse(text: str) -> tuple[str, str]:
    if len(text) > _MAX_CHARACTERS:
        reason = f"names are limited to {_MAX_CHARACTERS} characters; one has {len(text)}"
        raise InvalidArgumentError(_FIELD, reason, _MAX_CHARACTERS, text)
    found = _NAME.fullmatch(text)
    if found is None:
        raise InvalidArgumentError(_FIELD, f"{text!r} is no function: write FUNCTION or MODULE:FUNCTION", 0, text)
    return found["module"] or "", found["function"]


def with_functions(spec: SubscriptionSpec, functions: Sequence[Object]) -> SubscriptionSpec:
    """Return a subscription whose chains are of the functions that its request names."""
    clauses = []
    for position, clause in enumerate(spec.clauses):
        try:
            clauses.append(_with_functions(clause, functions))
        except InvalidArgumentError as error:
            raise error.within(f"clauses[{position}]") from None
    return replace(spec, clauses=tuple(clauses))


def _with_functions(clause: ClauseSpec, functions: Sequence[Object]) -> ClauseSpec:
    if clause.chain is None:
        return clause
    selectors = SelectorSet(clause.selectors)
    found: list[tuple[str, str]] = []
    for module, name in clause.chain.functions:
        obj, text = _only(module, name, functions), _written(module, name)
        if (obj.path, name) in found:
            raise InvalidArgumentError(_FIELD, f"{obj.path}:{name} is named twice", 0, text)
        found.append((obj.path, name))
        entries, returns = (_chosen(selectors, obj, name, end, text) for end in (ENTRY, RETURN))
        if entries != returns:
            reason = f"selectors choose the entry and the return of {obj.path}:{name} for different processes"
            raise InvalidArgumentError(_FIELD, reason, 0, text)
    return replace(clause, chain=Chain(tuple(found)))


def _written(module: str, name: str) -> str:
    return f"{module}:{name}" if module else name


def _only(module: str, name: str, functions: Iterable[Object]) -> Object:
    """Return the module that has a function, of those that the request names. module: empty for any."""
    found = [
        each
        for each in functions
        if module in {"", each.path} and any(site.function == name for site in each.parsed.sites)
    ]
    text = _written(module, name)
    if not found:
        raise InvalidArgumentError(_FIELD, f"{text} is not among the request's `functions`", 0, text)
    if len(found) > 1:
        modules = ", ".join(sorted(each.path for each in found))
        raise InvalidArgumentError(_FIELD, f"{text} is a function of {modules}; write MODULE:FUNCTION", 0, text)
    return found[0]


def _chosen(selectors: SelectorSet, obj: Object, name: str, end: str, text: str) -> frozenset[int] | None:
    """Return the processes for which an end of a function is chosen, None for all. text: of the function."""
    sites = [site for site in obj.parsed.sites if site.function == name and site.name == end]
    (meant,) = finish(selectors.meant([(obj.path, obj.parsed.providers)]))
    by_site = [selectors.pids(chosen) for chosen in finish(selectors.choose(meant, sites))]
    if not by_site:
        selector = f"{PROVIDER}:{obj.path}:{name}:{end}"
        reason = f"no selector of the clause chooses {selector}, which it needs"
        raise InvalidArgumentError(_FIELD, reason, 0, text)
    return None if None in by_site else frozenset().union(*(pids or () for pids in by_site))
