"""Types as D programs write them."""

from __future__ import annotations

import re

from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.nodes import Position
from stapsdtd.query.d.values import Integer, Pointer, String, Type

_MAX_POINTERS = 16
_SIZED = re.compile(r"(u?)int(8|16|32|64)_t")
_NAMED = {
    "size_t": Integer(64, is_signed=False),
    "ssize_t": Integer(64, is_signed=True),
    "uintptr_t": Integer(64, is_signed=False),
    "intptr_t": Integer(64, is_signed=True),
    "off_t": Integer(64, is_signed=True),
    **dict.fromkeys(("pid_t", "id_t"), Integer(32, is_signed=True)),
    **dict.fromkeys(("uid_t", "gid_t"), Integer(32, is_signed=False)),
}
_BITS = {
    ("char",): 8, ("short",): 16, ("int", "short"): 16, ("int",): 32, (): 32, ("long",): 64, ("int", "long"): 64,
    ("long", "long"): 64, ("int", "long", "long"): 64,
}  # fmt: skip


def parse_type(text: str, at: Position) -> Type:
    """Raises DError."""
    if text == "string":
        return String()
    if text.endswith("*"):
        if text.count("*") > _MAX_POINTERS:
            raise DError(f"a type has more than {_MAX_POINTERS} *", at)
        target = text[:-1].rstrip()
        return Pointer(None if target == "void" else parse_type(target, at))
    if text in _NAMED:
        return _NAMED[text]
    if match := _SIZED.fullmatch(text):
        return Integer(int(match[2]), is_signed=not match[1])
    words = text.split()
    signs = [word for word in words if word in {"signed", "unsigned"}]
    bits = _BITS.get(tuple(sorted(word for word in words if word not in {"signed", "unsigned"})))
    if bits is None or len(signs) > 1:
        raise DError(f"failed to resolve type {text}", at)
    return Integer(bits, is_signed="unsigned" not in signs)
