"""Options that take several expressions at once."""

from __future__ import annotations

import re

_STRING_OR_CHARACTER = re.compile(r""""(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|.""", re.DOTALL)


def split_keys(text: str) -> list[str]:
    """Split keys at the commas that are not within parentheses, brackets or quotes."""
    parts, depth = [""], 0
    for match in _STRING_OR_CHARACTER.finditer(text):
        depth += (match[0] in {"(", "["}) - (match[0] in {")", "]"})
        if match[0] == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += match[0]
    return [part.strip() for part in parts if part.strip()]
