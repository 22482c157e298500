"""Errors that carry facts, and the gRPC status code that clients get."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

_SHOWN_CHARACTERS = 80
"""Of what a client wrote: a message has to fit into the metadata of a response."""


REQUEST = "request"
"""The field of errors that are about a request as a whole."""


class StapsdtdError(Exception):
    """Base of all errors of this package. The text is meant for users, and programs have the attributes.

    grpc_code: the gRPC status code (grpc.StatusCode) that a client gets.
    field: the path of the request's field that the error is about, `clauses[1].where`, or REQUEST.
    value: the one of the field's values that it is about, if the field has several.
    """

    grpc_code: ClassVar[str] = "FAILED_PRECONDITION"
    field: str = REQUEST
    value: object = None

    @property
    def kind(self) -> str:
        """The name by which programs know the error: NO_MATCH for a NoMatchError."""
        return _WORD.sub("_", type(self).__name__.removesuffix("Error")).upper()

    @property
    def facts(self) -> dict[str, str]:
        """What else the error tells programs."""
        return {}


_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


@contextmanager
def about(field: str) -> Iterator[None]:
    """Name the field of a request that an error raised inside is about, if the error names none."""
    try:
        yield
    except StapsdtdError as error:
        if error.field == REQUEST:
            error.field = field
        raise


class ObjectUnreadableError(StapsdtdError):
    """The file starts like an ELF object but cannot be parsed as one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ObjectPendingError(StapsdtdError):
    """Not available yet: the file is still being parsed, or a process holds the lock of its memory map. Try again."""


class ObjectForeignError(StapsdtdError):
    """The file is on a filesystem where nothing may be armed; reason names it and how an operator can allow it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ObjectGoneError(StapsdtdError):
    """No running process maps the object any more, so it cannot be opened."""

    grpc_code = "NOT_FOUND"

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: no process maps it any more")
        self.path = path

    @property
    def facts(self) -> dict[str, str]:
        return {"path": self.path}


class FileRefusedError(StapsdtdError):
    """A file that a client named cannot be used."""

    field = "files"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = self.value = path
        self.reason = reason

    @property
    def facts(self) -> dict[str, str]:
        return {"path": self.path}


class InventoryError(StapsdtdError):
    """Installed files cannot be looked for."""

    field = "installed"


class InvalidArgumentError(StapsdtdError):
    """A field of a request or configuration is invalid.

    column, counted from 0, is where in text the error is; both are set only for fields that are parsed. value: see
    StapsdtdError; the text, if there is one. capture: which one of a capture list it is about, from 0.
    """

    grpc_code = "INVALID_ARGUMENT"

    def __init__(
        self,
        field: str,
        reason: str,
        column: int | None = None,
        text: str = "",
        *,
        value: object = None,
        capture: int | None = None,
    ) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.column = column
        self.text = text
        self.value = value if column is None else text
        self.capture = capture

    @property
    def facts(self) -> dict[str, str]:
        return {} if self.capture is None else {"capture": str(self.capture)}

    def within(self, outer: str) -> InvalidArgumentError:
        """Return the same error of a field of a message that is itself in a field."""
        inner = f"{outer}.{self.field}"
        return InvalidArgumentError(inner, self.reason, self.column, self.text, value=self.value, capture=self.capture)


class MalformedRequestError(InvalidArgumentError):
    """A request's bytes are not a message of its type."""

    def __init__(self, reason: str) -> None:
        super().__init__("request", reason)


class UnknownMethodError(StapsdtdError):
    """The server has no such method; it may be older than the client."""

    grpc_code = "UNIMPLEMENTED"

    def __init__(self, path: str) -> None:
        super().__init__(f"method not found: {path!r}; the server may be older than this client")


class UnknownSubscriptionError(StapsdtdError):
    """No subscription has this id: it never existed, was ended, or its lease expired."""

    grpc_code = "NOT_FOUND"
    field = "subscription_id"

    def __init__(self, subscription_id: str) -> None:
        shown = subscription_id[:_SHOWN_CHARACTERS]
        super().__init__(f"no subscription {shown!r}: it ended or its lease expired")
        self.subscription_id = subscription_id

    @property
    def facts(self) -> dict[str, str]:
        return {"subscription_id": self.subscription_id}


class NoMatchError(StapsdtdError):
    """No probe matches, and the client does not want to wait for one."""

    grpc_code = "NOT_FOUND"
    field = "require_match"

    def __init__(self) -> None:
        super().__init__("no probe matches")


