"""Chooses the next token of each request from its logits, and decides whether the token ends the request."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvarts.base.errors import ConfigError
from kvarts.core.sampling import Logprobs, SamplingParams, StructuredOutputs, TopLogprobs

__all__ = ["BatchSampler", "Grammars", "Matcher", "Sampler", "SamplingParams", "processors_of"]

MAX_KEPT = 64
"""Compiled grammars in the cache."""
MOST_FUEL = 100_000
"""Limit of the work on the states of a grammar's terminals before the first token: at most a third of a second. With
llguidance's default, it was seven.
"""
MOST_ITEMS = 800
"""Limit of the ways in which a text may continue in its grammar. With llguidance's default, 2,000, each token of an
ambiguous grammar took up to 1.4 s, for which all requests wait; with this one it takes 0.1 s. An object of a JSON
schema takes four for each optional property.
"""
MOST_STEP_ITEMS = 5_000
"""Limit of the work on the next token."""
SPACES = r"[ \t\n\r]{0,16}"
"""Whitespace between parts of JSON, bounded because a model may otherwise generate spaces without end."""
FIELD = "sampling.structured_outputs"


class Matcher:
    """The state of one text in a grammar, advanced token by token."""

    def __init__(self, matcher: Any, end_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_tokens = 0
        self.end_ids = end_ids
        """Tokens that end the text if the grammar allows it."""

    @property
    def is_complete(self) -> bool:
        """Whether only an end may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow, [vocabulary]. Raise ConfigError if the grammar became too complex."""
        self._check()
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._check()
        allowed = np.zeros(self._vocab_size, np.bool_)
        count = min(self._vocab_size, len(bits))
        allowed[:count] = bits[:count]
        return allowed

    def accept(self, token: int) -> None:
        """Advance by the chosen token, which must be allowed."""
        if token not in self.end_ids:
            self._matcher.consume_token(token)
            self._num_tokens += 1
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(
                f"cannot be kept to: {_first_line(self._matcher.get_error())}, after {self._num_tokens} tokens",
                field=FIELD,
            )


class Grammars:
    """Compiles grammars for one tokenizer, with an LRU cache. Thread-safe.

    `end_ids`: tokens that end a text. The tokenizer's data are prepared when the first grammar is compiled.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._lock = Lock()
        """Guards the compiled grammars. No thread holds it while it compiles one, so that steps can look up others."""
        self._making = Lock()
        self._made: Any = None
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()

    def compile(self, wanted: StructuredOutputs) -> Any:
        """Return a matcher at the start of the grammar. Raise ConfigError if it cannot be compiled.

        A grammar may take a second to compile: call this before passing the request to the engine, which then finds it
        cached.
        """
        key = msgspec.json.encode(wanted)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        compiled = self._compile(wanted)
        with self._lock:
            self._compiled[key] = compiled
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def matcher(self, wanted: StructuredOutputs) -> Matcher:
        """Return a Matcher for a new text. Raise ConfigError if the grammar cannot be compiled."""
        return Matcher(self.compile(wanted).deep_copy(), self._end_ids, self._vocab_size)

    def _compile(self, wanted: StructuredOutputs) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                "needs llguidance, which is not installed", field=FIELD, hint="pip install llguidance"
            ) from error
        kind, text = wanted.as_text()
        try:
            if kind == "json":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": SPACES})
            else:
                grammar = llguidance.grammar_from(kind, text)
            limits = llguidance.LLParserLimits(
                initial_lexer_fuel=MOST_FUEL, max_items_in_row=MOST_ITEMS, step_max_items=MOST_STEP_ITEMS
            )
            matcher = llguidance.LLMatcher(self._with_bytes(llguidance), grammar, log_level=0, limits=limits)
            matcher.compute_bitmask()  # the first one takes longest, and finds grammars that allow no text
        except ValueError as error:
            raise ConfigError(f"cannot be compiled: {_first_line(error)}", field=FIELD) from error
        if matcher.is_error():
            raise ConfigError(f"cannot be compiled: {_first_line(matcher.get_error())}", field=FIELD)
        # Some grammars turn out to be too complex with the first token.
        probe = Matcher(matcher.deep_copy(), self._end_ids, self._vocab_size)
        for token in np.flatnonzero(probe.allowed()).tolist():
            if token not in self._end_ids:
                probe.accept(token)
                break
        return matcher

    def _with_bytes(self, llguidance: Any) -> Any:
        with self._making:
            if self._made is None:
                backend = getattr(self._tokenizer, "backend_tokenizer", None)
                if backend is None:
                    raise ConfigError("needs the model's tokenizer, a fast one of transformers", field=FIELD)
                if not self._end_ids:
                    raise ConfigError("needs a model that has a token for the end", field=FIELD)
                self._made = llguidance.LLTokenizer(
                    backend.to_str(), n_vocab=self._vocab_size, eos_token=sorted(self._end_ids)
                )
            return self._made


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or ["unknown"])[0][:300]


