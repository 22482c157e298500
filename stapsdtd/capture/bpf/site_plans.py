"""Plans what the program does at a site: test the consumers' filters, and carry out their actions.

    consumers ──► filters, each once ───────────────────► tests ────┐
              ├─► Emit: a record's values, each once ──► operands ──┼─► SitePlan ──Tables.allocate_plan──► ActivePlan
              ├─► Aggregate: keys, values ─────────────► recipes ───┤
              └─► BeginSpan, EndSpan: keys, words ─────► pairings ──┘

A new action gets a class of its own beside `Emission`, `Summing` and `Pairing`, which ignore it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.armed import ArmedSite, Consumer
from stapsdtd.capture.bpf.constants import SiteConstants
from stapsdtd.capture.bpf.encode import Calculations, Filter
from stapsdtd.capture.bpf.operands import encode_abs_ip
from stapsdtd.capture.bpf.pairing import Pairing
from stapsdtd.capture.bpf.pairs import Pair
from stapsdtd.capture.bpf.reading import ActivePlan, Added, Counted, Reading
from stapsdtd.capture.bpf.recipe_rows import RecipeSpec
from stapsdtd.capture.bpf.recipes import Recipe
from stapsdtd.capture.bpf.sources import Layout
from stapsdtd.capture.bpf.span_kinds import SPANS_OF_RECORDS
from stapsdtd.capture.bpf.subjects import Subjects
from stapsdtd.capture.bpf.tables import PlanEntry, PlanSpec
from stapsdtd.capture.bpf.words import Words
from stapsdtd.capture.engine import SubscriptionKey
from stapsdtd.model import Capture, Constant, Unavailable
from stapsdtd.plan.values import OfStart, Value, united
from stapsdtd.query.actions import Aggregate, Emit
from stapsdtd.spans.span import is_of_pair

_RECORD_BYTES = layout.STRIDES[-1] - layout.RECORD_HEADER - layout.MAX_TEXT - 1
"""The program begins a string only if there is room for the longest one."""

_STARTS_BYTES = layout.STRIDES[-1] - layout.RECORD_HEADER - SPANS_OF_RECORDS[-1].entry_bytes - 8 * layout.MAX_VALUES
"""Nor does it copy a start where there would be no room for the longest one. Each begins at a word."""

_RESTRICTED_FILTERS = 3 * layout.MAX_FILTERS // 4
_RESTRICTED_STEPS = 3 * layout.MAX_STEPS // 4
_RESTRICTED_CAPTURES = layout.MAX_VALUES // 2
_RESTRICTED_PAIRINGS = layout.MAX_PAIRINGS // 2


@dataclass(frozen=True, slots=True)
class SitePlan:
    """spec: for the program. filters: by bit. bits: of each consumer's filter, by subscription.

    emission: the record that hits write. summing: what they add to. pairing: which of them are starts and ends.
    """

    spec: PlanSpec
    consumers: tuple[Consumer, ...]
    filters: Mapping[int, Filter]
    bits: Mapping[SubscriptionKey, int]
    emission: Emission
    summing: Summing
    pairing: Pairing

    @classmethod
    def of(cls, site: ArmedSite) -> SitePlan:
        """Raises ValueError if the consumers want more than the program can do at one site."""
        consumers = tuple(site.consumers.values())
        _check_shares(consumers)
        subjects = Subjects(site.site, site.object.architecture)
        pairs = Pairing.pairs_of(site)
        emission = Emission.of(site, subjects, pairs)
        # a record that one consumer's sum lacks is for this one alone, and an end may not be one, so that the filter of
        # either has a bit of its own
        choices = [
            (
                consumer.filter,
                consumer.is_added,
                consumer if consumer.is_end or _hands_over(consumer, subjects) else None,
            )
            for consumer in consumers
        ]
        starts = {
            each.channel.subscription_key: (each.start_filter, False, each)
            for each in consumers
            if each.start_filter is not None
        }
        distinct = list(dict.fromkeys([*choices, *starts.values()]))
        filters = {bit: choice[0] for bit, choice in enumerate(distinct)}
        if len(filters) > layout.MAX_FILTERS or sum(each.steps for each in filters.values()) > layout.MAX_STEPS:
            raise ValueError(f"the bpf engine cannot run that many tests at a site; distinct filters: {len(filters)}")
        bits = {
            consumer.channel.subscription_key: distinct.index(choice)
            for consumer, choice in zip(consumers, choices, strict=True)
        }
        summing = Summing.of(site, subjects, bits, pairs)
        start_bits = {key: distinct.index(choice) for key, choice in starts.items()}
        pairing = Pairing.of(site, bits, start_bits)
        emitted = {bits[consumer.channel.subscription_key] for consumer, _ in emission.layouts}
        programs = [each.decision for each in filters.values()]
        programs += [each.program for each in (*pairing.tests, *summing.calculations)]
        read = {Value(index) for program in programs for index in program.arguments}
        tested = sorted(read.difference(emission.positions))
        positions = {**emission.positions, **{value: at for at, value in enumerate(tested, len(emission.operands))}}
        operand_indexes = {value.subject: positions[value] for value in read if isinstance(value.subject, int)}
        spec = PlanSpec(
            emission.operands,
            [subjects.encode(value) for value in tested],
            filters,
            operand_indexes,
            has_texts=emission.max_bytes > emission.min_bytes or any(map(subjects.is_in_kernel, emission.positions)),
            emitted=sum(1 << bit for bit in emitted),
            recipes=summing.recipes,
            pairings=pairing.specs,
            is_paired=len(pairing.specs) == len(consumers) == 1,
            pair_tests=pairing.tests,
            calculations=summing.calculations,
        )
        return cls(spec, consumers, filters, bits, emission, summing, pairing)

    def active(self, entry: PlanEntry) -> ActivePlan:
        """Return the plan for the reader, once it is in the kernel's table."""
        channels = tuple((self._bit(consumer), consumer.channel) for consumer in self.consumers)
        readings = tuple(
            Reading(
                consumer.channel,
                self._bit(consumer),
                consumer.target.site_id,
                layout,
                is_complete=not consumer.is_added,
            )
            for consumer, layout in self.emission.layouts
        )
        tested = {bit for bit, each in self.filters.items() if not each.accepts_all}
        # that a filter accepts every hit does not say that every record is for a consumer that takes over some
        tested |= {reading.bit for reading in readings if not reading.is_complete}
        tested |= {paired.bit for paired in self.pairing.paired if paired.bit is not None}
        tested_bits = sum(1 << bit for bit in tested)
        abs_ip_at = len(self.emission.operands) - 1
        constants, counted, added = self.emission.constants, self.summing.counted, self.summing.added
        paired = self.pairing.paired
        return ActivePlan(entry, channels, readings, tested_bits, constants, abs_ip_at, counted, added, paired)

    def _bit(self, consumer: Consumer) -> int:
        return self.bits[consumer.channel.subscription_key]


