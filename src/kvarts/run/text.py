"""A request as its user sees it: tokens become text, and text may end it.

An executor's tokens become text in the step that samples them.

`TokenBytes` knows the bytes of single tokens, which a decoder shows only once they form whole characters.
"""

from __future__ import annotations

import json
import logging
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from kvarts.base.clock import Clock
from kvarts.base.errors import KvartsError
from kvarts.core.executor import Executor
from kvarts.core.request import Request
from kvarts.core.sampling import Logprobs, SamplingParams, TopLogprobs
from kvarts.core.sched.plan import StepPlan, StepResult

__all__ = ["Completion", "DetokenizingExecutor", "Generation", "TextOffsets", "TokenBytes"]

_log = logging.getLogger(__name__)

UNFINISHED = "\ufffd"
"""A tokenizer's text for an incomplete character."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
SPACE = "\u2581"
"""SentencePiece's character for a space."""


class Completion(msgspec.Struct, frozen=True):
    """The outcome of a prompt. `tokens`: the generated ones, including the one that ended it. `finish_reason`: `stop`,
    `length`, `cancelled` or `error`; `error` then describes the error. `stop_reason`: the requested stop text or token
    that ended it; None for the model's own end. `cached_tokens`: prompt tokens found in the cache. `error_field`: the
    field of the request that is at fault, if one is. `is_outage`: whether no worker was up that could answer.

    Log-probabilities are present if requested: `logprobs` of each token, `top_logprobs` of the likeliest tokens in its
    place, and `prompt_logprobs` of the prompt.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: str
    logprobs: tuple[float, ...] | None = None
    cached_tokens: int = 0
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: Logprobs | None = None
    error: str | None = None
    stop_reason: int | str | None = None
    error_field: str | None = None
    is_outage: bool = False


class _Beginning:
    """The longest end of a growing text that begins a stop text, found in time proportional to the text.

    This is the algorithm of Knuth, Morris and Pratt, whose table is made as far as it is needed.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._shorter = [0]
        """For a beginning of `stop` of length 1 + index: the length of its longest end that begins it as well."""
        self.num_chars = 0
        """Characters of the end of the text, fewer than those of `stop`."""

    def add(self, text: str) -> None:
        """Continue with more text."""
        stop, shorter, length = self.stop, self._shorter, self.num_chars
        if not length and stop[0] not in text:
            return
        for char in text:
            while length and stop[length] != char:
                length = shorter[length - 1]
            if stop[length] == char:
                length += 1
                if length > len(shorter):
                    shorter.append(self._next_shorter(char))
                if length == len(stop):
                    length = shorter[-1]
        self.num_chars = length

    def _next_shorter(self, char: str) -> int:
        length = self._shorter[-1]
        while length and self.stop[length] != char:
            length = self._shorter[length - 1]
        return length + (self.stop[length] == char)


