"""Assembly of a server: a model or a mock, its text, its metrics, and the application around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.clock import Clock
from kvarts.config import EngineOptions
from kvarts.event_log import EventReader
from kvarts.kv.group_needs import GroupNeeds
from kvarts.openai_api.access import Guard
from kvarts.openai_api.answers import Answers, Rule
from kvarts.openai_api.app import OpenAIApp, Watcher
from kvarts.openai_api.failures import FailureScript
from kvarts.openai_api.meter import Meter
from kvarts.openai_api.mock import mock_model
from kvarts.openai_api.models import Models
from kvarts.openai_api.prompts import HubText, TextModel, WordText
from kvarts.openai_api.recorded import ArrivalRecorder
from kvarts.openai_api.routes import Routes
from kvarts.openai_api.served import Limits, Served, Sharing
from kvarts.owners import Keys
from kvarts.rooms import from_room
from kvarts.sim.config import ReplayConfig

if TYPE_CHECKING:
    from kvarts.openai_api.access_log import AccessLog
    from kvarts.openai_api.meter import GoneEngines, Residency
    from kvarts.openai_api.recordings import RecordedAnswers

__all__ = ["Door", "Opened", "make_served", "meter_of", "mock_limits", "open_app", "open_mock", "open_model"]

DEFAULT_TOKENS = 128


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server over HTTP that do not depend on its model.

    `keys`: accepted keys; None: no key is required. `shares_prefix_cache`: owners can hit each other's KV. `origins`
    and `hosts`: see Guard. `fail`: a script of failures, drawn from `seed`. `allows_failures`: requests may ask for
    failures. `is_recording`: record arrivals. `has_page`: serve the live page. `access_log`: log of requests.
    `answers`, `recordings`, `media`: of mocks, rules, records, and the family by which images and audio are counted.
    `residency_share`: the share of KV blocks whose residency is measured; 0: none. `rank`: the rank of its engines
    among those of several workers.
    """

    names: tuple[str, ...] = ()
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
    recordings: RecordedAnswers | None = None
    media: str = ""
    residency_share: float = 0.0
    rank: int = 0


class Opened:
    """A server before its socket is opened."""

    def __init__(self, app: OpenAIApp, models: Models, routes: Routes) -> None:
        self.app = app
        self.models = models
        self.routes = routes

    @property
    def served(self) -> Served:
        """The model, or the first of several."""
        return self.models.first

    @property
    def recorder(self) -> ArrivalRecorder | None:
        """The recorder of arrivals at that model."""
        return self.served.recorder


def open_mock(
    config: ReplayConfig,
    door: Door,
    *,
    model: str = "mock",
    speedup: float = 1.0,
    token_bytes: int = 0,
    readers: Sequence[EventReader] = (),
    clock: Clock | None = None,
    watcher: Watcher | None = None,
) -> Opened:
    """Return a mock of the engine that `config` describes. `readers` receive all of its events.

    `max_model_len` of the limits is reduced to the tokens that the pages can hold.
    """
    limits = mock_limits(door, config)
    meter = meter_of(door, limits, speedup=speedup)
    host = mock_model(
        config,
        config.cost_model,
        seed=door.seed,
        speedup=speedup,
        offload=config.offload,
        token_bytes=token_bytes,
        max_positions=limits.max_model_len,
        readers=(*readers, *meter.readers),
        audit=config.audit,
        clock=clock,
        groups=None if config.kv_groups == "off" else config.memory,
        make_order=config.eviction,
    )
    facts = {"mock": True, "seed": door.seed, "speedup": speedup, "cost_model": config.to_builtins()["cost"]}
    served = make_served(host, WordText(), door.names or (model,), door, limits=limits, meter=meter, facts=facts)
    return open_app([served], door, speedup=speedup, watcher=watcher)


def meter_of(door: Door, limits: Limits, *, speedup: float = 1.0) -> Meter:
    """Return the meter of a mock's engine, with that of the residency of blocks if `door` asks for it."""
    return Meter(max_model_len=limits.max_model_len, speedup=speedup, residency=_residency_of(door, speedup))


