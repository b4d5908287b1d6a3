"""What goes from the thread of an engine to the event loop of a server: pieces of text, as they are generated.

The thread of the engine appends to lists and wakes the event loop once for all that came meanwhile; a coroutine that is
not waiting is not woken, and finds several pieces at once when it comes back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from time import monotonic, thread_time
from typing import Protocol

import msgspec

from kvarts.llm.listener import Gone, RequestFailedError
from kvarts.llm.llm_engine import LLMEngine
from kvarts.llm.text import Completion, Generation
from kvarts.openai_api.meter import BucketCounts
from kvarts.request import Request
from kvarts.sampling import Logprobs, TopLogprobs

__all__ = ["Answer", "Choice", "ChoiceMeter", "Outbox", "Piece", "TokenLogprob"]

LATE_S = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.05, 0.1, 0.5, 1.0, 10.0)

TokenLogprob = tuple[int, float | None, TopLogprobs]
"""A token, its log-probability, and the likeliest tokens in its place with theirs."""

Piece = tuple["Choice", str, int, str | None, list[TokenLogprob]]
"""Of which choice, its new text, how many tokens it has by now, why it ended or None, and log-probabilities."""


class ChoiceMeter(Protocol):
    """Counts what happens to choices, in the thread of the engine."""

    def prefilled(self, request: Request) -> None:
        """Count a prompt that is computed."""

    def first_token(self, waited_s: float) -> None:
        """Count a first token."""

    def next_tokens(self, num_tokens: int, waited_s: float) -> None:
        """Count tokens after the first, that long after those before them."""

    def ended(self, choice: Choice, completion: Completion, now_s: float) -> None:
        """Count a choice that has ended."""


class Outbox:
    """Wakes the coroutines of one event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = Lock()
        self._marked: list[Answer] = []
        self._is_holding = False
        self._not_before_s = 0.0
        self._is_put_off = False
        self._due_s: float | None = None
        self.due_s: Callable[[], float] | None = None
        """Returns when the last step should have ended, on the monotonic clock, where that is known."""
        self.late_s = BucketCounts(LATE_S)
        """Of what was written after a step: how long after that."""

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let answers be read in `loop` from now on."""
        self._loop = loop

    def mark(self, answer: Answer) -> None:
        """Have `answer` woken, from any thread. Raise Gone if there is no event loop any more."""
        with self._lock:
            if answer.is_marked:
                return
            answer.is_marked = True
            self._marked.append(answer)
            if self._is_holding or len(self._marked) > 1:
                return
        self._wake_soon()

    def hold(self) -> None:
        """Wake nothing until `release`: a step has ended."""
        with self._lock:
            self._is_holding = True
            if self.due_s is not None and not self._marked:  # else what waits is later still
                self._due_s = self.due_s()

    def release(self) -> None:
        """Have everything woken that was marked meanwhile."""
        with self._lock:
            self._is_holding = False
            if not self._marked:
                return
        with suppress(Gone):
            self._wake_soon()

    def _wake_soon(self) -> None:
        try:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError as error:
            with self._lock:
                self._marked.clear()
            raise Gone from error

    def _wake(self) -> None:
        """Wake all that were marked, for half of the time at most: with more to do, more is done at once."""
        early_s = self._not_before_s - monotonic()
        if early_s > 0.0:
            if not self._is_put_off:
                self._is_put_off = True
                assert self._loop is not None
                self._loop.call_later(early_s, self._wake)
            return
        self._is_put_off = False
        began_s = thread_time()
        with self._lock:
            marked, self._marked = self._marked, []
            due_s = self._due_s
            for answer in marked:
                answer.is_marked = False
        for answer in marked:
            answer.wake()
            if due_s is not None:
                self.late_s.add(monotonic() - due_s)
        self._not_before_s = monotonic() + thread_time() - began_s


class Answer:
    """The pieces of all choices of one HTTP request, in the order in which they came. For one coroutine."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.is_marked = False
        """Owned by the outbox."""
        self.pieces: deque[Piece | BaseException] = deque()
        self.write_now: Callable[[], bool] | None = None
        """Does at once, in the event loop, what the coroutine would do with the pieces. Returns whether that was all;
        or else the coroutine is woken.
        """
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: Piece | BaseException) -> None:
        """Add a piece, from any thread. Raise Gone if there is no event loop any more."""
        self.pieces.append(piece)
        if not self.is_marked:
            self.outbox.mark(self)

    def wake(self) -> None:
        """Wake the coroutine, if it waits."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # it comes by itself
        if self.write_now is None or not self.write_now():
            waiter.set_result(None)

    async def take(self) -> list[Piece]:
        """Return what has come since the last call, one piece or more. Raise the error that came instead."""
        pieces = self.pieces
        while not pieces:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken: list[Piece] = []
        while pieces:
            piece = pieces.popleft()
            if isinstance(piece, BaseException):
                raise piece
            taken.append(piece)
        return taken


class Choice:
    """A Listener of one request: a choice of an answer, by its `number`.

    `ends_itself`: at its last token it comes to its own end. `started_s`: when its HTTP request came, on the monotonic
    clock. `request` and `index` are set when it is submitted.
    """

    def __init__(
        self,
        answer: Answer,
        number: int,
        meter: ChoiceMeter,
        *,
        has_logprobs: bool = False,
        ends_itself: bool = False,
    ) -> None:
        self.number = number
        self.started_s = monotonic()
        self.index: int | None = None
        self.request: Request | None = None
        self.completion: Completion | None = None
        self.is_over = False
        """Whether it has ended, well or not; then it counts no more."""
        self.is_unwanted = False
        """Whether its client has gone before it began."""
        self.in_session: Callable[[], object] | None = None
        """Of one that a session answers: ends it, as if it were cancelled. For the thread of the event loop."""
        self._ends_itself = ends_itself
        self._answer = answer
        self._meter = meter
        self._has_logprobs = has_logprobs
        self.logprobs: Callable[[], Logprobs] = Logprobs
        """Returns the log-probabilities of its tokens, of those that have come or of more."""
        self.prompt_logprobs: Logprobs | None = None
        """Those of its prompt, where asked for; from its first piece on."""
        self._engine: LLMEngine | None = None
        self._num_tokens = 0
        self._num_chars = 0
        self._last_s = 0.0

    def note(self, engine: LLMEngine, request: Request) -> None:
        """Note that it is submitted, in the thread of the engine."""
        self.request, self.index, self._engine = request, request.index, engine
        self.logprobs = partial(engine.logprobs, request.index)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the cache."""
        return 0 if self.request is None else self.request.cached_tokens

    def update(self, generation: Generation) -> None:
        """Send what is new after a step."""
        tokens = generation.tokens
        num_tokens = len(tokens)
        if num_tokens == self._num_tokens:
            return
        text = generation.final_text
        if not self._num_tokens and generation.params.prompt_logprobs is not None and self._engine is not None:
            self.prompt_logprobs = self._engine.prompt_logprobs(generation.request.index)
        self._count(num_tokens)
        logprobs: list[TokenLogprob] = []
        if self._has_logprobs:
            logprobs = self._new_logprobs(tokens, self.logprobs())
        self._answer.put((self, text[self._num_chars :], num_tokens, None, logprobs))
        self._num_tokens, self._num_chars = num_tokens, len(text)

    def end(self, completion: Completion) -> None:
        """Send the rest, and the end."""
        self.is_over = True
        if self._ends_itself and completion.finish_reason == "length":
            completion = msgspec.structs.replace(completion, finish_reason="stop")
        self.completion = completion
        if completion.prompt_logprobs is not None:
            self.prompt_logprobs = completion.prompt_logprobs
        num_tokens = len(completion.tokens)
        if num_tokens > self._num_tokens:
            self._count(num_tokens)
        elif not num_tokens and completion.finish_reason == "length" and self.request is not None:
            self._meter.prefilled(self.request)
        self._meter.ended(self, completion, monotonic())
        if completion.error is not None:
            self._answer.put(RequestFailedError(completion.error))
            return
        logprobs: list[TokenLogprob] = []
        if self._has_logprobs and completion.logprobs is not None:
            told = Logprobs(list(completion.logprobs), list(completion.top_logprobs))
            logprobs = self._new_logprobs(completion.tokens, told)
        self._answer.put((self, completion.text[self._num_chars :], num_tokens, completion.finish_reason, logprobs))

    def fail(self, error: BaseException) -> None:
        """Send an error."""
        self.is_over = True
        self._answer.put(error)

    def _new_logprobs(self, tokens: Sequence[int], logprobs: Logprobs) -> list[TokenLogprob]:
        new = slice(self._num_tokens, len(tokens))
        return list(zip(tokens[new], logprobs.values[new], logprobs.top[new], strict=True))

    def _count(self, num_tokens: int) -> None:
        now_s = monotonic()
        if self._num_tokens:
            self._meter.next_tokens(num_tokens - self._num_tokens, now_s - self._last_s)
        else:
            assert self.request is not None
            self._meter.prefilled(self.request)
            self._meter.first_token(now_s - self.started_s)
            if num_tokens > 1:
                self._meter.next_tokens(num_tokens - 1, 0.0)
        self._last_s = now_s
