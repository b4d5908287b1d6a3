"""Two models with real pages on one device: their outputs are undisturbed while they evict each other's pages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.config import EngineConfig
from kvarts.core.engine import Engine
from kvarts.core.request import Request, RequestState
from kvarts.sim.sharing.device import SharedDevice

from builders.engines import engine_with
from builders.serving import Arrival, assert_undisturbed, make_request, output_of, served
from builders.toy_model import ToyExecutor, generate

pytestmark = pytest.mark.laws


@dataclass
class Served:
    """What one model was asked, and what became of it."""

    engine: Engine
    arrivals: list[Arrival]
    requests: list[Request]
    cancelled: set[int]


def serve_both(
    device: SharedDevice,
    models: dict[str, tuple[list[Arrival], EngineConfig]],
    *,
    page_bytes: dict[str, int],
    guarantees: dict[str, int],
) -> dict[str, Served]:
    """Run all arrivals, in turns; the laws of page accounting are checked after each."""
    found = {}
    for name, (arrivals, config) in models.items():
        part = device.register(name, page_bytes=page_bytes[name], guaranteed_bytes=guarantees[name], with_page_ids=True)
        part.token_budget = config.max_num_batched_tokens
        executor = ToyExecutor(part.pool.total, config.page_size, config.max_num_seqs)
        engine = engine_with(config, executor, cache=part.cache, pages=part)
        assert engine.scheduler.cache.pool.has_ids
        device.attach(name, engine.scheduler, engine.cancel)
        requests = [make_request(index, arrival, config.page_size) for index, arrival in enumerate(arrivals)]
        found[name] = Served(engine, arrivals, requests, set())
    for step in range(10_000):
        for name, mine in found.items():
            engine, cache = mine.engine, mine.engine.scheduler.cache
            for request, arrival in zip(mine.requests, mine.arrivals, strict=True):
                if arrival.step == step:
                    assert engine.submit(request, step) is None
                if arrival.cancel_at == step and request.state is not RequestState.FINISHED:
                    engine.cancel(request)
                    mine.cancelled.add(request.index)
            num_released = cache.num_released
            device.memory.parts[name].refresh()
            if engine.has_work:
                engine.step(step)
            device.end_turn(name, has_released=cache.num_released != num_released)
            device.check()
        is_over = all(arrival.step <= step for mine in found.values() for arrival in mine.arrivals)
        if is_over and not any(mine.engine.has_work for mine in found.values()):
            break
    assert not any(mine.engine.has_work for mine in found.values()), "L8: a request never ended"
    return found


@st.composite
def pairs(
    draw: st.DrawFn,
) -> tuple[int, dict[str, tuple[list[Arrival], EngineConfig]], dict[str, int], dict[str, int]]:
    """Two models whose pages differ in bytes, on a device that is barely large enough."""
    models = {name: draw(served()) for name in ("a", "b")}
    page_bytes = {name: draw(st.sampled_from([1, 2, 3])) for name in models}
    most = {
        name: max(-(-(len(a.prompt) + a.num_output - 1) // config.page_size) for a in arrivals) * page_bytes[name]
        for name, (arrivals, config) in models.items()
    }
    guarantees = {name: draw(st.sampled_from([0, 1, 2])) * most[name] // 2 for name in models}
    num_bytes = max(most["a"] + guarantees["b"], most["b"] + guarantees["a"], *most.values())
    num_bytes = max(num_bytes, sum(guarantees.values())) + draw(st.integers(0, 12))
    for name, (arrivals, config) in models.items():
        total = num_bytes // page_bytes[name]
        models[name] = (
            arrivals,
            EngineConfig(
                num_pages=total,
                page_size=config.page_size,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
            ),
        )
    return num_bytes, models, page_bytes, guarantees


@pytest.mark.laws
@given(pairs())
def test_the_outputs_of_both_equal_undisturbed_runs(
    case: tuple[int, dict[str, tuple[list[Arrival], EngineConfig]], dict[str, int], dict[str, int]],
) -> None:
    """L6, L1 to L3 and L8, under hits, evictions and preemptions across models."""
    num_bytes, models, page_bytes, guarantees = case
    device = SharedDevice(num_bytes)
    found = serve_both(device, models, page_bytes=page_bytes, guarantees=guarantees)
    for mine in found.values():
        assert_undisturbed(mine.arrivals, mine.requests, mine.cancelled)


def crowded() -> tuple[dict[str, Served], SharedDevice]:
    shared = [1, 2, 3, 4, 5, 6, 0, 1, 2]
    config = EngineConfig(num_pages=24, page_size=2, max_num_batched_tokens=8, max_num_seqs=4)
    models = {
        "a": ([Arrival(40 * (i // 2), [*shared, i % 3], 20, 0, None) for i in range(4)], config),
        "b": ([Arrival(40 * i + 16, [*shared, i % 3], 24, 1, None) for i in range(4)], config),
    }
    device = SharedDevice(24)
    pages, guarantees = {"a": 1, "b": 1}, {"a": 4, "b": 8}
    return serve_both(device, models, page_bytes=pages, guarantees=guarantees), device


def test_the_crowded_run_meets_everything() -> None:
    found, device = crowded()
    assert all(mine.engine.scheduler.cache.num_evicted for mine in found.values())
    assert any(request.cached_tokens for mine in found.values() for request in mine.requests)
    assert device.num_reclaimed("a"), "a more important request of the other took its pages"
    for mine in found.values():
        for request, arrival in zip(mine.requests, mine.arrivals, strict=True):
            assert output_of(request) == generate(arrival.prompt, arrival.num_output)


def test_steps_with_page_ids_are_done_one_by_one() -> None:
    found, _ = crowded()
    scheduler = found["a"].engine.scheduler
    request = make_request(99, Arrival(0, [1, 2], 9, 0, None), 2)
    assert found["a"].engine.submit(request, 0) is None
    found["a"].engine.step(0)
    with pytest.raises(AssertionError, match="page ids are handed out one step at a time"):
        scheduler.advance(3)
