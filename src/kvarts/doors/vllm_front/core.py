"""An engine core as vLLM's front end expects it: requests in, tokens, statistics and answers to calls out.

The thread that receives decodes requests, and starts them in the engine's loop. The thread that has the engine sends:
one message per step and API server.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Timer
from time import monotonic
from typing import Any, Literal

import msgspec
import numpy as np

from kvarts.base.clock import PacedClock
from kvarts.base.errors import ConfigError, KvartsError, with_type
from kvarts.core.content import Content
from kvarts.core.event_log import EventReader
from kvarts.core.events import Event, StepDone
from kvarts.core.keys import Adapter, salt_of_adapter
from kvarts.core.request import Request
from kvarts.core.sampling import SamplingParams
from kvarts.doors.openai.embeddings import embedding
from kvarts.doors.openai.failures import FailureScript, fail_transfers
from kvarts.doors.openai.recordings import ArrivalRecorder
from kvarts.doors.vllm_front.link import Link
from kvarts.doors.vllm_front.model import FrontModel
from kvarts.doors.vllm_front.protocol import (
    ABORT,
    ADD,
    UTILITY,
    Finish,
    FrontCall,
    FrontRequest,
    Protocol,
    array_of,
    tensor_of,
    with_media,
)
from kvarts.run.engine_loop import ModelHost
from kvarts.run.llm_engine import CoreEngine, Gone, LLMEngine, RequestFailedError
from kvarts.run.mock import natural_length
from kvarts.run.text import Completion, Generation

_log = logging.getLogger(__name__)

__all__ = ["Behind", "FrontCore", "HeldEngine", "StepTimes", "core_script"]

QUEUED, SCHEDULED, PREEMPTED = 1, 2, 3
COPY = re.compile(r"(\d{1,6})_")
"""The number of a choice, before the id of its request."""
COMPLETION = "cmpl-"
"""The beginning of the ids of requests to /v1/completions, whose prompts have no roles."""
DEFAULT_MAX_TOKENS = 16
"""vLLM's, if a request has none."""
FROZEN_WAIT_S = 0.05
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "cancelled": Finish.ABORT, "error": Finish.ERROR}
IDS, PROBABILITIES = np.dtype("<i4"), np.dtype("<f4")

PauseMode = Literal["abort", "wait", "keep"]
AnswerCall = Callable[[str, Sequence[Any], Callable[..., None]], None]


def core_script(text: str, *, seed: int = 0) -> FailureScript:
    """Return a script of failures of a core. Raise ConfigError for an invalid one, and for failures of HTTP."""
    script = FailureScript(text, seed=seed)
    if script.needs_http:
        raise ConfigError(
            "cuts, drops and damages answers, which are the front end's",
            field="fail",
            hint="A core has statuses, stalls, die and transfers.",
        )
    return script


