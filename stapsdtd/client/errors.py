"""What the client raises; `from_rpc_error` is the one place that turns a gRPC status into one of these."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from stapsdtd.errors import ServerStoppingError, StapsdtdError

if TYPE_CHECKING:
    from collections.abc import Iterator


class ClientError(StapsdtdError):
    """Base of all errors of the client; its text is fit to be shown to a user."""


class InvalidTargetError(ClientError):
    """No server can be at this address, or the files of Tls cannot be used."""


class ProtocolError(ClientError):
    """The server sent what this client does not know: one of the two is too old."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as an error names it: what was to be done, `list probes`, by the server at target.

    timeout_seconds: how long an answer may take, None for streams.
    """

    what: str
    target: str
    timeout_seconds: float | None = None


class RequestFailedError(ClientError):
    """The server answered a request with an error; details is its own text."""

    def __init__(self, code: grpc.StatusCode, details: str, message: str = "") -> None:
        super().__init__(message or details or f"the server answered {code.name}")
        self.code = code
        self.details = details


class ServerUnavailableError(RequestFailedError):
    """Nobody answers on target, or nobody does any more, or not to this client."""

    def __init__(self, code: grpc.StatusCode, details: str, target: str) -> None:
        super().__init__(code, details, _how_to_reach(target, details))
        self.target = target


class ServerTimeoutError(RequestFailedError):
    """The server did not answer in time."""


class CallCancelledError(RequestFailedError):
    """The server, or this client, gave the request up before it was answered."""


class NotFoundError(RequestFailedError):
    """There is no such subscription: it ended, its lease ran out, or the server was started anew."""


class AccessDeniedError(RequestFailedError):
    """The server does not let this client do that."""


class UnsupportedError(RequestFailedError):
    """The server cannot do that, yet."""


class LimitReachedError(RequestFailedError):
    """One of the server's limits is exhausted."""


class StillSubscribedError(LimitReachedError):
    """Unsubscribe was refused for too long, because this client asks too often; the lease ends the subscription."""


class StreamTakenOverError(RequestFailedError):
    """Another stream of the same subscription was opened, and this one ended."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that was not accepted, and why.

    excerpt: the part of its text in which it went wrong, at the character of number caret; empty where nothing tells.
    """

    field: str
    description: str
    excerpt: str = ""
    caret: int = 0


class InvalidRequestError(RequestFailedError):
    """The server did not understand a field; violations is empty where it did not say which."""

    def __init__(self, code: grpc.StatusCode, details: str, violations: tuple[Violation, ...] = ()) -> None:
        super().__init__(code, details, "; ".join(f"{each.field}: {each.description}" for each in violations))
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
    # grpc's and grpc.aio's errors share these methods and no typed base.
    failed = cast("Any", error)
    code: grpc.StatusCode = failed.code()
    details: str = failed.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return ServerUnavailableError(code, details, call.target)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(code, details, _violations(failed))
    return _BY_CODE.get(code, RequestFailedError)(code, details, _explained(code, details, call))


@contextmanager
def translated(call: Call) -> Iterator[None]:
    """Raises what grpc raises inside as a ClientError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, call) from error


def _explained(code: grpc.StatusCode, details: str, call: Call) -> str:
    """What failed, and what to do, where gRPC's own text would say neither; empty where the server said it."""
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            within = "in time" if call.timeout_seconds is None else f"within {call.timeout_seconds:g} s"
            return f"{call.what}: {call.target} did not answer {within}: it is busy; try again, or see its log"
        case grpc.StatusCode.CANCELLED:
            return f"{call.what}: {call.target} gave the request up, as it does when it stops: try again"
        case grpc.StatusCode.RESOURCE_EXHAUSTED if _TOO_LARGE.search(details):
            return f"{call.what}: more than one message holds ({details}): ask for fewer probes"
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return (
                f"{call.what}: {details}" if details else f"{call.what}: {call.target} is at its limit: try again later"
            )
        case grpc.StatusCode.UNIMPLEMENTED if _UNKNOWN_METHOD.search(details):
            return f"{call.what}: {call.target} is older than this client and cannot do that: upgrade it"
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN:
            return f"{call.what}: {call.target} failed ({details or code.name}): see its log"
        case _:
            return ""


_TOO_LARGE = re.compile(r"larger than max")
_UNKNOWN_METHOD = re.compile(r"method not found", re.IGNORECASE)
_UNVERIFIED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")
_MISNAMED = re.compile(r"Hostname Verification|not in peer certificate")
_CLOSED = re.compile(r"Socket closed|Connection reset|Broken pipe|delayed close", re.IGNORECASE)


def _how_to_reach(target: str, details: str) -> str:
    if details == str(ServerStoppingError()):
        return f"{target} is stopping: try again when it was started anew"
    if "Permission denied" in details:
        return f"{target} may not be opened by this user: run as root, or join the group that owns it"
    if verified := _UNVERIFIED.search(details):
        return f"{target} has a certificate that cannot be trusted ({verified[1]}): name the authority that signed it"
    if _MISNAMED.search(details):
        return f"{target} has a certificate for another name: ask for it by a name that stands there"
    if "WRONG_VERSION_NUMBER" in details:
        return f"{target} speaks no TLS: leave out the certificate"
    if _CLOSED.search(details):
        return f"{target} closed the connection: {_why_closed(target)}"
    if target.startswith("tcp:"):
        reason = (
            "there is no such host"
            if "resolving" in details
            else f"run 'stapsdtd' there and have it listen on {target}"
        )
        return f"nobody answers on {target}: {reason}"
    start = f"'systemctl start stapsdtd' or 'stapsdtd --listen {target}'"
    return f"nobody answers on {target}: start it with {start}"


def _why_closed(target: str) -> str:
    if target.startswith("tcp:"):
        return "it wants TLS, with a certificate that its authority signed and a role is for; its log says more"
    return "it stops, or has no role for this user, or no room for one more; its log says which"


def _violations(call: grpc.Call) -> tuple[Violation, ...]:
    status = rpc_status.from_call(call)
    if status is None:
        return ()
    bad_request, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    excerpt, caret = "", 0
    for detail in status.details:
        if detail.Unpack(info) and info.metadata["caret"].isdecimal():
            excerpt, caret = info.metadata["excerpt"], int(info.metadata["caret"])
    return tuple(
        Violation(each.field, each.description, excerpt, caret)
        for detail in status.details
        if detail.Unpack(bad_request)
        for each in bad_request.field_violations
    )
