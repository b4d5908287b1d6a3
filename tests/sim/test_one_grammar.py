"""A name, a class and an object are accepted in the same places, with the same result."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvarts import ConfigError, LinearCost, ReplayConfig, load_trace, plan, replay, sweep
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.sched.policy import PriorityPolicy
from kvarts.cost.polynomial import PolynomialCost
from kvarts.sim.auto_order import AutoOrder
from kvarts.sim.fleet.config import FleetConfig, PoolConfig
from kvarts.sim.orders import HintedOrder
from kvarts.sim.sharing.config import ModelShare, SharingConfig


class NextInLine:
    """A router with a state: the workers in turn."""

    def __init__(self, start: int = 0) -> None:
        self.turn = start

    def choose(self, asked: Any, view: Any) -> int:
        self.turn += 1
        found: int = view.workers[self.turn % len(view.workers)]
        return found


def told(**fields: Any) -> dict[str, Any]:
    fields = {"num_pages": 400, "page_size": 512, "replicas": 2, **fields}
    return replay("sample:mooncake", ReplayConfig(**fields)).summary


@pytest.mark.parametrize(
    ("field", "ways"),
    [
        ("eviction", ["auto", "kvarts.sim.auto_order:AutoOrder", AutoOrder, partial(AutoOrder), AutoOrder()]),
        ("eviction", ["lru", LruOrder, LruOrder()]),
        ("admission", ["priority", "kvarts.core.sched.policy:PriorityPolicy", PriorityPolicy, PriorityPolicy()]),
        ("router", ["sim.test_one_grammar:NextInLine", NextInLine, NextInLine()]),
        ("cost", ["polynomial", PolynomialCost, PolynomialCost()]),
        ("cost", ["linear:step_ms=2", LinearCost(step_ms=2)]),
    ],
)
def test_a_replay_takes_all_of_them(field: str, ways: list[Any]) -> None:
    first, *others = [told(**{field: way}) for way in ways]
    for summary in (first, *others):
        summary.pop("config")  # contains the name of a class
    assert all(other == first for other in others)


def test_an_object_stays_as_it_is_and_each_engine_has_a_copy() -> None:
    router, order = NextInLine(), AutoOrder()
    config = ReplayConfig(num_pages=400, page_size=512, replicas=2, router=router, eviction=order)
    first, second = [replay("sample:mooncake", config).to_json() for _ in range(2)]
    assert first == second and router.turn == 0 and list(order) == []
    assert replay("sample:mooncake", config).summary["config"]["router"] == "NextInLine"


@pytest.mark.parametrize(
    ("field", "given", "said"),
    [
        ("eviction", "atuo", "Did you mean auto?"),
        ("eviction", 3, "eviction: 3 is not an EvictionOrder"),
        ("eviction", NextInLine, "'NextInLine' is not an EvictionOrder"),
        ("eviction", "kvarts:nothing", "cannot be imported"),
        ("admission", "fifo", "admission: 'fifo' is not an AdmissionPolicy"),
        ("admission", LruOrder(), "is not an AdmissionPolicy"),
        ("admission", "kvarts:nothing", "admission: 'kvarts:nothing' cannot be imported"),
        ("admission", "kvarts.policies:LruOrder", "is not an AdmissionPolicy"),
        ("router", LruOrder(), "has no choose"),
        ("router", "kv-rooter", "router"),
        ("cost", "linear:step=2", "cost"),
        ("cost", LruOrder(), "cost"),
        ("cost", "kvarts:nothing", "cost: 'kvarts:nothing' cannot be imported"),
    ],
)
def test_what_is_none_of_them_is_refused_by_its_field(field: str, given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        ReplayConfig(**{field: given})
    assert said in str(caught.value)


def test_the_session_aware_order_knows_the_trace() -> None:
    trace = load_trace("sample:agents")
    config = ReplayConfig(num_pages=300, page_size=64, eviction="session-aware")
    summary = replay(trace, config).summary
    assert summary["config"]["eviction"] == "SessionAwareOrder"
    pools = (PoolConfig(role="mixed", each=config),)
    assert replay(trace, FleetConfig(pools=pools)).summary["prefix_hit_ratio"] == summary["prefix_hit_ratio"]
    with pytest.raises(ConfigError, match="needs a trace"):
        config.eviction()


def test_shares_take_all_of_them() -> None:
    def hits(way: Any) -> Any:
        models = {
            "chat": ModelShare(eviction=way, cost=LinearCost(step_ms=1), kv_bytes_per_token=1),
            "code": ModelShare(cost=LinearCost(step_ms=1), kv_bytes_per_token=1),
        }
        config = SharingConfig(models=models, kv_memory=300 * 512, each=ReplayConfig(page_size=512))
        traces = {"chat": "sample:mooncake", "code": "sample:mooncake"}
        return replay({name: load_trace(path) for name, path in traces.items()}, config).to_json()

    assert hits("hinted") == hits(HintedOrder) == hits(HintedOrder())


def test_a_plan_takes_all_of_them() -> None:
    trace = load_trace("sample:mooncake")
    ways = ["auto", AutoOrder, AutoOrder(), HintedOrder(), HintedOrder()]
    rows = plan(trace, page_size=512, policies=ways, at=[400]).values["league"]
    assert [row["policy"] for row in rows] == [
        "lru",
        "auto",
        "AutoOrder",
        "AutoOrder #2",
        "HintedOrder",
        "HintedOrder #2",
    ]
    assert len({row["hit_ratio"] for row in rows[1:4]}) == 1
    assert rows[2]["command"] is not None and rows[3]["command"] is None
    config = ReplayConfig(num_pages=400, page_size=512, replicas=2)
    by = [plan(trace, config, router=way).to_text() for way in (NextInLine, NextInLine())]
    assert by[0] == by[1]


class NoHash(AutoOrder):
    """An order that compares by its class, as a dataclass does: it has no hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoHash)

    __hash__ = None  # type: ignore[assignment]


