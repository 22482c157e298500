"""Which layout an object was compiled for.

bpf/build.py runs this file where numpy need not be, and has the compiler put the number into the object. A daemon
whose sources are newer than its object, as after an update of a checkout, would write tables that the program reads
otherwise.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent.parent
_SHARED = ("capture/bpf/layout.py", "query/program.py")
"""What says the same as bpf/stapsdt.h."""


def fingerprint() -> int:
    """Return a number of 64 bits that changes with these files."""
    return int.from_bytes(hashlib.sha256(b"".join((_PACKAGE / name).read_bytes() for name in _SHARED)).digest()[:8])
