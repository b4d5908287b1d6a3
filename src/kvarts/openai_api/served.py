"""A model that is served: the loop that owns its engine, its text, its names, and what it may be asked for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, time
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from kvarts.content import Content
from kvarts.errors import ConfigError
from kvarts.limits import MOST_COUNT, MOST_SECONDS
from kvarts.llm.host import ModelHost
from kvarts.llm.llm_engine import LLMEngine
from kvarts.openai_api.answer import Answer, Choice, Outbox
from kvarts.openai_api.bodies import APART
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.meter import Meter
from kvarts.openai_api.prompts import Message, TextModel
from kvarts.openai_api.recorded import ArrivalRecorder
from kvarts.request import Request
from kvarts.sampling import SamplingParams

__all__ = ["Ask", "Health", "Limits", "Served", "Sharing"]

T = TypeVar("T")
Health = Literal["healthy", "degraded", "dead"]
DEAD = "the model has died"


class CountsOfSessions(Protocol):
    """All sessions of one model together."""

    @property
    def num_sessions(self) -> int:
        """How many there are."""

    @property
    def num_reserved_pages(self) -> int:
        """Pages that are reserved for them, whether they are full or not."""

    @property
    def num_history_tokens(self) -> int:
        """Tokens of their histories."""

    @property
    def ended_by_reason(self) -> Mapping[str, int]:
        """How many have ended, by why."""


class InSessions(Protocol):
    """The sessions of one model. For one event loop."""

    def counts(self) -> CountsOfSessions | None:
        """Return what they hold now; None as long as no request has named one."""

    async def close(self) -> None:
        """End what is under way, and write what is to be kept."""

    def begin(self, owner: str, name: str, ask: Ask, choice: Choice) -> asyncio.Task[None]:
        """Have `choice` told what the session `name` of `owner` says to `ask`. Cancelling the task ends that."""


class Sharing(Protocol):
    """The device of a model beside others. For the thread of the engine."""

    def assign(self, index: int) -> None:
        """Note that request `index`, which is about to be queued, is for this model."""

    def set_health(self, health: Health) -> None:
        """Set the health of this model, between steps."""

    def loans(self) -> list[tuple[str, int]]:
        """Return the memory that it uses and others are guaranteed: the other, and how many bytes."""

    @property
    def num_reclaimed(self) -> int:
        """Its requests that were preempted for other models."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a server takes in.

    `max_queued`: requests beyond those that may run at once; more are refused with 429. `retry_after_s`: what these are
    told. `max_model_len`: tokens of a prompt and its answer. `max_body_bytes`: of one HTTP request, which has to come
    within `body_timeout_s`. `default_tokens`: about as many tokens has an answer for which no number is asked, of a
    mock; None: up to the end of the model. `trust_request_chat_template`: render templates that requests bring, which
    are programs of clients that may compute for ever.

    Raises ConfigError for a value out of range.
    """

    max_queued: int = 1024
    retry_after_s: float = 1.0
    max_model_len: int = 131_072
    max_body_bytes: int = 32 * 1024 * 1024
    body_timeout_s: float = 60.0
    default_tokens: int | None = None
    trust_request_chat_template: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.max_queued <= MOST_COUNT:
            raise ConfigError(f"must be from 0 to {MOST_COUNT}, got {self.max_queued}", field="max_queued")
        if not 0.0 <= self.retry_after_s <= MOST_SECONDS:
            raise ConfigError(f"must be from 0 to {MOST_SECONDS:g}, got {self.retry_after_s}", field="retry_after_s")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the engine. `ends_itself`: it comes to its own end at `max_tokens`, as by a token for that."""

    tokens: Sequence[int]
    params: SamplingParams
    priority: int = 0
    salt: str | None = None
    request_id: str | None = None
    ends_itself: bool = False


