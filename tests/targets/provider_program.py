"""A pure-Python program with probes that does what it is told on standard input, and answers each command with a line.

Its argument names the provider.

load, unload, reload | enabled | fire N | fork N: fire N in a child
close: close every descriptor but the standard ones
"""

from __future__ import annotations

import os
import sys

from stapsdtd.provider import INT32, Provider

provider = Provider(sys.argv[1])
request = provider.probe("request", str, INT32)
print("ready", flush=True)
for line in sys.stdin:
    command, _, count = line.strip().partition(" ")
    # in words that Python 3.9 knows, too
    if command in {"load", "unload", "reload"}:
        getattr(provider, command)()
    elif command == "close":
        os.closerange(3, 1024)
    elif command == "fire":
        for number in range(int(count)):
            request.fire(f"/page/{number}", number)
    elif command == "fork":
        child = os.fork()
        if child == 0:
            for number in range(int(count)):
                request.fire(f"/child/{number}", number)
            os._exit(0)
        os.waitpid(child, 0)
    print(command, int(request.enabled), flush=True)