_log = logging.getLogger(__name__)

USUAL_TEMPERATURES = 1e-3, 1e3
"""Between these, scores are divided in float32, as in transformers."""
Tokens = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
INFINITY_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""The bits of infinity. As integers, those of positive numbers are in the numbers' order, and above those of others."""


class BatchSampler:
    """Chooses tokens by the SamplingParams of requests. Owner of the sampling state of each request.

    Never raises while sampling: an error in one request ends that request, by a token that is an end.

    A request is added when it is submitted, and dropped when it has ended. `grammars`: compiles the grammars of
    structured outputs; None if these are not supported.
    """

    def __init__(self, device: torch.device, grammars: Grammars | None = None) -> None:
        self._device = device
        self._grammars = grammars
        self._requests: dict[int, _Sampled] = {}
        self.num_scored = 0
        """Number of requests that asked for the log-probabilities of their prompts."""

    def add(
        self, request_index: int, params: SamplingParams, prompt: Sequence[int], stop_ids: Collection[int] = ()
    ) -> None:
        """Sample for a request from now on. `stop_ids`: tokens that end it, beside those that `params` name."""
        if params.forced_tokens:
            raise ConfigError("is for mocks only", field="sampling.forced_tokens")
        ends = frozenset(params.stop_token_ids) | frozenset(stop_ids)
        sampler = None
        if not params.is_argmax:
            matcher = None
            if params.structured_outputs is not None:
                if self._grammars is None:
                    raise ConfigError("has no grammars", field="sampling.structured_outputs")
                matcher = self._grammars.matcher(params.structured_outputs)
            sampler = Sampler(params, request_index, self._device, len(prompt), ends, matcher)
        scores = None if params.prompt_logprobs is None else _PromptScores(prompt, params.prompt_logprobs)
        self._requests[request_index] = _Sampled(sampler, ends, prompt, scores)
        self.num_scored += scores is not None

    def drop(self, request_index: int) -> None:
        """Remove a request if it was added."""
        request = self._requests.pop(request_index, None)
        if request is not None:
            self.num_scored -= request.scores is not None

    def logprobs(self, request_index: int) -> Logprobs:
        """Return the log-probabilities of a request's tokens so far; empty if it samples by argmax alone."""
        return self._requests[request_index].logprobs

    def prompt_logprobs(self, request_index: int) -> Logprobs | None:
        """Return the log-probabilities of its prompt computed so far; None if they were not requested."""
        scores = self._requests[request_index].scores
        return None if scores is None else scores.logprobs

    def error(self, request_index: int) -> Exception | None:
        """Return the error that ended a request; its last token is then invalid."""
        return self._requests[request_index].error

    def sample(self, request_indices: Sequence[int], logits: torch.Tensor) -> tuple[Tokens, Flags]:
        """Return a token for each request, and whether that token ends it."""
        tokens = _argmax(logits)
        ends = []
        for place, index in enumerate(request_indices):
            request = self._requests[index]
            if request.sampler is not None:
                tokens[place] = request.choose(request.sampler, logits[place])
            ends.append(request.is_end(tokens[place]))
        return np.array(tokens, np.int64), np.array(ends, np.bool_)

    def sample_drafted(
        self, request_indices: Sequence[int], logits: torch.Tensor, drafts: Sequence[Sequence[int]]
    ) -> tuple[Tokens, Flags, list[int]]:
        """Return per request a token, whether it ends the request, and the number of accepted drafts before it."""
        largest = _argmax(logits)
        tokens, ends, accepted = [], [], []
        first = 0
        for index, draft in zip(request_indices, drafts, strict=True):
            request = self._requests[index]
            num_accepted = 0
            while True:
                token = largest[first + num_accepted]
                if request.sampler is not None:
                    token = request.choose(request.sampler, logits[first + num_accepted])
                is_end = request.is_end(token)
                if is_end or num_accepted == len(draft) or token != draft[num_accepted]:
                    break
                num_accepted += 1
            tokens.append(token)
            ends.append(is_end)
            accepted.append(num_accepted)
            first += len(draft) + 1
        return np.array(tokens, np.int64), np.array(ends, np.bool_), accepted

    def num_to_score(self, request_index: int) -> int:
        """Return the length of the prompt if the request asked for its log-probabilities, else 0."""
        scores = self._requests[request_index].scores
        return 0 if scores is None else len(scores.prompt)

    def score(self, request_index: int, start: int, logits: torch.Tensor) -> None:
        """Record the log-probabilities of a prompt's tokens after positions from `start` on."""
        request = self._requests[request_index]
        assert request.scores is not None
        try:
            request.scores.note(start, logits)
        except Exception as error:  # concerns this request only
            request.fail(request_index, error)


