"""What a session runtime refuses, each kind with the status that a door gives it."""

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
    """There is no session of that id, as far as the caller may know."""


class SessionGoneError(UnknownSessionError):
    """A session of the caller that was closed, evicted or has expired; the text says which, and when."""


class SessionValueError(KvartsError):
    """A value that cannot be accepted, such as a token id that the vocabulary lacks. The history is unchanged."""


class SessionNotReadyError(KvartsError):
    """The session is not in a state for this, such as a generation before anything was appended."""


class SessionBusyError(KvartsError):
    """Another operation on the session is under way. The history is unchanged."""


class SessionsExhaustedError(KvartsError):
    """There is no room for this; the text has the numbers."""
