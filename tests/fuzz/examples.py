"""How much hypothesis tries: more where `./dev fuzz` runs the tests than where they keep somebody waiting."""

from __future__ import annotations

import os

from hypothesis import settings

_FACTOR = int(os.environ.get("STAPSDTD_EXAMPLES", "1"))


def examples(count: int) -> settings:
    return settings(max_examples=count * _FACTOR)