class _PromptScores:
    """The log-probabilities of a prompt, recorded chunk by chunk, in any order."""

    def __init__(self, prompt: Sequence[int], num_top: int) -> None:
        self.prompt = prompt
        self._num_top = num_top
        count = len(prompt)
        self.logprobs = Logprobs([None] * count, [()] * count, [0] * count)

    def note(self, start: int, logits: torch.Tensor) -> None:
        """Record the tokens after positions [start, start + rows of `logits`)."""
        first, last = start + 1, start + 1 + len(logits)
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        tokens = torch.tensor(list(self.prompt[first:last]), dtype=torch.int64, device=logits.device)
        own = logprobs.gather(1, tokens[:, None])
        told = self.logprobs
        told.values[first:last] = own[:, 0].tolist()
        told.ranks[first:last] = (logprobs >= own).sum(dim=-1).tolist()
        if self._num_top:
            top = logprobs.topk(min(self._num_top, logprobs.shape[-1]), dim=-1)
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            told.top[first:last] = [tuple(zip(*pair, strict=True)) for pair in pairs]


class _Sampled:
    """A request. `known`: its prompt and tokens so far, maintained only if it has a sampler."""

    __slots__ = ("error", "known", "logprobs", "sampler", "scores", "stop_ids")

    def __init__(
        self,
        sampler: Sampler | None,
        stop_ids: frozenset[int],
        prompt: Sequence[int],
        scores: _PromptScores | None,
    ) -> None:
        self.sampler = sampler
        self.stop_ids = stop_ids
        self.known: list[int] = [] if sampler is None else list(prompt)
        self.scores = scores
        self.logprobs = Logprobs()
        self.error: Exception | None = None

    def is_end(self, token: int) -> bool:
        """Return whether the request ends with `token`."""
        return token in self.stop_ids or self.error is not None or (self.sampler is not None and self.sampler.is_over)

    def choose(self, sampler: Sampler, logits: torch.Tensor) -> int:
        """Return the next token, and record it with its log-probability. `logits` [vocabulary]."""
        if self.error is not None:
            return 0
        try:
            token, logprob, top = sampler.choose(logits, self.known)
        except Exception as error:  # concerns this request only
            self.fail(sampler.index, error)
            return 0
        self.known.append(token)
        self.logprobs.values.append(logprob)
        self.logprobs.top.append(top)
        return token

    def fail(self, request_index: int, error: Exception) -> None:
        """Record an error that ends the request."""
        _log.error("request %d: sampling failed", request_index, exc_info=error)
        self.error = error


