"""Contract between a loop and the listeners of its requests."""

from __future__ import annotations

from typing import Protocol

from kvarts.errors import KvartsError
from kvarts.llm.text import Completion, Generation

__all__ = ["EngineDeadError", "Gone", "Listener", "RequestFailedError"]


class EngineDeadError(KvartsError):
    """An error in an earlier step has left the engine in an unknown state."""

    exit_code = 1


class RequestFailedError(KvartsError):
    """An error ended one request; the engine and all other requests continue. `asked`: the field of the request that
    asked for what could not be done; None if the request is not at fault.
    """

    exit_code = 1

    def __init__(self, what: str, *, asked: str | None = None) -> None:
        super().__init__(what)
        self.asked = asked


class Listener(Protocol):
    """Receives the progress of one request, in the thread that has the engine. Raises Gone if nothing listens any more.

    Any other exception that it raises ends its request, and `fail` receives the error.
    """

    def update(self, generation: Generation) -> None:
        """Receive the state of the request after a step in which it did not end."""

    def end(self, completion: Completion) -> None:
        """Receive the end of the request, perhaps with an error."""

    def fail(self, error: BaseException) -> None:
        """Receive an error that replaces the completion of the request."""


class Gone(Exception):  # noqa: N818  # not an error: nothing listens any more
    """Raised by a listener after its event loop was closed."""
