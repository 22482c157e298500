"""What the service manager is told (sd_notify(3)), and the watchdog it keeps. Without one, all of this does nothing."""

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
            _log.warning("the service manager at %s cannot be told %s: %s", address, assignments[0], error)


def notify_reloading() -> None:
    """Say that SIGHUP is being obeyed; READY=1 says that it has been."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


@contextlib.asynccontextmanager
async def watched(prove_life: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Within, tell the watchdog twice in the time it grants that all is well, each time after prove_life came back.

    What that raises as a StapsdtdError is logged, and then the watchdog bites.
    """
    seconds = _watchdog_seconds()
    if seconds is None:
        yield
        return
    telling = asyncio.create_task(_tell(prove_life, seconds / 2))
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(prove_life: Callable[[], Awaitable[object]], pause_seconds: float) -> None:
    while True:
        try:
            await prove_life()
        except StapsdtdError as error:
            _log.error("the watchdog is told no more: %s", error)
            return
        notify("WATCHDOG=1")
        await asyncio.sleep(pause_seconds)


def _watchdog_seconds() -> float | None:
    """As sd_watchdog_enabled(3): a process that inherited the environment is not meant."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or int(microseconds) == 0:
        return None
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 1e6