@dataclass(frozen=True, slots=True)
class Emission:
    """The one record that a hit writes for all consumers whose action is Emit, and how each of them reads it.

    Also for consumers that add hits up, if these lack something that is not in memory: the daemon may know it.

    operands: of the record's values. positions: each value's among them. min_bytes, max_bytes: of a record.
    constants: of the file, if values may have to be read from it; then the last operand is abs_ip.
    """

    operands: tuple[bytes, ...]
    positions: Mapping[Value, int]
    min_bytes: int
    max_bytes: int
    layouts: tuple[tuple[Consumer, Layout], ...]
    constants: SiteConstants | None

    @classmethod
    def of(cls, site: ArmedSite, subjects: Subjects, pairs: Mapping[SubscriptionKey, Pair]) -> Emission:
        """pairs: of the consumers whose hits are ends. Raises ValueError if a record cannot hold all values."""
        sources: list[tuple[Consumer, list[tuple[Capture, Value | Constant | Unavailable]]]] = []
        for consumer in site.consumers.values():
            outcome = consumer.outcome
            if isinstance(outcome, Emit) or (outcome is not None and _hands_over(consumer, subjects)):
                pair = pairs.get(consumer.channel.subscription_key)
                sources.append((consumer, [(each, subjects.source_of(each, pair)) for each in outcome.captures]))
        values = united(source for _, each in sources for _, source in each if isinstance(source, Value))
        operands = [subjects.encode(value) for value in values]
        constants = None
        file = site.object.constants
        if file is not None and len(operands) < layout.MAX_VALUES and any(map(subjects.reads_memory, values)):
            constants = SiteConstants.around(file, site.site.site_offset)
        if constants is not None:
            operands.append(encode_abs_ip(site.object.architecture))
        if len(operands) > layout.MAX_VALUES:
            raise ValueError(
                f"its captures take {len(operands)} values, and a record holds at most {layout.MAX_VALUES}"
            )
        min_bytes = layout.RECORD.itemsize + 8 * len(operands)
        max_bytes = min_bytes + sum(value.limit for value in values)
        starts = [value.limit for value in values if isinstance(value.subject, OfStart)]
        if starts and max_bytes - min(starts) > _STARTS_BYTES:
            raise ValueError(f"a record has no room for {len(starts)} starts of so many bytes")
        if max_bytes > _RECORD_BYTES:
            raise ValueError(f"its captures take up to {max_bytes} bytes, and a record holds at most {_RECORD_BYTES}")
        by_argument = {value.key: position for position, value in enumerate(values)}
        layouts = tuple(
            (
                consumer,
                tuple(
                    subjects.reading_of(capture, source, by_argument, pairs.get(consumer.channel.subscription_key))
                    for capture, source in each
                ),
            )
            for consumer, each in sources
        )
        positions = {value: position for position, value in enumerate(values)}
        return cls(tuple(operands), positions, min_bytes, max_bytes, layouts, constants)

    @property
    def record_classes(self) -> range:
        """Return the classes of record sizes that hits may write."""
        return range(layout.record_class(self.min_bytes), layout.record_class(self.max_bytes) + 1)


