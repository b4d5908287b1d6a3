"""Asynchronous scheduling in virtual time: a request joins one step later than it could.

An engine that plans step n + 1 while step n runs, as vLLM does since 0.14, has already made that plan when a request
arrives during step n. The request joins step n + 2. An idle engine has made no plan, and loses no step; nor does one
whose plan was empty.
"""

from __future__ import annotations

from kvarts.request import Request

__all__ = ["Joining"]


class Joining:
    """Requests that arrived while steps were planned ahead. Owner of the step that each joins."""

    __slots__ = ("_arrived", "_due")

    def __init__(self) -> None:
        self._arrived: list[Request] = []
        self._due: list[Request] = []
        """Requests that had arrived when the last step was planned."""

    @property
    def num_requests(self) -> int:
        """The number of requests that have not joined."""
        return len(self._arrived) + len(self._due)

    def add(self, request: Request) -> None:
        """Let `request` join the step after the next."""
        self._arrived.append(request)

    def take_due(self) -> list[Request]:
        """Return the requests that the plan made last knows, in order of arrival. `plan_next` must follow."""
        due, self._due = self._due, []
        return due

    def plan_next(self) -> None:
        """Let those that have arrived be known to the next plan: it is made now, when the step planned last starts."""
        self._due += self._arrived
        self._arrived = []

    def take_all(self) -> list[Request]:
        """Return all requests, in order of arrival: no step is under way, so they join at once."""
        self.plan_next()
        return self.take_due()

    def has(self, request: Request) -> bool:
        """Return whether `request` waits here."""
        return request in self._arrived or request in self._due

    def drop(self, request: Request) -> bool:
        """Remove `request`; return whether it was waiting here."""
        for requests in (self._arrived, self._due):
            if request in requests:
                requests.remove(request)
                return True
        return False
