"""Replays behind routers: the same fast and slow, in any process; and what a router sees is what there is."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import ConfigError, ReplayConfig, load_trace, replay
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.cost.polynomial import LinearCost
from kvarts.policies import Routing
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.driver import Driver
from kvarts.sim.replay import open_replica
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.routers.policies import POLICIES
from kvarts.sim.traffic.source import source_of
from kvarts.sim.traffic.trace import Trace

from builders.case import Case, Row, cases
from builders.grouped import FULL
from oracles.naive_prefix_router import LookingRouter

MS = 1_000_000
LONG_WINDOW = KvLayer(kind="window", num_heads=1, head_numbers=2, span=100_000)

names = st.sampled_from(
    [
        *POLICIES,
        "llm-d:precise=2,kv=1",
        "llm-d:running=1,tokens=2,cold=1",
        "dynamo-kv:temperature=0.5,overlap_score_credit_decay=1",
    ]
)
routings: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    staleness=st.sampled_from([None, 0, 7, "50ms"]),
    event_lag=st.sampled_from([0, 0, 3, "40ms"]),
    seed=st.integers(0, 2),
    queue_threshold=st.sampled_from([None, None, 0.0, 0.5, 2]),
)


def routing_of(router: str, values: dict[str, Any]) -> Routing:
    """Settings, without those that have no effect on `router`."""
    routing = Routing(**values)
    for field, nothing in (("staleness", None), ("event_lag", 0)):
        try:
            routing.check(router)
        except ConfigError as error:
            if error.field == f"routing.{field}":
                routing = msgspec.structs.replace(routing, **{field: nothing})
    return routing


def in_sessions(trace: Trace, data: st.DataObject) -> Trace:
    rows, seen = [], set()
    for row in trace:
        session = data.draw(st.sampled_from([None, "a", "b"]))
        delay_ns = data.draw(st.sampled_from([0, 5 * MS, 400 * MS, None])) if session in seen else None
        seen.add(session)
        rows.append(msgspec.structs.replace(row, session_id=session, delay_ns=delay_ns))
    return Trace(rows, unit_tokens=trace.unit_tokens, has_output_tokens=trace.has_output_tokens)


@pytest.mark.laws
@given(cases(max_requests=24), names, routings, st.sampled_from([None, None, 2, 5]), st.booleans(), st.data())
def test_leaps_equal_steps(
    case: Case, router: str, values: dict[str, Any], concurrency: int | None, is_in_sessions: bool, data: st.DataObject
) -> None:
    """L5 and L8 behind every router: what it sees, late or not, does not hang on how a replay is carried out."""
    trace = in_sessions(case.trace(), data) if is_in_sessions else case.trace()
    changes: dict[str, Any] = {
        "replicas": 3,
        "router": router,
        "concurrency": concurrency,
        "routing": routing_of(router, values),
    }
    fast, slow = (
        replay(trace, case.config(step_by_step=slowly, audit=not slowly, **changes)) for slowly in (False, True)
    )
    assert fast.to_json() == slow.to_json()
    assert fast.requests_jsonl() == slow.requests_jsonl()
    assert fast.summary["num_completed"] + fast.summary["num_rejected"] == len(case.rows)
    if concurrency is None and not is_in_sessions:
        trace.has_sessions = True  # as if one request could wait for another: from event to event
        assert replay(trace, case.config(**changes)).requests_jsonl() == fast.requests_jsonl()


long_windows = st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=3).map(
    lambda groups: tuple(PartGroup(LONG_WINDOW if is_window else FULL, size) for is_window, size in groups)
)


@pytest.mark.laws
@given(cases(max_requests=24, cancels=True), names, routings, long_windows, st.booleans(), st.data())
def test_groups_that_keep_every_token_are_placed_as_whole_pages(
    case: Case,
    router: str,
    values: dict[str, Any],
    groups: tuple[PartGroup, ...],
    is_in_sessions: bool,
    data: st.DataObject,
) -> None:
    """No window passes a token, so a page has all its parts: whatever the router counts, late or not, is the same.

    Memory runs short with one group only: parts of several are evicted one by one.
    """
    case.profile = "default"
    if len(groups) > 1:
        case.num_pages += sum(row.num_prompt_tokens + row.num_output_tokens for row in case.rows)
    trace = in_sessions(case.trace(), data) if is_in_sessions else case.trace()
    changes: dict[str, Any] = {"replicas": 3, "router": router, "routing": routing_of(router, values)}
    by_group, whole = (
        replay(trace, case.config(**changes, **more)) for more in ({"kv_groups": "all", "groups": groups}, {})
    )
    for field in ("replica", "cached_tokens", "last_token_ns"):
        assert by_group.request_columns[field].tolist() == whole.request_columns[field].tolist()


def test_the_prefix_router_counts_blocks_in_use_as_pages() -> None:
    """A replica that has 40 of 50 tokens, and nothing else in use, costs less than one with 15 others in use."""
    prompts = [[0] * 40, [1] * 15, [0] * 40 + [2] * 10]
    rows = [Row(100 * place, units, len(units), 200, None, 0, None) for place, units in enumerate(prompts)]
    case = Case(rows, 1, 1, 10_000, 8192, 8, "default", 2)
    groups = (PartGroup(FULL, 1), PartGroup(LONG_WINDOW, 2))
    for more in ({}, {"kv_groups": "all", "groups": groups}):
        report = replay(case.trace(), case.config(router="prefix", cost=LinearCost(step_ms=10.0), **more))
        assert report.request_columns["replica"].tolist() == [0, 1, 0]


@pytest.mark.laws
@given(cases(max_requests=30), st.sampled_from([None, None, 3]))
def test_the_prefix_router_sees_what_there_is(case: Case, concurrency: int | None) -> None:
    """An index by events without lag, and metrics of now, lead to the choices of a router that looks."""
    config = case.config(replicas=3, router="prefix", concurrency=concurrency)
    told = replay(case.trace(), config)
    trace = case.trace()
    engines = [open_replica(config, []) for _ in range(3)]
    looked = RequestLog(largest_hit_counts=config.profile == "mocker")
    source = source_of(trace, concurrency=concurrency, speedup=1.0)
    Driver([Arrivals(trace, source, LookingRouter(engines), engines, looked)], engines).run()
    for field in ("replica", "cached_tokens", "last_token_ns"):
        assert told.request_columns[field].tolist() == list(looked.columns[field])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_prefix_router_sees_host_memory(order: tuple[int, int]) -> None:
    """What a replica has below its device counts: the last request goes where its prefix is, in either order.

    Two prompts arrive together, five pairs of others push both off the devices, and the first comes back.
    """
    from kvarts import OffloadConfig
    from kvarts.core.content import pack_units
    from kvarts.sim.traffic.trace import TraceRequest

    def row(number: int, at_s: float, first: int) -> TraceRequest:
        return TraceRequest(number, round(at_s * 1e9), pack_units(range(first, first + 40)), 40 * 512, 1)

    pair = [row(number, number / 100, 1000 * first) for number, first in enumerate(order)]
    others = [row(2 + n, 20 * (1 + n // 2) + n % 2 / 100, 2000 + 1000 * n) for n in range(10)]
    trace = Trace([*pair, *others, row(12, 200, 0)], unit_tokens=512)
    config = ReplayConfig(num_pages=2600, replicas=2, router="prefix", offload=OffloadConfig(host_pages=100_000))
    assert replay(trace, config).summary["num_cached_tokens"] == 20464


SEEDED = ("dynamo-kv", "llm-d", "power-of-two", "aibrix-prefix")
ROUTERS = ("prefix", "session", *SEEDED)


@cache
def replayed_in_a_process(seed: int, hash_seed: int) -> dict[str, str]:
    """Return the requests of a replay by each of ROUTERS, all in one process of its own."""
    code = (
        "import json, sys; from kvarts import ReplayConfig, load_trace, replay; "
        "from kvarts.policies import Routing; "
        "trace, seed = load_trace('sample:azure-chat'), Routing(seed=int(sys.argv[1])); "
        "of = lambda router: ReplayConfig(num_pages=3000, replicas=5, router=router, routing=seed); "
        "rows = {router: replay(trace, of(router)).requests_jsonl().decode() for router in sys.argv[2:]}; "
        "json.dump(rows, sys.stdout)"
    )
    env = {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code, str(seed), *ROUTERS]
    printed: dict[str, str] = json.loads(subprocess.run(command, capture_output=True, check=True, env=env).stdout)
    return printed


@pytest.mark.slow
def test_the_same_bytes_in_any_process() -> None:
    """L10: hash seeds do not matter, and the seed of a router does. One test: each process replays all routers."""
    first, other_hashes, other_seed = (replayed_in_a_process(*seeds) for seeds in ((1, 1), (1, 2), (2, 1)))
    assert all(first.values()) and first == other_hashes
    for router in SEEDED:
        assert first[router] != other_seed[router]


def test_late_metrics_cost_what_a_burst_does() -> None:
    """All requests of a burst see the metrics from before it, and go to the same few workers."""
    trace = load_trace("sample:mooncake")
    means = [
        replay(
            trace,
            ReplayConfig(
                num_pages=65_536, replicas=4, router="llm-d:running=1,queue=1", routing=Routing(staleness=staleness)
            ),
        ).summary["ttft_ms"]["mean"]
        for staleness in (0, "50ms", "5s")
    ]
    assert means == sorted(means) and means[2] > 1.5 * means[0]


@pytest.mark.slow
def test_late_events_hide_what_is_new() -> None:
    trace = load_trace("sample:agents")
    hits = [
        replay(trace, ReplayConfig(num_pages=30_000, replicas=4, router="prefix", routing=Routing(event_lag=lag)))
        .summary["prefix_hit_ratio"]
        for lag in (0, "3600s")
    ]  # fmt: skip
    assert hits[1] < hits[0] - 0.02


def test_a_run_directory_is_that_of_the_command(tmp_path: Path, run_command: Any, capsys: Any) -> None:
    config = tmp_path / "c.toml"
    config.write_text('replicas = 2\npages = 40000\nrouter = "llm-d"\n[routing]\nstaleness = "100ms"\nseed = 3\n')
    options = ["--replicas", "2", "--pages", "40000", "--router", "llm-d", "--set", "routing.seed=3"]
    assert run_command("replay", "sample:azure-chat", "--config", config, "--json") == 0
    from_file = capsys.readouterr().out
    assert run_command("replay", "sample:azure-chat", *options, "--set", "routing.staleness=100ms", "--json") == 0
    assert capsys.readouterr().out == from_file
    config.write_text('replicas = 2\nrouter = "os:getcwd"\n')
    assert run_command("replay", "sample:azure-chat", "--config", config) == 2
    assert "names code, which no file may" in capsys.readouterr().err
