"""Listening: the relay in front, and the gRPC server with the service, health and reflection behind it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stapsdtd.api.listeners import CannotListenError, ListeningSocket, open_listeners
from stapsdtd.api.relay import Relay
from stapsdtd.api.servicer import StapsdtServicer
from stapsdtd.config import Listener
from stapsdtd.v1 import stapsdt_pb2, stapsdt_pb2_grpc

SERVICE = stapsdt_pb2.DESCRIPTOR.services_by_name["StapsdtService"].full_name
_STOP_SECONDS = 2.0
_FAREWELL_SECONDS = 0.5
_IDLE_SECONDS = 300.0
"""A client without a request for so long is told to go; those of gRPC do, and come back with their next one."""
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # 256 selectors with paths, 8,192 process ids and the longest expression; what is refused was read before
    ("grpc.max_receive_message_length", 256 << 10),
    ("grpc.max_concurrent_streams", 256),
)


class Server:
    """A listening gRPC server; made and used on the API's event loop."""

    def __init__(
        self,
        servicer: StapsdtServicer,
        relay: Relay,
        listeners: Sequence[Listener],
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        """Raises CannotListenError."""
        self._servicer = servicer
        self._relay = relay
        self._listening: list[ListeningSocket] = open_listeners(listeners)
        self._server = grpc.aio.server(options=(*_OPTIONS, ("grpc.max_connection_idle_ms", int(1000 * idle_seconds))))
        stapsdt_pb2_grpc.add_StapsdtServiceServicer_to_server(servicer, self._server)
        self._folder: int | None = None
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)

    @property
    def addresses(self) -> list[str]:
        return [each.listener.address for each in self._listening]

    async def start(self) -> None:
        """Raises CannotListenError. When it returns, clients are served."""
        # nobody else gets into this folder, and nothing is left of it should the daemon be killed
        with tempfile.TemporaryDirectory(prefix="stapsdtd-", ignore_cleanup_errors=True) as folder:
            # short, whatever TMPDIR is; and what gRPC removes at the end by its path is nothing that another made there
            self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            path = f"/proc/self/fd/{self._folder}/grpc.sock"
            try:
                self._server.add_insecure_port(f"unix:{path}")
                await self._server.start()
            except RuntimeError as error:
                raise CannotListenError(f"{folder}: {error}") from error
            await self.tell_health(is_serving=True)
            self._relay.start(self._listening, path)

    def renew_certificates(self) -> None:
        """Read the files again, for connections to come. Raises CannotListenError, and keeps what it had then."""
        for listening, context in [(each, each.new_context()) for each in self._listening]:
            listening.tls = context

    async def stop(self) -> None:
        """Let streams that ended finish, then close."""
        await self.tell_health(is_serving=False)
        self._relay.refuse_more()
        self._servicer.stop()
        stopped = asyncio.ensure_future(self._server.stop(_STOP_SECONDS))
        await asyncio.wait({stopped}, timeout=_STOP_SECONDS + _FAREWELL_SECONDS)
        # gRPC waits for ever until a client has read what is left, or is gone; when it is done, that is on its way
        await self._relay.stop(is_flushing=stopped.done())
        await asyncio.wait({stopped}, timeout=_STOP_SECONDS)
        # gRPC does not wait for what a cancelled call does lastly
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._servicer.finished(), _STOP_SECONDS)
        self.let_go()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def let_go(self) -> None:
        """Leave the addresses to another daemon, in any thread."""
        for each in self._listening:
            each.close()

    async def tell_health(self, *, is_serving: bool) -> None:
        """To who asks with grpc.health.v1."""
        statuses = health_pb2.HealthCheckResponse
        status: Any = statuses.SERVING if is_serving else statuses.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)
