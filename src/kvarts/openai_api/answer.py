"""What goes from the thread of an engine to the event loop of a server: pieces of text, as they are generated.

The thread of the engine appends to lists and wakes the event loop once for all that came meanwhile; a coroutine that is
not waiting is not woken, and finds several pieces at once when it comes back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Protocol

import msgspec

from kvarts.llm.listener import Gone, RequestFailedError
from kvarts.llm.llm_engine import LLMEngine
from kvarts.llm.outbox import Outbox
from kvarts.llm.text import Completion, Generation
from kvarts.request import Request
from kvarts.sampling import Logprobs, TopLogprobs

__all__ = ["Answer", "Choice", "ChoiceMeter", "Piece", "TokenLogprob", "size_of"]

PIECE_BYTES = 200
PAIR_BYTES = 100
"""About the memory of a piece, or of a token with its log-probability, and of each other token in its place."""
LOOK_BYTES = 1 << 20

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
        self.is_read = False
        """Whether pieces are written as they are taken; else what was taken is kept until the end."""
        self.num_bytes = 0
        """About what it holds: pieces that were not taken, and what is kept."""
        self._next_look = LOOK_BYTES
        self.on_more: Callable[[], object] | None = None
        """Is called each time that it holds LOOK_BYTES more, in the thread of the engine."""
        self._is_cut = False

    def put(self, piece: Piece | BaseException) -> None:
        """Add a piece, from any thread. Raise Gone if there is no event loop any more, or if it was cut."""
        if self._is_cut:
            raise Gone
        self.pieces.append(piece)
        self.num_bytes += PIECE_BYTES
        if self.num_bytes > self._next_look:
            self._next_look = self.num_bytes + LOOK_BYTES
            if self.on_more is not None:
                self.on_more()
        if not self.is_marked:
            self.outbox.mark(self)

    def cut(self, error: BaseException) -> None:
        """Let go of what it holds, and have its coroutine raise `error`. In the thread of the engine."""
        self._is_cut = True
        self.pieces.clear()
        self.pieces.append(error)
        if not self.is_marked:
            self.outbox.mark(self)

    def keep(self, num_bytes: int) -> None:
        """Note what is kept of the pieces that were taken, all together."""
        self.num_bytes = num_bytes
        self._next_look = min(self._next_look, num_bytes + LOOK_BYTES)

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
        if self.is_read:
            self.keep(0)
        return taken


def size_of(logprobs: Sequence[TokenLogprob]) -> int:
    """Return about how many bytes of memory log-probabilities are."""
    return sum(PIECE_BYTES + PAIR_BYTES * len(top) for _, _, top in logprobs)


class Choice:
    """A Listener of one request: a choice of an answer, by its `number`.

    `own_end`: the finish reason at `max_tokens`, if the answer ends there by itself. `started_s`: when its HTTP request
    came, on the monotonic clock. `request` and `index` are set when it is submitted.
    """

    def __init__(
        self,
        answer: Answer,
        number: int,
        meter: ChoiceMeter,
        *,
        has_logprobs: bool = False,
        own_end: str | None = None,
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
        self.owner = ""
        self.num_held_tokens = 0
        """Of its prompt, as they are counted for its owner."""
        self.came: Callable[[], object] | None = None
        """Is called at its first token, from any thread."""
        self.went: Callable[[], object] | None = None
        """Is called when it is over, from any thread."""
        self._own_end = own_end
        self._answer = answer
        self._meter = meter
        self._has_logprobs = has_logprobs
        self.logprobs: Callable[[], Logprobs] = Logprobs
        """Returns the log-probabilities of its tokens, of those that have come or of more."""
        self.prompt_logprobs: Logprobs | None = None
        """Those of its prompt, where asked for; from its first piece on."""
        self._engine: LLMEngine | None = None
        self.tokens: Sequence[int] = ()
        """Those so far, and maybe more that come with the next piece."""
        self._num_tokens = 0
        self._num_chars = 0
        self._last_s = 0.0

    def note(self, engine: LLMEngine, request: Request) -> None:
        """Note that it is submitted, in the thread of the engine."""
        self.request, self.index, self._engine = request, request.index, engine
        self.logprobs = partial(engine.logprobs, request.index)

    @property
    def answer(self) -> Answer:
        """What its pieces go through."""
        return self._answer

    @property
    def num_tokens(self) -> int:
        """How many tokens it has so far."""
        return self._num_tokens if self.completion is None else len(self.completion.tokens)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the cache."""
        return 0 if self.request is None else self.request.cached_tokens

    def update(self, generation: Generation) -> None:
        """Send what is new after a step."""
        tokens = generation.tokens
        num_tokens, num_before = len(tokens), self._num_tokens
        if num_tokens == num_before:
            return
        text = generation.final_text
        if num_before:
            now_s = monotonic()
            self._meter.next_tokens(num_tokens - num_before, now_s - self._last_s)
            self._last_s = now_s
        else:
            if generation.params.prompt_logprobs is not None and self._engine is not None:
                self.prompt_logprobs = self._engine.prompt_logprobs(generation.request.index)
            self.tokens = tokens
            self._count(num_tokens)
        logprobs: list[TokenLogprob] = []
        if self._has_logprobs:
            logprobs = self._new_logprobs(tokens, self.logprobs())
            self._answer.num_bytes += size_of(logprobs)
        self._answer.put((self, text[self._num_chars :], num_tokens, None, logprobs))
        self._num_tokens, self._num_chars = num_tokens, len(text)

    def end(self, completion: Completion) -> None:
        """Send the rest, and the end."""
        self._note_over()
        reason = completion.finish_reason
        if self._own_end is not None and reason == "length":
            completion, reason = msgspec.structs.replace(completion, finish_reason="stop"), self._own_end
        self.completion = completion
        self.tokens = completion.tokens
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
        self._answer.put((self, completion.text[self._num_chars :], num_tokens, reason, logprobs))

    def fail(self, error: BaseException) -> None:
        """Send an error."""
        self._note_over()
        self._answer.put(error)

    def _note_over(self) -> None:
        self.is_over = True
        if self.went is not None:
            self.went()

    def _new_logprobs(self, tokens: Sequence[int], logprobs: Logprobs) -> list[TokenLogprob]:
        new = slice(self._num_tokens, len(tokens))
        return list(zip(tokens[new], logprobs.values[new], logprobs.top[new], strict=True))

    def _count(self, num_tokens: int) -> None:
        now_s = monotonic()
        if self._num_tokens:
            self._meter.next_tokens(num_tokens - self._num_tokens, now_s - self._last_s)
        else:
            assert self.request is not None
            if self.came is not None:
                self.came()
            self._meter.prefilled(self.request)
            self._meter.first_token(now_s - self.started_s)
            if num_tokens > 1:
                self._meter.next_tokens(num_tokens - 1, 0.0)
        self._last_s = now_s
