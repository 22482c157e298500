"""A client that harms, as far as it is let: `rude_client.py TARGET SELECTOR KIND`. It says `busy` when it is at it.

subscribe: subscribe without a pause in eight threads, and neither stream nor unsubscribe
unread: ask for more than fits anywhere, in as many calls as there may be at once, and stop before an answer is read
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

import grpc

from stapsdtd.client import Client, ClientError, SubscribeOptions
from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub

_THREADS = 8
_CALLS = 250


def subscribe(target: str, selector: str) -> None:
    enough = threading.Semaphore(0)

    def flood() -> None:
        with Client(target) as client:
            while True:
                with suppress(ClientError):
                    client.subscribe(selector, SubscribeOptions(lease_seconds=1, queue_bytes=1 << 20))
                enough.release()

    threads = [threading.Thread(target=flood) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for _ in range(4 * _THREADS):
        enough.acquire()
    print("busy", flush=True)
    for thread in threads:
        thread.join()


def unread(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        stub = StapsdtServiceStub(channel)
        calls = [stub.ListProbes.future(pb.ListProbesRequest(details=True)) for _ in range(_CALLS)]
        # one that came shows that the others were sent
        calls[0].result()
        print("busy", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    match sys.argv[3]:
        case "subscribe":
            subscribe(*sys.argv[1:3])
        case _:
            unread(sys.argv[1])
