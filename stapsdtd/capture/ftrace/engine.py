"""The ftrace engine: plans steps, has them executed, and connects armed events with the reader."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field

from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.capture.engine import EngineMetrics, Refusal, RowSink, Sink, SubscriptionKey, Target
from stapsdtd.capture.ftrace.consumers import NOT_AGGREGATED, NOT_PAIRED, consumers_of
from stapsdtd.capture.ftrace.decode import PidsOf
from stapsdtd.capture.ftrace.executor import Executor
from stapsdtd.capture.ftrace.instances import Instances
from stapsdtd.capture.ftrace.reader import Reader
from stapsdtd.capture.ftrace.wanted_events import WantedEvents
from stapsdtd.capture.names import Owner
from stapsdtd.errors import LimitReachedError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.perf import online_cpus
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import Argument, BuiltIn, Capture, Object, ObjectKey, Site, Unavailable
from stapsdtd.plan.events import Instance, group_sites
from stapsdtd.plan.fetch import fetch
from stapsdtd.procs.descendants import Descendants, FollowedProcesses
from stapsdtd.runtime.futures import finished
from stapsdtd.spans.span import NO_OPEN_SPANS, OpenSpans, Span

_log = logging.getLogger(__name__)

_EPHEMERAL_BUFFER_KIB = 256
_MAX_EPHEMERAL = 128
_TOO_MANY_EPHEMERAL = (
    f"the ftrace engine arms at most {_MAX_EPHEMERAL} memfds, deleted files and containers' files for a subscription"
)
NOT_OWN = 'the ftrace engine cannot tell whose process fires, so it serves roles with trace = "all"; the bpf engine can'
_NO_STRINGS = (
    "strings of more than a page make the kernel warn (trace_uprobe.c, prepare_uprobe_buffer), "
    "and kernel.panic_on_warn makes a warning bring this host down"
)


@dataclass(slots=True)
class _Subscription:
    """instances: one for each ephemeral object and, under None, one for all other objects."""

    sink: Sink
    kernel_buffer_kib: int
    instances: dict[ObjectKey | None, Instance] = field(default_factory=dict)
    excluded: set[int] = field(default_factory=set)
    followed: FollowedProcesses | None = None

    def instance_of(self, key: ObjectKey) -> Instance:
        return self.instances.get(key, self.instances[None])


class FtraceEngine:
    """See `capture.engine.Engine`.

    Removing an event empties the rings that it was ever enabled in (see `plan.steps`). So an object that may go before
    the subscription does (Target.is_ephemeral) gets an instance of its own, which is drained and removed with it.
    """

    name = "ftrace"

    def __init__(
        self,
        tracefs: Tracefs,
        owner: Owner,
        pids_of: PidsOf,
        descendants: Descendants,
        max_buffer_bytes: int = 1 << 40,
    ) -> None:
        """max_buffer_bytes: of all instances' rings together."""
        self._tracefs = tracefs
        self._executor = Executor(tracefs, owner.group)
        self._instances = Instances(tracefs, owner, max_buffer_bytes, self._executor.instance_gone)
        self._reader = Reader(tracefs, pids_of)
        self._events = WantedEvents(self._executor, self._reader)
        self._descendants = descendants
        self._subscriptions: dict[SubscriptionKey, _Subscription] = {}

    def why_not_paired(self, span: Span) -> str | None:
        del span
        return NOT_PAIRED

    def why_not_aggregated(self, aggregation: Aggregation, site: Site, architecture: str) -> str | None:  # noqa: ARG002
        return NOT_AGGREGATED

    def open(
        self,
        subscription_key: SubscriptionKey,
        sink: Sink,
        kernel_buffer_kib: int,
        owner: str = "",  # noqa: ARG002
        rows: RowSink | None = None,  # noqa: ARG002
        *,
        client: str = "",  # noqa: ARG002
    ) -> None:
        subscription = _Subscription(sink, kernel_buffer_kib)
        self._reader.open(subscription_key, sink)
        try:
            subscription.instances[None] = self._make_instance(subscription_key, subscription, kernel_buffer_kib)
        except BaseException:
            self._reader.close(subscription_key)
            raise
        self._subscriptions[subscription_key] = subscription

    def _make_instance(
        self, subscription_key: SubscriptionKey, subscription: _Subscription, buffer_kib: int
    ) -> Instance:
        """Raises LimitReachedError and TracefsRejectedError."""
        instance = self._instances.make(buffer_kib)
        try:
            self._instances.exclude(instance, subscription.excluded)
            self._reader.add(subscription_key, instance, online_cpus(), buffer_kib)
        except BaseException:
            self._discard(instance)
            raise
        return instance

    def _discard(self, instance: Instance) -> None:
        """Remove an instance, and then the events whose removal would have emptied its rings."""
        self._instances.discard(instance)
        self._events.reconcile()

    def _exclude(self, subscription: _Subscription, pids: frozenset[int]) -> None:
        """Keep processes from leaving events: a client traced while it handles events would cause more without end.

        Done only if such a process maps the object, since the list costs every context switch of the host. Threads
        that it starts later do leave events, which the reader filters.
        """
        new = pids - subscription.excluded
        for instance in subscription.instances.values():
            self._instances.exclude(instance, new)
        # last, so that what fails is tried again
        subscription.excluded |= new

    def follow(self, subscription_key: SubscriptionKey, pids: frozenset[int]) -> FollowedProcesses:
        followed = self._subscriptions[subscription_key].followed = self._descendants.follow(pids)
        return followed

    def arm(self, subscription_key: SubscriptionKey, target: Target) -> list[Refusal]:
        subscription = self._subscriptions[subscription_key]
        if target.owners is not None:
            return [Refusal(wanted.site, NOT_OWN) for wanted in target.sites]
        key = target.object.key
        consumers, refusals = consumers_of(target)
        if not consumers:
            return refusals
        self._reader.exclude(subscription_key, target.exclude_pids | target.exclude_later)
        self._exclude(subscription, target.exclude_pids)
        if target.is_ephemeral and len(subscription.instances) > _MAX_EPHEMERAL:
            return refusals + [Refusal(capture.site, _TOO_MANY_EPHEMERAL) for capture in consumers]
        if target.is_ephemeral and key not in subscription.instances:
            buffer_kib = min(subscription.kernel_buffer_kib, _EPHEMERAL_BUFFER_KIB)
            try:
                subscription.instances[key] = self._make_instance(subscription_key, subscription, buffer_kib)
            except LimitReachedError as error:
                return refusals + [Refusal(capture.site, str(error)) for capture in consumers]
        no_strings = _NO_STRINGS if procfs.panics_on_warning() else ""
        instance = subscription.instance_of(key)
        specs = group_sites(instance, key, target.object.parsed.architecture, tuple(consumers), no_strings)
        return refusals + self._events.arm(subscription_key, target, specs, consumers)

    def arm_in_steps(self, subscription_key: SubscriptionKey, target: Target) -> Generator[None, None, list[Refusal]]:
        yield
        return self.arm(subscription_key, target)

    def renew(self, pid: int) -> None:
        """Nothing needs to be done: files are armed, not processes."""

    def disarm(self, subscription_key: SubscriptionKey, target: Object, *, is_awaited: bool = False) -> None:  # noqa: ARG002
        subscription = self._subscriptions[subscription_key]
        self._events.forget(subscription_key, target.key)
        self._events.reconcile()
        instance = subscription.instances.pop(target.key, None)
        if instance is not None:
            self._remove_instance(subscription_key, subscription, instance)

    def close(self, subscription_key: SubscriptionKey) -> Future[None]:
        """Close a subscription; its sink has all events on return."""
        subscription = self._subscriptions.pop(subscription_key)
        self._events.forget_all(subscription_key)
        with contextlib.ExitStack() as steps:
            if subscription.followed is not None:
                steps.callback(subscription.followed.close)
            steps.callback(self._reader.close, subscription_key)
            for instance in subscription.instances.values():
                steps.callback(self._remove_instance, subscription_key, subscription, instance)
            self._events.reconcile()
        return self.quiesced()

    def _remove_instance(
        self, subscription_key: SubscriptionKey, subscription: _Subscription, instance: Instance
    ) -> None:
        """Deliver what is left in an instance, remove it, and then remove its events."""
        try:
            # the kernel also counts hits of excluded processes, which are no loss
            hits = None if subscription.excluded else _hits(self._executor, instance)
            self._reader.finish(subscription_key, instance, hits)
        finally:
            self._discard(instance)

    def why_not(self, capture: Capture, subject: Argument | BuiltIn, architecture: str) -> str | None:
        if capture.is_string and procfs.panics_on_warning():
            return _NO_STRINGS
        fetched = fetch(capture, subject, architecture)
        return fetched.reason if isinstance(fetched, Unavailable) else None

    def close_in_steps(self, subscription_key: SubscriptionKey) -> Generator[None, None, Future[None]]:
        yield
        return self.close(subscription_key)

    def collect(self, subscription_key: SubscriptionKey) -> Future[int]:
        return self._reader.collect(subscription_key)

    def ask(self) -> Future[None]:
        return self._reader.ask()

    def problem(self) -> str | None:
        return self._reader.problem() or self._tracefs.problem()

    def metrics(self) -> EngineMetrics:
        specs = list(self._executor.installed)
        return EngineMetrics(
            sum(len(spec.sites) for spec in specs), len(specs), tuple(self._reader.metrics()), self._reader.slices
        )

    def open_spans(self, subscription_key: SubscriptionKey) -> OpenSpans:  # noqa: ARG002
        """Return nothing: this engine pairs nothing."""
        return NO_OPEN_SPANS

    def quiesced(self, owner: str = "") -> Future[None]:  # noqa: ARG002
        """Return a finished future: disarm() and close() return only when nothing is patched any more."""
        return finished()

    def foreign_hits(self) -> dict[tuple[SubscriptionKey, ObjectKey], int]:
        """Return nothing: this engine refuses subscriptions that have foreign hits."""
        return {}

    def retry_cleanup(self) -> None:
        self._instances.remove_discarded(logging.DEBUG)
        self._events.reconcile(logging.DEBUG)

    def shutdown(self) -> None:
        with contextlib.ExitStack() as steps:
            steps.callback(self._reader.stop)
            steps.callback(self._events.reconcile)
            steps.callback(self._instances.remove_discarded)
            for subscription_key in list(self._subscriptions):
                steps.callback(self.close, subscription_key)


def _hits(executor: Executor, instance: Instance) -> int | None:
    try:
        return executor.hits(instance)
    except OSError as error:
        _log.warning("cannot count hits, so events too large for the ring are not reported as lost: %s", error)
        return None
