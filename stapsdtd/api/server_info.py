"""What a client is told of the server: its version, host and state, as far as the client may see that."""

from __future__ import annotations

import os
import platform
from functools import partial

from stapsdtd import __version__
from stapsdtd.api import convert
from stapsdtd.api.backend import Backend
from stapsdtd.api.listing import Listing
from stapsdtd.api.rights import Rights
from stapsdtd.v1 import stapsdt_pb2 as pb


async def server_info(backend: Backend, listing: Listing, rights: Rights) -> pb.GetServerInfoResponse:
    """Return the state of the server for a client with these rights. Runs on the API's event loop."""
    sees_all = rights.list is None
    visible = await listing.visible_pids(rights.list, None)
    count = partial(backend.registry.mapped_metrics, visible)
    # those of single users have been looked at by now
    mapped = await (backend.when_looked(None, count) if sees_all else backend.control.run(count))
    subscriptions = [each for each, _, _ in backend.subscriptions.all() if rights.may_use(each)]
    return pb.GetServerInfoResponse(
        version=__version__,
        engine=backend.engine,
        kernel_release=platform.release(),
        machine=platform.machine(),
        features=map(convert.feature, backend.features()),
        limits=convert.limits(backend.limits),
        subscriptions=len(subscriptions),
        processes=mapped.processes,
        objects=mapped.objects,
        probes=mapped.probes,
        pid=os.getpid(),
        access=convert.access(rights),
        arming=convert.arming(backend.arming(None if sees_all else rights.client), is_path_shown=sees_all),
        inventory=convert.inventory(backend.inventory.status),
    )
