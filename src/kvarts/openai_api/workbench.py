"""Work that grows with what a request brought: done in threads, so that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Workbench"]

T = TypeVar("T")


class Workbench:
    """Some threads, for which owners take turns. For one event loop.

    One is enough: what it does holds the interpreter's lock for most of its time, and what it makes takes memory.

    The interpreter's lock lets the event loop run every few milliseconds, whatever a thread does in Python; what one
    call into C may take is bounded by the size of bodies.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvarts-reading")
        self._num_free = num_threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Those that wait, by owner; the owner whose turn is next is the first."""

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """Return what `work` returns, which runs in a thread once it is the turn of `owner`."""
        await self._take_turn(owner)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # A thread is free when its work is done, also where nobody waits for that any more.
        running.add_done_callback(lambda _: self._free())
        try:
            return await running
        finally:
            # An error has a traceback with this frame: what the work had made would wait for the garbage collector.
            del running

    def close(self) -> None:
        """Let the threads end."""
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
            if turn.done() and not turn.cancelled():  # its turn came, and is another's now
                self._free()
            raise

    def _free(self) -> None:
        while self._waiting:
            owner, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind those of the others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
