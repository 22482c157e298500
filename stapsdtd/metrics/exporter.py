"""Serves metrics over HTTP, in a thread of its own and one request at a time: who is slow only keeps others waiting
for their metrics, and that not long.
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

_log = logging.getLogger(__name__)

_REQUEST_SECONDS = 5.0


class Exporter:
    """Serves from now on until it is closed. Raises CannotListenError."""

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
        # which wakes the thread, as to close it would not
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
                    _log.warning("metrics cannot be served now: %s", error)
                    # descriptors may have run out
                    self._closing.wait(self._request_seconds)
                continue
            with connection:
                self._current = connection
                self._answer(connection)
                self._current = None

    def _answer(self, connection: socket.socket) -> None:
        # a timeout of the socket would begin anew with each byte
        deadline = threading.Timer(self._request_seconds, hang_up, [connection])
        deadline.daemon = True
        deadline.start()
        try:
            self._handler(connection, ("", 0), None)
        except OSError as error:
            _log.debug("a request for metrics was not answered: %s", error)
        except Exception:  # noqa: BLE001 - the next request may fare better
            _log.exception("metrics could not be told")
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
