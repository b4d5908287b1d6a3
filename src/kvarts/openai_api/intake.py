"""Request bodies while they are read: limits of their bytes, in total and per owner."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from time import monotonic

from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.http import HttpRequest
from kvarts.owners.shares import Shares

__all__ = ["Body", "Intake"]

FREE_BYTES = 64 * 1024
"""Up to this size, a body may use all of the room; a quarter of it is reserved for the first bytes of bodies."""
STALLED_S = 1.0
"""A body that has not progressed for this time is dropped if others lack room."""


class Body:
    """The bytes of one body, from its arrival until its release."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.num_bytes = 0
        self.moved_s = monotonic()
        self.reader: asyncio.Task[object] | None = None
        """The task that reads it, while it is being read."""
        self.gave_way = False


class Intake:
    """Owner of the byte count of bodies that are read, or wait to be parsed. For one event loop.

    `num_bytes`: limit of all bodies together. `shares`: shares of owners, see Shares.
    """

    def __init__(self, num_bytes: int, shares: Mapping[str, float] | None = None) -> None:
        self._shares = Shares(num_bytes, shares)
        self._reading: OrderedDict[Body, None] = OrderedDict()
        """The bodies that are being read, least recently progressed first."""

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._shares.num_used

    async def read(self, request: HttpRequest, body: Body, max_bytes: int, *, timeout_s: float) -> bytes:
        """Return the body of a request, whose bytes are counted in `body` until `drop`.

        Raise ApiError if it is too long, too slow, or lacks room; ClientGone if it is cut off.
        """
        if (whole := request.whole_body(max_bytes)) is not None:
            if whole:
                self._take(body, len(whole))
            return whole
        body.reader = asyncio.current_task()
        self._reading[body] = None
        try:
            return await request.body(max_bytes, timeout_s=timeout_s, came=lambda count: self._take(body, count))
        except asyncio.CancelledError:
            if body.gave_way and body.reader is not None and body.reader.uncancel() == 0:
                raise ApiError(408, "other requests needed the room of this body, which did not come") from None
            raise
        finally:
            body.reader = None
            self._reading.pop(body, None)

    def drop(self, body: Body) -> None:
        """Release the bytes of a body."""
        if body.num_bytes:
            self._shares.give(body.owner, body.num_bytes)
            body.num_bytes = 0

    def _take(self, body: Body, count: int) -> None:
        """Reserve room for `count` more bytes. Raise ApiError if the room is exhausted."""
        body.moved_s = monotonic()
        if body in self._reading:
            self._reading.move_to_end(body)
        while not self._has_room(body, count):
            if not self._make_room(body):
                raise ApiError(503, "the server reads as many bytes of requests as it may", retry_after_s=1.0)
        self._shares.force(body.owner, count)
        body.num_bytes += count

    def _has_room(self, body: Body, count: int) -> bool:
        room = self._shares.room(body.owner)
        if body.num_bytes + count > FREE_BYTES:
            room -= self._shares.total // 4
        return count <= room

    def _make_room(self, body: Body) -> bool:
        """Drop the body that has stalled longest. Return whether one had stalled."""
        for other in self._reading:
            if monotonic() - other.moved_s < STALLED_S:
                return False
            if other is not body and other.num_bytes and other.reader is not None:
                other.gave_way = True
                other.reader.cancel()
                del self._reading[other]
                self.drop(other)
                return True
        return False
