"""As a program that a service manager starts with sockets: `python -m tests.api.inherit --fd FD… -- ADDRESS…`.

It prints the addresses on which open_listeners then listens, or why it does not. --pid: of whom the sockets are said
to be. --count: how many are said to be there. The first FD becomes descriptor 3, and so on.
"""

from __future__ import annotations

import argparse
import os

from stapsdtd.addresses import DEFAULT_ADDRESS
from stapsdtd.api.listeners import CannotListenError, open_listeners
from stapsdtd.config import Listener


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pid", type=int, default=os.getpid())
    parser.add_argument("--count", type=int)
    parser.add_argument("--fd", type=int, nargs="*", default=[])
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("addresses", nargs="*", default=[DEFAULT_ADDRESS])
    given = parser.parse_args()
    # out of the way of each other first
    high = [os.dup2(descriptor, 100 + place) for place, descriptor in enumerate(given.fd)]
    for place, descriptor in enumerate(high):
        os.dup2(descriptor, 3 + place)
    count = len(given.fd) if given.count is None else given.count
    os.environ.update(LISTEN_PID=str(given.pid), LISTEN_FDS=str(count), LISTEN_FDNAMES="x")
    listeners = [
        Listener(address, role="user" if given.plain else None, plain=given.plain) for address in given.addresses
    ]
    try:
        opened = open_listeners(listeners)
    except CannotListenError as error:
        print("refused:", error)
        return
    assert not any(name.startswith("LISTEN_") for name in os.environ), "children would take them for theirs"
    assert not any(os.get_inheritable(each.socket.fileno()) for each in opened)
    print(*(each.listener.address for each in opened))
    for each in opened:
        each.close()


if __name__ == "__main__":
    main()
