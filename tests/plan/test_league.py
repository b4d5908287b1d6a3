"""Policies of the league: each keeps what every order promises, none is above the optimum, one of one's own runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvarts.base.errors import ConfigError
from kvarts.cli.plan import POLICY_NAMES
from kvarts.core.hints import Hints
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.plan.cache import CachePlan, serial_hits
from kvarts.sim.auto_order import LRU, AutoOrder, WeightedOrder, Weights
from kvarts.sim.eviction import ALL_POLICIES, order_maker
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.testing import EvictionOrderContract, leave

from builders.plan_traces import small_traces
from published_orders import (
    LpcOrder,
    MarconiOrder,
    SaeOrder,
    TailOptimisedOrder,
    ToolTtlOrder,
    WorkloadAwareOrder,
)
from queue_orders import ArcOrder, S3FifoOrder, TinyLfuOrder

SAMPLE = Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))
PUBLISHED = {
    order.__name__: order
    for order in (
        ArcOrder,
        LpcOrder,
        MarconiOrder,
        S3FifoOrder,
        SaeOrder,
        TailOptimisedOrder,
        TinyLfuOrder,
        ToolTtlOrder,
        WorkloadAwareOrder,
    )
}
EVERY = (*ALL_POLICIES, *PUBLISHED)
COST = "linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,context_token_ms=0"
OWN = '''
from kvarts.sim.orders import RankedOrder


class Newest(RankedOrder):
    """Evict what came last."""

    def rank(self, node, hits, born):
        return (-self.now,)


class NoOrder:
    def __init__(self, size):
        self.size = size
'''


def prompts(sequence: Iterable[int]) -> Trace:
    """Prompts of eleven pages of one token, by number; two numbers share nothing."""
    return Trace(
        [TraceRequest(row, row, (range(which * 100, which * 100 + 11),), 11, 1) for row, which in enumerate(sequence)]
    )


def maker(name: str, trace: Trace) -> Callable[[], Any]:
    return PUBLISHED[name] if name in PUBLISHED else order_maker(name, trace)


class TestOrdersOfTheLeague(EvictionOrderContract):
    @pytest.fixture(autouse=True, params=EVERY)
    def policy(self, request: pytest.FixtureRequest) -> None:
        self.name: str = request.param

    def make_tree(self) -> PrefixTree:
        return PrefixTree(maker(self.name, Trace([]))())


@pytest.mark.laws
@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=2 * settings().max_examples)
@given(trace=small_traces(), page_size=st.integers(1, 4), num_pages=st.integers(1, 20))
def test_no_policy_is_above_the_optimum(name: str, trace: Trace, page_size: int, num_pages: int) -> None:
    plan = CachePlan(trace, page_size)
    hits = serial_hits(trace, page_size, num_pages, maker(name, trace))
    assert hits <= plan.optimum.hit_pages(num_pages)
    if name == "lru":
        assert hits == plan.curve.hit_pages(num_pages)


@given(small_traces(), st.integers(1, 4), st.integers(1, 20))
def test_no_correction_is_lru(trace: Trace, page_size: int, num_pages: int) -> None:
    plan = CachePlan(trace, page_size)
    hits = serial_hits(trace, page_size, num_pages, lambda: WeightedOrder(LRU))
    assert hits == plan.curve.hit_pages(num_pages)


def test_what_adapts_keeps_what_comes_back_where_lru_loses_it() -> None:
    """Ten prompts that come back, each time after thirty that do not, in a pool for fourteen."""
    rounds = 60
    trace = prompts(
        which for turn in range(rounds) for which in (*range(10), *range(10 + 30 * turn, 10 + 30 * (turn + 1)))
    )
    plan = CachePlan(trace, 1)
    assert plan.curve.hit_pages(154) == 0
    hits = serial_hits(trace, 1, 154, AutoOrder)
    assert 0.8 * plan.optimum.hit_pages(154) < hits <= plan.optimum.hit_pages(154)
    fits = prompts(which for _ in range(30) for which in range(14))
    assert serial_hits(fits, 1, 154, AutoOrder) == 14 * 29 * 10


def test_what_is_used_to_stay_away_goes_before_what_comes_back_soon() -> None:
    """Two prompts that come back every other time, eight that come back every twentieth, in a pool for three."""
    trace = prompts(which for turn in range(200) for which in (turn % 2, 100 + turn % 8))
    hits = {}
    for malus in (0.0, 0.5):
        hits[malus] = serial_hits(trace, 1, 33, partial(WeightedOrder, Weights(malus=malus, most_away=30)))
    assert hits[0.0] == CachePlan(trace, 1).curve.hit_pages(33)
    assert hits[0.5] > 1.2 * hits[0.0]


@pytest.mark.parametrize("share", [0.02, 0.05, 0.15, 0.4])
@pytest.mark.parametrize("name", ["sample:agents", "sample:mooncake"])
def test_auto_is_not_half_a_point_below_lru_on_bundled_traces(name: str, share: float) -> None:
    trace = load_trace(name)
    page_size = trace.unit_tokens
    plan = CachePlan(trace, page_size)
    num_pages = max(plan.least_pages, round(share * plan.curve.most_pages))
    least = plan.curve.hit_pages(num_pages) - 0.005 * plan.num_prompt_tokens / page_size
    assert serial_hits(trace, page_size, num_pages, AutoOrder) >= least


@pytest.mark.laws
@pytest.mark.parametrize("make", [AutoOrder, LpcOrder, SaeOrder, WorkloadAwareOrder])
@settings(max_examples=2 * settings().max_examples)
@given(trace=small_traces(), num_pages=st.integers(1, 20))
def test_what_is_learned_is_the_same_again(make: Any, trace: Trace, num_pages: int) -> None:
    """L10: and the first of all listed runs is the next to go."""
    assert serial_hits(trace, 2, num_pages, make) == serial_hits(trace, 2, num_pages, make)


def test_a_client_that_runs_a_tool_keeps_its_pages() -> None:
    """Prompts that come back every sixth time, each with a tool, among others that do not, in a pool for four."""
    trace = prompts(which for turn in range(100) for which in (turn % 3, 100 + turn))
    tool = Hints(tool="bash")
    told = Trace([replace(request, hints=tool) if not request.row % 2 else request for request in trace])
    assert serial_hits(trace, 1, 44, AutoOrder) < 97 * 10
    assert serial_hits(told, 1, 44, AutoOrder) == 97 * 10


def test_tail_optimised_gives_up_first_what_a_next_turn_can_compute_again() -> None:
    """Pages of the last turn of a conversation go before an older conversation that added nothing."""

    class Few(TailOptimisedOrder):
        MOST_TOKENS = 25

    firsts = []
    for order in (LruOrder(), Few()):
        cache = PageCache(CountPool(100), PrefixTree(order))
        leave(cache, list(range(30)), 0)
        leave(cache, list(range(100, 120)), 1)
        leave(cache, list(range(100, 130)), 2)
        first = order.next_run()
        firsts.append((first.start, first.end))
    assert firsts == [(0, 30), (20, 30)]


@pytest.mark.long
def test_auto_is_not_half_a_point_below_lru_on_the_recorded_traces(conversation_trace: Path) -> None:
    for name in ("conversation", "synthetic"):
        trace = load_trace(conversation_trace.with_name(f"{name}_trace.jsonl"))
        plan = CachePlan(trace, 512)
        trace_pages = plan.num_prompt_tokens / 512
        for num_pages in (2000, 4000, 8000, 16000):
            least = plan.curve.hit_pages(num_pages) - 0.005 * trace_pages
            assert serial_hits(trace, 512, num_pages, AutoOrder) >= least


def test_a_session_that_is_over_goes_first() -> None:
    """Two sessions in turn, in a pool for both; one that is over would push the first out."""
    rows = [(0, "a", 11), (2, "over", 11), (1, "b", 11), (0, "a", 12), (1, "b", 12), (0, "a", 13)]
    trace = Trace(
        [
            TraceRequest(row, row, (range(which * 100, which * 100 + length),), length, 1, session_id=session)
            for row, (which, session, length) in enumerate(rows)
        ]
    )
    # Pages of the third go before any of the first two, which find all but the last turn added.
    assert serial_hits(trace, 1, 25, order_maker("session-aware", trace)) == 11 + 11 + 12
    assert CachePlan(trace, 1).curve.hit_pages(25) < 11 + 11 + 12


def test_the_help_names_every_policy() -> None:
    assert set(POLICY_NAMES.split(", ")) == {name for name in ALL_POLICIES if name != "lru"}


@pytest.mark.slow
def test_a_policy_of_ones_own_takes_part(
    asked: Callable[..., Any],
    run_command: Callable[..., int],
    capsysbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "my_policies.py").write_text(OWN)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:200]))
    monkeypatch.syspath_prepend(tmp_path)
    setting = ("--page-size", 512, "--at", 2000, "--pages", 2000, "--cost", COST, "--set", "slo.ttft_ms=5000")
    plan = asked("plan", "policies", trace, *setting, "--policy", "my_policies:Newest", "--policy", "auto", "--json")
    rows = [row for row in plan["league"] if "replayed" not in row]
    assert [row["policy"] for row in rows] == ["lru", "my_policies:Newest", "auto"]
    assert rows[0]["hit_ratio"] == plan["at"][0]["hit_ratio"]
    assert all(row["hit_ratio"] <= row["optimum_hit_ratio"] for row in rows)
    replayed = [row for row in plan["league"] if "replayed" in row]
    assert [row["policy"] for row in replayed] == ["lru", "my_policies:Newest", "auto"]
    assert all(row["ttft_ms"]["mean"] > 0 and row["goodput_per_s"] is not None for row in replayed)
    for row in replayed:
        words = shlex.split(row["command"])
        assert words[:2] == ["kvarts", "replay"]
        assert asked(*words[1:], "--json")["ttft_ms"] == row["ttft_ms"]
    assert run_command("plan", "policies", trace, *setting, "--policy", "my_policies:NoOrder") == 2
    assert b"makes no EvictionOrder" in capsysbinary.readouterr().err


@pytest.mark.slow
def test_a_replay_takes_a_policy_by_its_name(
    asked: Callable[..., Any],
    tmp_path: Path,
    run_command: Callable[..., int],
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    """LRU by its name is the default, another policy is another replay, and a file and a sweep can name one too."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:400]))
    setting = ("--page-size", 512, "--pages", 3000, "--cost", COST, "--replicas", 2)
    plain = asked("replay", trace, *setting, "--json")
    hits = {"lru": plain["prefix_hit_ratio"]}
    for name in (
        *ALL_POLICIES,
        "queue_orders:ArcOrder",
        "published_orders:TailOptimisedOrder",
        "published_orders:WorkloadAwareOrder",
    ):
        summary = asked("replay", trace, *setting, "--eviction", name, "--json")
        if name == "lru":
            assert summary == plain
        hits[name] = summary["prefix_hit_ratio"]
    assert len(set(hits.values())) >= 4
    config = tmp_path / "sweep.toml"
    config.write_text(
        f'trace = "trace.jsonl"\npage_size = 512\npages = 3000\nreplicas = 2\ncost = "{COST}"\n'
        '[grid]\neviction = ["lru", "auto"]\n'
    )
    assert run_command("sweep", config, "-o", tmp_path / "out", "--workers", "1") == 0
    rows = json.loads((tmp_path / "out" / "points.json").read_bytes())
    assert {row["eviction"]: row["hit_ratio"] for row in rows} == {name: hits[name] for name in ("lru", "auto")}
    capsysbinary.readouterr()
    assert run_command("replay", trace, "--eviction", "nothing") == 2
    assert b"--eviction: 'nothing' is not a policy" in capsysbinary.readouterr().err
    config.write_text(config.read_text().replace('"auto"', '"nothing"'))
    assert run_command("sweep", config, "-o", tmp_path / "new", "--workers", "1") == 2
    assert b"'nothing' is not a policy" in capsysbinary.readouterr().err


@pytest.mark.parametrize("name", ["nothing", "kvarts.sim.orders:Nothing", "no_such_module:X", "kvarts:__version__"])
def test_what_is_no_policy_is_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        order_maker(name, Trace([]))
    assert caught.value.field == "eviction"
    assert name in caught.value.what
