"""Maps errors to gRPC status codes, with details for programs. Texts are escaped, as they name what programs, files and
clients are called.

    NOT_FOUND  no probe matches
      google.rpc.ErrorInfo    reason: NO_MATCH, domain: stapsdtd, metadata: {field: require_match}
    INVALID_ARGUMENT  selectors: 'c' is not a capture; write arg0, …
      google.rpc.BadRequest   field: selectors[1], description: 'c' is not a capture; write arg0, … (column 10)
      google.rpc.ErrorInfo    metadata: {field: selectors[1], index: 1, column: 9, excerpt: a:b(arg0,c), caret: 9}
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
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
_DOMAIN = "stapsdtd"
_EXCERPT_BEFORE, _EXCERPT_AFTER = 60, 20
_MAX_FACT_CHARACTERS = 256
"""All of them have to fit into metadata of 8 KiB."""
_STEP = re.compile(r"(?P<name>\w+)(?:\[(?P<index>\d+)\])?")

Context = grpc.aio.ServicerContext[Message, Message]


class Asked:
    """What a call asks for, once that is parsed: errors name positions in it."""

    request: Message | None = None


@asynccontextmanager
async def abort_on_error(context: Context) -> AsyncIterator[Asked]:
    """Turn an error raised inside into the call's status: an error's own code, INTERNAL for any other.

    Whatever the host may refuse is a HostRefusedError, so that any other OSError is a defect. gRPC keeps what it raises
    in a cycle, with the frames that it came through: they let go of the request before that.
    """
    asked = Asked()
    try:
        yield asked
    except StapsdtdError as error:
        clear_frames(error.__traceback__)
        status = _status(error, asked.request)
        asked.request = None
        await _abort(context, status)
    except grpc.aio.BaseError:
        # the call was aborted, or the client is gone
        raise
    except Exception as error:  # noqa: BLE001 - the client is told what is known, and the log has the rest
        if str(error) == _NO_THREAD:
            refusal = START_PROCESS.refused("a thread", errno.EAGAIN)
            _log.warning("a request failed: %s", refusal)
            await _abort(context, _status(refusal, None))
        _log.exception("a request failed")
        text = f"internal error, which is a defect of the server: {_described(error)}; report it, with {_LOG}"
        await context.abort(grpc.StatusCode.INTERNAL, escape(text))


async def _abort(context: Context, status: status_pb2.Status) -> None:
    code = grpc.StatusCode[code_pb2.Code.Name(status.code)]
    await context.abort(code, status.message, ((_DETAILS_KEY, status.SerializeToString()),))


def _described(error: Exception) -> str:
    """Return what is known of an error: `PermissionError, /proc/7/maps: Permission denied`."""
    reason = str(error)
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}, {reason}" if reason else type(error).__name__


def _status(error: StapsdtdError, request: Message | None) -> status_pb2.Status:
    field, index = _position(error, request)
    metadata = {name: escape(fact)[:_MAX_FACT_CHARACTERS] for name, fact in error.facts.items() if fact}
    metadata["field"] = field
    if index is not None:
        metadata["index"] = str(index)
    details: list[Message] = []
    if isinstance(error, InvalidArgumentError):
        column = ""
        if error.column is not None:
            column = f" (column {error.column + 1})"
            metadata["column"] = str(error.column)
            metadata |= _excerpt(error.text, error.column)
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=error.reason + column)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    details.append(error_details_pb2.ErrorInfo(reason=error.kind, domain=_DOMAIN, metadata=metadata))
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.grpc_code), message=escape(str(error)), details=map(_packed, details)
    )


def _position(error: StapsdtdError, request: Message | None) -> tuple[str, int | None]:
    """Return the path of the field that an error is about, down to its value, and the value's position if it is one of
    a list: `clauses[1].selectors[2]` and 2.
    """
    *outer, last = _STEP.finditer(error.field)
    if last["index"]:
        return error.field, int(last["index"])
    if request is None or error.value is None:
        return error.field, None
    holder: object = request
    for step in outer:
        inner = getattr(holder, step["name"], None)
        holder = inner[int(step["index"])] if step["index"] and isinstance(inner, Sequence) else inner
    values = getattr(holder, last["name"], None)
    if isinstance(values, Mapping):
        return f'{error.field}["{error.value}"]', None
    listed = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else []
    if error.value not in listed:
        return error.field, None
    index = listed.index(error.value)
    return f"{error.field}[{index}]", index


def _excerpt(text: str, column: int) -> dict[str, str]:
    """Return the text around the column, so that clients can point at it; a whole text may not fit into metadata."""
    begin = max(column - _EXCERPT_BEFORE, 0)
    return {"excerpt": text[begin : column + _EXCERPT_AFTER], "caret": str(column - begin)}


def _packed(message: Message) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail
