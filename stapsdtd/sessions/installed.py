"""Has installed files armed for live subscriptions, before a process maps them.

    Inventory: which files ──► opened with the client's rights ──► ObjectFollower: held, and armed like files it names

What a file has is read anew; the inventory only says which files are worth it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stapsdtd.arch import why_foreign
from stapsdtd.catalog.registry import Registry
from stapsdtd.errors import StapsdtdError
from stapsdtd.inventory.files import Change, InstalledFile, matching
from stapsdtd.model import Object
from stapsdtd.procs.named_files import Credentials, NamedFile, NamedFiles
from stapsdtd.runtime.logs import fields
from stapsdtd.sessions.chooser import Chooser
from stapsdtd.sessions.follower import ObjectFollower
from stapsdtd.sessions.live import LiveSubscription
from stapsdtd.sessions.spec import SubscriptionSpec

_log = logging.getLogger(__name__)


class InstalledFiles(Protocol):
    """As `inventory.inventory.Inventory`."""

    on_change: Callable[[Change], None]

    def files(self) -> tuple[InstalledFile, ...]: ...


class Opener(Protocol):
    """As `procs.file_opener.FileOpener`."""

    async def open(
        self, paths: list[str], credentials: Credentials, /, *, are_expected: bool = False
    ) -> NamedFiles: ...


@dataclass(frozen=True, slots=True)
class InstalledLimits:
    """How many installed files, and sites in them, are armed for a subscription before a process maps them. Each takes
    a descriptor. What is beyond is armed when a process maps it. all_files: for all subscriptions together.
    """

    files: int = 128
    sites: int = 20_000
    all_files: int = 4096


DEFAULT_LIMITS = InstalledLimits()


class InstalledFollower:
    """Runs on the control thread's event loop."""

    def __init__(  # noqa: PLR0917 - what it looks at
        self,
        installed: InstalledFiles,
        opener: Opener,
        live: Mapping[str, LiveSubscription],
        registry: Registry,
        follower: ObjectFollower,
        chooser: Chooser,
        object_of: Callable[[NamedFile], Object],
        limits: InstalledLimits = DEFAULT_LIMITS,
    ) -> None:
        """live: the live subscriptions, by id. object_of: as `Subscriptions.object_of`."""
        self._installed = installed
        self._opener = opener
        self._live = live
        self._registry = registry
        self._follower = follower
        self._chooser = chooser
        self._object_of = object_of
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, list[InstalledFile]] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        installed.on_change = self._on_change_in_any_thread

    def stop(self) -> None:
        for task in self._opening.values():
            task.cancel()

    def begin(self, live: LiveSubscription) -> None:
        """Arm for a new subscription what is installed; Subscribe waits for it."""
        files, first = self._installed.files(), live.first
        if files and first is not None and _may_want(live.subscription.spec):
            first.add()
            self._consider(live, files).add_done_callback(lambda _: first.settle())

    def _on_change_in_any_thread(self, change: Change) -> None:
        self._loop.call_soon_threadsafe(self._on_change, change)

    def _on_change(self, change: Change) -> None:
        for live in list(self._live.values()):
            self._let_go(live, {file.path for file in change.removed})
            if change.installed and _may_want(live.subscription.spec):
                self._consider(live, change.installed)

    def _let_go(self, live: LiveSubscription, paths: set[str]) -> None:
        """Let go of files that were removed, or written to."""
        for key, file in [(key, live.files[key]) for key in live.installed]:
            if file.path in paths and not file.is_unchanged:
                self._follower.let_go(live, key)

    def _consider(self, live: LiveSubscription, files: Iterable[InstalledFile]) -> asyncio.Task[None]:
        """Have those opened that are wanted, together with what else is installed until the last ones have been."""
        ident = live.subscription.id
        self._waiting.setdefault(ident, []).extend(files)
        task = self._opening.get(ident)
        if task is None:
            task = self._opening[ident] = self._loop.create_task(self._consider_all(live))
        return task

    async def _consider_all(self, live: LiveSubscription) -> None:
        ident = live.subscription.id
        try:
            while files := self._waiting.pop(ident, None):
                if paths := await self._wanted(live, files):
                    await self._open_and_hold(live, paths)
        finally:
            del self._opening[ident]

    async def _wanted(self, live: LiveSubscription, files: Sequence[InstalledFile]) -> list[str]:
        """Return the files that a subscription may want before a process maps them."""
        spec = live.subscription.spec
        # whoever asks for all probes means those of running programs
        selectors = [selector for selector in spec.selectors if not selector.is_any]
        matched = await asyncio.wrap_future(
            self._chooser.take_turns(live, matching(files, selectors), "matching installed files")
        )
        held = {live.files[key].path for key in live.installed if live.files[key].is_unchanged}
        found = [file.path for file in matched if not why_foreign(file.architecture) and file.path not in held]
        # these are armed already, and stay so as long as their paths lead to them
        is_of_all = spec.owners is None and not spec.scope.pids
        mapped = self._mapped_among(found) if is_of_all else set()
        wanted = [path for path in dict.fromkeys(found) if path not in mapped]
        return wanted[: self._room(live, len(wanted))]

    def _room(self, live: LiveSubscription, wanted: int) -> int:
        """Return how many further files a subscription may have, and say so if that is fewer than it wants."""
        of_all = sum(len(each.installed) for each in self._live.values())
        room = max(min(self._limits.files - len(live.installed), self._limits.all_files - of_all), 0)
        if wanted > room:
            self._say_left_out(live)
        return room

    def _mapped_among(self, paths: Iterable[str]) -> set[str]:
        among = set(paths)
        return {
            obj.path
            for obj in self._registry.objects()
            if obj.path in among and self._registry.mappings(obj.key) and self._follower.is_host_file(obj)
        }

    async def _open_and_hold(self, live: LiveSubscription, paths: list[str]) -> None:
        subscription = live.subscription
        credentials = subscription.spec.credentials
        if credentials is None:
            return
        try:
            opened = await self._opener.open(paths, credentials, are_expected=True)
        except (StapsdtdError, OSError) as error:
            cannot = "subscription %s: installed files cannot be opened: %s"
            _log.warning(cannot, subscription.id, error, extra=fields(client=subscription.client.name))
            return
        for path, reason in opened.unusable:
            _log.debug("subscription %s: %s is armed when a process maps it: %s", subscription.id, path, reason)
        # a path that leads elsewhere by now is not what was installed
        still_there = [file for file in opened.files if file.path in paths]
        chosen = [each async for each in self._within_limits(live, still_there)]
        if subscription.id not in self._live:
            return
        self._follower.hold(live, chosen[: self._room(live, len(chosen))], are_installed=True)

    async def _within_limits(
        self, live: LiveSubscription, files: Iterable[NamedFile]
    ) -> AsyncIterator[tuple[Object, NamedFile]]:
        """Yield the files of which sites are wanted, as long as there is room for these."""
        subscription = live.subscription
        left = self._limits.sites - sum(
            len(live.considered[key].selected_sites) for key in live.installed & live.considered.keys()
        )
        quota = subscription.client.sites_left
        if quota is not None:
            left = min(left, quota)
        for file in files:
            obj = self._object_of(file)
            sites = len(await self._chooser.selected_in(live, obj, file))
            if sites > left:
                self._say_left_out(live)
            elif sites:
                left -= sites
                yield obj, file

    def _say_left_out(self, live: LiveSubscription) -> None:
        if not live.is_beyond_bounds:
            live.is_beyond_bounds = True
            _log.warning(
                "subscription %s matches more installed files than may be armed for it: the others are armed when a "
                "process maps them",
                live.subscription.id,
                extra=fields(client=live.subscription.client.name),
            )


def _may_want(spec: SubscriptionSpec) -> bool:
    """Report whether installed files may be armed before a process maps them. Whoever is followed may execute any."""
    is_of_some = spec.files is not None or (spec.scope.pids and not spec.scope.follow) or spec.scope.containers
    return spec.credentials is not None and not is_of_some and not all(each.is_any for each in spec.selectors)


def credentials_of(client: str, spec: SubscriptionSpec, uid: int | None, groups: frozenset[int]) -> Credentials | None:
    """Return with whose rights installed files are opened for a client; None if for nobody's: a client without a user
    who may not trace everybody's processes.
    """
    if spec.owners is None:
        return Credentials(client, None, frozenset(), os.getpid())
    return None if uid is None else Credentials(client, uid, groups, os.getpid())
