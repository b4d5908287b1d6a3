"""Errors of failed calls: the error raised by the server if it has a name, otherwise one for the status."""

from __future__ import annotations

from typing import Any

import grpc

from kvarts.errors import ConfigError, KvartsError
from kvarts.proto import ERROR_KEY
from kvarts.session.values import (
    SessionBusyError,
    SessionGoneError,
    SessionNotReadyError,
    SessionsExhaustedError,
    SessionValueError,
    UnknownSessionError,
)

__all__ = ["CallCancelledError", "NotAuthenticatedError", "ServerError", "ServerUnreachableError", "error_of"]


class ServerError(KvartsError):
    """A call without a proper answer; the text begins with its status."""


class ServerUnreachableError(ServerError):
    """No server answers at the address, the server is stopping, or its certificate is not trusted."""


class NotAuthenticatedError(ServerError):
    """The server requires a token, and the call's was unknown or missing."""


class CallCancelledError(ServerError):
    """The call was cancelled: the operation ended at a token boundary, and the session is kept."""


NAMED: dict[str, type[KvartsError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        SessionBusyError,
        SessionGoneError,
        SessionNotReadyError,
        SessionValueError,
        SessionsExhaustedError,
        UnknownSessionError,
    )
}
BY_STATUS: dict[grpc.StatusCode, type[KvartsError]] = {
    grpc.StatusCode.NOT_FOUND: UnknownSessionError,
    grpc.StatusCode.INVALID_ARGUMENT: SessionValueError,
    grpc.StatusCode.FAILED_PRECONDITION: SessionNotReadyError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: SessionsExhaustedError,
    grpc.StatusCode.ABORTED: SessionBusyError,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticatedError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
    grpc.StatusCode.UNAVAILABLE: ServerUnreachableError,
}


def error_of(failure: Any, address: str) -> KvartsError:
    """Return the error of a failed call to the server at `address`."""
    status: grpc.StatusCode = failure.code()
    details: str = failure.details() or ""
    named = NAMED.get(str(dict(failure.trailing_metadata() or ()).get(ERROR_KEY, "")))
    kind = named or BY_STATUS.get(status, ServerError)
    if kind is ServerUnreachableError:
        return kind(f"{address} cannot be reached: {details}", hint="Is `kvarts serve sessions` running there?")
    if issubclass(kind, ServerError):
        return kind(f"{address}: {status.name}: {details}")
    return kind(details)
