"""Arms what live subscriptions want, as processes and files come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from stapsdtd.capture.engine import Engine
from stapsdtd.catalog.registry import Registry
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import Object, ObjectKey
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.procs.objects import Parse
from stapsdtd.procs.watcher import Watcher
from stapsdtd.runtime.fair_thread import FairThread
from stapsdtd.runtime.futures import all_done, finished
from stapsdtd.sessions.armer import Armer
from stapsdtd.sessions.attacher import Attacher, Opener
from stapsdtd.sessions.chooser import Chooser
from stapsdtd.sessions.file_writes import FileWriteWatcher
from stapsdtd.sessions.follower import ObjectFollower
from stapsdtd.sessions.foreign_bounds import ForeignBounds
from stapsdtd.sessions.installed import InstalledFiles, InstalledFollower, InstalledLimits
from stapsdtd.sessions.installed import Opener as InstalledOpener
from stapsdtd.sessions.live import FirstArming, LiveSubscription
from stapsdtd.sessions.matcher import is_mapped_in_scope, selected_sites
from stapsdtd.sessions.targets import ArmRequest


class Arming:
    """Its parts, and what concerns several of them. Runs on the control thread's event loop.

    latency: of arming an object's sites; any thread may read it.
    """

    def __init__(
        self,
        live: Mapping[str, LiveSubscription],
        registry: Registry,
        engine: Engine,
        watcher: Watcher,
        parse: Parse,
        *,
        arming_thread: FairThread,
        matching_thread: FairThread,
        nops: NopRewriting,
        filesystems: Filesystems,
        installed: InstalledFiles | None,
        installed_opener: InstalledOpener | None,
        installed_limits: InstalledLimits,
        open_object: Opener,
        clock: Callable[[], float],
    ) -> None:
        """live: the live subscriptions, by id. For the others see `Subscriptions`."""
        self._live = live
        self._registry = registry
        self._watcher = watcher
        self._file_writes = FileWriteWatcher(self._on_write)
        attacher = Attacher(
            engine,
            parse,
            nops=nops,
            # each thread needs its own, which makes the calls that may wait for a process's lock
            filesystems=Filesystems(filesystems.armed_too),
            file_writes=self._file_writes,
            clock=clock,
            open_object=open_object,
        )
        self.latency = attacher.latency
        self.armer = Armer(
            attacher,
            arming_thread,
            file_writes=self._file_writes,
            call_soon=asyncio.get_running_loop().call_soon_threadsafe,
            charge=watcher.charge,
            clock=clock,
        )
        self.foreign = ForeignBounds(clock)
        chooser = Chooser(live, matching_thread)
        self.follower = ObjectFollower(
            live, registry, self.armer, self.foreign, chooser=chooser, filesystems=filesystems, clock=clock
        )
        self._installed: InstalledFollower | None = None
        if installed is not None and installed_opener is not None:
            self._installed = InstalledFollower(
                installed, installed_opener, live, registry, self.follower, chooser, self.object_of, installed_limits
            )

    def begin(
        self, live: LiveSubscription, first: FirstArming, files: Sequence[NamedFile], functions: Sequence[Object] = ()
    ) -> None:
        """Begin to arm what a new subscription wants.

        files: are armed whether or not a process maps them. functions: of the kernel.
        """
        self.armer.open(live, first)
        self.follower.hold(live, ((self.object_of(file), file) for file in files))
        self.follower.consider_all(live, first)
        for obj in functions:
            if selected := selected_sites(live.subscription, live.choices, obj, [obj.path]):
                self.armer.arm(live, ArmRequest(obj, selected, {}, is_ephemeral=False), lambda: None)
        if self._installed is not None:
            self._installed.begin(live)

    def stop(self) -> None:
        """Arm nothing any more."""
        self.follower.stop()
        if self._installed is not None:
            self._installed.stop()
        self._file_writes.close()

    def object_of(self, file: NamedFile) -> Object:
        """Return the object of a file that a client named."""
        return self._watcher.object_of(file.key, file.path, file.parsed)

    def unmapped(self, live: LiveSubscription) -> list[Object]:
        """Return the objects that are armed for a subscription, or being armed, and no process maps."""
        in_files = (each.object for each in live.considered.values() if not each.object.is_kernel)
        return [obj for obj in in_files if not self._registry.mappings(obj.key)]

    def for_client(self, client: str) -> Future[None]:
        """Return a future that is done when everything now being armed for a client is armed, except what is late."""
        of_client = [live for live in self._live.values() if live.subscription.client.name == client]
        armed = all_done([arming for live in of_client for arming in self.armer.late.awaited(live)])
        return all_done([armed, *(choosing.settled for live in of_client for choosing in live.choosing.values())])

    def in_process(self, pid: int) -> Future[None]:
        """Look at a process now, and return a future that is done when the probes that it maps are armed for everyone
        who traces them, except those that take long.
        """
        if not self._live:
            return finished()
        self._watcher.look_at([pid])
        return self._armed_in(pid)

    def _armed_in(self, pid: int) -> Future[None]:
        """Return a future that is done once everything now being armed in a process is, except what is late."""
        mapped = self._registry.mapped_by(pid)
        live = list(self._live.values())
        choosing = [each.choosing[key].settled for each in live for key in mapped & each.choosing.keys()]
        arming = [
            considered.arming
            for each in live
            for key in mapped & each.considered.keys()
            if self.armer.late.is_awaited(considered := each.considered[key])
            and is_mapped_in_scope(each.subscription, considered.selected_sites, (pid,))
        ]
        return all_done([all_done(arming), *choosing])

    def _on_write(self, written: set[ObjectKey]) -> None:
        # the follower disarms through the armer, which needs the file writes first
        self.follower.on_write(written)
