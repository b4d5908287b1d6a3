"""Parts: where they act, in which order, and that a plain engine has none."""

from __future__ import annotations

from inspect import isdatadescriptor
from typing import Any

import pytest

from kvarts import OffloadConfig, ReplayConfig
from kvarts.base.errors import ConfigError
from kvarts.core.build import build_engine
from kvarts.core.config import EngineConfig
from kvarts.core.parts.catalogue import GATES, PARTS
from kvarts.core.parts.combines import FEATURES, PLACES
from kvarts.core.sched.scheduler import Scheduler
from kvarts.core.sched.step import Hooks
from kvarts.cost.polynomial import LinearCost
from kvarts.cost.simulated import SimExecutor
from kvarts.sim.fleet.config import FleetConfig
from kvarts.sim.replay import open_replica

from builders.engines import make_scheduler, request_of

# A compiled class has attributes, but no __slots__.
HOOKS = tuple(sorted(name for name, kind in vars(Hooks).items() if isdatadescriptor(kind) and name != "gates"))


def gates_of(scheduler: Scheduler) -> list[str]:
    return [gate.__qualname__ for gate in scheduler.hooks.gates]


def hooks_of(scheduler: Scheduler) -> list[str]:
    return [name for name in HOOKS if getattr(scheduler.hooks, name)]


def make(**settings: Any) -> Scheduler:
    return open_replica(ReplayConfig(num_pages=64, page_size=16, max_num_seqs=4, **settings), ()).scheduler


def test_a_plain_engine_has_one_gate_and_no_hooks() -> None:
    for settings in ({}, {"profile": "mocker"}, {"watermark": 0.1}, {"no_prefix_caching": True}):
        scheduler = make(**settings)
        assert gates_of(scheduler) == ["Memory.admit"]
        assert hooks_of(scheduler) == []


def test_gates_stand_in_the_order_of_the_rule() -> None:
    """What runs, what it finds, its memory, latency, and loads last, as they change what a request needs."""
    scheduler = make(max_itl_ms=50.0, offload=OffloadConfig(host_memory=1 << 20, kv_bytes_per_token=1024))
    assert gates_of(scheduler) == [
        "LoadAdmissions.has_seat",
        "Memory.find",
        "LoadAdmissions.resume_state",
        "LoadAdmissions.fits",
        "ItlBound.has_room",
        "LoadAdmissions.load",
    ]
    handed = make_scheduler(EngineConfig(num_pages=8, page_size=16, max_num_seqs=4), hands_over=True)
    assert gates_of(handed) == ["Handoffs.admit", "Memory.find", "Memory.fits"]


def test_a_part_acts_only_where_it_says() -> None:
    assert hooks_of(make(async_scheduling=True)) == ["after", "changes", "finishes", "planned"]
    assert hooks_of(make(long_prefill_token_threshold=8)) == ["before", "planned"]
    assert hooks_of(make(prefill_schedule_interval=4)) == ["before", "changes", "closing", "planned"]
    assert hooks_of(make(max_itl_ms=50.0)) == []


def test_parts_are_described_in_words_that_exist() -> None:
    fields = {*ReplayConfig.__struct_fields__, *FleetConfig.__struct_fields__}
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    for part in PARTS:
        assert part.summary and not part.summary.endswith(".")
        assert set(part.settings) <= fields, part.name
        assert set(part.features) <= set(FEATURES), part.name
        assert set(part.places) <= set(PLACES), part.name
        assert all(set(refusal.together) & set(part.features) for refusal in part.refusals)
    assert len(set(GATES)) == len(GATES)


def test_a_bound_of_latency_needs_the_cost_of_steps() -> None:
    config = EngineConfig(num_pages=8, page_size=16, max_itl_ms=5.0)
    with pytest.raises(ConfigError, match="an engine of its own"):
        build_engine(config, SimExecutor(LinearCost(step_ms=1.0)))


def test_prompts_wait_for_their_step_while_something_decodes() -> None:
    """The first prompt starts at once; the second one, four steps after it, though it is there before."""
    scheduler = make_scheduler(EngineConfig(num_pages=64, page_size=1, max_num_seqs=4, prefill_schedule_interval=4))
    steps = []
    for now in range(6):
        if now < 2:
            scheduler.add(request_of(now, range(100 * now, 100 * now + 9), 20))
        plan = scheduler.schedule(now)
        steps.append((len(plan.batch.chunks), plan.batch.num_decodes))
        scheduler.commit(now + 1)
    assert steps == [(1, 0), (0, 1), (0, 1), (0, 1), (1, 1), (0, 2)]
