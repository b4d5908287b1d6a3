"""Adds tokens, sampling and text to the requests of a core engine. Single-threaded; EngineLoop serves several
threads.

An outbox wakes coroutines of one event loop from an engine's thread, with one call per batch of updates.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from threading import Lock
from time import monotonic, thread_time
from typing import Any, Protocol

from kvarts.base.clock import Clock
from kvarts.base.errors import ConfigError, KvartsError
from kvarts.core.content import Content
from kvarts.core.request import Request
from kvarts.core.sampling import Logprobs, SamplingParams
from kvarts.run.text import Completion, Generation

__all__ = [
    "CoreEngine",
    "EngineDeadError",
    "Generations",
    "Gone",
    "Held",
    "LLMEngine",
    "Listener",
    "Outbox",
    "RequestFailedError",
    "SamplingState",
    "Woken",
]

TIMER_S = 0.001
"""The shortest timer: uvloop rounds to whole milliseconds, and its timers may fire early."""


class EngineDeadError(KvartsError):
    """An error in an earlier step has left the engine in an unknown state."""

    exit_code = 1


class RequestFailedError(KvartsError):
    """An error ended one request; the engine and all other requests continue. `asked`: the field of the request that
    asked for what could not be done; None if the request is not at fault. `is_outage`: whether no worker is up
    that could answer it.
    """

    exit_code = 1

    def __init__(self, what: str, *, asked: str | None = None, is_outage: bool = False) -> None:
        super().__init__(what)
        self.asked = asked
        self.is_outage = is_outage


class Listener(Protocol):
    """Receives the progress of one request, in the thread that has the engine. Raises Gone if nothing listens any more.

    Any other exception that it raises ends its request, and `fail` receives the error.
    """

    def update(self, generation: Generation) -> None:
        """Receive the state of the request after a step in which it did not end."""

    def end(self, completion: Completion) -> None:
        """Receive the end of the request, perhaps with an error."""

    def fail(self, error: BaseException) -> None:
        """Receive an error that replaces the completion of the request."""


class Held(Protocol):
    """A buffer of what listeners send. Called in the engine's thread."""

    def hold(self) -> None:
        """Begin to collect: a step has ended, and listeners receive its outcome."""

    def release(self) -> None:
        """Send the collected updates."""


class Gone(Exception):  # noqa: N818  # not an error: nothing listens any more
    """Raised by a listener after its event loop was closed."""


class Woken(Protocol):
    """An object that a coroutine waits for. `is_marked`: owned by the outbox, False at first."""

    is_marked: bool

    def wake(self) -> None:
        """Wake the coroutine if it waits. Called in the event loop."""


class Outbox:
    """Wakes marked objects in the event loop, in order."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = Lock()
        self._marked: list[Woken] = []
        self._is_holding = False
        self._not_before_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """Wakes the postponed objects, unless a later step does so first."""
        self._due_s: float | None = None
        self.due_s: Callable[[], float] | None = None
        """Returns when the last step should have ended, on the monotonic clock; None if that is not known."""
        self.on_late: Callable[[Sequence[float]], None] | None = None
        """Receives the delays of wake-ups after that time, in seconds, in ascending order."""

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake coroutines of `loop` from now on."""
        self._loop = loop

    def call_soon(self, call: Callable[[], object]) -> None:
        """Schedule `call` in the event loop, from any thread, if the loop is still open."""
        with suppress(RuntimeError):
            assert self._loop is not None
            self._loop.call_soon_threadsafe(call)

    def mark(self, woken: Woken) -> None:
        """Schedule a wake-up of `woken`, from any thread. Raise Gone if the event loop is closed."""
        with self._lock:
            if woken.is_marked:
                return
            woken.is_marked = True
            self._marked.append(woken)
            if self._is_holding or len(self._marked) > 1:
                return
        self._wake_soon()

    def hold(self) -> None:
        """Wake nothing until `release`: a step has ended."""
        with self._lock:
            self._is_holding = True
            if self.due_s is not None and not self._marked:  # else keep the earlier time
                self._due_s = self.due_s()

    def release(self) -> None:
        """Schedule the wake-ups of everything marked meanwhile."""
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
            self._take_marked()  # so that the next `mark` raises as well
            raise Gone from error

    def _take_marked(self) -> list[Woken]:
        with self._lock:
            marked, self._marked = self._marked, []
            for woken in marked:
                woken.is_marked = False
        return marked

    def _wake(self) -> None:
        """Wake all marked objects, but spend at most half of the time on it: under load, each call wakes more of
        them.
        """
        early_s = self._not_before_s - monotonic()
        if early_s > 0.0:
            if self._timer is None:
                assert self._loop is not None
                self._timer = self._loop.call_later(max(early_s, TIMER_S), self._wake_later)
            return
        began_s = thread_time()
        due_s, on_late = self._due_s, self.on_late
        if due_s is None or on_late is None:
            for woken in self._take_marked():
                woken.wake()
        else:
            late_s: list[float] = []
            for woken in self._take_marked():
                woken.wake()
                late_s.append(monotonic() - due_s)
            on_late(late_s)
        self._not_before_s = monotonic() + thread_time() - began_s

    def _wake_later(self) -> None:
        self._timer = None
        self._wake()


