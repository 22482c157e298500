"""Serves metrics over HTTP, in a thread of its own and one request at a time: a slow client delays only other scrapes,
and only until its request times out.
"""

from __future__ import annotations

import logging
import socket
import threading
from http import HTTPStatus
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector
from prometheus_client.registry import Collector

from stapsdtd.api.listeners import ListeningSocket, hang_up
from stapsdtd.config import Listener
from stapsdtd.kernel.host_calls import ACCEPT

_log = logging.getLogger(__name__)

_REQUEST_SECONDS = 5.0


class Exporter:
    """Serves metrics until it is closed. Raises CannotListenError."""

    def __init__(self, listener: Listener, collector: Collector, request_seconds: float = _REQUEST_SECONDS) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        ProcessCollector(registry=registry)
        self._handler = _Handler.factory(registry)
        self._request_seconds = request_seconds
        self._listening = ListeningSocket(listener)
        self._listening.socket.setblocking(True)
        self._closing = threading.Event()
        self._current: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="stapsdtd-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return self._listening.listener.address

    def close(self) -> None:
        self._closing.set()
        # wakes the thread, which close() would not
        hang_up(self._listening.socket)
        if (current := self._current) is not None:
            hang_up(current)
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listening.socket.accept()
            except OSError as error:
                if not self._closing.is_set():
                    _log.warning("no metrics for now: %s", ACCEPT.of(error, "a connection"))
                    # out of descriptors, for example
                    self._closing.wait(self._request_seconds)
                continue
            with connection:
                self._current = connection
                self._handle(connection)
                self._current = None

    def _handle(self, connection: socket.socket) -> None:
        # a socket timeout would start over with each byte
        deadline = threading.Timer(self._request_seconds, hang_up, [connection])
        deadline.daemon = True
        deadline.start()
        try:
            self._handler(connection, ("", 0), None)
        except OSError as error:
            _log.debug("a request for metrics failed: %s", error)
        except Exception:  # noqa: BLE001 - the next request may succeed
            _log.exception("cannot collect metrics")
        finally:
            deadline.cancel()


class _Handler(MetricsHandler):
    server_version = "stapsdtd"
    sys_version = ""

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        if urlsplit(self.path).path == "/metrics":
            super().do_GET()
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "metrics are at /metrics")
