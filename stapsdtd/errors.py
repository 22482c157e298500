"""Errors that carry facts, and the gRPC status code that clients get."""

from __future__ import annotations

import os
from typing import ClassVar

_SHOWN_CHARACTERS = 80
"""Of what a client wrote: a message has to fit into the metadata of a response."""


class StapsdtdError(Exception):
    """Base of all errors of this package. The text is meant for users.

    grpc_code: the gRPC status code (grpc.StatusCode) that a client gets.
    """

    grpc_code: ClassVar[str] = "FAILED_PRECONDITION"


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


class FileRefusedError(StapsdtdError):
    """A file that a client named cannot be used."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class InventoryError(StapsdtdError):
    """Installed files cannot be looked for."""


class InvalidArgumentError(StapsdtdError):
    """A field of a request or configuration is invalid.

    column, counted from 0, is where in text the error is; both are set only for fields that are parsed.
    """

    grpc_code = "INVALID_ARGUMENT"

    def __init__(self, field: str, reason: str, column: int | None = None, text: str = "") -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.column = column
        self.text = text

    def within(self, outer: str) -> InvalidArgumentError:
        """Return the same error of a field of a message that is itself in a field."""
        return InvalidArgumentError(f"{outer}.{self.field}", self.reason, self.column, self.text)


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

    def __init__(self, subscription_id: str) -> None:
        shown = subscription_id[:_SHOWN_CHARACTERS]
        super().__init__(f"no subscription {shown!r}: it ended or its lease expired")
        self.subscription_id = subscription_id


class NoMatchError(StapsdtdError):
    """No probe matches, and the client does not want to wait for one."""

    grpc_code = "NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("no probe matches")


class NotArmedError(StapsdtdError):
    """Not all sites that match are armed, and the client wants all or none."""


class LimitReachedError(StapsdtdError):
    """A limit of the server or a quota of the client is exhausted."""

    grpc_code = "RESOURCE_EXHAUSTED"


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

    def __init__(self, path: str, line: str, errno: int, kernel_message: str, remedy: str = "") -> None:
        suffix = f": {kernel_message}" if kernel_message else f"; {remedy}" if remedy else ""
        super().__init__(f"{path}: the kernel refused {line!r}: {os.strerror(errno)}{suffix}")
        self.path = path
        self.line = line
        self.errno = errno
        self.kernel_message = kernel_message


class KernelFeatureError(StapsdtdError):
    """The host lacks something that is required; remedy says what an operator can do about it."""

    def __init__(self, feature: str, reason: str, remedy: str) -> None:
        super().__init__(f"{feature}: {reason}; {remedy}")
        self.feature = feature
        self.reason = reason
        self.remedy = remedy


class AccessDeniedError(StapsdtdError):
    """The client's role does not allow the request."""

    grpc_code = "PERMISSION_DENIED"
