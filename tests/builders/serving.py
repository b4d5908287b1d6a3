"""Serving: arrivals at an engine with a real executor, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from kvarts.core.build import Audit
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.engine import Engine
from kvarts.core.event_log import EventReader
from kvarts.core.request import Request
from kvarts.proof.audit.opening import open_audit

from builders.engines import engine_with
from builders.toy_model import NUM_TOKEN_IDS, generate


@dataclass
class Arrival:
    step: int
    prompt: list[int]
    num_output: int
    priority: int
    cancel_at: int | None


def make_request(index: int, arrival: Arrival, page_size: int) -> Request:
    return Request(
        index,
        Content.from_tokens(arrival.prompt, page_size=page_size, owner=index),
        num_prompt_tokens=len(arrival.prompt),
        max_tokens=arrival.num_output,
        priority=arrival.priority,
    )


def serve(
    arrivals: list[Arrival],
    config: EngineConfig,
    executor: Any,
    observers: Sequence[EventReader] = (),
    *,
    between_steps: Callable[[Engine, int], object] = lambda _engine, _step: None,
    **below: Any,
) -> tuple[Engine, list[Request], set[int]]:
    """Runs all arrivals, one step at a time; the laws of page accounting are checked after each."""
    # The ledger of an audit does not follow drafts before prompts.
    audit: Audit = "laws" if below.get("num_draft_slots") else open_audit
    engine = engine_with(config, executor, audit=audit, readers=observers, **below)
    requests = [make_request(index, arrival, config.page_size) for index, arrival in enumerate(arrivals)]
    unfinished = set()
    cancelled = set()
    for step in range(10_000):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival.step == step and engine.submit(request, step) is None:
                unfinished.add(request.index)
            if arrival.cancel_at == step and request.index in unfinished:
                engine.cancel(request)
                engine.scheduler.check()
                unfinished.remove(request.index)
                cancelled.add(request.index)
        between_steps(engine, step)
        if engine.has_work:
            unfinished -= {request.index for request in engine.step(step)}
        elif all(arrival.step <= step for arrival in arrivals):
            break
    assert not unfinished, "L8: a request never ended"
    assert engine.scheduler.cache.num_used == 0
    return engine, requests, cancelled


def output_of(request: Request) -> list[int]:
    content = request.content
    return content.tokens(request.num_prompt_tokens, content.num_known_tokens).tolist()


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=3)


@st.composite
def served(draw: st.DrawFn) -> tuple[list[Arrival], EngineConfig]:
    page_size = draw(st.sampled_from([1, 2, 3, 4]))
    shared = draw(st.lists(st.integers(0, NUM_TOKEN_IDS - 1), max_size=16))
    arrivals = []
    for _ in range(draw(st.integers(1, 14))):
        step = draw(st.integers(0, 40))
        arrivals.append(
            Arrival(
                step,
                shared[: draw(st.integers(0, len(shared)))] + draw(prompts),
                draw(st.integers(1, 24)),
                draw(st.sampled_from([0, 0, 0, 1])),
                draw(st.none() | st.integers(step, step + 30)),
            )
        )
    most = max(-(-(len(a.prompt) + a.num_output - 1) // page_size) for a in arrivals)
    budget = draw(st.sampled_from([3, 8, 64]))
    return arrivals, EngineConfig(
        num_pages=most + draw(st.integers(0, 12)),
        page_size=page_size,
        max_num_batched_tokens=budget,
        max_num_seqs=min(budget, draw(st.integers(1, 6))),
    )


def assert_undisturbed(arrivals: list[Arrival], requests: list[Request], cancelled: set[int]) -> None:
    """The output of each is that of a run of its own, as far as it was not cancelled."""
    for request, arrival in zip(requests, arrivals, strict=True):
        undisturbed = generate(arrival.prompt, arrival.num_output)
        output = output_of(request)
        if request.index in cancelled:
            assert output == undisturbed[: len(output)]
        else:
            assert output == undisturbed
