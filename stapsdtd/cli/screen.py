"""A terminal whose content is redrawn in place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CLEAR, _HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """Standard output. Nothing of it is read back."""

    def open(self) -> None:
        # without wrapping, lines that are wider than computed, as in some scripts, are cut off
        self._write(_NO_WRAP + _HIDE_CURSOR + _CLEAR + _HOME)

    def draw(self, lines: Sequence[str]) -> None:
        """Replace what is shown. One line less than the screen has leaves room for the cursor."""
        self._write(_HOME + "".join(f"{line}{_REST_OF_LINE}\n" for line in lines) + _REST_OF_SCREEN)

    def clear(self) -> None:
        self._write(_CLEAR + _HOME)

    def close(self) -> None:
        """Restore the terminal."""
        self._write(_WRAP + _SHOW_CURSOR)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