class Generation:
    """An active request: its tokens and text so far. `own_ends`: the model's own end tokens."""

    def __init__(
        self, request: Request, params: SamplingParams, tokenizer: Any, *, own_ends: Collection[int] = ()
    ) -> None:
        self.request = request
        self.params = params
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        """The error in producing text that ended the request."""
        self.is_outage = False
        self.tokens: list[int] = []
        self.text = ""
        self._beginnings = () if params.include_stop_str_in_output else tuple(map(_Beginning, params.stop))
        self._own_ends = own_ends
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._piece = getattr(tokenizer, "piece", None)
        """Returns the text of a token, for a tokenizer in which it does not depend on other tokens."""
        if self._backend is not None:
            self._stream = self._new_stream()
            self._num_read = 0
            """Number of tokens that `text` covers."""

    def anew(self) -> Generation:
        """Return a generation of the same request, without tokens."""
        return Generation(self.request, self.params, self._tokenizer, own_ends=self._own_ends)

    def take(self, token: int, *, is_end: bool = False) -> bool:
        """Add the next token; `is_end`: whether it ends the request by its id. Return whether the request ends.

        The text of an end token is not part of the answer, unless that is requested.
        """
        self.tokens.append(token)
        if is_end:
            self.finish_reason = "stop"
            if token in self.params.stop_token_ids and token not in self._own_ends:
                self.stop_reason = token
        if self._tokenizer is not None and (not is_end or self.params.include_stop_str_in_output):
            try:
                self._extend_text(token)
            except Exception as error:  # concerns this request only
                _log.error("request %d: its tokens have no text", self.request.index, exc_info=error)
                self.fail(error)
        return self.finish_reason is not None

    def fail(self, error: Exception, *, is_outage: bool = False) -> None:
        """End the request with an error. `is_outage`: see Completion."""
        self.error = error
        self.is_outage = is_outage
        self.finish_reason = "error"

    def clear(self) -> None:
        """Discard the generated tokens and text of a request for zero tokens."""
        self.tokens.clear()
        self.text, self.finish_reason, self.stop_reason = "", None, None

    def finish(self, reason: str) -> None:
        """Set the finish reason, unless the request has one."""
        if self.finish_reason is None:
            self.finish_reason = reason

    def completion(self, logprobs: Logprobs | None = None, prompt_logprobs: Logprobs | None = None) -> Completion:
        """Return the outcome of a request that has ended."""
        assert self.finish_reason is not None
        told = logprobs if logprobs is not None and self.params.logprobs else None
        error, field = None if self.error is None else f"{type(self.error).__name__}: {self.error}", None
        if isinstance(self.error, KvartsError) and self.error.field is not None:
            error, field = str(self.error), self.error.field
        elif self.is_outage:
            error = str(self.error)
        return Completion(
            self.request.index,
            self.text,
            tuple(self.tokens),
            self.request.num_prompt_tokens,
            self.finish_reason,
            None if told is None else tuple(told.values),  # type: ignore[arg-type]  # None occurs only in prompts
            self.request.cached_tokens,
            () if told is None else tuple(told.top),
            prompt_logprobs,
            error,
            self.stop_reason if self.finish_reason == "stop" else None,
            field,
            self.is_outage,
        )

    @property
    def final_text(self) -> str:
        """The part of `text` that no stop text can still remove."""
        if not self._beginnings or self.finish_reason is not None:
            return self.text
        return self.text[: len(self.text) - max(each.num_chars for each in self._beginnings)]

    def _new_stream(self) -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(skip_special_tokens=self.params.skip_special_tokens)

    def _next_text(self, token: int) -> str | None:
        """Return the text that `token` completes, None for a part of a character.

        A byte that never becomes a character changes the text of the bytes before it: for `<0x0D>`, `<0xEA>`, `a`, a
        decoder first produces a line end, and finally three other characters. DecodeStream then raises an error. The
        text so far is kept, and a new stream continues after it.
        """
        try:
            text: str | None = self._stream.step(self._backend, token)
        except Exception:  # tokenizers has no narrower type
            self._stream = self._new_stream()
            text = self._stream.step(self._backend, self.tokens[self._num_read :])
        if text is not None:
            self._num_read = len(self.tokens)
        return text

    def _extend_text(self, token: int) -> None:
        """Update `text`; an incomplete character waits for its missing bytes."""
        if self._piece is not None or self._backend is not None:
            piece = self._piece(token) if self._piece is not None else self._next_text(token) or ""
            num_before, added = len(self.text), piece
            text, self.text = self.text, ""
            text += piece  # in place, because nothing else holds the text: a long one would be copied for each token
        else:
            text = self._tokenizer.decode(self.tokens, skip_special_tokens=self.params.skip_special_tokens)
            if text.endswith(UNFINISHED):
                return
            num_before, added = len(self.text), text[len(self.text) :]
            if not text.startswith(self.text):  # earlier text has changed
                self._beginnings, added = tuple(_Beginning(each.stop) for each in self._beginnings), text
        if not self.params.stop:
            self.text = text
            return
        for each in self._beginnings:
            each.add(added)
        if len(self.tokens) <= self.params.min_tokens:
            self.text = text
            return
        # Earlier text has been searched already, or precedes min_tokens.
        ends: list[tuple[int, str]] = []
        for stop in self.params.stop:
            place = text.find(stop, max(0, num_before - len(stop) + 1))
            if place >= 0:
                ends.append((place + len(stop), stop))
        if ends:
            end, stop = min(ends, key=itemgetter(0))  # the first to be complete, as if text arrived by characters
            text = text[: end if self.params.include_stop_str_in_output else end - len(stop)]
            self.finish_reason, self.stop_reason = "stop", stop
        self.text = text


