"""Puts a server together: a model or a mock, its text, its metrics, and the application around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvarts.clock import Clock
from kvarts.event_log import EventReader
from kvarts.openai_api.app import OpenAIApp, Watcher
from kvarts.openai_api.failures import FailureScript
from kvarts.openai_api.meter import Meter
from kvarts.openai_api.metrics import Metrics
from kvarts.openai_api.mock import mock_model
from kvarts.openai_api.prompts import HubText, TextModel, WordText
from kvarts.openai_api.recorded import ArrivalRecorder
from kvarts.openai_api.routes import Routes
from kvarts.openai_api.served import Limits, Served
from kvarts.rooms import from_room
from kvarts.sim.config import ReplayConfig

__all__ = ["Door", "Opened", "open_mock", "open_model"]

DEFAULT_TOKENS = 128


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """What a server over HTTP is to be, whatever it serves.

    `fail`: a script of failures, drawn by `seed`. `is_recording`: note what arrives.
    """

    names: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    limits: Limits = Limits()
    fail: str = ""
    seed: int = 0
    is_recording: bool = False


class Opened:
    """A server that has no socket yet."""

    def __init__(self, app: OpenAIApp, served: Served, routes: Routes, recorder: ArrivalRecorder | None) -> None:
        self.app = app
        self.served = served
        self.routes = routes
        self.recorder = recorder


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
    """Return a mock of the engine that `config` describes. `readers`: of all of its events.

    `max_model_len` of the limits is cut to what the pages hold.
    """
    limits = msgspec.structs.replace(
        door.limits,
        max_model_len=min(door.limits.max_model_len, config.pool_tokens),
        default_tokens=DEFAULT_TOKENS if door.limits.default_tokens is None else door.limits.default_tokens,
    )
    meter = Meter(max_model_len=limits.max_model_len, speedup=speedup)
    host = mock_model(
        config,
        config.cost_model,
        seed=door.seed,
        speedup=speedup,
        offload=config.offload,
        token_bytes=token_bytes,
        max_positions=limits.max_model_len,
        readers=(*readers, meter),
        audit=config.audit,
        clock=clock,
    )
    facts = {"mock": True, "seed": door.seed, "speedup": speedup, "cost": config.to_builtins()["cost"]}
    paced: Any = host.clock
    lag = None
    if hasattr(paced, "most_late_ns"):
        lag = lambda: (paced.late_ns / 1e9, paced.most_late_ns / 1e9)  # noqa: E731
    return _open(host, WordText(), door, limits, meter, facts, model, lag=lag, speedup=speedup, watcher=watcher)


def open_model(
    path: str,
    door: Door,
    *,
    readers: Sequence[EventReader] = (),
    max_model_len: int | None = None,
    **settings: Any,
) -> Opened:
    """Return the model in the directory `path`, with `settings` of kvarts.LLM. Raise what that raises."""
    llm = from_room("llm.llm", "LLM", field="model")(path, readers=readers, **settings)
    host = llm.host()
    most = min(host.config.pool_tokens, host.max_positions or 1 << 62)
    limits = msgspec.structs.replace(
        door.limits, max_model_len=most if max_model_len is None else min(most, max_model_len)
    )
    meter = Meter(max_model_len=limits.max_model_len)
    host.core.log.add_reader(meter)
    facts = {"mock": False, "dtype": settings.get("dtype", "auto")}
    return _open(host, HubText(llm.tokenizer), door, limits, meter, facts, path)


def _open(
    host: Any,
    text: TextModel,
    door: Door,
    limits: Limits,
    meter: Meter,
    facts: Mapping[str, Any],
    model: str,
    *,
    lag: Any = None,
    speedup: float | None = None,
    watcher: Watcher | None = None,
) -> Opened:
    recorder = ArrivalRecorder() if door.is_recording else None
    served = Served(
        host,
        text,
        door.names or (model,),
        limits=limits,
        meter=meter,
        recorder=recorder,
        adapters=door.adapters,
    )
    routes = Routes(served, Metrics(served, lag=lag), facts=facts, speedup=speedup)
    script = FailureScript(door.fail, seed=door.seed)
    app = OpenAIApp(served, routes, script=script, api_keys=door.api_keys, watcher=watcher)
    return Opened(app, served, routes, recorder)