class HeldEngine:
    """A CoreEngine around another: while `is_frozen`, its steps compute nothing."""

    def __init__(self, core: CoreEngine) -> None:
        self._core = core
        self.is_frozen = False
        self.wait: Callable[[float], object] = lambda _: None
        """Waits for a task, at most for so many seconds."""

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request`, or return why it can never run."""
        return self._core.submit(request, now_ns)

    def cancel(self, request: Request) -> None:
        """Drop `request` between steps."""
        self._core.cancel(request)

    def step(self, now_ns: int) -> list[Request]:
        """Run one step, or wait a moment."""
        if self.is_frozen:
            self.wait(FROZEN_WAIT_S)
            return []
        return self._core.step(now_ns)

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or transfers in flight."""
        return self._core.has_work


class StepTimes(EventReader):
    """Reader of steps: `end_ns`, of the last one, and when requests were preempted since the last look, by index."""

    wants_details = False

    def __init__(self) -> None:
        self.end_ns = 0
        self.preempted_ns: dict[int, list[int]] = {}

    def observe(self, events: Sequence[Event]) -> None:
        """Record steps."""
        for event in events:
            if isinstance(event, StepDone):
                self.end_ns = event.start_ns + event.duration_ns
                for preemption in event.preemptions:
                    self.preempted_ns.setdefault(preemption.victim, []).append(event.start_ns)


class Behind(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is like behind a front end. `max_model_len`: tokens of a prompt and its answer.

    `default_tokens`: mean length of answers without an end of their own. `task`: generate, or embed. `has_reasoning`:
    answers of chats begin with reasoning, which the front end parses. `facts`: of the ready response, besides those of
    the engine. `num_ranks`: engines behind the front end.
    """

    max_model_len: int
    default_tokens: int = 128
    task: Literal["generate", "embed"] = "generate"
    has_reasoning: bool = False
    facts: dict[str, Any] = {}
    num_ranks: int = 1


class _Answer:
    """A Listener: sends what becomes of a request.

    `most_own`: its own end is its token of this number; None: only its limits and stop tokens end it.
    """

    __slots__ = ("adapter", "asked", "batch", "client", "core", "has_ended", "index", "most_own", "num_admissions",
                 "num_sent", "num_top", "prompt", "request", "request_id", "vector")  # fmt: skip

    def __init__(self, core: FrontCore, asked: FrontRequest) -> None:
        self.core = core
        self.asked = asked
        self.request_id = asked.request_id
        self.client = asked.client_index
        self.batch = core.batch_of(asked.client_index)
        self.index: int | None = None
        self.request: Request | None = None
        self.num_sent = 0
        self.num_admissions = 1
        self.num_top: int | None = None
        self.most_own: int | None = None
        self.vector: Any = None
        self.adapter = "" if asked.lora_request is None else asked.lora_request.name
        self.prompt: Sequence[int] = asked.prompt_token_ids or ()
        self.has_ended = False

    def update(self, generation: Generation) -> None:
        """Send the tokens of a step."""
        tokens = generation.tokens
        num_tokens, num_sent = len(tokens), self.num_sent
        if num_tokens == num_sent:
            return
        is_plain = num_sent and self.num_top is None
        if is_plain and self.index not in self.core.times.preempted_ns:
            self.batch.append([self.request_id, tokens[num_sent:]])
            self.num_sent = num_tokens
        else:
            self.batch.append(self._output(generation.request, tokens[num_sent:]))

    def end(self, completion: Completion) -> None:
        """Send the last tokens, and the finish reason."""
        self.core.forget(self)
        reason = FINISHES[completion.finish_reason]
        if reason is Finish.ABORT:
            self.core.finished(self, None)
            return
        tokens = list(completion.tokens[self.num_sent :])
        given: dict[str, Any] = {"finish_reason": reason}
        if completion.stop_reason is not None:
            given["stop_reason"] = completion.stop_reason
        if self.vector is not None:
            given = {"finish_reason": Finish.STOP, "pooling_output": tensor_of(self.vector)}
        elif len(completion.tokens) == self.most_own:
            given["finish_reason"] = Finish.STOP
            if self.core.model.end_id is not None:
                tokens[-1] = self.core.model.end_id
        if reason is Finish.ERROR:
            given.update(self.core.error(500, completion.error or "the engine failed"))
        self.core.finished(self, self._output(self.request, tokens, **given))

    def fail(self, error: BaseException) -> None:
        """Send an error."""
        self.core.forget(self)
        what = str(error) if isinstance(error, KvartsError) else with_type(error)
        if self.core.host.loop.is_alive:
            _log.warning("request %s: %s", self.request_id, what)
        self.core.finished(self, self.core.failed(self, 400 if isinstance(error, ConfigError) else 500, what))

    def _output(self, request: Request | None, tokens: list[int], **given: Any) -> list[Any]:
        """Return an output with all that it needs besides tokens: the first, the last, or with log-probabilities."""
        core = self.core
        events: list[dict[str, Any]] = []
        if request is not None and (tokens or self.vector is not None):
            if not self.num_sent:
                given["prefill_stats"] = core.prefilled(request)
                events = [core.event(QUEUED, request.arrival_ns), core.event(SCHEDULED, request.first_admitted_ns)]
            if self.num_admissions < request.num_admissions:
                self.num_admissions = request.num_admissions
                core.readmitted(request)
            events += [core.event(PREEMPTED, time_ns) for time_ns in core.times.preempted_ns.pop(request.index, ())]
            if self.num_top is not None and tokens:
                given["new_logprobs"] = self._logprobs(tokens)
        if events:
            given["events"] = events
        if request is not None and not self.num_sent and self.prompt:
            given["new_prompt_logprobs_tensors"] = self._prompt_logprobs()
            if given["new_prompt_logprobs_tensors"] is None:
                del given["new_prompt_logprobs_tensors"]
        self.num_sent += len(tokens)
        return core.protocol.output(request_id=self.request_id, new_token_ids=tokens, **given)

    def _logprobs(self, tokens: Sequence[int]) -> list[Any]:
        """Return the log-probabilities of tokens, each of which is as likely as any other."""
        assert self.num_top is not None
        ids, values, ranks = self.core.model.even_logprobs(tokens, self.num_top)
        return [array_of(ids), array_of(values), array_of(ranks), None]

    def _prompt_logprobs(self) -> list[Any] | None:
        """Return the log-probabilities of the prompt's tokens after the first, if they were asked for; once."""
        prompt, self.prompt = self.prompt, ()
        num_top = (self.asked.sampling_params or {}).get("prompt_logprobs")
        if num_top is None:
            return None
        ids, values, ranks = self.core.model.even_logprobs(prompt[1:], num_top)
        return [tensor_of(ids), tensor_of(values), tensor_of(ranks), None]


class FrontCore:
    """The core of one rank. `held`, `times`: around the engine of `host`, and among its readers.

    `answering`: returns what answers calls, given this core: of their names, arguments and a function for the result.
    """

    def __init__(
        self,
        host: ModelHost,
        link: Link,
        protocol: Protocol,
        model: FrontModel,
        behind: Behind,
        *,
        held: HeldEngine,
        times: StepTimes,
        script: FailureScript,
        answering: Callable[[FrontCore], AnswerCall],
    ) -> None:
        self.protocol = protocol
        self.model = model
        self.times = times
        self.behind = behind
        self.host = host
        self._link = link
        self._held = held
        self._script = script
        self.recorder: ArrivalRecorder | None = None
        """Receives the requests that arrive; None for none."""
        self._rank = link.rank
        assert isinstance(host.clock, PacedClock)
        self._clock = host.clock
        self._per_ns = 1e-9 / host.clock.speedup
        self._zero_s = monotonic() - host.clock.now_ns() * self._per_ns
        self._answers: dict[str, _Answer] = {}
        """Requests under way, by id. Entered by the thread that receives, and removed by that with the engine."""
        self._batches: dict[int, list[Any]] = {0: []}
        self._finished: list[str] = []
        self._is_holding = False
        self._is_in_step = False
        """Whether the outputs are those of a step, and so of its end."""
        self._stats: Counter[str] = Counter()
        """Statistics of the prefix cache since they were last sent."""
        self._last_counts: tuple[int, int] = (0, 0)
        self._adapters: Counter[str] = Counter()
        self._step = 0
        self.pause: PauseMode | None = None
        self._pending: deque[_Answer] = deque()
        """Requests that wait until the engine goes on."""
        self._when_idle: list[Callable[[], object]] = []
        self.is_dead = False
        self.has_ended = False
        host.loop.held.append(self)
        held.wait = host.loop.wait_for_task
        scheduler = host.core.scheduler
        self._clock.is_at_rest = lambda: held.is_frozen or not scheduler.has_work
        self._answer_call = answering(self)

    # Life cycle -------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the front end has ended, the engine has failed, or the link is stopped."""
        try:
            self._serve()
        except KvartsError as error:  # messages of another version
            _log.error("%s", error)
            self.die()
        finally:
            self.has_ended = True
            self.post(self._abort_unheard)

    def _serve(self) -> None:
        for messages in self._link.received():
            begun = []
            for kind, *frames in messages:
                payload = frames[0] if frames else b""
                if kind == ADD:
                    begun += self._add(payload)
                    continue
                if begun:  # an abort or a call concerns what arrived before it
                    self.host.loop.start_all(begun)
                    begun = []
                if kind == ABORT:
                    self.post(partial(self._abort, self.protocol.aborted(payload)))
                elif kind == UTILITY:
                    self.post(partial(self._call, self.protocol.call(payload)))
            if begun:
                self.host.loop.start_all(begun)

    def die(self) -> None:
        """Tell the front end that the engine has failed, and stop. In any thread."""
        if not self.is_dead:
            self.is_dead = True
            self._link.say_dead()
            self._link.stop()

    def stop(self) -> None:
        """End `serve` soon. In any thread."""
        self._link.stop()

    def close(self) -> None:
        """Close the sockets; a front end that is still there learns that its engine has ended."""
        self._link.say_dead()
        self._link.close()

    def post(self, task: Callable[[], object]) -> None:
        """Run `task` between steps. An error in it is the end of the engine."""

        def run(_: LLMEngine) -> None:
            self.hold()
            self._is_in_step = False
            try:
                task()
            finally:
                self.release()

        future = self.host.loop.post(run)
        future.add_done_callback(lambda done: None if done.exception() is None else self.die())

    # Requests ---------------------------------------------------------------------------------------------

    def _add(self, payload: bytes) -> list[tuple[Callable[[LLMEngine], int | None], _Answer]]:
        """Return a request to start now; none if it waits, or has ended already."""
        asked = self.protocol.request(payload)
        answer = self._answers[asked.request_id] = _Answer(self, asked)
        failure = self._script.next()
        if failure.kills_engine:
            self.post(self._fail_on_purpose)
            return []
        if failure.status:
            self.post(partial(self._refuse, answer, failure.status, f"fails on purpose: {failure.text}"))
            return []
        start = partial(self._begin, answer)
        if failure.stall_s:
            timer = Timer(failure.stall_s, self.host.loop.start, (start, answer))
            timer.daemon = True
            timer.start()
            return []
        return [(start, answer)]

    @staticmethod
    def _fail_on_purpose() -> None:
        raise RuntimeError("the engine fails on purpose")

    def _refuse(self, answer: _Answer, status: int, what: str) -> None:
        self.forget(answer)
        self.finished(answer, self.failed(answer, status, what))

    def failed(self, answer: _Answer, status: int, what: str) -> list[Any]:
        """Return the output of a request that fails; its times are zero."""
        now_ns = self._clock.now_ns()
        events = [self.event(QUEUED, now_ns), self.event(SCHEDULED, now_ns)] if not answer.num_sent else []
        given = {**({"events": events} if events else {}), **self.error(status, what)}
        return self.protocol.output(request_id=answer.request_id, finish_reason=Finish.ERROR, **given)

    def _begin(self, answer: _Answer, engine: LLMEngine) -> int | None:
        """Start a request; return its index."""
        if answer.request_id not in self._answers:
            raise Gone  # aborted meanwhile
        asked = answer.asked
        if asked.abort_immediately:
            self.forget(answer)
            self.finished(answer, self.protocol.output(request_id=answer.request_id, finish_reason=Finish.ABORT))
            return None
        if self.pause in ("abort", "wait"):
            if self.protocol.has_error:
                self._refuse(answer, 503, "the engine is paused")
            else:
                self._pending.append(answer)
            return None
        tokens, params, stop_ids = self._read(answer, asked)

        def make(index: int, now_ns: int) -> Request:
            request = answer.request = Request(
                index,
                Content.from_tokens(tokens, page_size=self.host.config.page_size, owner=index, salt=_salt_of(asked)),
                num_prompt_tokens=len(tokens),
                max_tokens=max(1, params.max_tokens),
                arrival_ns=now_ns,
                priority=-asked.priority,  # in vLLM, the lower is the earlier
                request_id=asked.external_req_id or asked.request_id,
            )
            return request

        try:
            answer.index = engine.start(make, params, stop_ids=stop_ids)
        except ConfigError:
            if self.recorder is not None and answer.request is not None:
                self.recorder.rejected(answer.request, params)
            raise
        if self.recorder is not None and answer.request is not None:
            self.recorder.arrived(answer.request, params)
        if answer.adapter:
            self._adapters[answer.adapter] += 1
        return answer.index

    def _read(self, answer: _Answer, asked: FrontRequest) -> tuple[Sequence[int], SamplingParams, Sequence[int]]:
        """Return the prompt of a request, its sampling parameters, and the tokens that end it.

        Raise ConfigError, or RequestFailedError for any other error: it must not end the other requests.
        """
        if asked.prompt_token_ids is None or asked.resumable:
            raise ConfigError("is a stream of inputs, or of embeddings: give token ids", field="prompt")
        try:
            tokens = with_media(asked.prompt_token_ids, asked.mm_features or ())
            return tokens, *self._params(answer, asked, tokens)
        except KvartsError:
            raise
        except Exception as error:
            _log.error("request %s: cannot be read", asked.request_id, exc_info=error)
            raise RequestFailedError(f"the request cannot be read: {with_type(error)}") from error

    def _params(
        self, answer: _Answer, asked: FrontRequest, tokens: Sequence[int]
    ) -> tuple[SamplingParams, Sequence[int]]:
        """Return the sampling parameters of a request, and the tokens that end it."""
        if asked.pooling_params is not None:
            answer.vector = self.model.vector_of(embedding, tokens, asked.pooling_params)
            return SamplingParams(max_tokens=0, prompt_logprobs=0), ()
        given = asked.sampling_params or {}
        room = self.behind.max_model_len - len(tokens)
        max_tokens = given.get("max_tokens", DEFAULT_MAX_TOKENS)
        most = max(1, room if max_tokens is None else min(room, max_tokens))
        least = min(most, given.get("min_tokens", 0))
        seed, copy = given.get("seed"), COPY.match(asked.request_id)
        if seed is None and copy is not None and asked.external_req_id and int(copy[1]):
            seed = int(copy[1])
        ignores_end = given.get("ignore_eos", False)
        written = self.model.written(given, seed, most)
        is_chat = not (asked.external_req_id or "").startswith(COMPLETION)
        thoughts: Sequence[int] = ()
        if self.behind.has_reasoning and is_chat and not self.model.has_own_reasoning(given):
            thoughts = self.model.reasoning(tokens, seed)
        natural: int | None = None
        if written:
            natural = len(thoughts) + len(written) + 1
        elif not ignores_end and most >= max(1, self.behind.default_tokens // 2):
            natural = max(least, len(thoughts) + natural_length(self.behind.default_tokens, tokens, seed))
        if natural is not None and natural <= most:
            most = answer.most_own = natural
        num_top = given.get("logprobs")
        answer.num_top = None if num_top is None else self.model.num_top(num_top)
        end_id = given.get("_eos_token_id")
        return (
            SamplingParams(
                max_tokens=most,
                min_tokens=least,
                seed=None if seed is None else seed % 2**63,
                stop_token_ids=tuple(given.get("stop_token_ids") or ()),
                ignore_eos=ignores_end,
                prompt_logprobs=given.get("prompt_logprobs"),
                forced_tokens=tuple([*thoughts, *written][:most]),
            ),
            () if ignores_end or end_id is None else (end_id,),
        )

    def _abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            answer = self._answers.get(request_id)
            if answer is None:
                continue
            if answer.index is None:  # it stalls, or waits until the engine goes on
                self.forget(answer)
                self.finished(answer, None)
                if answer in self._pending:
                    self._pending.remove(answer)
            else:
                self.host.loop.end(answer.index)

    def _abort_unheard(self) -> None:
        """End every request under way: the front end has gone."""
        self._abort(list(self._answers))

    def abort_all(self) -> None:
        """End every request under way, and tell the front end."""
        for answer in list(self._answers.values()):
            if answer.index is not None:
                self.host.loop.end(answer.index)
                self._put(answer, self.protocol.output(request_id=answer.request_id, finish_reason=Finish.ABORT))

    def forget(self, answer: _Answer) -> None:
        """Remove a request that ends."""
        self._answers.pop(answer.request_id, None)
        if answer.adapter and answer.index is not None:
            self._adapters[answer.adapter] -= 1
        if answer.index is not None:
            self.times.preempted_ns.pop(answer.index, None)

    # Calls ------------------------------------------------------------------------------------------------

    def _call(self, call: FrontCall) -> None:
        def answer(result: Any = None, failure: str | None = None) -> None:
            output = [call.number, failure, None if failure is not None else [None, result]]
            self._link.send(call.client, self.protocol.encode(
                engine_index=self._rank, timestamp=self._now_s(), utility_output=output))  # fmt: skip

        self._answer_call(call.name, call.arguments, answer)

    def set_pause(self, mode: PauseMode | None, *, then: Callable[[], object] = lambda: None) -> None:
        """Pause the engine, or let it go on; call `then` once that is done, which may wait for requests under way."""
        self.pause = mode
        self._held.is_frozen = mode == "keep"
        if mode is None:
            waiting, self._pending = self._pending, deque()
            self.host.loop.start_all([(partial(self._begin, answer), answer) for answer in waiting])
        elif mode == "abort":
            self.abort_all()
        if mode == "wait":
            self._when_idle.append(then)
        else:
            then()

    def set_script(self, text: str) -> None:
        """Replace the script of failures, between two steps. Raise ConfigError for an invalid one."""
        script = core_script(text)
        fail_transfers(self.host.core.tiers, script.transfer_fails if script.has_transfers else None)()
        self._script = script

    # Outputs ----------------------------------------------------------------------------------------------

    def batch_of(self, client: int) -> list[Any]:
        """Return the outputs for an API server that are not sent yet."""
        return self._batches.setdefault(client, [])

    def _put(self, answer: _Answer, output: list[Any]) -> None:
        answer.batch.append(output)
        if not self._is_holding:
            self.release()

    def finished(self, answer: _Answer, output: list[Any] | None) -> None:
        """Send the last output of a request; None: the front end has aborted it."""
        if answer.has_ended:
            return
        answer.has_ended = True
        if not self.host.loop.is_alive:
            self.die()
            return
        if self._link.has_coordinator:
            self._finished.append(answer.request_id)
        if output is not None:
            self._put(answer, output)

    def hold(self) -> None:
        """Collect outputs until `release`."""
        self._is_holding = self._is_in_step = True

    def release(self) -> None:
        """Send the outputs of a step, with statistics for one of the API servers."""
        self._is_holding = False
        now_s = self._seconds(self.times.end_ns) if self._is_in_step else self._now_s()
        self._is_in_step = False
        if not self._answers and self._when_idle:
            calls, self._when_idle = self._when_idle, []
            for call in calls:
                call()
        scheduler = self.host.core.scheduler
        counts = scheduler.running.num_running, scheduler.num_waiting
        has_outputs = False
        finished, self._finished = self._finished, []
        for client, batch in list(self._batches.items()):
            if batch or (finished and client == 0):
                given: dict[str, Any] = {"engine_index": self._rank, "outputs": batch, "timestamp": now_s}
                if not has_outputs:
                    given["scheduler_stats"] = self._scheduler_stats(counts)
                if finished:
                    given["finished_requests"] = finished
                self._link.send(client, self.protocol.encode(**given))
                batch.clear()
                has_outputs = True
        if not has_outputs and (counts != self._last_counts or self._stats):
            stats = self._scheduler_stats(counts)
            payload = self.protocol.encode(engine_index=self._rank, scheduler_stats=stats, timestamp=now_s)
            self._link.send(0, payload)
        if counts != self._last_counts:
            self._last_counts = counts
            if self._link.has_coordinator:
                stats = {"num_running_reqs": counts[0], "num_waiting_reqs": counts[1]}
                self._link.send_to_coordinator(
                    self.protocol.encode(engine_index=self._rank, scheduler_stats=stats, timestamp=now_s)
                )

    def _scheduler_stats(self, counts: tuple[int, int]) -> dict[str, Any]:
        cache = self.host.core.scheduler.cache
        stats: dict[str, Any] = {
            "num_running_reqs": counts[0],
            "num_waiting_reqs": counts[1],
            "kv_cache_usage": cache.num_used / cache.pool.total,
        }
        if self._stats:
            seen, self._stats = self._stats, Counter()
            below = {name.removeprefix("below_"): count for name, count in seen.items() if name.startswith("below_")}
            stats["prefix_cache_stats"] = {name: seen[name] for name in seen if not name.startswith("below_")}
            if self.host.core.tiers is not None:
                stats["connector_prefix_cache_stats"] = below
        adapters = {name: count for name, count in self._adapters.items() if count > 0}
        if adapters:
            stats["running_lora_adapters"] = adapters
        return stats

    def clear_cache(self) -> None:
        """Evict every cached page, and count that."""
        self.host.core.clear_cache()
        self._stats["reset"] = True

    # Accounts of requests ---------------------------------------------------------------------------------

    def error(self, status: int, what: str) -> dict[str, Any]:
        """Return the fields of an output that state an error, in versions that have them."""
        if not self.protocol.has_error:
            return {}
        code = "validation_error" if status < 500 and status != 429 else "error"
        return {"error": {"code": code, "message": what, "retryable": status in (429, 503)}}

    def event(self, kind: int, time_ns: int) -> dict[str, Any]:
        """Return an event of a request, for the times of queue, prefill and decode."""
        return {"type": kind, "timestamp": self._seconds(time_ns)}

    def prefilled(self, request: Request) -> dict[str, int]:
        """Count the hits of a prompt that was computed, and return them."""
        num_prompt, num_cached = request.num_prompt_tokens, request.cached_tokens
        num_below = sum(request.cached_tokens_below)
        num_local = num_cached - num_below
        seen = self._stats
        seen["requests"] += 1
        seen["queries"] += num_prompt
        seen["hits"] += num_local
        if self.host.core.tiers is not None:
            seen["below_requests"] += 1
            seen["below_queries"] += num_prompt - num_local
            seen["below_hits"] += num_below
        return {
            "num_prompt_tokens": num_prompt,
            "num_computed_tokens": num_prompt - num_cached,
            "num_cached_tokens": num_cached,
            "num_local_cached_tokens": num_local,
            "num_external_cached_tokens": num_below,
        }

    def readmitted(self, request: Request) -> None:
        """Count the hits of a request that was preempted."""
        self._stats["preempted_requests"] += 1
        self._stats["preempted_queries"] += request.num_known
        self._stats["preempted_hits"] += request.hit_tokens

    def _seconds(self, time_ns: int) -> float:
        return self._zero_s + time_ns * self._per_ns

    def _now_s(self) -> float:
        return self._seconds(self._clock.now_ns())


def _salt_of(asked: FrontRequest) -> str | None:
    """Return the salt of the KV of a request: of its adapter, and of its tenant."""
    adapter = asked.lora_request
    return (
        asked.cache_salt if adapter is None else salt_of_adapter(Adapter(adapter.name, adapter.path), asked.cache_salt)
    )
