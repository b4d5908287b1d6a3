"""Errors as a caller receives them: a gRPC status, one line of text, and the name of the error."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from kvarts.errors import ConfigError
from kvarts.proto import ERROR_KEY
from kvarts.session.errors import (
    SessionBusyError,
    SessionNotReadyError,
    SessionsExhaustedError,
    SessionValueError,
    UnknownSessionError,
)

__all__ = ["STATUSES", "refuse"]

STATUSES: dict[type[BaseException], grpc.StatusCode] = {
    UnknownSessionError: grpc.StatusCode.NOT_FOUND,
    SessionValueError: grpc.StatusCode.INVALID_ARGUMENT,
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    SessionNotReadyError: grpc.StatusCode.FAILED_PRECONDITION,
    SessionsExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SessionBusyError: grpc.StatusCode.ABORTED,
    DecodeError: grpc.StatusCode.INVALID_ARGUMENT,
    asyncio.CancelledError: grpc.StatusCode.CANCELLED,
}
"""The status of each error and its subclasses. All others are INTERNAL."""

MAX_CHARS = 600
"""Limit of a text: the metadata of a call may have 8 KiB in total, and a character may take twelve bytes of it."""

LOG = logging.getLogger("kvarts.serve")


async def refuse(context: Any, error: BaseException) -> NoReturn:
    """End a call with the status of `error`. Log an error that is not in the table, since it is a bug."""
    status = next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), None)
    text = str(error)
    if status is grpc.StatusCode.CANCELLED:
        text = "was cancelled"
    elif status is None:
        LOG.error("an unexpected error", exc_info=error)
        status, text = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {text}"
    error.__traceback__ = None  # its frames hold the message, which may be large
    await context.abort(status, " ".join(text.split())[:MAX_CHARS], ((ERROR_KEY, type(error).__name__),))
    raise AssertionError("abort returns never")
