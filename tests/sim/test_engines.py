"""What is around the steps of an engine: planning ahead, the front end, engines by name, drafts, and how sure it is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.content import pack_units
from kvarts.core.kv.groups import PartGroup
from kvarts.core.sched.plan import Batch
from kvarts.cost.roofline import RooflineCost
from kvarts.cost.roofline_settings import shipped_constants
from kvarts.plan.latency import COST_ERROR, cost_error_of
from kvarts.sim.config import ENGINES, SECTIONS, TABLES, ReplayConfig, make_config
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.workload import UniformLength, Workload
from kvarts.sim.vllm_start import VERSIONS

from builders.case import ROUTERS, Case, cases
from builders.grouped import assert_same_outcome, part_groups
from builders.laws import assert_as_in_naive, assert_fast_as_slow
from builders.outcome import run_kvarts

STEP_NS = 10_000_000
WORKLOAD = Workload(
    num_sessions=60,
    new_tokens=UniformLength(20, 900),
    output_tokens=UniformLength(2, 80),
    sessions_per_s=30.0,
    seed=3,
)
MODEL = {"model": "llama-3.1-8b", "device": "h100-80gb"}

# Planning ahead -------------------------------------------------------------------------------------------


@pytest.mark.laws
@given(cases() | cases(cancels=True), st.booleans())
def test_every_request_and_every_eviction_is_as_in_the_naive_engine(case: Case, stops: bool) -> None:
    """L4, L7, L8, where the next step is planned while one runs."""
    requests, naive_engines = case.naive(plans_ahead=True, stops=stops)
    outcome = run_kvarts(case, async_scheduling=True, stop_tokens=stops)
    assert_as_in_naive(case, outcome, requests, naive_engines)


@pytest.mark.laws
@given(
    cases(max_requests=16) | cases(max_requests=16, limits=True) | cases(max_requests=16, cancels=True),
    st.sampled_from([{}, {"concurrency": 2}, {"frontend_ms": 3.0}, {"stop_tokens": True}]),
)
def test_fast_forward_equals_step_by_step(case: Case, changes: dict[str, Any]) -> None:
    assert_fast_as_slow(case, async_scheduling=True, **changes)


@pytest.mark.laws
@given(cases(max_requests=16) | cases(max_requests=16, cancels=True), part_groups(), st.sampled_from(["all", "tails"]))
def test_fast_forward_equals_step_by_step_with_groups(case: Case, groups: tuple[PartGroup, ...], keeps: str) -> None:
    """L1 to L3, L5."""
    case.profile = "default"
    case.num_pages = max(1, case.num_pages * 2 // 3)
    changes: dict[str, Any] = {"async_scheduling": True, "kv_groups": keeps, "groups": groups, "audit": True}
    fast, slow = (replay(case.trace(), case.config(step_by_step=slowly, **changes)) for slowly in (False, True))
    assert_same_outcome(fast, slow)


def naive_admissions(rows: list[tuple[int, int]]) -> list[int]:
    """When each (arrival, tokens) is admitted where every step takes STEP_NS and nothing is ever full.

    The plan of a step that follows another is made when that one starts.
    """
    admitted = [-1] * len(rows)
    left: dict[int, int] = {}
    now_ns, planned_ns = 0, 0
    while min(admitted) < 0 or left:
        arriving = [at for (at, _), since in zip(rows, admitted, strict=True) if since < 0]
        if not left and min(arriving) > planned_ns:  # else the plan has one who came before it was made
            now_ns = max(now_ns, min(arriving))
            planned_ns = now_ns
        for index, (arrival_ns, num_tokens) in enumerate(rows):
            if admitted[index] < 0 and arrival_ns <= planned_ns:
                admitted[index] = now_ns
                left[index] = num_tokens
        planned_ns = now_ns
        now_ns += STEP_NS
        left = {index: count - 1 for index, count in left.items() if count > 1}
    return admitted


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=8))
def test_a_request_joins_one_step_later_than_it_could(steps: list[tuple[int, int]]) -> None:
    """Arrivals in halves of a step, so that they fall within steps and between them."""
    rows = sorted((half * STEP_NS // 2, tokens) for half, tokens in steps)
    trace = Trace(
        [TraceRequest(index, at, (range(index, index + 1),), 1, tokens) for index, (at, tokens) in enumerate(rows)]
    )
    config = ReplayConfig(cost=lambda batch: STEP_NS / 1e6, async_scheduling=True)
    columns = replay(trace, config).request_columns
    first = rows[0][0]
    expected = naive_admissions([(at - first, tokens) for at, tokens in rows])
    assert (columns["first_admitted_ns"] - columns["arrival_ns"][0]).tolist() == expected


@pytest.mark.parametrize("changes", [{}, {"concurrency": 7}, {"replicas": 3, "router": ROUTERS[-1]}])
def test_a_busy_engine_makes_requests_wait_longer(changes: dict[str, Any]) -> None:
    late, soon = (
        replay(WORKLOAD, make_config({**MODEL, **changes, "async_scheduling": ahead})).summary
        for ahead in (True, False)
    )
    assert late["num_completed"] == soon["num_completed"] == 60
    assert late["ttft_ms"]["mean"] > 1.1 * soon["ttft_ms"]["mean"]


def test_ranks_in_lock_step_plan_ahead_as_well() -> None:
    settings = {"model": "qwen3-30b-a3b", "device": "h100", "data_parallel": 2, "expert_parallel": 2}
    fast, slow, soon = (
        replay(WORKLOAD, make_config({**settings, "concurrency": 8, **changes}))
        for changes in (
            {"async_scheduling": True},
            {"async_scheduling": True, "step_by_step": True},
            {"async_scheduling": False},
        )
    )
    assert fast.requests_jsonl() == slow.requests_jsonl()
    assert fast.summary["ttft_ms"]["mean"] > soon.summary["ttft_ms"]["mean"]


# The front end --------------------------------------------------------------------------------------------


def test_the_front_end_comes_before_the_engine() -> None:
    """Requests that arrive at known times are all shifted; in a closed loop the engine has fewer of them."""
    with_it, without = (
        replay(WORKLOAD, make_config({**MODEL, "frontend_ms": ms, "cost": "linear:step_ms=7"})) for ms in (20.0, 0.0)
    )
    ttft = [
        [first - arrival for first, arrival in zip(rows["first_token_ms"], rows["arrival_ms"], strict=True)]
        for rows in (with_it.requests, without.requests)
    ]
    assert ttft[0] == pytest.approx([value + 20.0 for value in ttft[1]], abs=1e-6)
    with_it, without = (
        replay(WORKLOAD, make_config({**MODEL, "frontend_ms": ms, "concurrency": 8})) for ms in (200.0, 0.0)
    )
    assert with_it.summary["duration_ms"] > without.summary["duration_ms"] + 200.0
    assert with_it.summary["tpot_ms"]["mean"] < without.summary["tpot_ms"]["mean"]


# Engines by name ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in VERSIONS])
def test_an_engine_is_a_set_of_defaults(name: str) -> None:
    config = make_config({**MODEL, "engine": name})
    known = ENGINES[name]  # type: ignore[index]
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (known.max_batched_tokens, known.max_seqs)
    assert (config.async_scheduling, config.frontend_ms) == (known.async_scheduling, known.frontend_ms)
    assert config.cost.separate_passes == known.separate_passes == (name == "sglang")
    assert config.to_builtins()["engine"] == name
    own = make_config({**MODEL, "engine": name, "max_seqs": 7, "async_scheduling": False, "memory_fraction": 0.5})
    assert (own.max_num_seqs, own.async_scheduling) == (7, False)
    assert own.num_pages < config.num_pages
    alone = make_config({"engine": name, "cost": "linear:step_ms=5"})
    assert alone.max_num_seqs == known.max_seqs


@pytest.mark.parametrize(("name", "given", "cached"), [
    ("vllm", {}, 2047), ("vllm", {"full_prompt_hits": False}, 1536), ("sglang", {}, 1536), ("none", {}, 1536)
])  # fmt: skip
def test_vllms_connector_loads_a_whole_prompt_and_computes_its_last_token(
    name: str, given: dict[str, Any], cached: int
) -> None:
    """The prompt has four whole pages, which are all in host memory when it comes again."""
    prompts = [(1, 2048), (2, 6144), (1, 2048)]
    rows = [
        TraceRequest(row, row * 10**9, pack_units([token] * count), count, 1)
        for row, (token, count) in enumerate(prompts)
    ]
    offload = {"host_pages": 40, "h2d": "10000GB/s", "latency_us": 0, **given}
    config = make_config(
        {**MODEL, "pages": 13, "page_size": 512, "engine": name, "offload": offload}, sections=(*SECTIONS, *TABLES)
    )
    requests: Any = replay(Trace(rows), config).requests
    assert requests["cached_tokens"].tolist() == [0, 0, cached]


def test_with_kv_groups_a_load_never_covers_a_whole_prompt() -> None:
    settings = {**MODEL, "model": "gpt-oss-20b", "engine": "vllm", "offload": {"host_memory": "8GiB"}}
    config = make_config(settings, sections=(*SECTIONS, *TABLES))
    assert config.kv_groups == "all" and config.offload is not None and not config.offload.full_prompt_hits


def test_without_an_engine_nothing_is_said_of_one() -> None:
    for settings in ({**MODEL}, {**MODEL, "engine": "none"}):
        config = make_config(settings)
        assert not config.async_scheduling and config.frontend_ms == 0.0
        assert not {"engine", "async_scheduling", "frontend_ms"} & set(config.to_builtins())
    with pytest.raises(ConfigError, match="engine"):
        make_config({**MODEL, "engine": "llama.cpp"})


def test_prompts_and_decodes_in_passes_of_their_own_take_longer() -> None:
    costs = [RooflineCost(llm="llama-3.1-8b", device="h100-80gb", separate_passes=apart) for apart in (False, True)]
    mixed, apart = (replay(WORKLOAD, ReplayConfig(cost=cost)).summary["ttft_ms"]["mean"] for cost in costs)
    assert apart > mixed


# Drafts ---------------------------------------------------------------------------------------------------


def test_drafts_make_more_tokens_of_a_step() -> None:
    plain = RooflineCost(llm="deepseek-v3", device="h200", tensor_parallel=8)
    drafting = msgspec.structs.replace(plain, speculative_tokens=3, acceptance=(0.8, 0.6, 0.4))
    assert drafting.tokens_per_step == pytest.approx(2.8)
    batch = Batch((), 8, 8000, 1)
    gain = plain.step_ns(batch) / drafting.step_ns(batch)
    assert 1.3 < gain < 2.8, "verifying and drafting cost something"
    none = msgspec.structs.replace(drafting, acceptance=(0.0, 0.0, 0.0))
    assert none.step_ns(batch) > plain.step_ns(batch)


def test_a_replay_with_drafts_needs_fewer_steps_time_and_more_memory() -> None:
    settings = {"model": "deepseek-v3", "device": "b200", "tensor_parallel": 8}
    drafts = {"speculative_tokens": 3, "acceptance": "0.8,0.6,0.4"}
    plain, drafting = make_config(settings), make_config({**settings, **drafts})
    assert 0.94 * plain.num_pages < drafting.num_pages < plain.num_pages
    fast, slow = (
        replay(WORKLOAD, make_config({**settings, **drafts, "step_by_step": slowly})) for slowly in (False, True)
    )
    assert fast.requests_jsonl() == slow.requests_jsonl()
    assert fast.summary["tpot_ms"]["mean"] < 0.7 * replay(WORKLOAD, plain).summary["tpot_ms"]["mean"]
    assert fast.summary["config"]["cost"]["speculative_tokens"] == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speculative_tokens": 2}, "go together"),
        ({"acceptance": "0.8"}, "go together"),
        ({"speculative_tokens": 1, "acceptance": "much"}, "'much' is not a list such as"),
        ({"speculative_tokens": 2, "acceptance": "0.8"}, "has 1 rates for 2 speculative tokens"),
        ({"speculative_tokens": 2, "acceptance": "0.5,0.6"}, "never rise: got 0.6 after 0.5"),
        ({"speculative_tokens": 1, "acceptance": "1.5"}, "must be from 0 to 1"),
        ({"speculative_tokens": -1, "acceptance": "0.5"}, "speculative_tokens"),
    ],
)
def test_drafts_that_cannot_be_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({**MODEL, **settings})
    assert says in str(caught.value)


# How sure it is -------------------------------------------------------------------------------------------


def test_a_report_says_how_sure_it_is_from_errors_of_others() -> None:
    summary = replay(WORKLOAD, make_config(MODEL)).summary
    for row in shipped_constants().held_out_of("dense").values():
        for statistic, value in summary[f"{row.metric}_ms"].items():
            assert summary["uncertainty"][f"{row.metric}_ms"][statistic] == pytest.approx(value * row.one_sigma)
    cost = RooflineCost(llm="llama-3.1-8b", device="h100-80gb", step_us=123.0)
    assert "uncertainty" not in replay(WORKLOAD, ReplayConfig(cost=cost)).summary
    assert "uncertainty" not in replay(WORKLOAD).summary


def test_plans_look_as_far_as_one_engine_in_ten() -> None:
    cost = RooflineCost(llm="qwen3-30b-a3b", device="h100-80gb")
    assert cost_error_of(cost) == pytest.approx(1.28 * cost.held_out["tpot"].one_sigma, abs=0.006)
    assert cost_error_of(msgspec.structs.replace(cost, step_us=1.0)) == COST_ERROR
    assert cost_error_of(ReplayConfig().cost) == COST_ERROR


# Without a prefix cache -----------------------------------------------------------------------------------


@pytest.mark.laws
@given(cases(max_requests=16) | cases(max_requests=16, cancels=True), st.booleans(), part_groups() | st.just(()))
def test_without_a_prefix_cache_fast_forward_equals_step_by_step(
    case: Case, is_async: bool, groups: tuple[PartGroup, ...]
) -> None:
    """L1 to L3, L5; the audit checks that nothing is hit."""
    case.profile = "default"
    changes: dict[str, Any] = {"no_prefix_caching": True, "async_scheduling": is_async, "audit": True}
    if groups:
        changes |= {"kv_groups": "all", "groups": groups}
    fast, slow = (replay(case.trace(), case.config(step_by_step=slowly, **changes)) for slowly in (False, True))
    assert_same_outcome(fast, slow)
    assert not any(fast.requests["cached_tokens"])


@pytest.mark.laws
@given(cases(max_requests=16), st.booleans())
def test_without_a_prefix_cache_requests_are_as_those_that_share_nothing(case: Case, is_async: bool) -> None:
    """Only a request that is preempted would find something then: pages of its own."""
    case.profile = "default"
    trace = case.trace()
    rows = [msgspec.structs.replace(row, tenant=str(place)) for place, row in enumerate(trace)]
    apart = Trace(rows, unit_tokens=trace.unit_tokens, has_output_tokens=trace.has_output_tokens)
    uncached = replay(trace, case.config(async_scheduling=is_async, no_prefix_caching=True))
    alone = replay(apart, case.config(async_scheduling=is_async))
    assume(not any(alone.requests["preemptions"]))
    assert uncached.requests_jsonl() == alone.requests_jsonl()


def test_a_router_that_chooses_by_cached_pages_is_refused_without_a_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="chooses by cached pages"):
        ReplayConfig(no_prefix_caching=True, replicas=2, router="prefix")
    ReplayConfig(no_prefix_caching=True, replicas=2, router="least-loaded")
