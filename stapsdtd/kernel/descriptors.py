"""How many descriptors this process may have open."""

from __future__ import annotations

import resource

from stapsdtd.errors import KernelFeatureError

_MIN_DESCRIPTORS = 256
"""An idle daemon has some 90 open."""


def allow_all_descriptors() -> None:
    """Raise the soft limit, usually 1,024: each ring, client and armed file takes a descriptor.

    Raises KernelFeatureError if the hard limit is too low for a daemon.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit < _MIN_DESCRIPTORS:
        raise KernelFeatureError(
            "descriptors", f"only {hard_limit} may be open, which is too few", "raise LimitNOFILE or ulimit -n"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
