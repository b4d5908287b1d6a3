"""A served model: the loop that owns its engine, its text, its names, and its limits."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_COUNT, MOST_SECONDS, brief
from kvarts.base.tenants import ANYONE, Keys, Owner, Shares
from kvarts.core.content import Content
from kvarts.core.hints import Hints
from kvarts.core.keys import Adapter, salt_parts
from kvarts.core.request import Request
from kvarts.core.sampling import SamplingParams
from kvarts.doors.openai.answer import Answer, Choice, ChoiceMeter
from kvarts.doors.openai.answers import Answers, Rule
from kvarts.doors.openai.budget import MOST_VALUES, Budget
from kvarts.doors.openai.errors import ApiError, too_long
from kvarts.doors.openai.failures import fail_transfers
from kvarts.doors.openai.kv_hints import with_parts
from kvarts.doors.openai.meter import BucketCounts, Meter
from kvarts.doors.openai.prompts import OPEN, Message, TextModel
from kvarts.doors.openai.scripted import ScriptedAnswer
from kvarts.doors.openai.words import NOTHING
from kvarts.run.engine_loop import ModelHost
from kvarts.run.llm_engine import LLMEngine, Outbox

if TYPE_CHECKING:
    from kvarts.doors.openai.access import AccessLog
    from kvarts.doors.openai.gate import Entry, Gate
    from kvarts.doors.openai.media import Media
    from kvarts.doors.openai.recordings import ArrivalRecorder

__all__ = [
    "MAX_BODY_BYTES",
    "Ask",
    "CountsOfSessions",
    "Door",
    "Health",
    "InSessions",
    "Limits",
    "Models",
    "Served",
    "SessionsOnDemand",
    "Sharing",
    "WorkerDoor",
    "vllm_priority",
]

LATE_S = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.05, 0.1, 0.5, 1.0, 10.0)

T = TypeVar("T")
Health = Literal["healthy", "degraded", "dead"]
DEAD = "the model has died"
MAX_BODY_BYTES = 8 * 1024 * 1024
MOST_HELD_TOKENS = 16_000_000
"""Limit of the prompt tokens of all requests: 128 MB, or four times the tokens of the pages if that is more."""
MOST_ANSWER_BYTES = 64 * 1024 * 1024
"""Approximate limit of the memory of all answers: text that clients have not read, or that is kept until the end."""
GUARANTEED = 1 << 32
"""Added to the priority of a request within its owner's guarantee, which precedes requests on borrowed capacity."""


class CountsOfSessions(msgspec.Struct, frozen=True):
    """Counts of all sessions of one model. `num_reserved_pages`: reserved for sessions, whether full or not.

    `num_history_tokens`: tokens of their histories. `ended_by_reason`: the number of ended sessions, by reason.
    """

    num_sessions: int
    num_reserved_pages: int
    num_history_tokens: int
    ended_by_reason: dict[str, int]


class InSessions(Protocol):
    """The sessions of one model. For one event loop."""

    def counts(self) -> CountsOfSessions | None:
        """Return the counts of the sessions now; None until a request has named one."""

    async def close(self) -> None:
        """End requests under way, and write durable state."""

    def begin(self, owner: str, name: str, ask: Ask, choice: Choice) -> asyncio.Task[None]:
        """Run `ask` in session `name` and stream the answer to `choice`. Cancelling the task ends the request."""


Begin = Callable[["Ask", Choice], object]


class Sharing(Protocol):
    """One model's view of a shared device. For the engine's thread."""

    def assign(self, index: int) -> None:
        """Assign request `index`, which is about to be queued, to this model."""

    def set_health(self, health: Health) -> None:
        """Set the health of this model, between steps."""

    def loans(self) -> list[tuple[str, int]]:
        """Return the memory that this model uses out of others' guarantees: each lender, and the bytes."""

    @property
    def num_reclaimed(self) -> int:
        """Requests of this model that were preempted for other models."""