def _residency_of(door: Door, speedup: float = 1.0) -> Residency | None:
    if not door.residency_share:
        return None
    from kvarts.openai_api.meter import Residency

    return Residency(door.residency_share, seed=door.seed, speedup=speedup)


def mock_limits(door: Door, config: ReplayConfig) -> Limits:
    """Return the limits of a mock: a context that fits in its pages, and a default length of answers."""
    most = door.limits.max_model_len
    if config.kv_groups == "off":
        most = min(most, config.pool_tokens)
    else:
        needs = GroupNeeds(config.memory, page_size=config.page_size, most_new=config.max_num_batched_tokens)
        most = needs.most_tokens(most, config.num_blocks)
    return msgspec.structs.replace(
        door.limits,
        max_model_len=most,
        default_tokens=DEFAULT_TOKENS if door.limits.default_tokens is None else door.limits.default_tokens,
    )


def open_model(
    path: str,
    door: Door,
    *,
    readers: Sequence[EventReader] = (),
    max_model_len: int | None = None,
    tool_call_parser: str = "auto",
    options: EngineOptions | None = None,
    **settings: Any,
) -> Opened:
    """Return the model in `path`, with `options` and other `settings` of kvarts.LLM. Raise the errors of kvarts.LLM.

    `tool_call_parser`: the model's format of calls, see kvarts.openai_api.tool_calls.
    """
    residency = _residency_of(door)
    if residency is not None:
        readers = [*readers, residency]
    llm = from_room("llm.llm", "LLM", field="model")(path, options=options, readers=readers, **settings)
    host = llm.host()
    most = host.core.scheduler.most_tokens(host.max_positions or 1 << 40)
    limits = msgspec.structs.replace(
        door.limits, max_model_len=most if max_model_len is None else min(most, max_model_len)
    )
    meter = Meter(max_model_len=limits.max_model_len, residency=residency)
    host.core.log.add_reader(meter)
    facts = {"mock": False, "dtype": settings.get("dtype", "auto" if options is None else options.dtype)}
    text = HubText(host.tokenizer, host.eos_ids, tool_call_parser=tool_call_parser)
    served = make_served(host, text, door.names or (path,), door, limits=limits, meter=meter, facts=facts)
    return open_app([served], door)


def make_served(
    host: Any,
    text: TextModel,
    names: Sequence[str],
    door: Door,
    *,
    limits: Limits,
    meter: Meter,
    facts: Mapping[str, Any],
    sharing: Sharing | None = None,
    adapters: Sequence[str] | None = None,
) -> Served:
    """Return a served model. `adapters`: those of the door, unless given."""
    return Served(
        host,
        text,
        names,
        limits=limits,
        meter=meter,
        recorder=ArrivalRecorder() if door.is_recording else None,
        adapters=door.adapters if adapters is None else adapters,
        sharing=sharing,
        facts=facts,
        shares={} if door.keys is None else door.keys.shares,
        sets_owners_apart=door.keys is not None and door.keys.has_several_owners and not door.shares_prefix_cache,
        answers=Answers(door.answers, seed=door.seed, allows_failures=door.allows_failures, recordings=door.recordings)
        if facts.get("mock")
        else None,
        media=door.media,
        rank=door.rank,
    )


def open_app(
    served: Sequence[Served],
    door: Door,
    *,
    speedup: float | None = None,
    watcher: Watcher | None = None,
    engines: Sequence[Served] | None = None,
    gone: GoneEngines | None = None,
) -> Opened:
    """Return the application around the served models. `engines` and `gone`: see Routes."""
    models = Models(served)
    routes = Routes(models, speedup=speedup, engines=engines, gone=gone)
    script = FailureScript(door.fail, seed=door.seed)
    app = OpenAIApp(
        models,
        routes,
        script=script,
        guard=Guard(door.keys, origins=door.origins, hosts=door.hosts),
        allows_failures=door.allows_failures,
        watcher=watcher,
        has_page=door.has_page,
        access_log=door.access_log,
    )
    return Opened(app, models, routes)
