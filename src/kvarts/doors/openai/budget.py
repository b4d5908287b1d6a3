"""The cost limit of one request, on which work that grows with a request draws first, and the threads of that work."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvarts.doors.openai.errors import ApiError

__all__ = ["INLINE_BYTES", "MOST_MADE_BYTES", "MOST_MADE_VALUES", "MOST_VALUES", "Budget", "Workbench", "num_values"]

INLINE_BYTES = 16 * 1024
"""Up to this size, bodies are read and answers built in the event loop, within a few milliseconds; beyond it, off it.
"""
MOST_VALUES = 1_000_000
"""JSON values and prompt tokens of a request: about 100 MB while they are Python objects."""
MOST_MADE_VALUES = 20_000
"""JSON values that a mock makes for the schemas of a request, over all choices: about 20 ms."""
MOST_MADE_BYTES = 4 * 1024 * 1024

OBJECT_VALUES = 6
"""Values whose memory equals that of one object."""
T = TypeVar("T")


def num_values(payload: bytes) -> int:
    """Return an upper bound of the values in JSON text, keys included; an object counts as `OBJECT_VALUES`.

    Marks within strings are counted as well, which is much faster: prose has one in fifty characters.
    """
    return 1 + sum(map(payload.count, (b",", b":", b"["))) + OBJECT_VALUES * payload.count(b"{")


class Budget:
    """The remaining budget of one request. `values`: JSON values and prompt tokens. `sequences`: prompts times choices.

    Every `draw` raises ApiError, before the work is done, if too little remains. A negative count draws nothing.
    """

    __slots__ = ("num_made", "num_made_bytes", "num_sequences", "num_values")

    def __init__(self, *, values: int = MOST_VALUES, sequences: int) -> None:
        self.num_values = values
        self.num_sequences = sequences
        self.num_made = MOST_MADE_VALUES
        self.num_made_bytes = MOST_MADE_BYTES

    def draw_json(self, payload: bytes) -> None:
        """Draw the values of JSON text."""
        self.draw_values(num_values(payload), None)

    def draw_values(self, count: int, param: str | None) -> None:
        """Draw `count` values or tokens."""
        self.num_values -= max(0, count)
        if self.num_values < 0:
            raise ApiError(
                400, f"a request has at most {MOST_VALUES:,} JSON values and prompt tokens together", param=param
            )

    def draw_sequences(self, num_prompts: int, num_choices: int) -> None:
        """Draw the answers to `num_prompts` prompts."""
        count = num_prompts * num_choices
        if count > self.num_sequences:
            raise ApiError(
                400,
                f"{num_prompts:,} prompts with {num_choices} choices are {count:,} requests at once, and there is room "
                f"for {self.num_sequences:,} in all",
                param="n" if num_choices > 1 else "prompt",
            )
        self.num_sequences -= count

    def draw_made(self, count: int, num_bytes: int, param: str) -> None:
        """Draw values that are made for a JSON schema, and their bytes."""
        self.num_made -= max(0, count)
        self.num_made_bytes -= max(0, num_bytes)
        if self.num_made < 0 or self.num_made_bytes < 0:
            raise ApiError(
                400,
                f"its answer would be more than {MOST_MADE_VALUES:,} values or {MOST_MADE_BYTES:,} bytes of JSON, all "
                "choices together",
                param=param,
            )


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
