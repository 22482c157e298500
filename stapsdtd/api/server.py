"""Listening: one lock for each socket path, the service, health and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stapsdtd.api.servicer import StapsdtServicer
from stapsdtd.errors import StapsdtdError
from stapsdtd.v1 import stapsdt_pb2, stapsdt_pb2_grpc

SERVICE = stapsdt_pb2.DESCRIPTOR.services_by_name["StapsdtService"].full_name
_SOCKET_MODE = 0o660
_STOP_SECONDS = 5.0


class CannotListenError(StapsdtdError):
    """The address is in use or cannot be made."""


class SocketLock:
    """Held for as long as a daemon serves a path: gRPC would silently take the path from a living one."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise CannotListenError(
                f"{path}.lock: {error.strerror}; does its folder exist, and may you write there?"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise CannotListenError(
                f"{path}: another stapsdtd serves it; stop that one or choose another path"
            ) from error

    def release(self) -> None:
        """Leave the lock file: removing it would let two daemons hold locks on two files of one name."""
        os.close(self._descriptor)


class Server:
    """A listening gRPC server; made and used on the API's event loop."""

    def __init__(self, servicer: StapsdtServicer, path: str) -> None:
        self._path = path
        self._servicer = servicer
        self._lock = SocketLock(path)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1 << 20)])
        stapsdt_pb2_grpc.add_StapsdtServiceServicer_to_server(servicer, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)

    async def start(self) -> None:
        """Raises CannotListenError. When it returns, the socket accepts."""
        before = os.umask(0o777 & ~_SOCKET_MODE)
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
            await self._server.start()
        except RuntimeError as error:
            raise CannotListenError(f"{self._path}: {error}") from error
        finally:
            os.umask(before)
        await self._tell_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Let streams that ended finish, then close."""
        await self._tell_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._servicer.stop()
        await self._server.stop(_STOP_SECONDS)
        # gRPC does not wait for what a cancelled call does lastly
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._servicer.finished(), _STOP_SECONDS)
        self._lock.release()

    async def _tell_health(self, status: Any) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)
