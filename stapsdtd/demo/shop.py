"""The demo's traced program: an imaginary shop in pure Python that declares probes at run time.

It loads a second provider halfway through, and finally prints how many times it fired a probe.
"""

from __future__ import annotations

import random
import sys
import time

from stapsdtd.provider import INT32, Probe, Provider

_PAGES = ("/", "/cart", "/search?q=lamp", "/item/17", "/checkout")
_PAUSE_SECONDS = 0.12


def main(requests: int) -> None:
    rng = random.Random(17)  # noqa: S311 - no secrets
    shop, cache = Provider("shop"), Provider("shop_cache")
    request = shop.probe("request", str, INT32, INT32)
    lookup = cache.probe("lookup", str, INT32)
    fired = 0
    _load(shop, request)
    for number in range(requests):
        if number == requests // 2:
            _load(cache, lookup)
        page = rng.choice(_PAGES)
        time.sleep(_PAUSE_SECONDS)
        if request.enabled:
            request.fire(page, rng.choice((200, 200, 200, 404)), rng.randrange(300, 9000))
            fired += 1
        if lookup.enabled:
            lookup.fire(page, rng.randrange(2))
            fired += 1
    print(fired)


def _load(provider: Provider, probe: Probe) -> None:
    """Load the provider and wait until it is traced. A real program need not wait; the demo shows every request."""
    provider.load()
    deadline = time.monotonic() + 2
    while not probe.enabled and time.monotonic() < deadline:
        time.sleep(0.001)


if __name__ == "__main__":
    main(int(sys.argv[1]))
