"""Finds out which sites of objects subscriptions choose: what is little at once, the rest in the matching thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import Future
from typing import TypeVar

from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.model import Object
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.runtime.fair_thread import FairThread, Queue
from stapsdtd.runtime.futures import all_done, once_done
from stapsdtd.runtime.logs import fields
from stapsdtd.sessions.choices import Found, names_of
from stapsdtd.sessions.live import Choosing, FirstArming, LiveSubscription
from stapsdtd.sessions.matcher import selected_sites

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_MATCHES_AT_ONCE = 500
"""Matches of a site by a selector, of one object, that the control thread makes itself: some 0.3 ms."""


class Chooser:
    """Runs on the control thread's event loop."""

    def __init__(self, live: Mapping[str, LiveSubscription], thread: FairThread) -> None:
        """live: the live subscriptions, by id. thread: the matching thread."""
        self._live = live
        self._thread = thread
        self._loop = asyncio.get_running_loop()

    def has_chosen(self, live: LiveSubscription, obj: Object, names: Collection[str], then: Callable[[], None]) -> bool:
        """Report whether an object's choices under some names are known, or found at once.

        If not, call `then` when they are, unless the subscription has ended by then. Subscribe waits for that.
        """
        if live.choices.matches(obj, names) <= _MATCHES_AT_ONCE:
            return True
        if obj.key not in live.choosing:
            first = live.first if live.first and live.first.is_waiting else None
            if first is not None:
                first.add_match()
            choosing = live.choosing[obj.key] = Choosing(self._search(live, obj, names))
            once_done(
                choosing.search,
                lambda _: self._loop.call_soon_threadsafe(self._on_found, live, obj, choosing, first, then),
            )
        return False

    def _search(self, live: LiveSubscription, obj: Object, names: Collection[str]) -> Future[Found]:
        return self.take_turns(live, live.choices.search(obj, names), f"matching {obj.path}")

    def take_turns(self, live: LiveSubscription, steps: Generator[None, None, _T], name: str) -> Future[_T]:
        """Take steps in the matching thread. name: for messages."""
        return self._thread.take_turns(Queue(live.subscription.client.name), steps, name)

    def _on_found(
        self,
        live: LiveSubscription,
        obj: Object,
        choosing: Choosing,
        first: FirstArming | None,
        then: Callable[[], None],
    ) -> None:
        del live.choosing[obj.key]
        error: BaseException | None = None
        try:
            if live.subscription.id in self._live:
                live.choices.take(obj.key, choosing.search.result())
                then()
        except BaseException as raised:  # noqa: BLE001 - whoever waits for it is told
            error = raised
            if first is None:
                extra = fields(client=live.subscription.client.name)
                _log.exception("subscription %s: %s cannot be matched", live.subscription.id, obj.path, extra=extra)
        if again := live.choosing.get(obj.key):
            settled = again.settled
        else:
            considered = live.considered.get(obj.key)
            settled = all_done([considered.arming] if considered else [])
        settled.add_done_callback(lambda _: choosing.settled.set_result(None))
        if first is not None:
            first.settle_match(error)

    async def selected_in(self, live: LiveSubscription, obj: Object, named: NamedFile) -> tuple[SelectedSite, ...]:
        """Return the sites of a file that are wanted before a process maps it."""
        names = names_of(obj, {}, named)
        if live.choices.matches(obj, names) > _MATCHES_AT_ONCE:
            found = await asyncio.wrap_future(self._search(live, obj, names))
            live.choices.take(obj.key, found)
        return selected_sites(live.subscription, live.choices, obj, names)
