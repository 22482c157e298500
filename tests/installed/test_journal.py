"""What all tests before this one left in the journal: no traceback, and no error."""

from __future__ import annotations

import pytest

from tests.installed import machine

pytestmark = pytest.mark.installed

_SLOW = "the arming thread has been busy or hanging"
"""An emulated processor takes seconds to verify a program."""


def test_no_traceback() -> None:
    assert not [line for line in machine.journal() if "Traceback" in line]


def test_no_error() -> None:
    assert not [line for line in machine.journal() if " ERROR " in line and _SLOW not in line]
