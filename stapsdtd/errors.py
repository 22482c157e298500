"""Errors that carry facts; `api/errors.py` is the one place that turns them into gRPC codes."""

from __future__ import annotations

import os


class StapsdtdError(Exception):
    """Base of all errors of this package; its text is fit to be shown to a user."""


class ObjectUnreadableError(StapsdtdError):
    """A file that pretends to be an ELF object and is not one that can be read."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ObjectPendingError(StapsdtdError):
    """The file is being parsed, which takes a while."""


class ObjectForeignError(StapsdtdError):
    """The file lies where none may be armed; reason says on what, and how an operator allows it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ObjectGoneError(StapsdtdError):
    """No living process maps the object any more, so it cannot be reached."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: no process maps it any more")
        self.path = path


class InvalidArgumentError(StapsdtdError):
    """A request's field that cannot be accepted; where the field is a text, column counts from 0 in it."""

    def __init__(self, field: str, reason: str, column: int | None = None, text: str = "") -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.column = column
        self.text = text


class NotSupportedError(StapsdtdError):
    """A request for something that this server or engine cannot do."""


class UnknownSubscriptionError(StapsdtdError):
    """There is no subscription of this id: it never was, was ended, or its lease ran out."""

    def __init__(self, subscription_id: str) -> None:
        super().__init__(f"no subscription {subscription_id!r}: it ended, or its lease ran out")
        self.subscription_id = subscription_id


class LimitReachedError(StapsdtdError):
    """The server holds, or a client asked for, as much as is allowed at once."""


class ServerStoppingError(StapsdtdError):
    """The server is about to end and begins nothing new."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")


class TracefsRejectedError(StapsdtdError):
    """The kernel refused a line written to a tracefs file; kernel_message is error_log's own text or empty."""

    def __init__(self, path: str, line: str, errno: int, kernel_message: str) -> None:
        because = f": {kernel_message}" if kernel_message else ""
        super().__init__(f"{path}: the kernel refused {line!r}: {os.strerror(errno)}{because}")
        self.path = path
        self.line = line
        self.errno = errno
        self.kernel_message = kernel_message


class KernelFeatureError(StapsdtdError):
    """Something the host must offer is missing; remedy is what an operator can do about it."""

    def __init__(self, feature: str, reason: str, remedy: str) -> None:
        super().__init__(f"{feature}: {reason}; {remedy}")
        self.feature = feature
        self.reason = reason
        self.remedy = remedy


class AccessDeniedError(StapsdtdError):
    """A client asked for what its role does not allow."""
