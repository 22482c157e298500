"""The client of the benchmarks, a process of its own: `python -m tests.bench.consumer TARGET SELECTOR [OPTION…]`.

It subscribes, says `ready`, reads every event and sums their first arguments, as a client would that has something to
do with them. A line on standard input makes it unsubscribe, read what is left, and tell what it saw in a line of JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from stapsdtd.client import Client, Encoding, EventBatch, NumberColumn, SubscribeOptions, Subscription
from stapsdtd.client.column_batch import ColumnBatch


@dataclasses.dataclass(frozen=True, slots=True)
class Consumed:
    """What one process read, of all its subscriptions together.

    total is the sum of the first arguments. last_ns: CLOCK_MONOTONIC when the last event was there. cpu_ns: what the
    process spent since it had subscribed. delays_ns: from each hit to the moment at which its event was there, where
    that was asked for. The rest is the server's account.
    """

    events: int
    total: int
    last_ns: int
    cpu_ns: int
    delays_ns: list[int]
    fired: int
    delivered: int
    filtered: int
    lost: int


class Reader:
    """Reads one subscription to its end, in a thread."""

    def __init__(self, subscription: Subscription, encoding: Encoding, *, delays: bool) -> None:
        self.subscription = subscription
        self.events = 0
        self.total = 0
        self.last_ns = 0
        self.delays_ns: list[int] = []
        self._with_delays = delays
        work: Callable[[], None] = self._read_columns if encoding is Encoding.COLUMNS else self._read_rows
        self.thread = threading.Thread(target=work)
        self.thread.start()

    def _read_columns(self) -> None:
        for message in self.subscription.messages(Encoding.COLUMNS):
            if not isinstance(message, ColumnBatch):
                continue
            self.last_ns = time.monotonic_ns()
            if self._with_delays:
                self.delays_ns += (time.time_ns() - message.time_ns).tolist()
            first = message.values[0]
            assert isinstance(first, NumberColumn)
            self.events += message.count
            self.total += int(np.sum(first.values))

    def _read_rows(self) -> None:
        for message in self.subscription.messages(Encoding.ROWS):
            if not isinstance(message, EventBatch):
                continue
            self.last_ns = time.monotonic_ns()
            if self._with_delays:
                now = time.time_ns()
                self.delays_ns += [now - event.time_ns for event in message.events]
            self.events += len(message.events)
            firsts = (event.values[0] for event in message.events)
            self.total += sum(value for value in firsts if isinstance(value, int))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.consumer")
    parser.add_argument("target", help="unix:PATH of the server")
    parser.add_argument("selector")
    parser.add_argument("--encoding", choices=[each.value for each in Encoding], default="columns")
    parser.add_argument("--subscriptions", type=int, default=1, metavar="N")
    parser.add_argument("--buffer", type=int, default=0, metavar="KIB", help="the kernel's buffer, for each CPU")
    parser.add_argument("--delays", action="store_true", help="take the time from each hit to its event")
    options = parser.parse_args()
    with ExitStack() as stack:
        client = stack.enter_context(Client(options.target))
        wanted = SubscribeOptions(kernel_buffer_kib=options.buffer)
        subscriptions = [client.subscribe(options.selector, wanted) for _ in range(options.subscriptions)]
        begin_ns = time.process_time_ns()
        readers = [Reader(each, Encoding(options.encoding), delays=options.delays) for each in subscriptions]
        print("ready", flush=True)
        sys.stdin.readline()
        for subscription in subscriptions:
            subscription.unsubscribe()
        for reader in readers:
            reader.thread.join()
        accounts = [each.account for each in subscriptions if each.account is not None]
        consumed = Consumed(
            events=sum(reader.events for reader in readers),
            total=sum(reader.total for reader in readers),
            last_ns=max(reader.last_ns for reader in readers),
            cpu_ns=time.process_time_ns() - begin_ns,
            delays_ns=[delay for reader in readers for delay in reader.delays_ns],
            fired=sum(account.fired for account in accounts),
            delivered=sum(account.delivered for account in accounts),
            filtered=sum(account.filtered for account in accounts),
            lost=sum(account.lost for account in accounts),
        )
    print(json.dumps(dataclasses.asdict(consumed)), flush=True)


if __name__ == "__main__":
    main()
