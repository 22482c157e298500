"""The gRPC server with the service, health and reflection, behind the relay that clients connect to."""

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

from stapsdtd.api.admission import Admission
from stapsdtd.api.listeners import CannotListenError, ListeningSocket, open_listeners
from stapsdtd.api.relay import Relay
from stapsdtd.api.servicer import StapsdtServicer
from stapsdtd.config import Listener
from stapsdtd.config.request_limits import MAX_MESSAGE_BYTES
from stapsdtd.v1 import stapsdt_pb2, stapsdt_pb2_grpc

SERVICE = stapsdt_pb2.DESCRIPTOR.services_by_name["StapsdtService"].full_name
_STOP_SECONDS = 2.0
_STOP_MARGIN_SECONDS = 0.5
_IDLE_SECONDS = 300.0
"""A connection without a request for this long gets a GOAWAY; gRPC clients then reconnect with their next request."""
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 256),
)


class Server:
    """A listening gRPC server, created and used on the API's event loop."""

    def __init__(
        self,
        servicer: StapsdtServicer,
        relay: Relay,
        listeners: Sequence[Listener],
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        self._servicer = servicer
        self._relay = relay
        self._listeners = listeners
        self._listening: list[ListeningSocket] = []
        self._server = grpc.aio.server(
            interceptors=[Admission(servicer.gate)],
            options=(*_OPTIONS, ("grpc.max_connection_idle_ms", int(1000 * idle_seconds))),
        )
        # its methods take an admitted client instead of a context
        methods: Any = servicer
        stapsdt_pb2_grpc.add_StapsdtServiceServicer_to_server(methods, self._server)
        # replaces the generated handler: messages of streams are already serialized
        stream: Any = grpc.unary_stream_rpc_method_handler(methods.Stream, stapsdt_pb2.StreamRequest.FromString, None)
        self._server.add_registered_method_handlers(SERVICE, {"Stream": stream})
        self._directory: int | None = None
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)

    @property
    def addresses(self) -> list[str]:
        return [each.listener.address for each in self._listening]

    @property
    def socket_paths(self) -> list[str]:
        """Return the paths of the unix sockets that it serves on."""
        paths = (each.listener.path for each in self._listening)
        return [path for path in paths if path is not None and not path.startswith("@")]

    async def start(self) -> None:
        """Listen and serve. Raises CannotListenError."""
        self._listening = open_listeners(self._listeners)
        # only the daemon can enter this directory, and it is gone before clients connect, even if the daemon is killed
        with tempfile.TemporaryDirectory(prefix="stapsdtd-", ignore_cleanup_errors=True) as directory:
            # this path is short whatever TMPDIR is, and when gRPC unlinks it at the end it cannot hit another's file
            self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            path = f"/proc/self/fd/{self._directory}/grpc.sock"
            try:
                self._server.add_insecure_port(f"unix:{path}")
                await self._server.start()
            except RuntimeError as error:
                raise CannotListenError(f"{directory}: {error}") from error
            await self.set_health(is_serving=True)
            self._relay.start(self._listening, path)

    def renew_certificates(self) -> None:
        """Read the certificates again, for new connections. Raises CannotListenError, and then keeps the old ones."""
        for listening, context in [(each, each.new_context()) for each in self._listening]:
            listening.tls = context

    async def stop(self) -> None:
        """Let streams that have ended finish, then close."""
        await self.set_health(is_serving=False)
        self._relay.stop_accepting()
        await self._servicer.stop()
        stopped = asyncio.ensure_future(self._server.stop(_STOP_SECONDS))
        await asyncio.wait({stopped}, timeout=_STOP_SECONDS + _STOP_MARGIN_SECONDS)
        # gRPC waits without a limit for clients to read; once it is done, the relay has all that is left
        await self._relay.stop(is_flushing=stopped.done())
        await asyncio.wait({stopped}, timeout=_STOP_SECONDS)
        # gRPC does not wait for the cleanup of cancelled calls
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._servicer.finished(), _STOP_SECONDS)
        self.close_listeners()
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def close_listeners(self) -> None:
        """Free the addresses for another daemon. May be called from any thread."""
        for listening in self._listening:
            listening.close()

    async def set_health(self, *, is_serving: bool) -> None:
        """Set the status that grpc.health.v1 reports."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if is_serving else statuses.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)
