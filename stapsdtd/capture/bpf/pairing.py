"""Plans which hits of a site are starts and ends, for the consumers that want pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stapsdtd.aggregate.aggregation import HitField
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.armed import ArmedSite, Consumer
from stapsdtd.capture.bpf.encode import Calculations
from stapsdtd.capture.bpf.pairing_rows import PairingSpec
from stapsdtd.capture.bpf.pairs import Pair, key_of
from stapsdtd.capture.bpf.reading import Counted, Paired
from stapsdtd.capture.bpf.recipes import Recipe
from stapsdtd.capture.bpf.span_tables import SpanTable
from stapsdtd.capture.engine import SubscriptionKey
from stapsdtd.query.actions import Aggregate


@dataclass(frozen=True, slots=True)
class Pairing:
    """How hits begin and end spans for the consumers whose action is BeginSpan or EndSpan. paired: whose they are.

    tests: of the pairs that they make.
    """

    specs: tuple[PairingSpec, ...]
    paired: tuple[Paired, ...]
    tests: tuple[Calculations, ...]

    @staticmethod
    def pairs_of(site: ArmedSite) -> dict[SubscriptionKey, Pair]:
        """Return what the consumers whose hits are ends know of starts.

        Raises ValueError if the program cannot pair for so many.
        """
        pairing = _pairing(site)
        if len(pairing) > layout.MAX_PAIRINGS:
            raise ValueError(f"the bpf engine pairs hits of a site for at most {layout.MAX_PAIRINGS} subscriptions")
        return {
            consumer.channel.subscription_key: Pair(number, table.span, table.kept)
            for number, (consumer, table) in enumerate(pairing)
            if consumer.is_end
        }

    @classmethod
    def of(
        cls, site: ArmedSite, bits: Mapping[SubscriptionKey, int], start_bits: Mapping[SubscriptionKey, int]
    ) -> Pairing:
        """bits: of the filters, by subscription; start_bits: of those of starts. Raises NotEncodableError."""
        specs, paired, tests = [], [], []
        for number, (consumer, table) in enumerate(_pairing(site)):
            bit, architecture = bits[consumer.channel.subscription_key], site.object.architecture
            key = key_of(table.span, site.site, architecture)
            kept = () if consumer.is_end else table.kept_of(site.site, architecture).operands
            is_of_call = table.span.is_of_calls
            is_of_thread = HitField.TID in table.span.key and not is_of_call
            specs.append(
                PairingSpec(
                    table.number,
                    bit,
                    consumer.is_end,
                    is_of_thread,
                    key.operands,
                    kept,
                    table.span.timeout_ns,
                    table.kind,
                    # of two calls in the same place, the first one is over
                    takes_latest=table.span.takes_latest or is_of_call,
                    is_of_call=is_of_call,
                    start_bit=start_bits.get(consumer.channel.subscription_key),
                    may_reject=consumer.may_reject_pairs,
                )
            )
            counted = _counted(site, consumer, bit)
            paired.append(Paired(consumer.channel, table.number, bit if consumer.is_end else None, counted))
            if consumer.pair_filter is not None:
                tests.append(Calculations(bit, consumer.pair_filter, number))
        return cls(tuple(specs), tuple(paired), tuple(tests))


def _pairing(site: ArmedSite) -> list[tuple[Consumer, SpanTable]]:
    return [(consumer, consumer.span) for consumer in site.consumers.values() if consumer.span is not None]


def _counted(site: ArmedSite, consumer: Consumer, bit: int) -> Counted | None:
    """Return how pairs are told that need no table of rows."""
    match consumer.outcome:
        case Aggregate(aggregation) if consumer.table is None:
            site_id = consumer.target.site_id
            layout = Recipe.of(aggregation, site.site, site_id, site.object.architecture).layout
            return Counted(consumer.channel, bit, layout.site_id, layout.fixed_key)
        case _:
            return None
