"""What the client raises; `from_rpc_error` is the one place that turns a gRPC status into one of these."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from stapsdtd.errors import StapsdtdError

if TYPE_CHECKING:
    from collections.abc import Iterator


class ClientError(StapsdtdError):
    """Base of all errors of the client; its text is fit to be shown to a user."""


class InvalidTargetError(ClientError):
    """No server can be at this address, or the files of Tls cannot be used."""


class ProtocolError(ClientError):
    """The server sent what this client does not know: one of the two is too old."""


class RequestFailedError(ClientError):
    """The server answered a request with an error; details is its own text."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details or f"the server answered {code.name}")
        self.code = code
        self.details = details


class ServerUnavailableError(RequestFailedError):
    """Nobody answers on target, or nobody does any more, or not to this client."""

    def __init__(self, code: grpc.StatusCode, details: str, target: str) -> None:
        super().__init__(code, _how_to_reach(target, details))
        self.target = target


class ServerTimeoutError(RequestFailedError):
    """The server did not answer in time."""


class NotFoundError(RequestFailedError):
    """There is no such subscription: it ended, its lease ran out, or the server was started anew."""


class AccessDeniedError(RequestFailedError):
    """The server does not let this client do that."""


class UnsupportedError(RequestFailedError):
    """The server cannot do that, yet."""


class LimitReachedError(RequestFailedError):
    """One of the server's limits is exhausted."""


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
        super().__init__(code, "; ".join(f"{each.field}: {each.description}" for each in violations) or details)
        self.violations = violations


_BY_CODE: dict[grpc.StatusCode, type[RequestFailedError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: ServerTimeoutError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.PERMISSION_DENIED: AccessDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitReachedError,
    grpc.StatusCode.ABORTED: StreamTakenOverError,
}


def from_rpc_error(error: grpc.RpcError, target: str) -> RequestFailedError:
    # grpc's and grpc.aio's errors share these methods and no typed base.
    call = cast("Any", error)
    code: grpc.StatusCode = call.code()
    details: str = call.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return ServerUnavailableError(code, details, target)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(code, details, _violations(call))
    return _BY_CODE.get(code, RequestFailedError)(code, details)


@contextmanager
def translated(target: str) -> Iterator[None]:
    """Raises what grpc raises inside as a ClientError; target is the server's address."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, target) from error


_UNVERIFIED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")
_MISNAMED = re.compile(r"Hostname Verification|not in peer certificate")
_CLOSED = re.compile(r"Socket closed|Connection reset|Broken pipe|delayed close", re.IGNORECASE)


def _how_to_reach(target: str, details: str) -> str:
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