class CoreEngine(Protocol):
    """Plans and carries out steps."""

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request`, or return why it can never run."""

    def cancel(self, request: Request) -> None:
        """Drop `request` between steps; its pages are free at once."""

    def step(self, now_ns: int) -> list[Request]:
        """Run one step that starts at `now_ns`. Return the requests that finished, in admission order."""

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or transfers in flight."""


class SamplingState(Protocol):
    """The sampling state of each active request."""

    def add(
        self, request_index: int, params: SamplingParams, prompt: Sequence[int], stop_ids: Collection[int] = ()
    ) -> None:
        """Register a request; tokens in `stop_ids` end it."""

    def drop(self, request_index: int) -> None:
        """Remove a request if it was added."""

    def logprobs(self, request_index: int) -> Logprobs:
        """Return the log-probabilities of a request's tokens so far, if it asked for them; drafts may add more."""

    def prompt_logprobs(self, request_index: int) -> Logprobs | None:
        """Return the log-probabilities of its prompt known so far; None if it did not ask for them."""

    def error(self, request_index: int) -> Exception | None:
        """Return the error in sampling a request's last token, which is then invalid."""


class Generations(Protocol):
    """The active generations."""

    def add(self, generation: Generation) -> None:
        """Register a request for detokenization."""

    def get(self, request_index: int) -> Generation | None:
        """Return an active request; None if the index is not active."""

    def drop(self, request_index: int) -> Generation | None:
        """Remove a request, and return its tokens and text; None if it was not added."""


_log = logging.getLogger(__name__)

LONG = "\x00long"
"""Added to the salt of sequences with the rotation for long ones, since their KV differs."""
SCORED = "\x00scored"
"""Added, with the index of the request, to the salt of prompts with computed log-probabilities: they never match
cached pages, and no other request matches theirs.
"""


class LLMEngine:
    """A core engine for requests with sampling parameters and text. `eos_ids`: the model's end tokens.

    `switch_length`: longer sequences get other KV, as the model's rotation changes; None for a model without that.
    """

    def __init__(
        self,
        core: CoreEngine,
        sampling: SamplingState,
        generations: Generations,
        clock: Clock,
        *,
        page_size: int,
        tokenizer: Any = None,
        eos_ids: Collection[int] = (),
        switch_length: int | None = None,
    ) -> None:
        self._core = core
        self._switch_length = switch_length
        self._sampling = sampling
        self._generations = generations
        self._clock = clock
        self._page_size = page_size
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._num_submitted = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._core.has_work

    def submit(self, tokens: Sequence[int], params: SamplingParams, *, priority: int = 0) -> int:
        """Queue a prompt, and return its index. Raise ConfigError if it can never run."""

        def make(index: int, now_ns: int) -> Request:
            return Request(
                index,
                Content.from_tokens(tokens, page_size=self._page_size, owner=index),
                num_prompt_tokens=len(tokens),
                max_tokens=max(1, params.max_tokens),
                arrival_ns=now_ns,
                priority=priority,
            )

        return self.start(make, params, tokenizer=self._tokenizer)

    def start(
        self,
        make: Callable[[int, int], Request],
        params: SamplingParams,
        *,
        stop_ids: Collection[int] = (),
        tokenizer: Any = None,
    ) -> int:
        """Queue the request that `make` returns, given its index and the time, and return the index.

        `stop_ids`: tokens that end it, in addition to those of `params` and the model's own. Without a `tokenizer`, no
        text is produced. Raise ConfigError for a request that can never run, RequestFailedError for any other error
        before it is queued. A request with `max_tokens` of 0 still samples one token, which is dropped at its end.
        """
        # An index is used up even if the prompt is rejected: events name requests by it.
        index = self._num_submitted
        self._num_submitted += 1
        try:
            request = make(index, self._clock.now_ns())
            self._set_apart(request)
            if params.prompt_logprobs is not None:
                if request.content.owner != index:
                    raise ConfigError("is not kept of a session", field="sampling.prompt_logprobs")
                request.content.salt = f"{request.content.salt or ''}{SCORED}{index}"
            # Only sampling that depends on earlier tokens needs them, and a long history is expensive to copy.
            needs_prompt = not params.is_argmax or params.prompt_logprobs is not None
            prompt = request.content.tokens(0, request.num_prompt_tokens) if needs_prompt else ()
            own_ids = frozenset() if params.ignore_eos else self._eos_ids
            self._sampling.add(index, params, prompt, own_ids.union(stop_ids))
            self._generations.add(Generation(request, params, tokenizer, own_ends=own_ids))
        except KvartsError:
            self._forget(index)
            raise
        except Exception as error:  # concerns this request only, which is not queued yet
            _log.error("request %d: cannot be begun", index, exc_info=error)
            self._forget(index)
            raise RequestFailedError(f"the request cannot be begun: {type(error).__name__}: {error}") from error
        reason = self._core.submit(request, request.arrival_ns)
        if reason is not None:
            self._forget(index)
            raise ConfigError(reason, field="prompt", hint="Lower max_tokens, or give the engine more kv_memory.")
        return index

    def _forget(self, index: int) -> None:
        self._generations.drop(index)
        self._sampling.drop(index)

    def _set_apart(self, request: Request) -> None:
        """Salt a long sequence, so that its KV is never shared with short ones.

        Raise ConfigError for a sequence that would become long during generation: all of its KV would have to be
        recomputed.
        """
        limit, content = self._switch_length, request.content
        # The last token is sampled but not computed.
        if limit is None or max(request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens - 1) <= limit:
            return
        if request.num_prompt_tokens <= limit:
            raise ConfigError(
                f"{request.num_prompt_tokens} prompt tokens and {request.max_tokens} to generate pass {limit:,} "
                "tokens, where the model changes its rotation",
                field="prompt",
                hint=f"Give a prompt of more than {limit:,} tokens, or lower max_tokens.",
            )
        if content.owner != request.index:
            raise ConfigError(
                f"a session of this model ends at {limit:,} tokens, where it changes its rotation", field="prompt"
            )
        content.salt = (content.salt or "") + LONG

    def cancel(self, index: int, error: Exception | None = None) -> Completion | None:
        """End a request between steps, and return its completion; None if it has ended. Its pages are free at once.

        `error`: the cause, if an error ended it.
        """
        generation = self._generations.get(index)
        if generation is None:
            return None
        self._core.cancel(generation.request)
        if error is not None:
            generation.fail(error)
        return self._end(index, "cancelled")

    def step(self) -> list[Completion]:
        """Run one step. Return the requests that ended with it."""
        return [self._end(request.index, "length") for request in self._core.step(self._clock.now_ns())]

    def logprobs(self, index: int) -> Logprobs:
        """Return the log-probabilities, token by token, of an active request that asked for them."""
        return self._sampling.logprobs(index)

    def prompt_logprobs(self, index: int) -> Logprobs | None:
        """Return the log-probabilities of its prompt computed so far; None if it did not ask for them."""
        return self._sampling.prompt_logprobs(index)

    def generation(self, index: int) -> Generation | None:
        """Return an active request; None if the index is not active."""
        return self._generations.get(index)

    def _end(self, index: int, reason: str) -> Completion:
        generation = self._generations.drop(index)
        assert generation is not None, "a request ends once"
        sampling, params = self._sampling, generation.params
        error = sampling.error(index)
        if error is not None and len(generation.tokens) > len(sampling.logprobs(index).values):
            del generation.tokens[-1:]  # a placeholder: the request had to end with some token
            generation.fail(error)
        elif not params.max_tokens:
            generation.clear()
            reason = "length"
        generation.finish(reason)
        try:
            return self._completion(index, generation)
        except Exception as failure:  # concerns this request only, and its pages are free already
            _log.error("request %d: it has no completion", index, exc_info=failure)
            count, what = generation.request.num_prompt_tokens, f"{type(failure).__name__}: {failure}"
            return Completion(index, generation.text, tuple(generation.tokens), count, "error", error=what)
        finally:
            sampling.drop(index)

    def _completion(self, index: int, generation: Generation) -> Completion:
        logprobs = None
        if generation.params.logprobs:
            # Drafted tokens may have been sampled after the one that completed a stop text.
            logprobs = self._sampling.logprobs(index).until(len(generation.tokens))
        return generation.completion(logprobs, self._sampling.prompt_logprobs(index))