class Served:
    """Owner of the requests under way over HTTP, of the names of the model, and of whether it sleeps or drains.

    `names`: of the model, the first one is its own. `recorder` notes what arrives.
    """

    def __init__(
        self,
        host: ModelHost,
        text: TextModel,
        names: Sequence[str],
        *,
        limits: Limits,
        meter: Meter,
        recorder: ArrivalRecorder | None = None,
        adapters: Sequence[str] = (),
        sharing: Sharing | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.host = host
        self.text = text
        self.names = tuple(names)
        self.adapters: OrderedDict[str, int] = OrderedDict((name, index + 1) for index, name in enumerate(adapters))
        """Names of LoRA adapters, with their numbers. Their KV is kept apart."""
        self.limits = limits
        self.meter = meter
        self.recorder = recorder
        self.facts = dict(facts or {})
        """What /server_info tells beside the engine."""
        self.sessions: InSessions | None = None
        """Where requests go that name a session; without, a name is of no account."""
        self.why_no_sessions = ""
        """Why there can be none, where that is so: what a request is told that asks for one by its body."""
        self.outbox = Outbox()
        host.loop.held.append(self.outbox)
        since_due_ns: Callable[[], int] | None = getattr(host.clock, "since_due_ns", None)
        if since_due_ns is not None:
            self.outbox.due_s = lambda: monotonic() - since_due_ns() / 1e9
        self.created_s = int(time())
        self.health: Health = "healthy"
        """Of a model that shares its device: a degraded one admits nothing, a dead one has lost its requests."""
        self.sharing = sharing
        self.is_draining = False
        self.is_starting = False
        self.sleep_level = 0
        self._live: set[Choice] = set()
        self._idle: asyncio.Event | None = None

    @property
    def keeps_to_grammars(self) -> bool:
        """Whether the text of the model can be made to keep to a grammar."""
        return self.host.check_params is not None

    def open(self) -> None:
        """Let requests come from the event loop that runs now."""
        self.outbox.open(asyncio.get_running_loop())

    # What it is asked for ----------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests that are in the engine, running or waiting."""
        return len(self._live)

    @property
    def max_live(self) -> int:
        """The most of these."""
        return self.host.config.max_num_seqs + self.limits.max_queued

    def adapter_of(self, model: str | None) -> str | None:
        """Return the LoRA adapter that `model` names; None for the model itself. Raise ApiError for another name."""
        if model is None or model in self.names:
            return None
        if model in self.adapters:
            return model
        raise ApiError(404, f"the model {model!r} does not exist; there is {self.names[0]!r}", param="model")

    def conversation(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """Return the prompt of a conversation, as TextModel does. Raise ApiError for a template that is not trusted."""
        brings_one = options.get("chat_template") or "chat_template" in (options.get("chat_template_kwargs") or {})
        if brings_one and not self.limits.trust_request_chat_template:
            raise ApiError(
                400,
                "the chat template of a request is rendered only with --trust-request-chat-template",
                param="chat_template",
            )
        return self.text.conversation(messages, options)

    def ready(self) -> None:
        """Raise ApiError where nothing new is taken in."""
        if self.is_starting:
            raise ApiError(503, "the server is starting", retry_after_s=1.0)
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", retry_after_s=1.0)
        if self.health == "dead":
            raise ApiError(503, DEAD, retry_after_s=1.0)
        if self.sleep_level:
            raise ApiError(503, "the engine sleeps: POST /wake_up first", retry_after_s=1.0)

    def start(self, asks: Sequence[Ask], *, started_s: float | None = None) -> tuple[Answer, list[Choice]]:
        """Begin requests; return what their answers come through. Raise ApiError where they are not taken in.

        What the engine refuses comes as an error through the answer.
        """
        answer, choices = self.admit(asks, started_s=started_s)
        for ask, choice in zip(asks, choices, strict=True):
            self.host.loop.start(_Begin(ask, choice, self), choice)
        return answer, choices

    def admit(self, asks: Sequence[Ask], *, started_s: float | None = None) -> tuple[Answer, list[Choice]]:
        """Return what the answers to requests are to come through. Raise ApiError where they are not taken in."""
        self.ready()
        if self.num_live + len(asks) > self.max_live:
            self.meter.num_refused += 1
            raise ApiError(
                429,
                f"{self.num_live} requests run or wait, and there is room for {self.max_live}",
                retry_after_s=self.limits.retry_after_s,
            )
        answer = Answer(self.outbox)
        choices = []
        for number, ask in enumerate(asks):
            choice = Choice(answer, number, self.meter, has_logprobs=ask.params.logprobs, ends_itself=ask.ends_itself)
            if started_s is not None:
                choice.started_s = started_s
            choices.append(choice)
            self._live.add(choice)
        return answer, choices

    def finish(self, choices: Sequence[Choice]) -> None:
        """Note that an answer is over: written, or given up. What is under way ends, and frees its pages."""
        self._live.difference_update(choices)
        under_way = [choice for choice in choices if not choice.is_over]
        if under_way:
            self.host.loop.post(lambda _: self._cancel(under_way))
        if self._idle is not None and not self._live:
            self._idle.set()

    def _cancel(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            choice.is_unwanted = True
            if choice.index is not None and not choice.is_over:
                self.meter.num_aborted += 1
                self.host.loop.end(choice.index)

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; return whether that came in time."""
        self.is_draining = True
        if self._live:
            self._idle = asyncio.Event()
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    def assign(self, index: int) -> None:
        """Say that request `index` is for this model, before it is queued."""
        if self.sharing is not None:
            self.sharing.assign(index)

    def abort_all(self) -> None:
        """End what is under way."""
        under_way = [choice for choice in self._live if not choice.is_over]
        for choice in under_way:
            if choice.in_session is not None:
                choice.in_session()
        self.host.loop.post(lambda _: self._cancel(under_way))

    def live_adapters(self) -> list[str]:
        """Return the adapters that requests under way are for."""
        salts = {choice.request.content.salt for choice in list(self._live) if choice.request is not None}
        return [name for name in self.adapters if any(salt and salt.startswith(f"{name}{APART}") for salt in salts)]

    async def forget_cached(self) -> None:
        """Forget every cached page that is not in use."""
        await self.between_steps(lambda _: self.host.core.clear_cache())

    @property
    def told_health(self) -> Health:
        """What is told of its health: that of the engine as well."""
        return self.health if self.host.loop.is_alive else "dead"

    async def set_health(self, health: Health) -> None:
        """Set the health of a model that shares its device. The requests of one that dies fail.

        Raise ApiError for a model that has its engine for itself: that one can only die, and for good.
        """
        sharing = self.sharing
        if sharing is None:
            if health != "dead":
                raise ApiError(400, "a model that shares no device can only be 'dead'", param="health")
            self.kill()
            return
        self.health = health

        def change(_: LLMEngine) -> None:
            if health == "dead":
                for choice in sorted(self._live, key=lambda choice: choice.index or 0):
                    if choice.is_over:
                        continue
                    choice.is_unwanted = True
                    choice.fail(ApiError(503, DEAD, retry_after_s=1.0))
                    if choice.index is not None:
                        self.host.loop.end(choice.index)
            sharing.set_health(health)

        await self.between_steps(change)

    def fail_transfers(self, fails: Callable[[int], bool] | None) -> None:
        """Say which transfers to and from tiers fail from now on, by their numbers from 1; None: none.

        Raise ConfigError where there are no tiers.
        """
        tiers: Any = self.host.core.tiers
        if tiers is None:
            if fails is not None:
                raise ConfigError(
                    "there are no tiers below the device, so no transfers", field="fail", hint="Give --host-memory."
                )
            return

        def change(_: LLMEngine) -> None:
            num_before = tiers.num_transfers
            tiers.fails = None if fails is None else lambda number: number > num_before and fails(number - num_before)

        self.host.loop.post(change)

    def kill(self) -> None:
        """Let the model die: beside others on its device alone, or else with its engine, as by an error in a step."""
        if self.sharing is not None:
            self.health = "dead"
            self._dying = asyncio.ensure_future(self.set_health("dead"))
            return

        def die(_: LLMEngine) -> None:
            raise RuntimeError("the engine dies on purpose")

        self.host.loop.post(die)

    async def between_steps(self, task: Callable[[LLMEngine], T]) -> T:
        """Return what `task` returns, which runs between two steps."""
        return await asyncio.wrap_future(self.host.loop.post(task))

    @property
    def is_alive(self) -> bool:
        """Whether the engine has not died of an error, and the model not on its own."""
        return self.host.loop.is_alive and self.health != "dead"


class _Begin:
    """Begins one request in the thread of the engine."""

    def __init__(self, ask: Ask, choice: Choice, served: Served) -> None:
        self._ask = ask
        self._choice = choice
        self._served = served

    def __call__(self, engine: LLMEngine) -> int | None:
        """Submit the request; return its index, or None if it is not wanted any more."""
        ask, choice, served = self._ask, self._choice, self._served
        if choice.is_unwanted:
            return None
        page_size = served.host.config.page_size

        def make(index: int, now_ns: int) -> Request:
            served.assign(index)
            request = Request(
                index,
                Content.from_tokens(ask.tokens, page_size=page_size, owner=index, salt=ask.salt),
                num_prompt_tokens=len(ask.tokens),
                max_tokens=max(1, ask.params.max_tokens),
                arrival_ns=now_ns,
                priority=ask.priority,
                request_id=ask.request_id,
            )
            choice.note(engine, request)
            return request

        recorder = served.recorder
        try:
            index = engine.start(make, ask.params, tokenizer=served.text.generation_tokenizer)
        except ConfigError:
            served.meter.num_rejected += 1
            if recorder is not None and choice.request is not None:
                recorder.rejected(choice.request, ask.params)
            raise
        if recorder is not None:
            assert choice.request is not None
            recorder.arrived(choice.request, ask.params)
        return index
