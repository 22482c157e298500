"""The events that subscriptions want: has them defined and enabled, and removes those that nobody wants any more."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

from stapsdtd.capture.engine import Refusal, SubscriptionKey, Target
from stapsdtd.capture.ftrace.decode import Decoder, SiteConsumer
from stapsdtd.capture.ftrace.executor import Executor
from stapsdtd.capture.ftrace.reader import Reader
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.model import ObjectKey, SiteCapture
from stapsdtd.plan.events import EventSpec, split
from stapsdtd.plan.steps import Enable, changes

_log = logging.getLogger(__name__)


class WantedEvents:
    """Called from the engine's thread."""

    def __init__(self, executor: Executor, reader: Reader) -> None:
        """reader: learns how to decode an event before it is enabled."""
        self._executor = executor
        self._reader = reader
        self._wanted: defaultdict[SubscriptionKey, dict[ObjectKey, set[EventSpec]]] = defaultdict(dict)

    def arm(
        self,
        subscription_key: SubscriptionKey,
        target: Target,
        specs: Iterable[EventSpec],
        consumers: Mapping[SiteCapture, SiteConsumer],
    ) -> list[Refusal]:
        """Arm events of one object; one that the kernel refuses is split, to find the sites that it refuses."""
        refusals: list[Refusal] = []
        pending = list(specs)
        while pending:
            spec = pending.pop()
            try:
                self._arm_event(subscription_key, spec, consumers, target.file_path)
            except TracefsRejectedError as error:
                if len(spec.sites) > 1:
                    pending += split(spec)
                else:
                    _log.info("%s: %s", target.object.path, error)
                    refusals.append(Refusal(spec.sites[0].capture.site, str(error)))
            else:
                self._wanted[subscription_key].setdefault(target.object.key, set()).add(spec)
        return refusals

    def _arm_event(
        self,
        subscription_key: SubscriptionKey,
        spec: EventSpec,
        consumers: Mapping[SiteCapture, SiteConsumer],
        file_path: str,
    ) -> None:
        """Define and enable an event. The reader learns of it in between, so that it never meets an unknown record."""
        installed = {other: state for other, state in self._executor.state().items() if other == spec}
        try:
            for step in changes({spec}, installed):
                if isinstance(step, Enable):
                    sites = tuple(consumers[plan.capture] for plan in spec.sites)
                    decoder = Decoder(spec, self._executor.installed[spec].format, sites)
                    self._reader.decode_with(subscription_key, spec.instance, decoder)
                self._executor.run([step], file_path)
        except TracefsRejectedError:
            self.reconcile()
            raise

    def forget(self, subscription_key: SubscriptionKey, key: ObjectKey) -> None:
        """Want none of an object's events for a subscription. They stay until reconcile() is called."""
        self._wanted[subscription_key].pop(key, None)

    def forget_all(self, subscription_key: SubscriptionKey) -> None:
        """Want none of a subscription's events. They stay until reconcile() is called."""
        self._wanted.pop(subscription_key, None)

    def reconcile(self, log_level: int = logging.WARNING) -> None:
        """Disarm and remove events that nobody wants. What the kernel refuses is tried again when called again."""
        wanted = {spec for by_object in self._wanted.values() for specs in by_object.values() for spec in specs}
        for step in changes(wanted, self._executor.state()):
            try:
                self._executor.run([step])
            except TracefsRejectedError as error:
                _log.log(log_level, "%s; trying again later", error)
