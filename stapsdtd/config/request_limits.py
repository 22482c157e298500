"""What one request may contain, whoever sends it.

The limits make the largest request take at most 20 ms of CPU time from its bytes to a subscription or a list that is
checked and may begin (`./dev bench --only requests`). What operators may change is in `Limits`: max_selectors.
"""

from __future__ import annotations

from stapsdtd.errors import InvalidArgumentError

MAX_MESSAGE_BYTES = 256 << 10
"""Fits max_selectors selectors with paths, 8,192 process ids and the longest expression."""

MAX_PARTS = 1536
"""Of all expressions together: names, numbers, strings, operators and parentheses, and the end of each. A text that is
repeated counts once.
"""

MAX_CAPTURES = 3072
"""Elements of all capture lists, and values of kernel functions with each step to them. Fits 64 functions with 12
values of three steps each.
"""

MAX_CHARACTERS = 32 << 10
"""Of all selectors, functions and expressions together. A text that is repeated counts once."""

MAX_CLAUSES = 32
MAX_TAG_BYTES = 256
MAX_FIELDS = 32
MAX_KEYS = 8
MAX_PIDS = 4096
MAX_SCOPE_VALUES = 256
MAX_FILES = 1000
MAX_PATH_BYTES = 4096


TOO_MANY_PARTS = f"names, numbers, operators and parentheses of a request are limited to {MAX_PARTS} in all"
_TOO_MANY_CAPTURES = f"captures and values of a request are limited to {MAX_CAPTURES} in all"
_TOO_LONG = f"selectors, functions and expressions of a request are limited to {MAX_CHARACTERS} characters in all"


class RequestBudget:
    """What the texts of one request may still have. Methods raise InvalidArgumentError if it is exceeded."""

    def __init__(self) -> None:
        self.parts_left = MAX_PARTS
        self._captures_left = MAX_CAPTURES
        self._characters_left = MAX_CHARACTERS

    def take_parts(self, count: int, text: str, field: str) -> None:
        """Take the parts of a text."""
        self.parts_left -= count
        if self.parts_left < 0:
            raise InvalidArgumentError(field, TOO_MANY_PARTS, 0, text)

    def take_captures(self, count: int, text: str, field: str) -> None:
        """Take the captures of a text."""
        self._captures_left -= count
        if self._captures_left < 0:
            raise InvalidArgumentError(field, _TOO_MANY_CAPTURES, 0, text)

    def take_characters(self, text: str, field: str) -> None:
        """Take a text's characters, before it is parsed."""
        self._characters_left -= len(text)
        if self._characters_left < 0:
            raise InvalidArgumentError(field, _TOO_LONG, len(text) + self._characters_left, text)


def check_count(field: str, count: int, limit: int) -> None:
    """Raises InvalidArgumentError if a field has more values than it may have."""
    if count > limit:
        raise InvalidArgumentError(field, f"there are {count}, more than the {limit} allowed")
