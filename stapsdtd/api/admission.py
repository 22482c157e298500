"""Admits the calls of all services before their bytes are parsed: the API's, the health check's and the reflection's.

    bytes ──► Gate.enter: role, rate ──► parsed ──► the service's method ──► errors to status codes

gRPC would parse a message first, and log a traceback for each that it cannot.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import aclosing
from functools import partial
from types import coroutine
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from stapsdtd.api.access import Caller, Gate
from stapsdtd.api.errors import Asked, Context, abort_on_error
from stapsdtd.api.parts import as_bytes
from stapsdtd.api.unread import UnreadAnswers
from stapsdtd.errors import MalformedRequestError, UnknownMethodError
from stapsdtd.v1 import stapsdt_pb2

_SERVICE = stapsdt_pb2.DESCRIPTOR.services_by_name["StapsdtService"].full_name
_CALLS = {
    f"/{_SERVICE}/{method}": call
    for method, call in {
        "GetServerInfo": "info",
        "ListProbes": "list",
        "WatchProbes": "watch",
        "Subscribe": "subscribe",
        "Stream": "stream",
        "Unsubscribe": "unsubscribe",
        "ListSubscriptions": "subscriptions",
        "ListKernelFunctions": "functions",
    }.items()
}
"""What the log calls the API's methods; others have their own names there."""
_UNSUBSCRIBE = f"/{_SERVICE}/Unsubscribe"
_CHANGING = frozenset({f"/{_SERVICE}/Subscribe", _UNSUBSCRIBE})
"""Whoever gets an error for one of these has to be able to believe that it did nothing."""
_MAX_SHOWN_CHARACTERS = 80

_Requests = bytes | AsyncIterator[bytes]


class Admission(grpc.aio.ServerInterceptor):
    """Runs on the API's event loop."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._unread = UnreadAnswers()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        path = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.stream_unary_rpc_method_handler(self._refuse_unknown(path))
        kind = "_".join("stream" if streams else "unary" for streams in _streams(handler))
        admitted = self._admitted(path, handler.request_deserializer, getattr(handler, kind))
        return handler._replace(
            **{kind: admitted, "request_deserializer": None, "response_serializer": as_bytes},
        )

    def _refuse_unknown(self, path: str) -> Any:
        async def refuse(_requests: _Requests, context: Context) -> None:
            async with abort_on_error(context):
                caller = self._gate.enter("unknown method", context.peer())
                with caller.recording_refusals():
                    raise UnknownMethodError(path[:_MAX_SHOWN_CHARACTERS])

        return refuse

    def _admitted(self, path: str, parse: Callable[[bytes], Any], method: Any) -> Any:
        """Return a method of unparsed requests that does what this one does."""
        call = _CALLS.get(path, path.removeprefix("/"))

        async def enter(context: Context) -> Caller:
            caller = self._gate.enter(call, context.peer())
            # what makes less work for the daemon does not wait
            if path != _UNSUBSCRIBE:
                await self._gate.wait_for_turn(caller)
            return caller

        def begun(caller: Caller, requests: _Requests, context: Context, asked: Asked) -> Any:
            if not isinstance(requests, bytes):
                return method(messages(requests, context), context)
            asked.request = _parsed(caller, parse, requests)
            return method(asked.request, caller if path in _CALLS else context)

        async def messages(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async for request in requests:
                yield _parsed(await enter(context), parse, request)

        async def answer(requests: _Requests, context: Context) -> Any:
            async with abort_on_error(context) as asked:
                caller = await enter(context)
                client = caller.peer.client
                if path != _UNSUBSCRIBE:
                    self._unread.check(client)
                work = _awaited(partial(begun, caller, requests, context, asked))
                # this frame may outlive the call, see `abort_on_error`
                del requests
                response = as_bytes(await self._charged(caller, work))
                # others' answers may have come in between
                if path not in _CHANGING:
                    self._unread.check(client)
                self._unread.hold(client, response, context)
                return response

        async def answers(requests: _Requests, context: Context) -> AsyncIterator[Any]:
            async with abort_on_error(context) as asked:
                caller = await enter(context)
                async with aclosing(begun(caller, requests, context, asked)) as responses:
                    while (response := await self._charged(caller, anext(responses, None))) is not None:
                        yield response
                        await self._gate.pause(caller)

        return answers if inspect.isasyncgenfunction(method) else answer

    @coroutine
    def _charged(self, caller: Caller, work: Awaitable[Any]) -> Generator[Any, Any, Any]:
        """Await work, and charge the client for what it takes of this thread, but not while it waits."""
        steps = work.__await__()
        charged = partial(self._gate.shares.charged, caller.peer.client, "requests")
        try:
            with charged():
                waits_for = steps.send(None)
            while True:
                try:
                    sent = yield waits_for
                except BaseException as error:  # noqa: BLE001 - the work decides what becomes of it
                    with charged():
                        waits_for = steps.throw(error)
                else:
                    with charged():
                        waits_for = steps.send(sent)
        except StopIteration as end:
            return end.value


async def _awaited(begin: Callable[[], Awaitable[Any]]) -> Any:
    return await begin()


def _streams(handler: Any) -> tuple[bool, bool]:
    return handler.request_streaming, handler.response_streaming


def _parsed(caller: Caller, parse: Callable[[bytes], Any], request: bytes) -> Any:
    """Raises MalformedRequestError."""
    try:
        return parse(request)
    except DecodeError as error:
        with caller.recording_refusals():
            raise MalformedRequestError(f"{len(request)} bytes cannot be parsed: {error}") from None
