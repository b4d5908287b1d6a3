"""Work that grows with the size of a request: done in threads, so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Workbench"]

T = TypeVar("T")


class Workbench:
    """Worker threads that owners use in turn. For one event loop.

    One thread is enough: it holds the interpreter's lock most of the time, and its results take memory. The interpreter
    lets the event loop run every few milliseconds while a thread runs Python; the size limit of bodies bounds each call
    into C.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvarts-reading")
        self._num_free = num_threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting work by owner, in the order of the owners' turns."""

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs in a thread once it is the turn of `owner`."""
        await self._take_turn(owner)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # A thread is free when its work is done, even if the client has disconnected.
        running.add_done_callback(lambda _: self._free())
        try:
            return await running
        finally:
            # An error's traceback references this frame: without `del`, results would wait for the garbage collector.
            del running

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _take_turn(self, owner: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had its turn, which now passes to another
                self._free()
            raise

    def _free(self) -> None:
        while self._waiting:
            owner, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind the other owners
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
