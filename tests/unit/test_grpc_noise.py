"""What gRPC logs of clients that went away is no news."""

from __future__ import annotations

import logging

import pytest

from stapsdtd.runtime import logs


class ExecuteBatchError(Exception):
    """As gRPC names it."""


@pytest.mark.parametrize(("error", "is_told"), [(ExecuteBatchError("gone"), False), (ValueError("wrong"), True)])
def test_what_is_told_of_calls_that_failed(capfd: pytest.CaptureFixture[str], error: Exception, is_told: bool) -> None:
    logger = logging.getLogger("grpc._cython.cygrpc")
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    filters = list(logger.filters)
    try:
        logs.set_up("info")
        try:
            raise error
        except type(error):
            logger.exception("raised in core by servicer method")
    finally:
        root.handlers = handlers
        logger.filters = filters
    assert ("raised in core" in capfd.readouterr().err) is is_told
