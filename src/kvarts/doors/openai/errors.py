"""Errors in the form that clients of OpenAI's API expect: one envelope for all of them."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvarts.base.errors import KvartsError, OutputError, with_type
from kvarts.run.llm_engine import EngineDeadError, RequestFailedError

__all__ = ["ApiError", "api_error", "is_bug", "too_long"]

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

MOST_MESSAGE_CHARS = 2000
MOST_PARAM_CHARS = 200


class ApiError(Exception):
    """Refusal of a request. `param`: the field at fault. `retry_after_s`: when the client may retry.

    The message names the field, since many clients show nothing else: if it does not, the name is put before it, unless
    the message `is_verbatim`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        is_verbatim: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        # An error may quote a request, which may be large.
        self.what = message if len(message) <= MOST_MESSAGE_CHARS else f"{message[:MOST_MESSAGE_CHARS]}..."
        self.param = None if param is None else param[:MOST_PARAM_CHARS]
        self.retry_after_s = retry_after_s
        self._is_verbatim = is_verbatim

    @property
    def message(self) -> str:
        """The error, with the name of the field."""
        param, what = self.param, self.what
        if not param or self._is_verbatim or re.search(rf"(?<![\w.]){re.escape(param)}(?!\w)", what):
            return what
        return f"{param}: {what}"

    @property
    def body(self) -> bytes:
        """The envelope."""
        return msgspec.json.encode({"error": self.content})

    @property
    def content(self) -> dict[str, Any]:
        """The content of the envelope."""
        kind = TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.status}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The Retry-After header, if the delay is known."""
        if self.retry_after_s is None:
            return []
        return [(b"retry-after", f"{self.retry_after_s:g}".encode())]


def too_long(limit: int, num_prompt_tokens: int | None, max_tokens: int, *, param: str) -> ApiError:
    """Return the error of a request that exceeds the context, in vLLM's words, which clients search for.

    `num_prompt_tokens`: None for more than the context, uncounted.
    """
    told = f"more than {limit}" if num_prompt_tokens is None else f"{num_prompt_tokens + max_tokens}"
    parts = "" if num_prompt_tokens is None else f" ({num_prompt_tokens} in the prompt, {max_tokens} in the completion)"
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, you requested {told} tokens{parts}. Please "
        "reduce the length of the prompt or the completion.",
        param=param,
        is_verbatim=True,
    )


def api_error(error: BaseException) -> ApiError:
    """Return the error that the client receives for `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(500, error.what)
    if isinstance(error, RequestFailedError) and error.asked is None:
        return ApiError(503 if error.is_outage else 500, str(error))
    if isinstance(error, OutputError):
        return ApiError(503, error.what)  # without the path, which is the operator's
    if isinstance(error, KvartsError):
        field = (error.asked if isinstance(error, RequestFailedError) else error.field) or ""
        return ApiError(400, str(error).removeprefix("sampling."), param=field.removeprefix("sampling.") or None)
    return ApiError(500, f"the engine has stopped after an error: {with_type(error)}")


def is_bug(error: BaseException) -> bool:
    """Return whether `error` is neither an answer on purpose nor one that a user, a disk or a dead engine causes."""
    if isinstance(error, RequestFailedError):
        return error.asked is None and not error.is_outage
    return not isinstance(error, ApiError | KvartsError)
