"""The objects that have armed sites, each with its file, and the sites' slots."""

from __future__ import annotations

import contextlib
import os

from stapsdtd.capture.bpf.armed import ArmedObject, ArmedSite, Consumer, Group
from stapsdtd.capture.bpf.constants import ReadOnlyFile
from stapsdtd.capture.bpf.endings import Endings
from stapsdtd.capture.bpf.tables import Tables
from stapsdtd.capture.engine import SubscriptionKey, Target
from stapsdtd.kernel.host_calls import OPEN_FILE, host_call
from stapsdtd.model import ObjectKey, Site

_NO_SLOT = 0


class ArmedObjects:
    """Called from one thread, except for `groups`."""

    def __init__(self, tables: Tables, endings: Endings) -> None:
        """tables: have a slot for each site. endings: say when a file's constants are needed no more."""
        self._tables = tables
        self._endings = endings
        self._objects: dict[ObjectKey, ArmedObject] = {}

    def of(self, target: Target) -> ArmedObject:
        """Return the target's object, whose file is opened for its first site. Raises OSError."""
        key = target.object.key
        armed = self._objects.get(key)
        if armed is None:
            armed = self._objects[key] = _opened(target)
        return armed

    @staticmethod
    def preview(armed: ArmedObject, site: Site, subscription_key: SubscriptionKey, consumer: Consumer) -> ArmedSite:
        """Return a site as it will be with one more consumer. It has no slot."""
        known = armed.sites.get(site)
        others = known.consumers if known is not None else {}
        return ArmedSite(armed, site, _NO_SLOT, {**others, subscription_key: consumer})

    def site(self, armed: ArmedObject, site: Site) -> ArmedSite:
        """Return a site, with a slot, armed or not. Raises TableFullError."""
        armed_site = armed.sites.get(site)
        if armed_site is None:
            armed_site = armed.sites[site] = ArmedSite(armed, site, self._tables.slots.allocate())
        return armed_site

    def forget_unwanted(self, armed: ArmedObject) -> None:
        """Free the slots of an object's sites that nobody wants and no event has, and close its file with the last."""
        for site in [site for site in armed.sites.values() if not site.consumers and site.group is None]:
            self._tables.slots.free(site.slot)
            del armed.sites[site.site]
        if not armed.sites and self._objects.get(armed.key) is armed:
            del self._objects[armed.key]
            # records of plans that ended before may still need constants from the file
            self._endings.begin([]).add_done_callback(lambda _: _close(armed))

    def groups(self) -> list[Group]:
        """Return the group of each site that is attached. Any thread may call this."""
        sites = [site for armed in list(self._objects.values()) for site in list(armed.sites.values())]
        return [site.group for site in sites if site.group is not None]


def _opened(target: Target) -> ArmedObject:
    obj, descriptor, constants = target.object, None, None
    if not obj.is_kernel:
        with host_call(OPEN_FILE, target.object.path):
            descriptor = os.open(target.file_path, os.O_RDONLY | os.O_CLOEXEC)
        constants = ReadOnlyFile(descriptor, obj.parsed.read_only)
        with contextlib.suppress(OSError):
            constants.read_ahead()
    architecture = obj.parsed.architecture
    return ArmedObject(obj.key, obj.path, architecture, descriptor, target.owner, constants, obj.is_kernel)


def _close(armed: ArmedObject) -> None:
    if armed.descriptor is not None:
        os.close(armed.descriptor)