class Sampler:
    """Chooses the tokens of one request. `index`: its seed, if `params` has none.

    `num_prompt_tokens`: length of the prompt in the known tokens. `stop_ids`: tokens that end it, excluded until
    `min_tokens`. `matcher`: the grammar that constrains its text.
    """

    def __init__(
        self,
        params: SamplingParams,
        index: int,
        device: torch.device,
        num_prompt_tokens: int = 0,
        stop_ids: Collection[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self.index = index
        self._matcher = matcher
        self.is_over = False
        """Whether the text has ended as its grammar allows."""
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
        self._processors = processors_of(params)
        self._generator: torch.Generator | None = None
        if params.temperature > 0.0:
            self._generator = torch.Generator(device=device)
            self._generator.manual_seed(index if params.seed is None else params.seed)

    def choose(self, logits: torch.Tensor, known: Sequence[int]) -> tuple[int, float, TopLogprobs]:
        """Return a token, its log-probability before any processing, and the likeliest tokens with theirs.

        `logits` [vocabulary]. `known`: the request's tokens, which become a tensor only where they matter.
        """
        logits = logits.float()
        params = self._params
        scores = logits.clone()
        num_generated = len(known) - self._num_prompt_tokens
        matcher = self._matcher
        if matcher is not None:
            allowed = torch.from_numpy(matcher.allowed()).to(scores.device)
            scores.masked_fill_(~allowed, -torch.inf)
        if num_generated < params.min_tokens and (matcher is None or not matcher.is_complete):
            scores[self._stop_ids[self._stop_ids < len(scores)]] = -torch.inf
        if params.presence_penalty or params.frequency_penalty:
            generated = torch.tensor(known[self._num_prompt_tokens :], dtype=torch.int64, device=scores.device)
            seen, counts = generated.unique(return_counts=True)
            scores[seen] -= params.presence_penalty + params.frequency_penalty * counts
        penalized = known if params.repetition_penalty != 1.0 else ()
        ids = torch.tensor([penalized], dtype=torch.int64, device=scores.device) if self._processors else None
        for process in self._processors:
            scores = process(ids, scores[None])[0]
        if not bool(torch.isfinite(scores.max())):
            scores = _finite(scores, logits if matcher is None else logits.masked_fill(~allowed, -torch.inf))
        if self._generator is None:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._generator))
        if matcher is not None:
            matcher.accept(token)
            self.is_over = token in matcher.end_ids
        logprobs = torch.log_softmax(logits, dim=-1)
        top: TopLogprobs = ()
        if params.top_logprobs:
            found = logprobs.topk(min(params.top_logprobs, len(logprobs)))
            top = tuple(zip(found.indices.tolist(), found.values.tolist(), strict=True))
        return token, float(logprobs[token]), top


def processors_of(params: SamplingParams) -> list[Any]:
    """Return the processors of scores that `params` need, as transformers' `generate` orders them.

    The first one imports a part of transformers, which takes half a second.
    """
    made = []
    if params.repetition_penalty != 1.0:
        made.append(_processor("RepetitionPenaltyLogitsProcessor", params.repetition_penalty))
    if params.temperature > 0.0:
        if not USUAL_TEMPERATURES[0] <= params.temperature <= USUAL_TEMPERATURES[1]:
            made.append(_AnyTemperature(params.temperature))
        elif params.temperature != 1.0:
            made.append(_processor("TemperatureLogitsWarper", params.temperature))
        if params.top_k:
            made.append(_processor("TopKLogitsWarper", params.top_k))
        if params.top_p < 1.0:
            made.append(_processor("TopPLogitsWarper", params.top_p))
        if params.min_p > 0.0:
            made.append(_processor("MinPLogitsWarper", params.min_p))
    return made


def _processor(name: str, value: float) -> Any:
    from transformers.generation import logits_process

    return getattr(logits_process, name)(value)


class _AnyTemperature:
    """A temperature too extreme for float32: scores are shifted so that the largest is 0, in float64, before
    division.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wide = scores.double()
        return ((wide - wide.max(dim=-1, keepdim=True).values) / self._temperature).float()


def _finite(scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return scores that can be sampled from: uniform over the infinite ones if there are any, else `logits`."""
    infinite = scores == torch.inf
    if bool(infinite.any()):
        return torch.where(infinite, 0.0, -torch.inf)
    return torch.nan_to_num(logits, nan=-torch.inf)


def _argmax(logits: torch.Tensor) -> list[int]:
    """Return the token with the largest logit of each row, the first of equal ones."""
    if logits.device.type != "cpu":
        of_device: list[int] = logits.argmax(dim=-1).tolist()
        return of_device
    if logits.dtype not in INFINITY_BITS:
        return _argmax_of_floats(logits)
    bits = logits.view(torch.int16).numpy()
    tokens = bits.argmax(axis=-1)
    most = bits[np.arange(len(bits)), tokens]
    unsure = np.flatnonzero((most <= 0) | (most >= INFINITY_BITS[logits.dtype]))
    if len(unsure):
        tokens[unsure] = _argmax_of_floats(logits[unsure])
    likeliest: list[int] = tokens.tolist()
    return likeliest


def _argmax_of_floats(logits: torch.Tensor) -> list[int]:
    likeliest: list[int] = logits.float().numpy().argmax(axis=-1).tolist()
    return likeliest
