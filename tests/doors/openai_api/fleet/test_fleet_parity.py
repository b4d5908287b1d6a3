"""L11 for a fleet: what arrived at its doors, replayed, is placed on the same workers, with the same events."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvarts.core.events import Arrived, CacheCleared, PagesRemoved
from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.fleet.config import FleetConfig, PoolConfig, Role, StoreSettings
from kvarts.sim.fleet.faults import Fault, Kind
from kvarts.sim.fleet.replay import replay_fleet
from kvarts.sim.fleet.scaling import parse_scaler
from kvarts.sim.routers.config import Routing
from kvarts.sim.traffic.formats import load_trace

from builders.grouped import group_settings
from builders.live_fleet import Sent, replayed, served_live, small_pool
from builders.parity import shifted

MIXED, APART, BOTH = "mixed", "apart", "both"
AFTER_ALL = {CacheCleared.__name__, PagesRemoved.__name__}


def small_fleet(
    shape: str,
    router: str = "round-robin",
    *,
    pages: int = 40,
    seqs: int = 4,
    budget: int = 32,
    pool: dict[str, Any] | None = None,
    **settings: Any,
) -> FleetConfig:
    each = {"num_pages": pages, "max_num_seqs": seqs, "max_num_batched_tokens": max(budget, seqs), "router": router,
            "audit": True, **(pool or {})}  # fmt: skip
    pools: list[PoolConfig] = []
    if shape in (MIXED, BOTH):
        pools.append(small_pool("mixed", 2, **each))
    if shape in (APART, BOTH):
        pools += [small_pool("prefill", 2, **each), small_pool("decode", 2, **each)]
    return FleetConfig(pools=tuple(pools), token_bytes=10, **settings)


def assert_same(config: FleetConfig, sent: list[Sent], *, speedup: float = 1.0) -> None:
    run = served_live(config, sent, speedup=speedup)
    _, again = replayed(config, run.rows)
    for worker, heard in run.heard.items():
        # The policy and faults go on after the last request; workers do nothing then, but those that fail are empty.
        mine, other = shifted(heard.events, 0), again[worker].events if worker in again else []
        while len(mine) > len(other) and mine[-1][0] in AFTER_ALL:
            mine.pop()
        for number, (one, two) in enumerate(zip(mine, other, strict=False)):
            assert one == two, f"worker {worker}, event {number}"
        assert len(mine) == len(other), f"worker {worker}"


tokens = st.integers(0, 3)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=30),
    st.tuples(st.integers(0, 2), st.lists(tokens, max_size=6)).map(lambda pair: [pair[0]] * 17 + pair[1]),
)
requests = st.builds(
    Sent,
    delay_ms=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
    prompt=prompts,
    num_tokens=st.integers(1, 24),
    worker=st.sampled_from([None, None, None, 0, 1]),
    left_at=st.sampled_from([None, None, 0, 1]),
    gives_up_ms=st.sampled_from([None, None, None, 0.5, 2.0]),
    num_stops=st.sampled_from([0, 0, 60, 450]),
    priority=st.integers(0, 1),
    salt=st.sampled_from([None, None, "a"]),
)


@pytest.mark.laws
@settings(deadline=None, max_examples=max(1, settings().max_examples // 2))
@given(
    sent=st.lists(requests, min_size=1, max_size=12),
    shape=st.sampled_from([MIXED, APART, BOTH]),
    router=st.sampled_from(["round-robin", "least-loaded", "dynamo-kv"]),
    pages=st.integers(16, 40),
    seqs=st.integers(1, 4),
    budget=st.sampled_from([4, 16, 64]),
    rate=st.sampled_from([None, 1e5, 1e6]),
    sharing=st.booleans(),
    only_missing=st.booleans(),
    least_remote=st.sampled_from([None, None, 8]),
    hold_s=st.sampled_from([0.0, 0.002, 30.0]),
    late=st.booleans(),
    kept=st.one_of(st.just({}), st.just({}), group_settings()),
)
def test_a_recorded_fleet_replays_to_the_same_events(
    sent: list[Sent],
    shape: str,
    router: str,
    pages: int,
    seqs: int,
    budget: int,
    rate: float | None,
    sharing: bool,
    only_missing: bool,
    least_remote: int | None,
    hold_s: float,
    late: bool,
    kept: dict[str, Any],
) -> None:
    config = small_fleet(
        shape,
        router,
        pages=pages,
        seqs=seqs,
        budget=budget,
        bytes_per_s=rate,
        sharing="worker" if sharing and rate else "none",
        transfer="missing" if only_missing else "full-prompt",
        latency_ms=0.3 if late else 0.0,
        least_remote=least_remote if shape != MIXED else None,
        hold_s=hold_s,
        pool=kept,
    )
    assert_same(config, sent)


@pytest.mark.laws
@settings(deadline=None, max_examples=max(1, settings().max_examples // 4))
@given(
    sent=st.lists(requests, min_size=1, max_size=12),
    shape=st.sampled_from([MIXED, APART]),
    router=st.sampled_from(["round-robin", "least-loaded", "prefix"]),
    faults=st.lists(
        st.tuples(
            st.sampled_from(["down", "cut", "slow"]),
            st.integers(0, 1),
            st.integers(0, 8),
            st.sampled_from([None, 1, 3]),
        ),
        max_size=3,
        unique_by=lambda each: each[:2],
    ),
    has_host=st.booleans(),
    below=st.sampled_from(["", "store", "pulls"]),
    staleness_ms=st.sampled_from([0.0, 0.0, 0.7]),
    lag_ms=st.sampled_from([0.0, 0.4]),
    kept=st.one_of(st.just({}), group_settings()),
)
def test_failures_tiers_and_a_store_change_nothing_of_that(
    sent: list[Sent],
    shape: str,
    router: str,
    faults: list[tuple[Kind, int, int, int | None]],
    has_host: bool,
    below: str,
    staleness_ms: float,
    lag_ms: float,
    kept: dict[str, Any],
) -> None:
    settings: dict[str, Any] = dict(kept)
    if staleness_ms and not kept:
        router, settings["routing"] = "llm-d", Routing(staleness=f"{staleness_ms}ms")
    elif lag_ms and router == "prefix":
        settings["routing"] = Routing(event_lag=lag_ms)
    if has_host or below == "pulls":
        settings["offload"] = OffloadConfig(host_pages=30, policy="eager")
    config = small_fleet(shape, router, pages=24, pool=settings, bytes_per_s=1e6)
    changes: dict[str, Any] = {
        "faults": tuple(
            Fault(kind, worker, start * 1_000_000, None if after is None else (start + after) * 1_000_000,
                  7 if kind == "slow" else 1)
            for kind, worker, start, after in faults
            if shape != MIXED or kind == "down"
        )
    }  # fmt: skip
    if below == "pulls":
        changes["pulls"] = True
    elif below:
        changes["store"] = StoreSettings(pages=200, rate="1MB/s", worker_rate="1MB/s", latency_us=10.0)
    assert_same(replace(config, **changes), sent)


@pytest.mark.laws
@settings(deadline=None, max_examples=max(1, settings().max_examples // 4))
@given(
    sent=st.lists(requests, min_size=1, max_size=12),
    router=st.sampled_from(["round-robin", "least-loaded", "prefix"]),
    policy=st.sampled_from([
        "script,0s=1:3,0.002s=3:1,0.005s=2:2", "script,0.001s=1:1,0.003s=2:3", "queue,target=1,every=0.001s,stable=0s"
    ]),
    startup_s=st.sampled_from([0.0, 0.0007]),
    fails=st.booleans(),
    pulls=st.booleans(),
)  # fmt: skip
def test_a_scaler_on_the_wall_clock_replays_to_the_same_events(
    sent: list[Sent], router: str, policy: str, startup_s: float, fails: bool, pulls: bool
) -> None:
    """Workers start and drain meanwhile. A request to one that was taken away is refused."""
    pool = {"offload": OffloadConfig(host_pages=30, policy="eager")} if pulls else None
    config = small_fleet(APART, router, pages=24, bytes_per_s=1e6, pulls=pulls, pool=pool)
    faults = (Fault("down", 0, 1_000_000, 2_000_000),) if fails else ()
    scaler = partial(parse_scaler, policy)
    assert_same(replace(config, scaler=scaler, scaling=policy, startup_s=startup_s, faults=faults), sent)


def test_a_run_under_load_replays_to_the_same_report_also_from_a_file(tmp_path: Path) -> None:
    config = small_fleet(APART, "dynamo-kv", pages=60, bytes_per_s=1e6)
    sent = [Sent(0.2 * index, [index % 3] * 16 + [index], 20) for index in range(60)]
    run = served_live(config, sent)
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in run.rows))
    report = replay_fleet(load_trace(path), config)
    columns = report.request_columns
    assert report.summary["num_completed"] == len(sent)
    placed = [[int(source), int(target)] for source, target in zip(columns["source"], columns["replica"], strict=True)]
    for worker, heard in run.heard.items():
        came = [dict(fields)["request_id"] for kind, fields in heard.events if kind == Arrived.__name__]
        column = 0 if worker < 2 else 1
        assert sorted(came) == sorted(str(row.request_id) for row, place in zip(run.rows, placed, strict=True)
                                      if place[column] == worker)  # fmt: skip


@pytest.mark.long
def test_thousands_of_requests_replay_to_the_same_events() -> None:
    config = small_fleet(BOTH, "dynamo-kv", pages=300, seqs=16, budget=128, bytes_per_s=1e6)
    sent = [
        Sent(
            1.5 * index,
            [index % 7] * 32 + [index % 97] * 20 + [index],
            10 + index % 30,
            worker=index % 6 if index % 5 == 0 else None,
            left_at=index % 6 if index % 15 == 0 else None,
            gives_up_ms=3.0 if index % 11 == 0 else None,
        )
        for index in range(4_000)
    ]
    assert_same(config, sent)


def models_fleet(router: str, **settings: Any) -> FleetConfig:
    """A model of two workers that do both, one of two that compute prompts and two that generate."""
    each: dict[str, Any] = {"num_pages": 40, "router": router, "audit": True}
    chat = replace(small_pool("mixed", 2, **each), name="chat", served_model_name="chat")
    roles: tuple[Role, ...] = ("prefill", "decode")
    apart = [replace(small_pool(role, 2, **each), name=f"code-{role}", served_model_name="code") for role in roles]
    return FleetConfig(pools=(chat, *apart), token_bytes=10, **settings)


@settings(max_examples=5)
@given(
    st.lists(st.tuples(requests, st.sampled_from([None, "chat", "code"])), min_size=1, max_size=14),
    st.sampled_from(["round-robin", "prefix", "least-loaded"]),
)
def test_requests_for_several_models_replay(asked: list[tuple[Sent, str | None]], router: str) -> None:
    """At any door: a request without a model is for the first, and one to a worker for that of the worker."""
    sent = [replace_sent(each, model) for each, model in asked]
    config = models_fleet(router, bytes_per_s=1e6)
    run = served_live(config, sent)
    assert {row.model for row in run.rows} <= {"chat", "code"}
    report, again = replayed(config, run.rows)
    for worker, heard in run.heard.items():
        mine = shifted(heard.events, 0)
        while mine and mine[-1][0] in AFTER_ALL:
            mine.pop()
        assert mine == (again[worker].events if worker in again else []), f"worker {worker}"
    for model, worker in zip(report.requests["model"], report.requests["replica"].tolist(), strict=True):
        assert worker < 0 or (worker < 2) is (model == "chat")


def replace_sent(sent: Sent, model: str | None) -> Sent:
    return Sent(**{**vars(sent), "model": model})
