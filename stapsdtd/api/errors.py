"""Maps errors to gRPC status codes. Texts are escaped, as they name what programs, files and clients are called."""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from traceback import clear_frames

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from stapsdtd.errors import InvalidArgumentError, StapsdtdError
from stapsdtd.kernel.host_calls import START_PROCESS
from stapsdtd.runtime.text import escape

_log = logging.getLogger(__name__)

_LOG = "the server's log ('journalctl -u stapsdtd')"
_NO_THREAD = "can't start new thread"
"""A RuntimeError of Python's without an errno, which was EAGAIN."""
_DETAILS_KEY = "grpc-status-details-bin"
_EXCERPT_BEFORE, _EXCERPT_AFTER = 60, 20

Context = grpc.aio.ServicerContext[Message, Message]


@asynccontextmanager
async def abort_on_error(context: Context) -> AsyncIterator[None]:
    """Turn an error raised inside into the call's status: an error's own code, INTERNAL for any other.

    Whatever the host may refuse is a HostRefusedError, so that any other OSError is a defect. gRPC keeps what it raises
    in a cycle, with the frames that it came through: they let go of the request before that.
    """
    try:
        yield
    except InvalidArgumentError as error:
        clear_frames(error.__traceback__)
        await context.abort(
            grpc.StatusCode[error.grpc_code],
            escape(str(error)),
            ((_DETAILS_KEY, _bad_request(error).SerializeToString()),),
        )
    except StapsdtdError as error:
        clear_frames(error.__traceback__)
        await context.abort(grpc.StatusCode[error.grpc_code], escape(str(error)))
    except grpc.aio.BaseError:
        # the call was aborted, or the client is gone
        raise
    except Exception as error:  # noqa: BLE001 - the client is told what is known, and the log has the rest
        if str(error) == _NO_THREAD:
            refusal = START_PROCESS.refused("a thread", errno.EAGAIN)
            _log.warning("a request failed: %s", refusal)
            await context.abort(grpc.StatusCode[refusal.grpc_code], escape(str(refusal)))
        _log.exception("a request failed")
        text = f"internal error, which is a defect of the server: {_described(error)}; report it, with {_LOG}"
        await context.abort(grpc.StatusCode.INTERNAL, escape(text))


def _described(error: Exception) -> str:
    """Return what is known of an error: `PermissionError, /proc/7/maps: Permission denied`."""
    reason = str(error)
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}, {reason}" if reason else type(error).__name__


def _bad_request(error: InvalidArgumentError) -> status_pb2.Status:
    column = "" if error.column is None else f" (column {error.column + 1})"
    violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.reason + column)
    details = [_packed(error_details_pb2.BadRequest(field_violations=[violation]))]
    if error.column is not None and error.text:
        details.append(_packed(_excerpt(error.text, error.column)))
    return status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message=escape(str(error)), details=details)


def _excerpt(text: str, column: int) -> error_details_pb2.ErrorInfo:
    """Return the text around the column, so that clients can point at it; a whole text may not fit into metadata."""
    begin = max(column - _EXCERPT_BEFORE, 0)
    excerpt = text[begin : column + _EXCERPT_AFTER]
    return error_details_pb2.ErrorInfo(
        reason="WRONG_TEXT", domain="stapsdtd", metadata={"excerpt": excerpt, "caret": str(column - begin)}
    )


def _packed(message: Message) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail
