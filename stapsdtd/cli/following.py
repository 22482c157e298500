"""What commands that follow a subscription have in common: until when, and what became of all events at the end.

Unsubscribe is called while the stream is open. It returns when the probes are disarmed; the stream goes on with what
had fired until then, and its End carries the account.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stapsdtd.cli.render import complain
from stapsdtd.client import AsyncSubscription, ClientError, EndReason, NotFoundError, SiteState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping
    from types import FrameType
    from typing import Any

LEASE_SECONDS = 5
"""How long probes stay armed when a command is killed; also how long a connection may be broken."""

_UNWANTED_ENDS = {
    EndReason.SERVER_STOPPING: "the server stopped: start it again when it is back",
    EndReason.LEASE_EXPIRED: "the server heard nothing for too long and ended the subscription: start it again",
    EndReason.ACCESS_REVOKED: "the server's policy changed and does not allow it any more",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of all events that fired; unread are those that nobody wanted to see after the last one shown."""

    delivered: int
    filtered: int
    lost_by_stage: Mapping[str, int]
    sites: int
    refused: int
    unread: int

    @property
    def lost(self) -> int:
        return sum(self.lost_by_stage.values())

    def as_record(self) -> dict[str, object]:
        record: dict[str, object] = {
            "delivered": self.delivered,
            "filtered": self.filtered,
            "lost": self.lost,
            "sites": self.sites,
        }
        if self.lost:
            record["lost_by_stage"] = dict(self.lost_by_stage)
        if self.refused:
            record["refused"] = self.refused
        if self.unread > 0:
            record["unread"] = self.unread
        return record


async def follow(
    subscription: AsyncSubscription,
    reading: Coroutine[Any, Any, None],
    stop: asyncio.Event,
    *,
    duration: float | None,
    ending: Callable[[], object] = lambda: None,
) -> str | None:
    """Let a coroutine that reads the stream go on to the end that was asked for, or came by itself.

    It ends by itself after the End, or where it has seen enough. ending: called when no more is wanted.
    Answer what went wrong, if anything did.
    """
    task = asyncio.create_task(reading)
    stopping = asyncio.create_task(stop.wait())
    failure: str | None = None
    try:
        await asyncio.wait({task, stopping}, timeout=duration, return_when=asyncio.FIRST_COMPLETED)
        ending()
        if task.done():
            await task
            await subscription.unsubscribe()
        else:
            await subscription.unsubscribe()
            # A stream that broke just now finds no subscription any more; the account tells what it missed.
            with suppress(NotFoundError):
                await task
    except ClientError as error:
        failure = str(error)
    finally:
        task.cancel()
        stopping.cancel()
    if subscription.still_disarming:
        complain("still disarming: the kernel takes longer than usual; what still fires is not taken any more")
    if subscription.end and subscription.end.reason is not EndReason.UNSUBSCRIBED:
        failure = _UNWANTED_ENDS[subscription.end.reason]
    return failure


def summary_of(subscription: AsyncSubscription, shown: int) -> Summary:
    """From the final account, or where the connection was lost before it came, from what the stream had told."""
    sites = subscription.sites_armed
    refused = sum(each.state is SiteState.REFUSED for each in subscription.sites)
    account = subscription.account
    if account is None:
        by_stage = {stage.value: count for stage, count in subscription.lost.items()}
        return Summary(shown, 0, by_stage, sites, refused, unread=0)
    return Summary(
        delivered=shown,
        filtered=account.filtered,
        lost_by_stage={
            "kernel_buffer": account.lost_kernel_buffer,
            "queue": account.lost_queue,
            "decode": account.lost_decode,
            "quota": account.lost_quota,
        },
        sites=sites,
        refused=refused,
        unread=account.fired - account.filtered - account.lost - shown,
    )


@contextmanager
def set_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """Sets stop at the first SIGINT or SIGTERM; a second one kills, whatever goes on."""
    loop = asyncio.get_running_loop()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        loop.call_soon_threadsafe(stop.set)

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
