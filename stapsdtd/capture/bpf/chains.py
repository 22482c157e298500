"""Chains of kernel functions: bpf/chain.h keeps, by thread, which calls are on each.

open ──► chain 3: {task: a b}    entries, returns ──► test: is this call on chain 3?    the end of a task ──► {}
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.inner_maps import InnerMaps
from stapsdtd.capture.bpf.places import Places
from stapsdtd.capture.bpf.table_memory import TableMemory
from stapsdtd.capture.engine import SubscriptionKey
from stapsdtd.kernel.bpf_entries import EntryMap

_KEY_BYTES = 8
_BYTE_COUNT = layout.MAX_CHAINED * (64 + _KEY_BYTES + layout.CHAIN.itemsize)
"""Of all threads: struct htab_elem and its share of the buckets, the task, and what is kept of it."""


class Kernel(Protocol):
    """See `capture.bpf.kernel.Loaded`."""

    @property
    def chains(self) -> InnerMaps: ...

    def attach_to_ends_of_tasks(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class OpenChain:
    """One subscription's chain. number: tests in the program name it so."""

    number: int
    owner: str
    threads: EntryMap
    memory: TableMemory

    def close(self) -> None:
        self.threads.close()
        self.memory.give_back(self.owner, _BYTE_COUNT)


class Chains:
    """Called from one thread."""

    def __init__(self, kernel: Kernel, memory: TableMemory) -> None:
        self._maps = kernel.chains
        self._memory = memory
        self._of: dict[SubscriptionKey, OpenChain] = {}
        self._places = Places[OpenChain](
            layout.MAX_CHAINS, "trace calls that led to each other", kernel.attach_to_ends_of_tasks, kernel.chains.take
        )

    def number_for(self, subscription_key: SubscriptionKey, owner: str) -> int:
        """Return the number of a subscription's chain. Raises TableFullError and OSError."""
        if subscription_key not in self._of:
            self._of[subscription_key] = self._places.put(
                lambda number: self._make(number, owner),
                owner,
                lambda made: self._maps.put(made.number, made.threads.descriptor),
            )
        return self._of[subscription_key].number

    def _make(self, number: int, owner: str) -> OpenChain:
        self._memory.take(owner, _BYTE_COUNT)
        try:
            threads = EntryMap(_KEY_BYTES, layout.CHAIN.itemsize, layout.MAX_CHAINED)
        except BaseException:
            self._memory.give_back(owner, _BYTE_COUNT)
            raise
        return OpenChain(number, owner, threads, self._memory)

    def forget_calls(self, subscription_key: SubscriptionKey) -> None:
        """Take all calls off a chain, whose returns would not be known as theirs. Raises OSError."""
        chain = self._of.get(subscription_key)
        if chain is not None:
            for task in chain.threads.all_keys():
                chain.threads.take(task)

    def end(self, subscription_key: SubscriptionKey, tested: Future[None]) -> None:
        """Let go of a subscription's chain. tested: done when no hit can test for it any more."""
        if (chain := self._of.pop(subscription_key, None)) is not None:
            self._places.end(chain, tested)

    def collect(self) -> None:
        """Release the chains whose last hit is over."""
        self._places.collect()

    def close(self) -> None:
        self._places.close()