class WorkerDoor(Protocol):
    """The door of a worker of a fleet: KV that requests leave at a worker, or fetch from one."""

    def check(self, asks: Sequence[Ask]) -> None:
        """Raise ApiError for requests that the worker does not accept."""

    def assign(self, index: int, ask: Ask) -> None:
        """Send request `index`, which is about to be queued, to the worker. In the engine's thread."""

    def clear_cache(self) -> None:
        """Drop every cached page of the worker that is not in use. In the engine's thread."""

    def told(self, asked: dict[str, Any] | None, choices: Sequence[Choice]) -> dict[str, Any] | None:
        """Return `kv_transfer_params` of the answer to a request that has `asked` for them."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the requests that a server accepts.

    `max_queued`: requests beyond those that may run at once; further ones are refused with 429, and with
    `retry_after_s`. `max_model_len`: tokens of a prompt and its answer. `max_body_bytes`: body of one HTTP request,
    which must arrive within `body_timeout_s`. `default_tokens`: approximate length of a mock's answers; None: the model
    ends them.

    Raises ConfigError for a value out of range.
    """

    max_queued: int = 1024
    retry_after_s: float = 1.0
    max_model_len: int = 131_072
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float = 60.0
    default_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_queued <= MOST_COUNT:
            raise ConfigError(f"must be from 0 to {MOST_COUNT}, got {self.max_queued}", field="max_queued")
        if not 0.0 <= self.retry_after_s <= MOST_SECONDS:
            raise ConfigError(f"must be from 0 to {MOST_SECONDS:g}, got {self.retry_after_s}", field="retry_after_s")


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server over HTTP that do not depend on its model.

    `any_model`: requests may name any model; one that is not served is the first.
    `keys`: accepted keys; None: no key is required. `shares_prefix_cache`: owners can hit each other's KV. `origins`
    and `hosts`: see Guard. `fail`: a script of failures, drawn from `seed`. `allows_failures`: requests may ask for
    failures. `is_recording`: record arrivals. `has_page`: serve the live page. `access_log`: log of requests.
    `answers`, `media`: of mocks, rules, and the family or model by which images and audio are counted.
    `residency_share`: the share of KV blocks whose residency is measured; 0: none. `rank`: the number of its
    engine among the workers of a fleet.
    """

    names: tuple[str, ...] = ()
    any_model: bool = False
    adapters: tuple[str, ...] = ()
    keys: Keys | None = None
    shares_prefix_cache: bool = False
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    allows_failures: bool = False
    limits: Limits = Limits()
    fail: str = ""
    seed: int = 0
    is_recording: bool = False
    has_page: bool = True
    access_log: AccessLog | None = None
    answers: tuple[Rule, ...] = ()
    media: str = ""
    residency_share: float = 0.0
    rank: int = 0

    def __post_init__(self) -> None:
        for flag, names in (("--served-model-name", self.names), ("--lora", self.adapters)):
            if not all(names):
                raise ConfigError("is empty, and no client could ask for it", field=flag, hint="Give a name.")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the engine. `own_end`: the finish reason at `max_tokens`, if the answer ends there.

    `salt` separates its KV from that of all other requests, `tenant` from that of its owner's other requests.
    """

    tokens: Sequence[int]
    params: SamplingParams
    priority: int = 0
    hints: Hints | None = None
    hints_of_parts: Hints | None = None
    """The hint of parts of its prompt; without effect in a session."""
    salt: str | None = None
    tenant: str | None = None
    request_id: str | None = None
    own_end: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


def vllm_priority(priority: int | None) -> int:
    """Return the priority of a request to vLLM: the lower, the earlier."""
    return -(priority or 0)


