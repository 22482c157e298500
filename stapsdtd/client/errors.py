"""Errors that the client raises. `from_rpc_error` maps gRPC statuses to them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from stapsdtd.errors import ServerStoppingError, StapsdtdError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ClientError(StapsdtdError):
    """Base of all errors of the client. The text is meant for users."""


class InvalidAggregateError(ClientError):
    """An aggregation names a function that does not exist, or parameters that are no integers."""


class InvalidTargetError(ClientError):
    """The address is malformed or requires TLS, or the files of Tls cannot be used."""


class AllRefusedError(ClientError):
    """Every site that matches was refused, so that no event is to be expected. reasons: of each site."""

    def __init__(self, reasons: Sequence[str]) -> None:
        others = len(reasons) - 1
        more = f", and {others} more" if others else ""
        super().__init__(f"every site that matches was refused: {reasons[0]}{more}")
        self.reasons = tuple(reasons)


class ServerStoppedError(ClientError):
    """The server ended a subscription because it stops."""

    def __init__(self) -> None:
        super().__init__("the server stopped")


class ProtocolError(ClientError):
    """The server sent something that this client does not know. Their versions may differ too much."""


@dataclass(frozen=True, slots=True)
class Call:
    """Describes a request in error messages.

    operation: what the client asked for, such as `list probes`.
    target: the server's address.
    timeout_seconds: how long the response may take; None for streams.
    """

    operation: str
    target: str
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What the server tells programs of an error: see RequestFailedError."""

    kind: str = ""
    field: str = ""
    index: int | None = None
    column: int | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)


_NOTHING_TOLD = Told()


class RequestFailedError(ClientError):
    """The request failed.

    details: the text that came with the gRPC status.
    kind: the server's name of the error, such as `NO_MATCH`; empty if gRPC itself failed, or the server is older.
    field: the path of the request's field that it is about, `clauses[1].selectors[2]`; `request` if the whole one.
    index: the position of the value in that field, from 0, if the field is a list.
    column: where in the value's text the error is, from 0.
    facts: what else there is, such as the `limit` that was reached; docs/python.md lists them.
    """

    def __init__(self, code: grpc.StatusCode, details: str, message: str = "", told: Told = _NOTHING_TOLD) -> None:
        super().__init__(message or details or "the server refused and did not say why: see its log")
        self.code = code
        self.details = details
        self.field, self.index, self.column = told.field, told.index, told.column
        self._kind, self._facts = told.kind, dict(told.facts)

    @property
    def kind(self) -> str:
        return self._kind

    @property
    def facts(self) -> dict[str, str]:
        return self._facts


class ServerUnavailableError(RequestFailedError):
    """The server cannot be reached, closed the connection, or does not admit this client."""

    def __init__(self, code: grpc.StatusCode, details: str, target: str, told: Told = _NOTHING_TOLD) -> None:
        super().__init__(code, details, _how_to_reach(target, details), told)
        self.target = target


class ServerTimeoutError(RequestFailedError):
    """The server did not respond in time."""


class CallCancelledError(RequestFailedError):
    """The request was cancelled by the server or by this client."""


class NotFoundError(RequestFailedError):
    """There is no such subscription: it ended, its lease expired, or the server was restarted. Or no probe matches,
    and the request required one.
    """


class AccessDeniedError(RequestFailedError):
    """The client's role does not allow the request."""


class UnsupportedError(RequestFailedError):
    """The server does not support the request."""


class LimitReachedError(RequestFailedError):
    """A limit of the server or a quota of this client is exhausted."""


class StillSubscribedError(LimitReachedError):
    """Unsubscribe kept exceeding the client's request quota. The subscription lives until its lease expires."""


class StreamTakenOverError(RequestFailedError):
    """Another stream of the same subscription was opened, which ended this one."""


@dataclass(frozen=True, slots=True)
class Violation:
    """An invalid field of a request.

    excerpt: the part of the field's text that contains the error, or empty.
    caret: the position of the error in excerpt.
    """

    field: str
    description: str
    excerpt: str = ""
    caret: int = 0


class InvalidRequestError(RequestFailedError):
    """A field of the request is invalid. violations is empty if the server did not name it."""

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        violations: tuple[Violation, ...] = (),
        told: Told = _NOTHING_TOLD,
    ) -> None:
        super().__init__(code, details, "; ".join(f"{each.field}: {each.description}" for each in violations), told)
        self.violations = violations


