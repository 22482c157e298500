"""The bystander's process: `python -m tests.siege.bystander TARGET PROGRAM PROVIDER`, PROGRAM being a ticker.

It says `ready`. For each line of standard input, a number of seconds, it works for so long, and answers with a line of
JSON, a `Round`. Everything that it sees of others is counted: it asks for more than its own.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

from stapsdtd.client import Aggregate, Client, ClientError, Encoding, EventBatch, Subscription
from tests.support import Ticker

T = TypeVar("T")

CALLS = ("info", "list", "subscribe", "unsubscribe", "stream", "count")
_STREAMED, _COUNTED = 100, 50
_CYCLE_SECONDS = 0.2
"""Seven requests each, which is within the 50 a second of an ordinary user."""
_LEAST_CYCLES = 2
_SAID = 100
"""Characters of an error."""
_PATIENCE_SECONDS = 10.0


@dataclass(slots=True)
class Round:
    """What the bystander measured and saw.

    seconds: of each call, by its name; `stream` is from the order to fire to the arrival of the last event, `count`
    from the request to its account. fired, received: by its program, and in its stream. accounted: what the daemon
    says became of them. miscounted: aggregations whose count was not what was fired. foreign: events, probes and
    totals that concern others. failures: of calls, by the name of the error.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    fired: int = 0
    received: int = 0
    accounted: Mapping[str, int] = field(default_factory=dict)
    miscounted: int = 0
    foreign: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, object]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def is_exact(self) -> bool:
        accounted = {"fired": self.fired, "delivered": self.fired, "lost": 0}
        return self.received == self.fired and self.accounted == accounted and not self.miscounted


class _Stream:
    """Reads a subscription in a thread."""

    def __init__(self, subscription: Subscription, pid: int) -> None:
        self.received = 0
        self.foreign = 0
        self._subscription = subscription
        self._pid = pid
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for message in self._subscription.messages(Encoding.ROWS):
            if isinstance(message, EventBatch):
                own = sum(event.pid == self._pid for event in message.events)
                with self._changed:
                    self.received += own
                    self.foreign += len(message.events) - own
                    self._changed.notify()

    def wait_for(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.received >= count, _PATIENCE_SECONDS):
                raise TimeoutError

    def finish(self) -> Mapping[str, int]:
        self._subscription.unsubscribe()
        self._thread.join(_PATIENCE_SECONDS)
        account = self._subscription.account
        assert account is not None
        return {"fired": account.fired, "delivered": account.delivered, "lost": account.lost}


class Bystander:
    def __init__(self, client: Client, ticker: Ticker, provider: str) -> None:
        self._client = client
        self._ticker = ticker
        self._tick = f"{provider}:tick"
        self._own = {os.getpid(), ticker.pid}

    def work(self, seconds: float) -> Round:
        told = Round()
        end = time.monotonic() + seconds
        # those of others, which the bystander may ask for and must not get
        selectors = [self._tick, "raid:*", "loaded:*"]
        # who is not let in at all is as much held up as who has to wait later
        stream = _Stream(
            self._until_answered(told, "subscribe", lambda: self._client.subscribe(selectors)), self._ticker.pid
        )
        known = self._until_answered(told, "info", self._client.info).probes
        cycles = 0
        while (begin := time.monotonic()) < end or (cycles < _LEAST_CYCLES and not told.failures):
            self._cycle(told, stream, known)
            cycles += 1
            time.sleep(max(0.0, begin + _CYCLE_SECONDS - time.monotonic()))
        told.accounted = self._measured(told, "end", stream.finish) or {}
        told.received, told.foreign = stream.received, told.foreign + stream.foreign
        return told

    def _cycle(self, told: Round, stream: _Stream, known: int) -> None:
        info = self._measured(told, "info", self._client.info)
        told.foreign += info is not None and info.probes != known
        listing = self._measured(told, "list", lambda: self._client.list_probes("*:*")) or ()
        told.foreign += sum(not self._own.issuperset(probe.pids) for probe in listing)
        subscription = self._measured(told, "subscribe", lambda: self._client.subscribe(self._tick))
        if subscription is not None:
            self._measured(told, "unsubscribe", subscription.unsubscribe)
        self._measured(told, "stream", lambda: self._streamed(told, stream))
        self._measured(told, "count", lambda: self._counted(told))

    def _measured(self, told: Round, name: str, call: Callable[[], T]) -> T | None:
        begin = time.perf_counter()
        try:
            return call()
        except (ClientError, TimeoutError) as error:
            told.failures[f"{name}: {type(error).__name__}: {str(error)[:_SAID]}"] += 1
            return None
        finally:
            if name in CALLS:
                told.seconds.setdefault(name, []).append(time.perf_counter() - begin)

    def _until_answered(self, told: Round, name: str, call: Callable[[], T]) -> T:
        while True:
            if (answer := self._measured(told, name, call)) is not None:
                return answer

    def _fire(self, told: Round, count: int) -> None:
        told.fired += count
        self._ticker.do(f"fire {count}")

    def _streamed(self, told: Round, stream: _Stream) -> None:
        self._fire(told, _STREAMED)
        stream.wait_for(told.fired)

    def _counted(self, told: Round) -> None:
        subscription = self._client.aggregate(self._tick, Aggregate(functions=("count",)))
        self._fire(told, _COUNTED)
        account = subscription.unsubscribe()
        told.miscounted += (account.fired, account.aggregated) != (_COUNTED, _COUNTED)


def main(arguments: Sequence[str]) -> None:
    target, program, provider = arguments
    with Client(target, timeout_seconds=_PATIENCE_SECONDS) as client, Ticker(program) as ticker:
        bystander = Bystander(client, ticker, provider)
        # what is loaded with the first of each call is not the daemon's doing
        bystander.work(_CYCLE_SECONDS)
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(bystander.work(float(line)).as_json()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