class NotArmedError(StapsdtdError):
    """Not all sites that match are armed, and the client wants all or none."""

    field = "all_or_nothing"

    def __init__(self, count: int, failed: int, probe: str, place: str, reason: str) -> None:
        """count: of sites that match. failed: how many of them are not armed. probe, place, reason: of one of these."""
        super().__init__(f"{failed} of {count} sites are not armed, such as {probe} {place}: {reason}")
        self._facts = {
            "sites": str(count), "failed": str(failed), "probe": probe, "place": place, "reason": reason
        }  # fmt: skip

    @property
    def facts(self) -> dict[str, str]:
        return self._facts


class LimitReachedError(StapsdtdError):
    """A limit of the server or a quota of the client is exhausted.

    limit: the setting, such as `max_subscriptions`, or what else there is only so much of.
    """

    grpc_code = "RESOURCE_EXHAUSTED"

    def __init__(self, text: str, limit: str, field: str = REQUEST) -> None:
        super().__init__(text)
        self.limit = limit
        self.field = field

    @property
    def facts(self) -> dict[str, str]:
        return {"limit": self.limit}


class ServerStoppingError(StapsdtdError):
    """The server is shutting down and accepts no new work."""

    grpc_code = "UNAVAILABLE"

    def __init__(self) -> None:
        super().__init__("the server is stopping")


class HostRefusedError(StapsdtdError, OSError):
    """The kernel refused an operation on an object.

    remedy: what that takes, and the command that mends it; empty if the reason says so. reason: the errno's text, or
    the daemon's own.

    As with OSError, the class depends on errno: one with ESRCH is a ProcessLookupError, too.
    """

    def __new__(  # noqa: PYI034
        cls,
        operation: str,  # noqa: ARG004
        subject: str,  # noqa: ARG004
        number: int,
        remedy: str,  # noqa: ARG004
        reason: str = "",
    ) -> HostRefusedError:
        return super().__new__(_class_for(cls, number), number, reason or os.strerror(number))

    def __init__(self, operation: str, subject: str, number: int, remedy: str, reason: str = "") -> None:
        """operation: a system call, or a verb for several. subject: what it was done to. number: the errno."""
        super().__init__(number, reason or os.strerror(number))
        self.operation = operation
        self.subject = subject
        self.remedy = remedy

    def __str__(self) -> str:
        what = f"{self.operation} {self.subject}".rstrip()
        return f"{what}: {self.strerror}; {self.remedy}" if self.remedy else f"{what}: {self.strerror}"

    @property
    def facts(self) -> dict[str, str]:
        return {
            "operation": self.operation,
            "subject": self.subject,
            "errno": errno.errorcode.get(self.errno or 0, str(self.errno)),
            "remedy": self.remedy,
        }


_classes: dict[tuple[type[HostRefusedError], int], type[HostRefusedError]] = {}


def _class_for(base: type[HostRefusedError], number: int) -> type[HostRefusedError]:
    if (base, number) not in _classes:
        builtin = type(OSError(number, ""))
        _classes[base, number] = base if issubclass(base, builtin) else type(base.__name__, (base, builtin), {})
    return _classes[base, number]


class TracefsRejectedError(StapsdtdError):
    """The kernel rejected a line written to a tracefs file.

    kernel_message: the text of error_log, or empty. remedy: what mends it, where the kernel says nothing.
    """

    def __init__(self, path: str, line: str, number: int, kernel_message: str, remedy: str = "") -> None:
        suffix = f": {kernel_message}" if kernel_message else f"; {remedy}" if remedy else ""
        super().__init__(f"{path}: the kernel refused {line!r}: {os.strerror(number)}{suffix}")
        self.path = path
        self.line = line
        self.errno = number
        self.kernel_message = kernel_message

    @property
    def facts(self) -> dict[str, str]:
        return {"path": self.path, "line": self.line, "kernel_message": self.kernel_message}


class KernelFeatureError(StapsdtdError):
    """The host lacks something that is required; remedy says what an operator can do about it."""

    def __init__(self, feature: str, reason: str, remedy: str) -> None:
        super().__init__(f"{feature}: {reason}; {remedy}")
        self.feature = feature
        self.reason = reason
        self.remedy = remedy

    @property
    def facts(self) -> dict[str, str]:
        return {"feature": self.feature, "remedy": self.remedy}


class AccessDeniedError(StapsdtdError):
    """The client's role does not allow the request.

    right: what the role would have to have, such as `list`. value: see StapsdtdError.
    """

    grpc_code = "PERMISSION_DENIED"

    def __init__(self, text: str, right: str, field: str = REQUEST, *, value: object = None) -> None:
        super().__init__(text)
        self.right = right
        self.field = field
        self.value = value

    @property
    def facts(self) -> dict[str, str]:
        return {"right": self.right}