@dataclass(frozen=True, slots=True)
class Summing:
    """How hits are added up for the consumers whose action is Aggregate: by the program, or by its counters alone.

    added: whose the recipes are. calculations: for their keys and values.
    """

    recipes: tuple[RecipeSpec, ...]
    added: tuple[Added, ...]
    counted: tuple[Counted, ...]
    calculations: tuple[Calculations, ...]

    @classmethod
    def of(
        cls,
        site: ArmedSite,
        subjects: Subjects,
        bits: Mapping[SubscriptionKey, int],
        pairs: Mapping[SubscriptionKey, Pair],
    ) -> Summing:
        """bits: of the filters, by subscription. pairs: as `Emission.of`.

        Raises ValueError if the program cannot add up what is wanted.
        """
        recipes, added, counted, words = [], [], [], Words()
        for consumer in site.consumers.values():
            match consumer.outcome:
                case Aggregate(aggregation):
                    key, table, site_id = consumer.channel.subscription_key, consumer.table, consumer.target.site_id
                    bit, architecture = bits[key], site.object.architecture
                    pair = pairs.get(key)
                    recipe = Recipe.of(aggregation, site.site, site_id, architecture, pair, first_word=words.used)
                    if table is None and not consumer.is_end:
                        counted.append(Counted(consumer.channel, bit, recipe.layout.site_id, recipe.layout.fixed_key))
                    if table is None:
                        continue
                    variant = table.variant(recipe.layout)
                    is_recorded = _hands_over(consumer, subjects)
                    recipes.append(RecipeSpec(recipe, bit, table.number, variant, table.key_class, is_recorded))
                    added.append(Added(consumer.channel, table.number))
                    words.take(recipe, consumer, bit, pair.pairing if pair else 0)
        return cls(tuple(recipes), tuple(added), tuple(counted), tuple(words.calculations))


def _check_shares(consumers: Sequence[Consumer]) -> None:
    """Reserve a part of what the program can do at a site for clients that may trace everybody's processes.

    Raises ValueError if the others want more than the rest.
    """
    restricted = [consumer for consumer in consumers if consumer.filter.owners is not None]
    if not restricted:
        return
    filters = {each for consumer in restricted for each in (consumer.filter, consumer.start_filter) if each is not None}
    captures = {capture for consumer in restricted for capture in consumer.target.action.captures}
    steps = sum(each.steps for each in filters)
    if len(filters) > _RESTRICTED_FILTERS or steps > _RESTRICTED_STEPS or len(captures) > _RESTRICTED_CAPTURES:
        raise ValueError("its filters or captures are too many for clients that may not trace everybody's processes")
    if sum(consumer.span is not None for consumer in restricted) > _RESTRICTED_PAIRINGS:
        raise ValueError(
            f"the bpf engine pairs a site's hits at most {_RESTRICTED_PAIRINGS} times for clients that may not trace"
            " everybody's processes"
        )


def _hands_over(consumer: Consumer, subjects: Subjects) -> bool:
    """Report whether something that a consumer adds up may not be in memory."""
    if not consumer.is_added or consumer.table is None:
        return False
    of_hits = (capture for capture in consumer.target.action.captures if not is_of_pair(capture))
    sources = map(subjects.source_of, of_hits)
    return any(isinstance(source, Value) and subjects.reads_memory(source) for source in sources)
