"""Makes consumers, with the tables that their hits need."""

from __future__ import annotations

from collections.abc import Callable

from stapsdtd.capture.bpf.armed import Consumer
from stapsdtd.capture.bpf.chains import Chains
from stapsdtd.capture.bpf.draining import Drainer
from stapsdtd.capture.bpf.filters import filter_of, filter_of_pairs, filter_of_starts
from stapsdtd.capture.bpf.operands import NotEncodableError, encode_frame
from stapsdtd.capture.bpf.pairs import key_of, why_not
from stapsdtd.capture.bpf.reading import Channel
from stapsdtd.capture.bpf.span_tables import SpanTable, SpanTables
from stapsdtd.capture.engine import Target, TargetSite
from stapsdtd.functions.probes import RETURN
from stapsdtd.query.actions import BeginSpan, EndSpan


class Consumers:
    """Called from one thread."""

    def __init__(self, drainer: Drainer, spans: SpanTables, chains: Chains) -> None:
        self._drainer = drainer
        self._spans = spans
        self._chains = chains

    def make(
        self, channel: Channel, owner: str, target: Target, wanted: TargetSite, plan_ends: Callable[[], None]
    ) -> Consumer:
        """plan_ends: called where it becomes known what is kept of starts; plans the subscription's ends anew.

        Raises TableFullError, ValueError and OSError.
        """
        architecture = target.object.parsed.architecture
        chain = None if wanted.link is None else self._chain_for(channel, owner, wanted, architecture)
        filters = filter_of(target, wanted, chain), filter_of_starts(wanted), filter_of_pairs(wanted)
        span = self._span_for(channel, owner, wanted, architecture)
        table = self._drainer.table_for(channel, owner, wanted, architecture)
        if span is not None and span.kept is None and isinstance(wanted.action, BeginSpan):
            self._spans.keep(span, span.kept_of(wanted.site, architecture))
            try:
                plan_ends()
            except BaseException:
                span.kept = None
                raise
        hit_filter, start_filter, pair_filter = filters
        return Consumer(channel, wanted, hit_filter, table, span, start_filter, pair_filter)

    def _span_for(self, channel: Channel, owner: str, wanted: TargetSite, architecture: str) -> SpanTable | None:
        match wanted.action:
            case BeginSpan(span) | EndSpan(span):
                if reason := why_not(span):
                    raise NotEncodableError(reason)
                key = key_of(span, wanted.site, architecture)
                table = self._spans.open(channel, owner, span)
                table.key_signs = () if span.is_of_calls else key.signs
                self._drainer.wake()
                if isinstance(wanted.action, BeginSpan):
                    table.kept_of(wanted.site, architecture)
                return table
            case _:
                return None

    def _chain_for(self, channel: Channel, owner: str, wanted: TargetSite, architecture: str) -> int:
        # as the program does, which knows no other calling conventions
        encode_frame(architecture, is_return=wanted.site.name == RETURN)
        return self._chains.number_for(channel.subscription_key, owner)