_BY_CODE: dict[grpc.StatusCode, type[RequestFailedError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: ServerTimeoutError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.PERMISSION_DENIED: AccessDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitReachedError,
    grpc.StatusCode.ABORTED: StreamTakenOverError,
}


def from_rpc_error(error: grpc.RpcError, call: Call) -> RequestFailedError:
    # The errors of grpc and grpc.aio share these methods, but no typed base class.
    call_error = cast("grpc.Call", error)
    code = call_error.code()
    details = call_error.details() or ""
    info, violations = _details(call_error)
    told = _told(info)
    if code is grpc.StatusCode.UNAVAILABLE:
        return ServerUnavailableError(code, details, call.target, told)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        excerpt, caret = info.get("excerpt", ""), _number(info, "caret") or 0
        named = tuple(Violation(each.field, each.description, excerpt, caret) for each in violations)
        return InvalidRequestError(code, details, named, told)
    return _BY_CODE.get(code, RequestFailedError)(code, details, _explanation(code, details, call), told)


@contextmanager
def translated(call: Call) -> Iterator[None]:
    """Turn a grpc.RpcError raised inside into a ClientError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, call) from error


def _explanation(code: grpc.StatusCode, details: str, call: Call) -> str:
    """Return what failed and what to do, or an empty string if the server's own text says so."""
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            within = "in time" if call.timeout_seconds is None else f"within {call.timeout_seconds:g} s"
            return f"{call.operation}: {call.target} did not answer {within}: it may be busy; try again, or see its log"
        case grpc.StatusCode.CANCELLED:
            return f"{call.operation}: {call.target} cancelled the request, as it does when it stops: try again"
        case grpc.StatusCode.RESOURCE_EXHAUSTED if _TOO_LARGE.search(details):
            return f"{call.operation}: too much for one message: ask for fewer probes"
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return f"{call.operation}: {details or f'{call.target} is at its limit: try again later'}"
        case grpc.StatusCode.UNIMPLEMENTED if _UNKNOWN_METHOD.search(details):
            return f"{call.operation}: {call.target} is older than this client and cannot do this: upgrade it"
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN:
            return f"{call.operation}: {call.target} failed{f' ({details})' if details else ''}: see its log"
        case _:
            return ""


_TOO_LARGE = re.compile(r"larger than max")
_UNKNOWN_METHOD = re.compile(r"method not found", re.IGNORECASE)
_UNVERIFIED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")
_MISNAMED = re.compile(r"Hostname Verification|not in peer certificate")
_CLOSED = re.compile(r"Socket closed|Connection reset|Broken pipe|delayed close", re.IGNORECASE)


def _how_to_reach(target: str, details: str) -> str:
    if details == str(ServerStoppingError()):
        return f"{target} is stopping: try again after it has restarted"
    if "Permission denied" in details:
        return f"permission denied on {target}: run as root, or join the group that owns it"
    if verified := _UNVERIFIED.search(details):
        return f"{target} has a certificate that cannot be trusted ({verified[1]}): name the authority that signed it"
    if _MISNAMED.search(details):
        return f"{target} has a certificate for another name: connect by a name in the certificate"
    if "WRONG_VERSION_NUMBER" in details:
        return f"{target} does not use TLS: connect without a certificate"
    if _CLOSED.search(details):
        return f"{target} closed the connection: {_why_closed(target)}"
    if target.startswith("tcp:"):
        start = f"start 'stapsdtd' there and have it listen on {target}"
        return f"cannot connect to {target}: {'there is no such host' if 'resolving' in details else start}"
    start = f"'systemctl start stapsdtd' or 'stapsdtd --listen {target}'"
    return f"cannot connect to {target}: start the server with {start}"


def _why_closed(target: str) -> str:
    if target.startswith("tcp:"):
        return "it requires TLS and a certificate that its authority signed and that has a role; see its log"
    return "it is stopping, has no role for this user, or has too many connections; see its log"


_KIND = "kind"
_IN_ATTRIBUTES = frozenset({_KIND, "field", "index", "column", "excerpt", "caret"})


def _details(call: grpc.Call) -> tuple[dict[str, str], list[error_details_pb2.BadRequest.FieldViolation]]:
    """Return the metadata of an error's ErrorInfo, its reason as _KIND among them, and the violations of BadRequest."""
    info, violations = {}, []
    error_info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    status = rpc_status.from_call(call)
    for detail in status.details if status is not None else ():
        if detail.Unpack(error_info):
            info = {**error_info.metadata, _KIND: error_info.reason}
        elif detail.Unpack(bad_request):
            violations = list(bad_request.field_violations)
    return info, violations


def _told(info: Mapping[str, str]) -> Told:
    facts = {name: fact for name, fact in info.items() if name not in _IN_ATTRIBUTES}
    return Told(
        info.get(_KIND, ""),
        info.get("field", ""),
        _number(info, "index"),
        _number(info, "column"),
        facts,
    )


def _number(info: Mapping[str, str], name: str) -> int | None:
    text = info.get(name, "")
    return int(text) if text.isdecimal() else None
