"""Errors as clients of OpenAI's API read them: one envelope for all of them."""

from __future__ import annotations

from typing import Any

import msgspec

from kvarts.errors import KvartsError
from kvarts.llm.listener import EngineDeadError, RequestFailedError

__all__ = ["ApiError", "api_error"]

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """What a request is refused with. `param`: the field that is wrong. `retry_after_s`: when to come again."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> bytes:
        """The envelope."""
        return msgspec.json.encode({"error": self.content})

    @property
    def content(self) -> dict[str, Any]:
        """What the envelope holds."""
        kind = TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.status}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The header that says when to come again, if that is known."""
        if self.retry_after_s is None:
            return []
        return [(b"retry-after", f"{self.retry_after_s:g}".encode())]


def api_error(error: BaseException) -> ApiError:
    """Return what a client is told of `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(500, "the engine has stopped after an error")
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error))
    if isinstance(error, KvartsError):
        return ApiError(400, str(error), param=(error.field or "").removeprefix("sampling.") or None)
    return ApiError(500, "the engine has stopped after an error")