def test_a_plan_takes_objects_without_a_hash() -> None:
    rows = plan("sample:mooncake", page_size=512, policies=[NoHash(), NoHash(), "auto"], at=[400]).values["league"]
    assert [row["policy"] for row in rows] == ["lru", "NoHash", "auto"]
    assert rows[1]["hit_ratio"] == rows[2]["hit_ratio"]


def lru() -> AutoOrder:
    """A function by the name of another order."""
    return AutoOrder()


def polynomial(batch: Any) -> float:
    """A function by the name of another cost model."""
    return 1.0


def test_a_sweep_tells_a_function_from_the_policy_of_its_name() -> None:
    base = {"trace": "sample:mooncake", "page_size": 512, "pages": 3_000}
    found = sweep({**base, "grid": {"eviction": [lru, "lru", "auto"]}}).rows
    assert [row["eviction"] for row in found] == ["lru #2", "lru", "auto"]
    assert found[0]["hit_ratio"] == found[2]["hit_ratio"] != found[1]["hit_ratio"]
    found = sweep({**base, "grid": {"cost": ["polynomial", polynomial]}}).rows
    assert [row["cost"] for row in found] == ["polynomial", "polynomial #2"]
    assert found[0]["ttft_ms_p50"] != found[1]["ttft_ms_p50"]


def test_a_sweep_takes_all_of_them(tmp_path: Any) -> None:
    base = {"trace": "sample:mooncake", "page_size": 512, "pages": 400, "replicas": 2}
    grid = {"eviction": ["auto", AutoOrder, AutoOrder()], "router": ["round-robin", NextInLine]}
    found = sweep({**base, "grid": grid}, tmp_path / "out")
    assert [row["eviction"] for row in found.rows] == ["auto"] * 2 + ["AutoOrder"] * 2 + ["AutoOrder #2"] * 2
    assert [row["router"] for row in found.rows] == ["round-robin", "NextInLine"] * 3
    assert len({row["hit_ratio"] for row in found.rows[::2]}) == 1
    assert found.rows[0]["command"] and found.rows[1]["command"] is None
    again = sweep({**base, "grid": grid}, tmp_path / "out")
    assert again.rows == found.rows
    with pytest.raises(ConfigError, match="eviction"):
        sweep({**base, "grid": {"eviction": [NextInLine]}})
    alone = sweep(
        {"trace": "sample:mooncake", "page_size": 512, "cost": LinearCost(step_ms=1), "grid": {"pages": [400]}}
    )
    config = ReplayConfig(num_pages=400, page_size=512, cost=LinearCost(step_ms=1))
    assert alone.rows[0]["hit_ratio"] == replay("sample:mooncake", config).summary["prefix_hit_ratio"]
