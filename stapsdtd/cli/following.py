"""Common code of commands that follow a subscription: what they are told, when to end, and the final summary.

Unsubscribe is called while the stream is open. It returns when the probes are disarmed. The stream then delivers what
had fired until then, and its End carries the final account.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from stapsdtd.cli.moved_text import moved_record
from stapsdtd.cli.render import plural, print_stderr
from stapsdtd.cli.trace_output import notice_of, restart_record
from stapsdtd.client import (
    AsyncSubscription,
    ClientError,
    ClockChange,
    EndReason,
    Interruption,
    NotFoundError,
    Resubscribed,
    SiteState,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
    from types import FrameType

    from stapsdtd.cli.command import Run
    from stapsdtd.cli.trace_output import Notice
    from stapsdtd.client import Message, MovedText, OpenSpans, SpanAccount

_FAILURES = {
    EndReason.SERVER_STOPPING: "the server stopped: run the command again once it is back",
    EndReason.LEASE_EXPIRED: "the server dropped the subscription after {lease} s without a reader",
    EndReason.ACCESS_REVOKED: "the server's policy changed and no longer allows this",
}
_ARMING_SECONDS = 60.0
"""At most, before a command starts."""
_LOOK_SECONDS = 0.05
_FORGOTTEN = "the server forgot the subscription: it was restarted, or had no reader for {lease} s"


@dataclass(frozen=True, slots=True)
class Summary:
    """Accounts for all events that fired. unread: events that fired after the last one shown, as with --count.
    is_aggregated: events were not delivered but counted in rows. spans: what became of starts; events are pairs then.

    processes_ended: whether the trace ended because every process in its scope did. silent: why nothing may have fired,
    if nothing did. appeared: objects that appeared after the beginning, and were armed. armed_after_ms: the longest
    that one of them took, since the server noticed it. open: the spans that had no end at the end.
    is_exact: whether the server gave an account; otherwise it is unknown what else fired. refusals: the reasons why
    sites are refused, the most frequent first, with how many. undecided: of those filtered, and
    valueless: of those aggregated; see `Account`. moved: processes that execute copies of the probes' text, where these
    never fire. restarts: of the server, after which the command went on.
    uncertain: why times of pairs may be too long, if so. is_latest: whether starts replaced those that waited.
    """

    delivered: int
    filtered: int
    lost_by_stage: Mapping[str, int]
    sites: int
    refused: int
    unread: int
    processes_ended: bool = False
    silent: tuple[str, ...] = ()
    appeared: int = 0
    armed_after_ms: float = 0.0
    is_aggregated: bool = False
    spans: SpanAccount | None = None
    open: OpenSpans | None = None
    is_exact: bool = True
    refusals: tuple[tuple[str, int], ...] = ()
    undecided: int = 0
    valueless: int = 0
    moved: tuple[MovedText, ...] = ()
    restarts: tuple[Resubscribed, ...] = ()
    uncertain: str = ""
    is_latest: bool = False

    @property
    def outcome(self) -> str:
        """What became of the events that are called delivered."""
        return "aggregated" if self.is_aggregated else "delivered"

    @property
    def is_silent(self) -> bool:
        """Whether nothing fired."""
        fired = (
            not self.is_exact,
            self.delivered,
            self.filtered,
            self.lost,
            self.unread,
            *(asdict(self.spans).values() if self.spans else ()),
        )
        return not any(fired)

    @property
    def is_all_filtered(self) -> bool:
        """Whether hits were filtered, and there were no others."""
        return bool(self.filtered) and not (self.delivered or self.lost or self.unread > 0)

    @property
    def lost(self) -> int:
        return sum(self.lost_by_stage.values())

    def as_record(self) -> dict[str, object]:
        record: dict[str, object] = {
            self.outcome: self.delivered,
            "filtered": self.filtered,
            "lost": self.lost,
            "sites": self.sites,
        }
        if not self.is_exact:
            # what was filtered, and what else was lost, is unknown
            del record["filtered"]
            record["account"] = "unknown"
        if self.undecided:
            record["undecided"] = self.undecided
        if self.valueless:
            record["valueless"] = self.valueless
        if self.spans:
            record["spans"] = asdict(self.spans)
        if self.lost:
            record["lost_by_stage"] = dict(self.lost_by_stage)
        if self.refused:
            record["refused"] = self.refused
            record["refusals"] = [{"reason": reason, "sites": sites} for reason, sites in self.refusals]
        if self.unread > 0:
            record["unread"] = self.unread
        if self.processes_ended:
            record["processes_ended"] = True
        if self.appeared:
            record["appeared_later"] = self.appeared
            record["armed_after_ms"] = round(self.armed_after_ms, 1)
        if self.moved:
            record["moved"] = list(map(moved_record, self.moved))
        if self.silent:
            record["silent"] = list(self.silent)
        if self.uncertain:
            record["uncertain"] = self.uncertain
        if self.restarts:
            record["restarts"] = list(map(restart_record, self.restarts))
        return record


async def messages(
    subscription: AsyncSubscription, notice: Callable[[Notice], object], *, retries: bool
) -> AsyncIterator[Message]:
    """Yield what the stream carries and, with retries, what that of the next subscription does, once the server was
    restarted. notice: tells the user what happens to the stream.
    """
    async with aclosing(subscription.messages(resubscribe=retries)) as stream:
        async for message in stream:
            if isinstance(message, ClockChange | Interruption | Resubscribed):
                notice(notice_of(message))
            yield message


async def follow(
    subscription: AsyncSubscription,
    reading: Coroutine[object, object, None],
    stop: asyncio.Event,
    *,
    duration: float | None,
    run: Run,
    ending: Callable[[], object] = lambda: None,
) -> str | None:
    """Run a coroutine that reads the stream until it returns, stop is set, or duration (seconds) is over.

    The coroutine returns after the End, or earlier if it needs no more events. run: released unless there is nothing to
    be read. ending: called before unsubscribing.
    Return an error message if something failed or, unless a command ran, if no site was ever armed.
    """
    if subscription.sites and all(site.state is SiteState.REFUSED for site in subscription.sites):
        reading.close()
        ending()
        await subscription.unsubscribe()
        return "every site that matches was refused"
    task = asyncio.create_task(reading)
    stopping = asyncio.create_task(stop.wait())
    failure: str | None = None
    try:
        if run.is_command:
            await _until_armed(subscription, {task, stopping})
        if not stop.is_set() and not task.done():
            run.release(stop)
        await asyncio.wait({task, stopping}, timeout=duration, return_when=asyncio.FIRST_COMPLETED)
        ending()
        if task.done():
            await task
            await subscription.unsubscribe()
        else:
            await subscription.unsubscribe()
            # A stream that broke just now finds the subscription gone; the account covers what it missed. And one that
            # waits for the server has nothing to tell.
            if not subscription.is_down:
                with suppress(NotFoundError):
                    await task
    except NotFoundError:
        failure = _FORGOTTEN.format(lease=subscription.lease_seconds)
    except ClientError as error:
        failure = str(error)
    finally:
        task.cancel()
        stopping.cancel()
    if subscription.still_disarming:
        print_stderr("still disarming: the kernel takes longer than usual; events that fire meanwhile are not captured")
    if failure is None and subscription.end and subscription.end.reason in _FAILURES:
        failure = _FAILURES[subscription.end.reason].format(lease=subscription.lease_seconds)
    return failure or (None if subscription.sites_armed or run.is_released else _why_nothing_armed(subscription, run))


async def _until_armed(subscription: AsyncSubscription, ending: Collection[asyncio.Task[object]]) -> None:
    """Wait until what matches is armed or refused, or until a task has ended. Say so, and also if it takes too long."""
    loop, is_told = asyncio.get_running_loop(), False
    deadline = loop.time() + _ARMING_SECONDS
    while arming := sum(site.state is SiteState.ARMING for site in subscription.sites):
        if loop.time() >= deadline:
            print_stderr(f"the command starts before {plural(arming, 'site')} could be armed: hits may be missed")
            return
        if not is_told:
            is_told = True
            print_stderr(f"the command waits for {plural(arming, 'site')} to be armed")
        done, _ = await asyncio.wait(ending, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return


def _why_nothing_armed(subscription: AsyncSubscription, run: Run) -> str:
    states = {site.state for site in subscription.sites}
    if SiteState.ARMING in states:
        return "no site was armed in time"
    return "every site that matched was refused" if states else run.nothing_found


def summary_of(subscription: AsyncSubscription, shown: int, run: Run) -> Summary:
    """Summarize the final account or, if the connection was lost before it arrived, what the stream reported."""
    late_ns = subscription.appeared.values()
    summary = replace(
        _summary_of(subscription, shown), appeared=len(late_ns), armed_after_ms=max(late_ns, default=0) / 1e6
    )
    if not run.is_command:
        return summary
    return replace(
        summary,
        processes_ended=False,
        silent=(_why_nothing_armed(subscription, run),) if run.is_released and not summary.sites else (),
    )


def _summary_of(subscription: AsyncSubscription, shown: int) -> Summary:
    sites = subscription.sites_armed
    refusals = Counter(site.reason for site in subscription.sites if site.state is SiteState.REFUSED)
    refused, reasons = refusals.total(), tuple(refusals.most_common())
    account, restarts = subscription.total, tuple(subscription.restarts)
    if account is None:
        by_stage = {stage.value: count for stage, count in subscription.lost.items()}
        return Summary(
            shown, 0, by_stage, sites, refused, unread=0, is_exact=False, refusals=reasons, restarts=restarts
        )
    spans = account.spans
    return Summary(
        delivered=shown,
        filtered=account.filtered,
        undecided=account.undecided,
        valueless=account.valueless,
        lost_by_stage={
            "kernel_buffer": account.lost_kernel_buffer,
            "queue": account.lost_queue,
            "decode": account.lost_decode,
            "quota": account.lost_quota,
            "table_full": account.lost_table_full,
            "missed": account.lost_missed,
            "filter": account.lost_filter,
        },
        sites=sites,
        refused=refused,
        refusals=reasons,
        unread=account.fired - account.filtered - account.lost - spans.starts - spans.unmatched - shown,
        spans=spans if spans.starts or spans.unmatched else None,
        open=next(iter(subscription.open_spans.values()), None),
        processes_ended=subscription.end is not None and subscription.end.reason is EndReason.PROCESSES_ENDED,
        restarts=restarts,
    )


@contextmanager
def set_on_signals(*stops: asyncio.Event) -> Iterator[None]:
    """Set one event for each SIGINT or SIGTERM, in order. One more kills the process.

    Also SIGINT, which shells have jobs ignore that a script starts in the background: kill -INT is how these end.
    """
    loop, waiting = asyncio.get_running_loop(), list(stops)
    came: set[int] = set()

    def handle(signum: int, frame: FrameType | None) -> None:
        del frame
        came.add(signum)
        if len(waiting) == 1:
            signal.signal(signum, signal.SIG_DFL)
        stop = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        loop.call_soon_threadsafe(stop.set)

    previous = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            # all is said: one more would only interrupt the interpreter's end, with a traceback
            signal.signal(signum, signal.SIG_IGN if signum in came else handler)