class DetokenizingExecutor:
    """An Executor around another that passes each sampled token to its Generation.

    A request ends in the step in which its text reaches a stop text, as with an end token; accepted drafted tokens
    after that point are discarded. The step's duration includes detokenization. Owner of the active generations.
    """

    def __init__(self, executor: Executor, *, max_num_seqs: int, clock: Clock) -> None:
        self.needs_page_ids = executor.needs_page_ids
        self._executor = executor
        self._clock = clock
        self._generations: dict[int, Generation] = {}
        self._request_of_row = np.full(max_num_seqs, -1, np.int64)

    def add(self, generation: Generation) -> None:
        """Register a request for detokenization."""
        self._generations[generation.request.index] = generation

    def get(self, request_index: int) -> Generation | None:
        """Return an active request; None if the index is not active."""
        return self._generations.get(request_index)

    def drop(self, request_index: int) -> Generation | None:
        """Remove a request, and return its tokens and text; None if it was not added."""
        return self._generations.pop(request_index, None)

    def execute(self, plan: StepPlan) -> StepResult:
        """Have the wrapped executor carry out a step, and add its tokens to the generations."""
        start_ns = self._clock.now_ns()
        result = self._executor.execute(plan)
        rows = [] if plan.decodes is None else plan.decodes.rows.tolist()
        for chunk in plan.batch.chunks:
            self._request_of_row[chunk.row] = chunk.request_index
            if chunk.is_last:
                rows.append(chunk.row)
        if not rows:
            return result
        assert result.tokens is not None
        requests = self._request_of_row[rows].tolist()
        tokens = result.tokens[rows].tolist()
        if result.accepted:
            result = self._with_accepted(plan, result, dict(zip(rows, requests, strict=True)))
            stopped = result.stopped_rows
        else:
            ends = set(result.stopped_rows)
            stopped = tuple(
                row
                for row, request, token in zip(rows, requests, tokens, strict=True)
                if self._generations[request].take(token, is_end=row in ends)
            )
        return result.replaced(duration_ns=self._clock.now_ns() - start_ns, stopped_rows=stopped)

    def _with_accepted(self, plan: StepPlan, result: StepResult, request_of_row: dict[int, int]) -> StepResult:
        """Add the tokens of a step with accepted drafts, and discard those after the end of a text.

        The request then ends with the drafted token that completed its text.
        """
        assert plan.drafts is not None and result.tokens is not None
        tokens, ends = result.tokens.copy(), set(result.stopped_rows)
        drafted = {row: plan.drafts.tokens[plan.drafts.rows == row][:count].tolist() for row, count in result.accepted}
        stopped: list[int] = []
        for row, request in request_of_row.items():
            generation, mine = self._generations[request], drafted.get(row, [])
            num_taken = next((place for place, token in enumerate(mine, 1) if generation.take(token)), 0)
            if num_taken:
                tokens[row] = mine[num_taken - 1]
                drafted[row] = mine[: num_taken - 1]
                stopped.append(row)
            elif generation.take(int(tokens[row]), is_end=row in ends):
                stopped.append(row)
        accepted = tuple((row, len(mine)) for row, mine in drafted.items() if mine)
        return result.replaced(tokens=tokens, stopped_rows=tuple(stopped), accepted=accepted)


class TokenBytes:
    """The bytes of each token of a transformers tokenizer, independent of context.

    There are two kinds of vocabularies: byte-level ones spell each byte as a printable character (GPT-2), others are
    text with `<0xE2>` for a single byte (SentencePiece). A token of any other vocabulary has the bytes of its text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Any = backend
        kinds = set() if backend is None else set(_decoders(json.loads(backend.to_str()).get("decoder")))
        self._is_byte_level = "ByteLevel" in kinds
        self._is_sentencepiece = bool(kinds & {"ByteFallback", "Metaspace"})
        self._added: dict[int, Any] = {} if backend is None else dict(backend.get_added_tokens_decoder())
        self.special_ids = frozenset(token for token, added in self._added.items() if added.special)
        self._first_space: bool | None = None

    def of(self, token: int) -> bytes:
        """Return the bytes of `token`; empty if it is not in the vocabulary."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._read(token)
        return known

    @property
    def drops_first_space(self) -> bool:
        """Whether the text of a sequence begins without the space of its first token."""
        if self._first_space is None:
            self._first_space = self._is_sentencepiece and self._backend.decode(self._spaced()) == "a"
        return self._first_space

    def _spaced(self) -> list[int]:
        token = self._backend.token_to_id(f"{SPACE}a")
        return [] if token is None else [token]

    def _read(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token].content).encode()
        if self._backend is None:
            return str(self._tokenizer.decode([token])).encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._is_byte_level and all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece)
        if self._is_sentencepiece:
            byte = BYTE.match(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()
        return str(self._backend.decode([token])).encode()


class TextOffsets:
    """The offset in a text of the character that contains each token's first byte. Tokens are added in order.

    `bytes_of`: returns the bytes of a token. `start`: the offset of the first token. `skipped`: tokens without text.
    `drops_first_space`: the text begins without the space of its first token.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        *,
        start: int = 0,
        skipped: Collection[int] = (),
        drops_first_space: bool = False,
    ) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._drops_space = drops_first_space
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.end = start
        """Offset of the end of the complete characters."""

    def add(self, tokens: Iterable[int]) -> list[int]:
        """Return the offset of each of the next tokens. A token that begins within a character has that character's
        offset.
        """
        offsets = []
        for token in tokens:
            offsets.append(self.end)
            piece = b"" if token in self._skipped else self._bytes_of(token)
            if piece and self._drops_space:
                self._drops_space = False
                piece = piece.removeprefix(b" ")
            self.end += len(self._decoder.decode(piece))
        return offsets


def _decoders(decoder: Any) -> Sequence[str]:
    if not isinstance(decoder, dict):
        return []
    parts = [kind for part in decoder.get("decoders", ()) for kind in _decoders(part)]
    return [str(decoder.get("type")), *parts]


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character stands for: printable ones themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_of_character()