class Served:
    """Owner of the requests under way over HTTP, of the names of the model, and of whether it sleeps or drains.

    `names`: of the model, the first one is its own. `limits`: those of `door`, as this model can keep them. `facts`:
    for /server_info; those of a mock contain `mock`. `adapters`: those of `door`, unless given.
    """

    def __init__(
        self,
        host: ModelHost,
        text: TextModel,
        names: Sequence[str],
        door: Door,
        *,
        limits: Limits,
        meter: Meter,
        facts: Mapping[str, Any],
        sharing: Sharing | None = None,
        adapters: Sequence[str] | None = None,
    ) -> None:
        self.host = host
        self.rank = door.rank
        """The number of the engine among the workers of a fleet, from 0."""
        self.any_model = door.any_model
        """Whether it answers requests for names that it does not have."""
        self._media = door.media
        self.priority_of: Callable[[int | None], int] = vllm_priority
        """Returns the priority in the engine, of which larger ones come first, of a request's `priority`."""
        self.answers: Answers | None = None
        """None for a real model."""
        if facts.get("mock"):
            self.answers = Answers(door.answers, seed=door.seed, allows_failures=door.allows_failures)
        keys = door.keys
        self.sets_owners_apart = keys is not None and keys.has_several_owners and not door.shares_prefix_cache
        """Whether pages of an owner are found by its own requests only."""
        shares = {} if keys is None else keys.shares
        config = host.config
        shares = self._shares = dict(shares)
        self._places = Shares(config.max_num_seqs + limits.max_queued, shares)
        self._held_tokens = Shares(max(MOST_HELD_TOKENS, 4 * config.pool_tokens), shares)
        self._gate: Gate | None = None
        """None with one owner, whose requests wait in the engine."""
        self._entries: dict[Choice, Entry] = {}
        """Entries of the requests at the gate or inside, until they are over."""
        if len(shares) > 1:
            from kvarts.doors.openai.gate import Gate

            self._gate = Gate(config.max_num_seqs, config.pool_tokens, config.max_num_batched_tokens, shares)
        self.text = text
        self.names = tuple(names)
        self.adapters: OrderedDict[str, Adapter] = OrderedDict(
            (adapter.name, adapter) for adapter in map(Adapter.of, door.adapters if adapters is None else adapters)
        )
        """LoRA adapters by name. Each has separate KV."""
        self.limits = limits
        self.meter = meter
        self.recorder: ArrivalRecorder | None = None
        """Records arrivals."""
        if door.is_recording:
            from kvarts.doors.openai.recordings import ArrivalRecorder

            self.recorder = ArrivalRecorder()
        self.facts = dict(facts)
        """Facts for /server_info in addition to those of the engine."""
        self.sessions: InSessions | None = None
        """Handles requests that name a session; None: the name is ignored."""
        self.why_no_sessions = ""
        """Why sessions are unavailable, if they are: the error for a request whose body names one."""
        self.outbox = Outbox()
        self.late_s = BucketCounts(LATE_S)
        """Delay of writes after a mock's step, relative to the time at which the step was due."""
        host.loop.held.append(self.outbox)
        since_due_ns: Callable[[], int] | None = getattr(host.clock, "since_due_ns", None)
        if since_due_ns is not None:
            self.outbox.due_s = lambda: monotonic() - since_due_ns() / 1e9
            self.outbox.on_late = self.late_s.add_sorted
        self.created_s = int(time())
        self.health: Health = "healthy"
        """Health of a model on a shared device: a degraded model admits nothing, a dead one has lost its requests."""
        self.sharing = sharing
        self.transfers: WorkerDoor | None = None
        """The door of a worker of a fleet."""
        self.make_meter: Callable[[], ChoiceMeter] | None = None
        """Makes the meter of a choice, if that is not `meter`."""
        self.is_draining = False
        self.is_leaving = False
        """Whether /health reports a shutdown already, while requests are still accepted."""
        self.is_starting = False
        self._live: set[Choice] = set()
        self._begun: list[tuple[_Begin, Choice]] = []
        """Requests on their way to the engine."""
        self._idle: asyncio.Event | None = None

    def written(self, answer: ScriptedAnswer, budget: Budget) -> tuple[int, ...]:
        """Return the tokens of a scripted answer: at least one, at most `max_model_len` + 1."""
        text = "".join(segment.text for segment in answer.segments())
        tokens = tuple(self.text.encode(text, add_special_tokens=False, most=self.limits.max_model_len))
        budget.draw_values(len(tokens), "kvarts_answer")
        return tokens or (NOTHING,)

    def reasoning_span(self, answer: ScriptedAnswer) -> tuple[int, int]:
        """Return the first token of reasoning in a scripted answer, and the one after the last; 0 and 0 for none."""
        if not answer.reasoning:
            return 0, 0
        most = self.limits.max_model_len
        start = len(self.text.encode(OPEN, add_special_tokens=False, most=most))
        return start, len(self.text.encode(f"{OPEN}{answer.reasoning}", add_special_tokens=False, most=most))

    def open(self) -> None:
        """Accept requests from the running event loop."""
        self.outbox.open(asyncio.get_running_loop())

    # Requests ----------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests in the engine, running or waiting."""
        return len(self._live)

    @property
    def max_live(self) -> int:
        """The largest allowed `num_live`."""
        return self.host.config.max_num_seqs + self.limits.max_queued

    def adapter_of(self, model: str | None) -> Adapter | None:
        """Return the LoRA adapter that `model` names; None for the model itself. Raise ApiError for another name."""
        if model is None or model in self.names:
            return None
        if model in self.adapters:
            return self.adapters[model]
        if self.any_model and model:
            return None
        raise ApiError(404, f"the model {brief(model)} does not exist; there is {self.names[0]!r}", param="model")

    def encode(
        self, text: str, budget: Budget, *, add_special_tokens: bool, most_tokens: int | None = None
    ) -> array[int]:
        """Return the tokens of a text. Raise ApiError above `most_tokens`, by default those of the context.

        A text that is certainly longer is not tokenized.
        """
        most = self.limits.max_model_len if most_tokens is None else most_tokens
        tokens: Sequence[int] = ()
        is_too_long = len(text) > most * self.text.max_chars_per_token
        if not is_too_long:
            tokens = self.text.encode(text, add_special_tokens=add_special_tokens, most=most)
        if is_too_long or len(tokens) > most:
            if most_tokens is None:
                raise too_long(most, None, 0, param="prompt")
            raise ApiError(400, f"here a prompt has at most {most} tokens, and this one has more", param="prompt")
        budget.draw_values(len(tokens), "prompt")
        return array("Q", tokens)

    def media(self) -> Media | None:
        """Return a reader of the images and audio of one request; None for a real model, which reads text alone."""
        if self.answers is None:
            return None
        from kvarts.doors.openai.media import FAMILIES, Media, family_of

        return Media(FAMILIES[family_of(self._media or self.names[0])], self.limits.max_model_len)

    def checked(self, tokens: Sequence[int]) -> array[int]:
        """Return the token ids of a request. Raise ApiError if any is not in the vocabulary."""
        if tokens and (max(tokens) >= self.host.vocab_size or min(tokens) < 0):
            raise ApiError(400, f"token ids must be from 0 to {self.host.vocab_size - 1}", param="prompt")
        return array("Q", tokens)

    def conversation(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """Return the prompt of a conversation, as TextModel does. Raise ApiError if it brings a template of its own."""
        if "chat_template" in (options.get("chat_template_kwargs") or {}):
            raise ApiError(400, "chat_template is not supported: omit it", param="chat_template_kwargs")
        return self.text.conversation(messages, options)

    def ready(self) -> None:
        """Raise ApiError if new requests are not accepted."""
        if self.is_starting:
            raise ApiError(503, "the server is starting", retry_after_s=1.0)
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", retry_after_s=1.0)
        if self.health == "dead":
            raise ApiError(503, DEAD, retry_after_s=1.0)

    def start(
        self, asks: Sequence[Ask], owner: Owner = ANYONE, *, started_s: float | None = None, begin: Begin | None = None
    ) -> tuple[Answer, list[Choice]]:
        """Begin requests; return the Answer that receives the results. Raise ApiError if they are not accepted.

        A refusal by the engine arrives as an error in the answer. `begin`: starts one request, by default in the
        engine.
        """
        answer, choices = self._admit(asks, owner, started_s=started_s)
        begin = self._begin if begin is None else begin
        try:
            for ask, choice in zip(asks, choices, strict=True):
                self._enter(ask, choice, owner, begin)
        except BaseException:
            self.finish(choices)
            raise
        return answer, choices

    def _begin(self, ask: Ask, choice: Choice) -> None:
        # Requests of one turn of the event loop reach the engine together: waking its thread for each is expensive.
        self._begun.append((_Begin(ask, choice, self), choice))
        if len(self._begun) == 1:
            asyncio.get_running_loop().call_soon(self._start_begun)

    def _start_begun(self) -> None:
        """Pass the requests that have begun to the engine, before anything else that concerns them."""
        begun, self._begun = self._begun, []
        if begun:
            self.host.loop.start_all(begun)

    def _enter(self, ask: Ask, choice: Choice, owner: Owner, begin: Begin) -> None:
        """Begin a request, once it is its owner's turn."""
        gate = self._gate
        if gate is None:
            begin(ask, choice)
            return
        num_prompt_tokens = len(ask.tokens)

        def enter(is_guaranteed: bool) -> None:
            priority = ask.priority + (GUARANTEED if is_guaranteed else 0)
            begin(msgspec.structs.replace(ask, priority=priority), choice)

        entry = gate.entry(owner.name, num_prompt_tokens + ask.params.max_tokens, num_prompt_tokens, enter)
        self._entries[choice] = entry
        choice.came = partial(self.outbox.call_soon, partial(gate.prefilled, entry))
        choice.went = partial(self.outbox.call_soon, partial(self._leave, choice))
        gate.add(entry)

    def _leave(self, choice: Choice) -> None:
        """Release a request's capacity in the engine, or its turn at the gate."""
        entry = self._entries.pop(choice, None)
        if entry is not None and self._gate is not None:
            choice.came = choice.went = None  # they hold the choice, and nothing follows
            self._gate.leave(entry, choice.num_held_tokens + choice.num_tokens)

    def _admit(
        self, asks: Sequence[Ask], owner: Owner, *, started_s: float | None = None
    ) -> tuple[Answer, list[Choice]]:
        """Reserve capacity and return the Answer for requests. Raise ApiError if there is too little."""
        self.ready()
        if self.transfers is not None:
            self.transfers.check(asks)
        num_tokens = sum([len(ask.tokens) for ask in asks])
        places, held = self._places, self._held_tokens
        places.resize(self.max_live)
        if len(asks) > places.room(owner.name) or num_tokens > held.room(owner.name):
            self.meter.num_refused += 1
            raise ApiError(
                429,
                f"{self.num_live} requests run or wait, and there is room for {self.max_live}"
                f"{', of all owners together' if self._gate is not None else ''}, and for {held.total:,} prompt tokens",
                retry_after_s=self.limits.retry_after_s,
            )
        places.force(owner.name, len(asks))
        held.force(owner.name, num_tokens)
        answer = Answer(self.outbox)
        answer.on_more = self._bound_answers
        choices = []
        for number, ask in enumerate(asks):
            meter = self.meter if self.make_meter is None else self.make_meter()
            choice = Choice(answer, number, meter, has_logprobs=ask.params.logprobs, own_end=ask.own_end)
            choice.owner, choice.num_held_tokens = owner.name, len(ask.tokens)
            if started_s is not None:
                choice.started_s = started_s
            choices.append(choice)
            self._live.add(choice)
        return answer, choices

    def _bound_answers(self) -> None:
        """Cut the largest answer of the owner with the most memory if all exceed the limit. In the engine's thread."""
        owners = {choice.answer: choice.owner for choice in list(self._live)}
        if sum(answer.num_bytes for answer in owners) <= MOST_ANSWER_BYTES:
            return
        held = Counter[str]()
        for answer, owner in owners.items():
            held[owner] += answer.num_bytes
        owner = max(held, key=lambda name: (held[name] / self._shares.get(name, 1.0), name))
        largest = max((answer for answer in owners if owners[answer] == owner), key=lambda answer: answer.num_bytes)
        largest.cut(ApiError(503, "answers that are not read, or not streamed, take too much memory: stream, and read"))

    def finish(self, choices: Sequence[Choice]) -> None:
        """Release an answer that was written or abandoned. Requests under way end, which frees their pages."""
        for choice in choices:
            if choice in self._live:
                self._live.remove(choice)
                self._places.give(choice.owner)
                self._held_tokens.give(choice.owner, choice.num_held_tokens)
        under_way = [choice for choice in choices if not choice.is_over]
        if under_way:
            self.host.loop.post(lambda _: self._cancel(under_way))
        if self._gate is not None:
            for choice in choices:
                self._leave(choice)
        if self._idle is not None and not self._live:
            self._idle.set()

    def _cancel(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            choice.is_unwanted = True
            if choice.index is not None and not choice.is_over:
                self.host.loop.end(choice.index)

    async def drained(self, timeout_s: float) -> bool:
        """Wait until all requests have ended; return whether they did in time."""
        self.is_draining = True
        if self._live:
            self._idle = asyncio.Event()
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    def assign(self, index: int, ask: Ask) -> None:
        """Assign request `index` to this model, or this worker, before it is queued."""
        if self.sharing is not None:
            self.sharing.assign(index)
        if self.transfers is not None:
            self.transfers.assign(index, ask)

    def kv_transfer_params(self, asked: dict[str, Any] | None, choices: Sequence[Choice]) -> dict[str, Any] | None:
        """Return the field of an answer to a request that has `asked`: what it has asked, unless workers send KV."""
        return asked if self.transfers is None else self.transfers.told(asked, choices)

    def abort_all(self) -> None:
        """End all requests under way."""
        self._start_begun()
        under_way = [choice for choice in self._live if not choice.is_over]
        for choice in under_way:
            if choice.in_session is not None:
                choice.in_session()
            entry = self._entries.get(choice)
            if entry is not None and not entry.is_inside:
                self._leave(choice)
                choice.fail(ApiError(503, "the request was ended before it began", retry_after_s=1.0))
        self.host.loop.post(lambda _: self._cancel(under_way))

    def live_choices(self) -> list[Choice]:
        """Return the choices under way."""
        return list(self._live)

    def live_adapters(self) -> list[str]:
        """Return the adapters of requests under way."""
        salts = {choice.request.content.salt for choice in list(self._live) if choice.request is not None}
        live = {salt_parts(salt)[0] for salt in salts}
        return [name for name, adapter in self.adapters.items() if adapter in live]

    async def forget_cached(self) -> None:
        """Evict every cached page that is not in use."""
        clear = self.host.core.clear_cache if self.transfers is None else self.transfers.clear_cache
        await self.between_steps(lambda _: clear())

    async def reset_cache(self, *, preempts: bool) -> bool:
        """Evict every cached page, unless a page is in use; return whether it did. A fleet evicts what is not in use.

        `preempts`: running requests first lose their pages, and compute again.
        """
        if self.transfers is not None:
            await self.forget_cached()
            return True
        return await self.between_steps(lambda _: self.host.core.reset_cache(preempts=preempts))

    @property
    def told_health(self) -> Health:
        """The reported health, which includes that of the engine."""
        return self.health if self.host.loop.is_alive else "dead"

    async def set_health(self, health: Health) -> None:
        """Set the health of a model on a shared device. The requests of a dying model fail.

        Raise ApiError for a model with a separate engine, which can only die, permanently.
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
        """Set which transfers to and from tiers fail from now on, by their numbers from 1; None: none.

        Raise ConfigError if the model lacks tiers.
        """
        change = fail_transfers(self.host.core.tiers, fails)
        self.host.loop.post(lambda _: change())

    def kill(self) -> None:
        """Kill the model: alone if it shares its device, else with its engine, as an error in a step would."""
        if self.sharing is not None:
            self.health = "dead"
            self._dying = asyncio.ensure_future(self.set_health("dead"))
            return

        def die(_: LLMEngine) -> None:
            raise RuntimeError("the engine dies on purpose")

        self.host.loop.post(die)

    async def between_steps(self, task: Callable[[LLMEngine], T]) -> T:
        """Return the result of `task`, which runs between two steps."""
        return await asyncio.wrap_future(self.host.loop.post(task))

    @property
    def is_alive(self) -> bool:
        """Whether neither the engine nor the model has died."""
        return self.host.loop.is_alive and self.health != "dead"


class _Begin:
    """Begins one request in the engine's thread."""

    def __init__(self, ask: Ask, choice: Choice, served: Served) -> None:
        self._ask = ask
        self._choice = choice
        self._served = served

    def __call__(self, engine: LLMEngine) -> int | None:
        """Submit the request; return its index, or None if it is no longer wanted."""
        ask, choice, served = self._ask, self._choice, self._served
        if choice.is_unwanted:
            return None
        page_size = served.host.config.page_size

        def make(index: int, now_ns: int) -> Request:
            served.assign(index, ask)
            hints = ask.hints if ask.hints_of_parts is None else with_parts(ask.hints, ask.hints_of_parts)
            request = Request(
                index,
                Content.from_tokens(
                    ask.tokens,
                    page_size=page_size,
                    owner=index,
                    salt=ask.salt,
                    hints=None if hints is None else hints.for_prompt(len(ask.tokens)),
                    lookahead=served.host.core.scheduler.lookahead,
                ),
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


class SessionsOnDemand:
    """An InSessions that calls `open_now` on first use. For one event loop."""

    def __init__(self, open_now: Callable[[], InSessions]) -> None:
        self._open_now = open_now
        self._opened: InSessions | None = None

    def begin(self, owner: str, name: str, ask: Ask, choice: Choice) -> asyncio.Task[None]:
        """Run `ask` in session `name` and stream the answer to `choice`. Cancelling the task ends the request."""
        if self._opened is None:
            self._opened = self._open_now()
        return self._opened.begin(owner, name, ask, choice)

    def counts(self) -> CountsOfSessions | None:
        """Return the counts of the sessions now; None until a request has named one."""
        return None if self._opened is None else self._opened.counts()

    async def close(self) -> None:
        """Close the sessions if they were opened."""
        if self._opened is not None:
            await self._opened.close()


class Models:
    """One Served, or several on one device.

    The first one answers requests without a model, and with `any_model` those for names of none. Raises ConfigError if
    two of them have the same name.
    """

    def __init__(self, served: Sequence[Served]) -> None:
        self._served = tuple(served)
        self.first = self._served[0]
        names = [name for each in served for name in (*each.names, *each.adapters)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{name!r} is the name of two models", field="served_model_name")

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served)

    def __len__(self) -> int:
        return len(self._served)

    def of(self, model: str | None) -> Served:
        """Return the Served with the name or the adapter `model`. Raise ApiError for another name."""
        if model is None:
            return self.first
        for served in self._served:
            if model in served.names or model in served.adapters:
                return served
        if self.first.any_model and model:
            return self.first
        there_are = ", ".join(repr(served.names[0]) for served in self._served)
        raise ApiError(404, f"the model {brief(model)} does not exist; there is {there_are}", param="model")

    def by_own_name(self, name: str) -> Served:
        """Return the model whose first name is `name`. Raise ApiError for another name."""
        for served in self._served:
            if served.names[0] == name:
                return served
        raise ApiError(404, f"there is no model {brief(name)}", param=name)

    def budget(self) -> Budget:
        """Return the budget of one request: prompt tokens for a context twice, and sequences for all places."""
        if len(self._served) == 1:
            served = self.first
            return Budget(values=max(MOST_VALUES, 2 * served.limits.max_model_len), sequences=served.max_live)
        return Budget(
            values=max(MOST_VALUES, 2 * max(served.limits.max_model_len for served in self._served)),
            sequences=max(served.max_live for served in self._served),
        )

    # All of them ------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests in the engines, running or waiting."""
        return sum(served.num_live for served in self._served)

    @property
    def is_alive(self) -> bool:
        """Whether any model is alive."""
        return any(served.is_alive for served in self._served)

    @property
    def most_late_ns(self) -> int:
        """The largest delay of a mock's step; 0 for real models."""
        return max(getattr(served.host.clock, "most_late_ns", 0) for served in self._served)

    def open(self) -> None:
        """Accept requests from the running event loop."""
        for served in self._served:
            served.open()

    def set_starting(self, *, is_starting: bool) -> None:
        """Set whether the server is still starting, and therefore refuses requests."""
        for served in self._served:
            served.is_starting = is_starting

    def leave(self) -> None:
        """Report a shutdown at /health; requests are still accepted."""
        for served in self._served:
            served.is_leaving = True

    async def drained(self, timeout_s: float) -> bool:
        """Wait until all requests have ended; return whether they did in time."""
        return all(await asyncio.gather(*(served.drained(timeout_s) for served in self._served)))

    def fail_transfers(self, fails: Callable[[int], bool] | None) -> None:
        """Set which transfers fail from now on, in each model with tiers. Raise ConfigError without tiers."""
        with_tiers = [served for served in self._served if served.host.core.tiers is not None]
        for served in with_tiers or self._served:
            served.fail_transfers(fails)

    def abort_all(self) -> None:
        """End all requests under way."""
        for served in self._served:
            served.abort_all()

    async def close(self) -> None:
        """Write durable state of sessions, after all requests have ended."""
        for served in self._served:
            if served.sessions is not None:
                await served.sessions.close()
