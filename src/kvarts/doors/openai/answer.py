"""Pieces of text on their way from an engine's thread to the event loop of a server, as they are generated.

The engine's thread appends to lists and wakes the event loop once for all pieces that arrived meanwhile. A coroutine
that is not waiting is not woken; it finds several pieces at once when it next takes some.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Protocol

import msgspec

from kvarts.core.request import Request
from kvarts.core.sampling import Logprobs, TopLogprobs
from kvarts.run.llm_engine import Gone, LLMEngine, Outbox, RequestFailedError
from kvarts.run.text import Completion, Generation

__all__ = ["Answer", "Choice", "ChoiceMeter", "Piece", "TokenLogprob", "size_of"]

PIECE_BYTES = 200
PAIR_BYTES = 100
"""Approximate memory of a piece, or of a token with its log-probability, and of each alternative to that token."""
LOOK_BYTES = 1 << 20

TokenLogprob = tuple[int, float | None, TopLogprobs]
"""A token, its log-probability, and the likeliest tokens at its position with theirs."""

Piece = tuple["Choice", str, int, str | None, list[TokenLogprob]]
"""The choice, its new text, its number of tokens so far, its finish reason or None, and log-probabilities."""


class ChoiceMeter(Protocol):
    """Counts the events of choices, in the engine's thread."""

    def prefilled(self, request: Request) -> None:
        """Count a prompt that has been computed."""

    def first_token(self, waited_s: float) -> None:
        """Count a first token."""

    def next_tokens(self, num_tokens: int, waited_s: float) -> None:
        """Count tokens after the first; they arrived `waited_s` after the previous ones."""

    def ended(self, choice: Choice, completion: Completion, now_s: float) -> None:
        """Count a choice that has ended."""


class Answer:
    """The pieces of all choices of one HTTP request, in order of arrival. For one coroutine."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.is_marked = False
        """Owned by the outbox."""
        self.pieces: deque[Piece | BaseException] = deque()
        self.write_now: Callable[[], bool] | None = None
        """Processes the pieces in the event loop, in place of the coroutine. Returns whether it took all; if not, the
        coroutine is woken.
        """
        self._waiter: asyncio.Future[None] | None = None
        self.is_read = False
        """Whether pieces are written as they are taken; otherwise taken pieces are kept until the end."""
        self.num_bytes = 0
        """Approximate memory held: pieces that were not taken, and those that are kept."""
        self._next_look = LOOK_BYTES
        self.on_more: Callable[[], object] | None = None
        """Called after each further LOOK_BYTES held, in the engine's thread."""
        self._is_cut = False

    def put(self, piece: Piece | BaseException) -> None:
        """Add a piece, from any thread. Raise Gone if the event loop has ended, or if the answer was cut."""
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
        """Drop the pieces, and make the coroutine raise `error`. In the engine's thread."""
        self._is_cut = True
        self.pieces.clear()
        self.pieces.append(error)
        if not self.is_marked:
            self.outbox.mark(self)

    def close(self) -> None:
        """Drop the pieces that were not taken, and refuse further ones."""
        self._is_cut = True
        self.pieces.clear()

    def keep(self, num_bytes: int) -> None:
        """Record the total size of the taken pieces that are kept."""
        self.num_bytes = num_bytes
        self._next_look = min(self._next_look, num_bytes + LOOK_BYTES)

    def wake(self) -> None:
        """Wake the coroutine, if it waits."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # it takes the pieces without being woken
        if self.write_now is None or not self.write_now():
            waiter.set_result(None)

    async def take(self) -> list[Piece]:
        """Return the pieces that arrived since the last call, at least one. Raise an error that arrived instead."""
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
                try:
                    raise piece
                finally:
                    del piece  # its traceback holds this frame: both would wait for the collector
            taken.append(piece)
        if self.is_read:
            self.keep(0)
        return taken


def size_of(logprobs: Sequence[TokenLogprob]) -> int:
    """Return the approximate memory of log-probabilities in bytes."""
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
        """Whether it has ended, successfully or not; it is then no longer counted."""
        self.is_unwanted = False
        """Whether its client disconnected before it began."""
        self.in_session: Callable[[], object] | None = None
        """Ends a choice that a session answers, as if it were cancelled. For the event loop's thread."""
        self.owner = ""
        self.num_held_tokens = 0
        """Tokens of its prompt that are counted for its owner."""
        self.came: Callable[[], object] | None = None
        """Called at its first token, from any thread."""
        self.went: Callable[[], object] | None = None
        """Called when it is over, from any thread."""
        self._own_end = own_end
        self._answer = answer
        self._meter = meter
        self._has_logprobs = has_logprobs
        self.logprobs: Callable[[], Logprobs] = Logprobs
        """Returns the log-probabilities of at least the tokens that have arrived so far."""
        self.prompt_logprobs: Logprobs | None = None
        """Log-probabilities of its prompt if requested; set from its first piece on."""
        self._engine: LLMEngine | None = None
        self.tokens: Sequence[int] = ()
        """Its tokens so far; may already include those of the next piece."""
        self._num_tokens = 0
        self._num_chars = 0
        self._last_s = 0.0

    def note(self, engine: LLMEngine, request: Request) -> None:
        """Record its submission, in the engine's thread."""
        self.request, self.index, self._engine = request, request.index, engine
        self.logprobs = partial(engine.logprobs, request.index)

    @property
    def answer(self) -> Answer:
        """The Answer that receives its pieces."""
        return self._answer

    @property
    def num_tokens(self) -> int:
        """The number of its tokens so far."""
        return self._num_tokens if self.completion is None else len(self.completion.tokens)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were hit in the cache."""
        return 0 if self.request is None else self.request.cached_tokens

    def update(self, generation: Generation) -> None:
        """Send the tokens and text that a step added."""
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
        """Send the rest, and the finish reason."""
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
            asked, is_outage = completion.error_field, completion.is_outage
            self._answer.put(RequestFailedError(completion.error, asked=asked, is_outage=is_outage))
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
        if (went := self.went) is not None:  # read once: the event loop's thread may reset it
            went()

    def _new_logprobs(self, tokens: Sequence[int], logprobs: Logprobs) -> list[TokenLogprob]:
        new = slice(self._num_tokens, len(tokens))
        return list(zip(tokens[new], logprobs.values[new], logprobs.top[new], strict=True))

    def _count(self, num_tokens: int) -> None:
        now_s = monotonic()
        if self._num_tokens:
            self._meter.next_tokens(num_tokens - self._num_tokens, now_s - self._last_s)
        else:
            assert self.request is not None
            if (came := self.came) is not None:
                came()
            self._meter.prefilled(self.request)
            self._meter.first_token(now_s - self.started_s)
            if num_tokens > 1:
                self._meter.next_tokens(num_tokens - 1, 0.0)
        self._last_s = now_s
