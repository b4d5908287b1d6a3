"""Reads request messages only after their metadata, and a few at a time per owner.

gRPC announces a message without its length, and holds all of it in memory while it arrives. Until the message is
requested, it holds at most a window of 64 KiB. So a call waits here before its message is read: an owner occupies the
memory of at most READS messages, regardless of how many it sends. A call whose message arrives slowly is ended if
others of its owner wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

__all__ = ["NO_MESSAGE", "READS", "CallIntake"]

READS = 2
"""Messages of an owner that are read concurrently."""

LARGE_BYTES = 64 * 1024
"""A larger message is parsed in a thread, one at a time."""

NO_MESSAGE = object()

PATIENCE_S = 0.5
"""Time limit for the arrival of a message while others of its owner wait."""

READ_S = 30.0
"""Time limit for the arrival of a message."""

MAX_CALLS = 16_384
"""Limit of an owner's calls in progress or waiting; further calls are refused."""


class _Reading:
    """A message that is being read for the call of `context`."""

    def __init__(self, context: Any, begun_s: float) -> None:
        self.context = context
        self.begun_s = begun_s
        self.timer: asyncio.TimerHandle | None = None
        self.aborting: asyncio.Task[Any] | None = None


class CallIntake:
    """Owner of the turns in which messages are read, for one event loop."""

    def __init__(self, *, reads: int = READS, patience_s: float = PATIENCE_S, read_s: float = READ_S) -> None:
        self._reads = reads
        self._patience_s = patience_s
        self._read_s = read_s
        self._parsing = asyncio.Lock()
        self._num_reading: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._num_calls: dict[str, int] = {}

    async def read(self, owner: str, context: Any, parse: Callable[[bytes], Any]) -> Any:
        """Wait for a turn; return the result of `parse` for the next message of a call, or NO_MESSAGE at the end.

        Raise the errors of `parse`. A message that arrives too slowly ends the call.
        """
        await self._take(owner)
        try:
            holder = [await self._read(owner, context)]
            if not isinstance(holder[0], bytes):
                return NO_MESSAGE
            if len(holder[0]) <= LARGE_BYTES:
                return parse(holder.pop())
            async with self._parsing:
                found, error = await asyncio.to_thread(_parse, parse, holder)
        finally:
            self._give(owner)
        if error is not None:
            raise error
        return found

    @asynccontextmanager
    async def call(self, owner: str, context: Any) -> AsyncIterator[None]:
        """Count a call of `owner`. End it if there are too many."""
        num_calls = self._num_calls.get(owner, 0)
        if num_calls >= MAX_CALLS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_CALLS} calls are under way already")
        self._num_calls[owner] = num_calls + 1
        try:
            yield
        finally:
            _count_down(self._num_calls, owner)

    async def _read(self, owner: str, context: Any) -> Any:
        loop = asyncio.get_running_loop()
        reading = _Reading(context, loop.time())
        reading.timer = loop.call_later(self._patience_s, self._look, owner, reading)
        try:
            data = await context.read()  # raises if the call was aborted
        finally:
            reading.timer.cancel()
        if reading.aborting is not None:
            data = None  # it arrived in the meantime: the error raised here would keep it alive
            await reading.aborting
        return data

    def _look(self, owner: str, reading: _Reading) -> None:
        """Check whether a message that has not arrived must give up its turn."""
        loop = asyncio.get_running_loop()
        if self._waiting.get(owner) or loop.time() - reading.begun_s >= self._read_s:
            # The read is not cancelled: gRPC would keep the received part of the message forever.
            reading.aborting = loop.create_task(
                reading.context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the message arrives too slowly")
            )
            reading.aborting.add_done_callback(lambda task: task.cancelled() or task.exception())
        else:
            reading.timer = loop.call_later(self._patience_s, self._look, owner, reading)

    async def _take(self, owner: str) -> None:
        num_reading = self._num_reading.get(owner, 0)
        if num_reading < self._reads:
            self._num_reading[owner] = num_reading + 1
            return
        turn = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(owner, deque())
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(owner)  # the turn was granted already
            raise

    def _give(self, owner: str) -> None:
        """Pass the turn to the call that has waited longest, or free it."""
        waiting = self._waiting.get(owner, deque())
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._waiting.pop(owner, None)
        _count_down(self._num_reading, owner)


def _parse(parse: Callable[[bytes], Any], holder: list[Any]) -> tuple[Any, Exception | None]:
    """Return the result of `parse`, or its error without the frames that hold the message."""
    try:
        return parse(holder.pop()), None
    except Exception as error:
        return None, error.with_traceback(None)


def _count_down(counts: dict[str, int], owner: str) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
