"""Checks which kernel functions a clause wants to have led to each other. Functions raise InvalidArgumentError."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stapsdtd.catalog.selectors import Selector
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.functions.chain import MAX_LENGTH, Chain
from stapsdtd.functions.probes import ENTRY, PROVIDER, RETURN
from stapsdtd.functions.selectors import VMLINUX
from stapsdtd.model import FileOffset, Site
from stapsdtd.v1 import stapsdt_pb2 as pb

_FIELD = "chain"
_NAME = re.compile(r"(?:(?P<module>[\w-]+):)?(?P<function>[\w.]+)")


def parse_chain(clause: pb.Clause, functions: Sequence[str], chosen: Sequence[Selector]) -> Chain | None:
    """Return the chain of a clause; None if it has none. functions: of the request. chosen: by the clause."""
    if not clause.chain:
        return None
    if clause.HasField("span"):
        raise InvalidArgumentError(_FIELD, "it cannot be combined with a span")
    if not functions:
        raise InvalidArgumentError(_FIELD, "it is of kernel functions, and the request names none in `functions`")
    if len(clause.chain) > MAX_LENGTH:
        raise InvalidArgumentError(_FIELD, f"it has {len(clause.chain)} functions; the limit is {MAX_LENGTH}")
    named = tuple(map(_parse, clause.chain))
    for at, (text, (module, function)) in enumerate(zip(clause.chain, named, strict=True)):
        if (module, function) in named[:at]:
            raise InvalidArgumentError(_FIELD, f"{text} is named twice")
        for end in (ENTRY, RETURN):
            site = Site(PROVIDER, end, FileOffset(0), None, function, (), nop_bytes=1)
            if not any(selector.match(module, site) for selector in chosen):
                selector = f"{PROVIDER}:{module}:{function}:{end}"
                raise InvalidArgumentError(_FIELD, f"no selector of the clause chooses {selector}, which it needs")
    return Chain(named)


def _parse(text: str) -> tuple[str, str]:
    found = _NAME.fullmatch(text)
    if found is None:
        raise InvalidArgumentError(_FIELD, f"{text!r} is no function: write FUNCTION or MODULE:FUNCTION")
    return found["module"] or VMLINUX, found["function"]
