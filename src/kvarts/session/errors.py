"""Errors of a session runtime. Doors map each class to a status."""

from __future__ import annotations

from kvarts.errors import KvartsError

__all__ = [
    "SessionBusyError",
    "SessionGoneError",
    "SessionNotReadyError",
    "SessionValueError",
    "SessionsExhaustedError",
    "UnknownSessionError",
]


class UnknownSessionError(KvartsError):
    """The caller has no session with this id."""


class SessionGoneError(UnknownSessionError):
    """A session of the caller that was closed, was evicted or has expired; the text contains which, and when."""


class SessionValueError(KvartsError):
    """A value that cannot be accepted, such as a token id outside the vocabulary. The history is unchanged."""


class SessionNotReadyError(KvartsError):
    """The session's state does not permit this, such as a generation before anything was appended."""


class SessionBusyError(KvartsError):
    """Another operation on the session is in progress. The history is unchanged."""


class SessionsExhaustedError(KvartsError):
    """There is not enough room for this; the text contains the numbers."""
