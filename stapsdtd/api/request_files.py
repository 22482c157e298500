"""Opens the files that requests name, and the installed ones in which they look for probes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from stapsdtd.api import requests
from stapsdtd.api.access import Caller
from stapsdtd.api.backend import Backend
from stapsdtd.api.listing import Listing
from stapsdtd.catalog.selectors import Selector
from stapsdtd.errors import InvalidArgumentError, InventoryError, about
from stapsdtd.inventory.files import matching
from stapsdtd.procs.named_files import NO_FILES, Credentials, NamedFile, NamedFiles
from stapsdtd.sessions.spec import SubscriptionSpec
from stapsdtd.v1 import stapsdt_pb2 as pb

_MAX_INSTALLED = 1000


class RequestFiles:
    """Runs on the API's event loop. Its methods raise InvalidArgumentError, AccessDeniedError, FileRefusedError,
    LimitReachedError and InventoryError.
    """

    def __init__(self, backend: Backend, listing: Listing) -> None:
        self._backend = backend
        self._listing = listing

    async def of_list(
        self, request: pb.ListProbesRequest, selectors: tuple[Selector, ...], caller: Caller
    ) -> tuple[Sequence[NamedFile] | None, int]:
        """Return the files in which probes are listed, None for all that processes map, and how many were left out."""
        if request.installed and request.files:
            raise InvalidArgumentError("files", "cannot be combined with installed")
        if request.installed:
            with caller.recording_refusals():
                return await self._installed(selectors, caller)
        if request.files:
            return (await self._named("files", request.files, caller)).files, 0
        return None, 0

    async def of_subscription(
        self, request: pb.SubscribeRequest, spec: SubscriptionSpec, caller: Caller
    ) -> tuple[NamedFiles, SubscriptionSpec]:
        """Return the files that are to be armed before a process maps them, and the spec with what restricts it."""
        if request.files or request.expected_files:
            with caller.recording_refusals():
                caller.rights.check_trace(spec.scope.pids)
        if request.files:
            named = await self._named("files", request.files, caller)
            return named, replace(spec, files=named.paths)
        if request.expected_files:
            return await self._named("expected_files", request.expected_files, caller, are_expected=True), spec
        return NO_FILES, spec

    async def _named(
        self, field: str, paths: Sequence[str], caller: Caller, *, are_expected: bool = False
    ) -> NamedFiles:
        """Open the files that a request names in a field. are_expected: as for `FileOpener.open`."""
        checked = requests.parse_files(field, paths)
        peer = caller.peer
        with caller.recording_refusals():
            if peer.uid is None:
                caller.rights.check_files()
            credentials = Credentials(peer.client, peer.uid, peer.groups, peer.pid or os.getpid())
            with about(field):
                return await self._backend.files.open(checked, credentials, are_expected=are_expected)

    async def _installed(self, selectors: tuple[Selector, ...], caller: Caller) -> tuple[Sequence[NamedFile], int]:
        """Open the installed files that may match and the caller may read."""
        backend, peer = self._backend, caller.peer
        if not backend.inventory.is_on:
            raise InventoryError("this server keeps no inventory of installed files; its configuration says so")
        if caller.rights.list is None:
            credentials = Credentials(peer.client, None, frozenset(), os.getpid())
        else:
            if peer.uid is None:
                caller.rights.check_files()
            credentials = Credentials(peer.client, peer.uid, peer.groups, os.getpid())
        steps = matching(backend.inventory.files(), selectors)
        paths = [file.path for file in await self._listing.in_turns(caller.rights.client, steps)]
        if not paths:
            return (), 0
        shown = paths[:_MAX_INSTALLED]
        with about("installed"):
            opened = await backend.files.open(shown, credentials, are_expected=True)
        return tuple(file for file in opened.files if file.path in shown), len(paths) - len(shown)
