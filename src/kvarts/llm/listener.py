"""What a loop promises to those that wait for a request, and what they promise to it."""

from __future__ import annotations

from typing import Protocol

from kvarts.errors import KvartsError
from kvarts.llm.text import Completion, Generation

__all__ = ["EngineDeadError", "Gone", "Holds", "Listener", "RequestFailedError"]


class EngineDeadError(KvartsError):
    """An engine that an error in an earlier step has left in an unknown state."""

    exit_code = 1


class RequestFailedError(KvartsError):
    """One request that something went wrong in, which ended it; the engine and all other requests go on."""

    exit_code = 1


class Listener(Protocol):
    """Receives what becomes of one request, in the thread that has the engine. Raises Gone where nothing listens.

    Whatever else it raises ends its request, and `fail` receives the error.
    """

    def update(self, generation: Generation) -> None:
        """Note the state of the request after a step in which it did not end."""

    def end(self, completion: Completion) -> None:
        """Note that the request has ended, perhaps with an error."""

    def fail(self, error: BaseException) -> None:
        """Note that the request will never end."""


class Gone(Exception):  # noqa: N818  # not an error: nothing listens any more
    """Raised by a listener when its event loop is closed."""


class Holds(Protocol):
    """Passes on what listeners are told, and can keep it for a moment."""

    def hold(self) -> None:
        """Keep what comes from now on."""

    def release(self) -> None:
        """Pass on what was kept, all at once."""
