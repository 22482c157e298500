"""Many clients, each a process with several subscriptions: `clients.py TARGET`, told in JSON by standard input.

The first line lists the clients; a client is a list of what each subscription is made with, as keywords of
Client.subscribe. When all are subscribed, a line says with which pids. The next line on standard input makes them
unsubscribe and tell what they saw, in a line each.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from stapsdtd.client import Client, Encoding, EventBatch, SubscribeOptions, Subscription


class Reader:
    """Reads a subscription's events in a thread; the sum is of their first values."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.events = 0
        self.total = 0
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for message in self.subscription.messages(Encoding.ROWS):
            if isinstance(message, EventBatch):
                self.events += len(message.events)
                self.total += sum(value for event in message.events if isinstance(value := event.values[0], int))

    def result(self) -> dict[str, int]:
        self._thread.join()
        account = self.subscription.account
        assert account is not None
        return {
            "events": self.events,
            "total": self.total,
            "fired": account.fired,
            "delivered": account.delivered,
            "filtered": account.filtered,
            "lost": account.lost,
        }


def be_client(target: str, wishes: list[dict[str, Any]], ready: int, go: int) -> None:
    with Client(target) as client:
        readers = [Reader(client.subscribe(wish.pop("selectors"), SubscribeOptions(**wish))) for wish in wishes]
        os.write(ready, b"x")
        os.read(go, 1)
        for reader in readers:
            reader.subscription.unsubscribe()
        line = json.dumps({"pid": os.getpid(), "results": [reader.result() for reader in readers]})
    # short enough for a pipe to take it in one piece
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def main() -> None:
    target, clients = sys.argv[1], json.loads(sys.stdin.readline())
    is_ready, ready = os.pipe()
    go, begin = os.pipe()
    pids = []
    for wishes in clients:
        # before anything of gRPC runs, which does not survive a fork
        pid = os.fork()
        if pid == 0:
            os.close(begin)
            be_client(target, wishes, ready, go)
            os._exit(0)
        pids.append(pid)
    for _ in pids:
        os.read(is_ready, 1)
    print(json.dumps(pids), flush=True)
    sys.stdin.readline()
    os.close(go)
    os.close(begin)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
