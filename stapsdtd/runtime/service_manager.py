"""Notify the service manager and its watchdog (sd_notify(3)). Does nothing without a service manager."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from stapsdtd.errors import StapsdtdError

_log = logging.getLogger(__name__)


def notify(*assignments: str) -> None:
    """Send assignments such as READY=1, STATUS=… or STOPPING=1 in one message."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
        try:
            # an address that begins with @ is in the abstract namespace
            manager.connect("\0" + address[1:] if address.startswith("@") else address)
            manager.sendall("\n".join(assignments).encode())
        except OSError as error:
            _log.warning("cannot send %s to the service manager at %s: %s", assignments[0], address, error)


def notify_reloading() -> None:
    """Notify that a reload has begun; READY=1 notifies that it is complete."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


@contextlib.asynccontextmanager
async def watched(prove_life: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """In the with block, await prove_life and then notify the watchdog, twice per watchdog interval.

    If prove_life raises StapsdtdError, log it and stop notifying, so that the watchdog restarts the daemon.
    """
    seconds = _watchdog_seconds()
    if seconds is None:
        yield
        return
    notifying = asyncio.create_task(_notify_watchdog(prove_life, seconds / 2))
    try:
        yield
    finally:
        notifying.cancel()
        await asyncio.gather(notifying, return_exceptions=True)


async def _notify_watchdog(prove_life: Callable[[], Awaitable[object]], pause_seconds: float) -> None:
    while True:
        try:
            await prove_life()
        except StapsdtdError as error:
            _log.error("stopping watchdog notifications: %s", error)
            return
        notify("WATCHDOG=1")
        await asyncio.sleep(pause_seconds)


def _watchdog_seconds() -> float | None:
    """Return the watchdog interval as sd_watchdog_enabled(3) does; None if this process merely inherited it."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or int(microseconds) == 0:
        return None
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 1e6
