"""What is around the steps of an engine: planning ahead, the front end, engines by name, drafts, and how sure it is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.cli.outputs import render_table
from kvarts.core.content import pack_units
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.sched.plan import Batch
from kvarts.cost.hardware.fit import local_kv_groups
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.cost.roofline import RooflineCost
from kvarts.cost.roofline_settings import shipped_constants
from kvarts.plan.confidence import COST_ERROR, WIDER, cost_error_of
from kvarts.sim.config import ENGINES, SECTIONS, TABLES, ReplayConfig, engine_of, make_config
from kvarts.sim.replaying import replay
from kvarts.sim.report.words import opening
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.workload import UniformLength, Workload

from builders.case import ROUTERS, Case, branching_cases, cases, following_cases
from builders.grouped import FULL, assert_same_outcome, part_groups, settings_of_keeps
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
TURNS = msgspec.structs.replace(WORKLOAD, turns_per_session=4, num_sessions=30, prefix_tokens=500, num_prefix_groups=8)
"""Sessions that go on from answers, of several groups."""
MODEL = {"model": "llama-3.1-8b", "device": "h100-80gb"}
STORAGE = {
    "hicache_ratio": 0.4,
    "hicache_storage_backend": "file",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 16}',
}
WINDOWS = {"sliding_window_size": 127}
STATES = {"max_mamba_cache_size": 200, "max_seqs": 40}
QWEN = {"model": "qwen3.5-35b-a3b", "device": "h200"}

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


@pytest.mark.laws
@given(
    branching_cases()
    | following_cases()
    | cases(max_requests=16)
    | cases(max_requests=16, limits=True)
    | cases(max_requests=16, cancels=True),
    part_groups(by_page=True),
    st.sampled_from(["all", "tails", "0"]),
    st.sampled_from([{}, {"concurrency": 3}, {"stop_tokens": True}, {"router": ROUTERS[-1], "replicas": 2}]),
    st.sampled_from(["snapshots", "all", "align"]),
)
def test_decodes_that_are_followed_release_and_publish_when_those_do_that_an_auditor_reads(
    case: Case, groups: tuple[PartGroup, ...], keeps: str, changes: dict[str, Any], mode: str
) -> None:
    """L1 to L3, L5: leaps, single steps, and steps whose events are read, of which every page of a decode is named."""
    case.profile = "default"
    case.num_pages = max(1, case.num_pages * 2 // 3)
    if keeps == "0":
        aligns = mode == "align" and not any(group.has_states_by_page for group in groups)
        groups = tuple(group for group in groups if (aligns or not group.is_state) and not group.layer.sink)
        assume(any(group.layer.keeps_tokens for group in groups))
    settings: dict[str, Any] = {**settings_of_keeps(case, keeps), "groups": groups, "async_scheduling": True, **changes}
    if any(group.is_state for group in groups) and not any(group.has_states_by_page for group in groups):
        settings["mamba_cache_mode"] = mode
    read, fast, slow = (
        replay(case.trace(), case.config(**settings, **how)) for how in ({"audit": True}, {}, {"step_by_step": True})
    )
    assert_same_outcome(fast, slow)
    assert_same_outcome(read, fast)


@pytest.mark.laws
@given(
    branching_cases() | following_cases() | cases(max_requests=16) | cases(max_requests=16, cancels=True),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([{}, {"concurrency": 3}, {"concurrency": 8}, {"async_scheduling": False}]),
)
def test_decodes_take_pages_in_turn_where_windows_release_them_in_the_same_step(
    case: Case, num_equal: int, num_pages: int, share: int, changes: dict[str, Any]
) -> None:
    """L1 to L3, L5: equal groups of windows that retain the parts of prompts only, in a memory that is full."""
    case.profile = "default"
    case.num_pages = max(1, case.num_pages * share // 3)
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=num_pages * case.page_size), 2)
    groups = (*(window,) * num_equal, PartGroup(FULL, 2))
    settings = {**settings_of_keeps(case, "0"), "groups": groups, "async_scheduling": True, **changes}
    read, fast, slow = (
        replay(case.trace(), case.config(**settings, **how)) for how in ({"audit": True}, {}, {"step_by_step": True})
    )
    assert_same_outcome(fast, slow)
    assert_same_outcome(read, fast)


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


@pytest.mark.parametrize("changes", [{"cost": "linear:step_ms=7"}, {"concurrency": 8}, {"concurrency": 1}])
def test_the_front_end_adds_its_time_to_each_first_token_and_to_nothing_else(changes: dict[str, Any]) -> None:
    """In a closed loop as well: the engine has as many requests in flight with it as without."""
    with_it, without = (replay(WORKLOAD, make_config({**MODEL, "frontend_ms": ms, **changes})) for ms in (20.0, 0.0))
    ttft, between = (
        [
            [end - begin for begin, end in zip(rows[begins], rows[ends], strict=True)]
            for rows in (with_it.requests, without.requests)
        ]
        for begins, ends in (("arrival_ms", "first_token_ms"), ("first_token_ms", "last_token_ms"))
    )
    assert ttft[0] == pytest.approx([value + 20.0 for value in ttft[1]], abs=1e-6)
    assert between[0] == pytest.approx(between[1], abs=1e-6)
    assert min(with_it.requests["arrival_ms"]) == 0.0


# Engines by name ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ENGINES if not name.startswith("vllm")])
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
    ("vllm", {}, 2047), ("vllm", {"full_prompt_hits": False}, 1536), ("tensorrt-llm", {}, 1536), ("none", {}, 1536)
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
    pages: dict[str, Any] = {"pages": 14, "max_model_len": 6145} if name == "vllm" else {"pages": 13}
    config = make_config(
        {**MODEL, **pages, "page_size": 512, "engine": name, "offload": offload}, sections=(*SECTIONS, *TABLES)
    )
    requests: Any = replay(Trace(rows), config).requests
    assert requests["cached_tokens"].tolist() == [0, 0, cached]


def test_vllm_starts_as_its_newest_version_where_a_replay_has_all_of_it() -> None:
    """Sessions prevent that start, and the report gives the reason; without a model there is no start."""
    started = make_config({**MODEL, "engine": "vllm"})
    assert started.to_builtins()["engine"] == "vllm==0.33" and started.start is not None and not started.not_started
    assert (started.max_num_batched_tokens, started.max_num_seqs, started.async_scheduling) == (8192, 1024, True)
    own = make_config({**MODEL, "engine": "vllm", "max_seqs": 7, "async_scheduling": False})
    assert (own.max_num_seqs, own.async_scheduling) == (7, False)
    of_groups = {**MODEL, "model": "gpt-oss-20b", "engine": "vllm"}
    tiered = make_config({**of_groups, "offload": {"host_memory": "8GiB"}}, sections=(*SECTIONS, *TABLES))
    assert tiered.start is not None and tiered.retention_interval == 0
    config = make_config({**of_groups, "sessions": {"window": 64}}, sections=(*SECTIONS, *TABLES))
    assert config.start is None and "does not go with sessions" in config.not_started
    assert "does not go with sessions" in config.to_builtins()["not_started"]
    alone = make_config({"engine": "vllm", "cost": "linear:step_ms=5"})
    assert (alone.max_num_seqs, alone.start, alone.not_started) == (1024, None, "")


@pytest.mark.parametrize("pipeline_parallel", [12, 16, 24])
def test_vllm_starts_where_the_first_stage_has_no_layer_of_a_group(pipeline_parallel: int) -> None:
    """24 layers, of which every other one has a window: a stage of one layer has blocks of both groups."""
    given = {"model": "gpt-oss-20b", "device": "l4", "pipeline_parallel": pipeline_parallel}
    config = make_config(given)
    assert [(group.layer.kind, group.layer.span) for group in config.groups] == [("window", 128), ("full", None)]
    assert [group.num_layers for group in config.groups] == ([1, 1] if pipeline_parallel == 12 else [1, 0])
    assert_same_outcome(
        *(replay(WORKLOAD, msgspec.structs.replace(config, step_by_step=slowly)) for slowly in (False, True))
    )


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


@pytest.mark.parametrize(("changes", "load"), [({}, "open"), ({"concurrency": 8}, "closed")])
def test_a_report_says_how_sure_it_is_from_errors_of_others(changes: dict[str, Any], load: str) -> None:
    """The errors are those of the same load, kind and format, or of the next wider cell that was measured."""
    summary = replay(WORKLOAD, make_config({**MODEL, **changes})).summary
    rows = shipped_constants().held_out_of("NVIDIA", "dense", load, "16bit")
    assert "ttft" in rows and rows["ttft"].load == load
    for row in rows.values():
        for statistic, value in summary[f"{row.metric}_ms"].items():
            assert summary["uncertainty"][f"{row.metric}_ms"][statistic] == pytest.approx(value * row.one_sigma)
    cost = RooflineCost(llm="llama-3.1-8b", device="h100-80gb", step_us=123.0)
    assert "uncertainty" not in replay(WORKLOAD, ReplayConfig(cost=cost)).summary
    assert "uncertainty" not in replay(WORKLOAD).summary


def test_plans_look_as_far_as_one_engine_in_ten() -> None:
    cost = RooflineCost(llm="qwen3-30b-a3b", device="h100-80gb")
    trace = WORKLOAD.trace()
    assert cost.evidence == "near"
    for load, config in (("open", ReplayConfig(cost=cost)), ("closed", ReplayConfig(cost=cost, concurrency=4))):
        share = 1.28 * cost.held_out(load)["tpot"].one_sigma
        assert cost_error_of(config, trace) == pytest.approx(min(0.9, WIDER["near"] * share), abs=0.006)
    for llm, device, evidence in (
        ("gpt-oss-120b", "h100-80gb", "measured"),
        ("openai/gpt-oss-120b", "h100-80gb", "measured"),
        ("gpt-oss-120b", "mi300x", "near"),
        ("gpt-oss-120b", "mi325x", "extrapolated"),
    ):
        other = RooflineCost(llm=llm, device=device)
        error = other.held_out("open").get("tpot")
        share = COST_ERROR if error is None else 1.28 * error.one_sigma
        assert other.evidence == evidence
        assert cost_error_of(ReplayConfig(cost=other), trace) == pytest.approx(
            min(0.9, WIDER[evidence] * share), abs=0.006
        )
    assert cost_error_of(ReplayConfig(cost=msgspec.structs.replace(cost, step_us=1.0)), trace) == COST_ERROR
    assert cost_error_of(ReplayConfig(), trace) == COST_ERROR


VERSION_OF = ("sglang==0.5.12", "tensorrt-llm==1.2", "trtllm==1.2", "vllm==0.19", "vllm==0.30", "sglang==0.4.1")


@pytest.mark.parametrize("name", VERSION_OF)
def test_a_version_has_the_settings_of_its_engine_and_its_own_step_times_if_it_was_measured(name: str) -> None:
    engine, _, version = name.partition("==")
    of_version, of_engine = (make_config({**MODEL, "engine": each}, counts_groups=False) for each in (name, engine))
    if engine != "vllm":  # without a version it starts as its newest
        assert of_version.num_pages == of_engine.num_pages
    assert of_version.plans_batches == of_engine.plans_batches
    assert of_version.async_scheduling == of_engine.async_scheduling
    is_measured = shipped_constants().has_measured(name)
    assert is_measured == (name not in VERSION_OF[-2:])
    assert (of_version.cost.scale == of_engine.cost.scale) != is_measured
    text = "\n".join(opening(replay(WORKLOAD, of_version).summary["config"]))
    assert version in text and ("unmeasured" in text) != is_measured


def test_a_release_is_known_by_its_version() -> None:
    """What pip prints of vLLM 0.33 would have its defaults, and not its start."""
    with pytest.raises(ConfigError, match="is a release of one version") as caught:
        make_config({**MODEL, "engine": "vllm==0.33.0"})
    assert caught.value.hint == "Give vllm==0.33."


def test_a_version_has_the_defaults_of_its_time() -> None:
    assert not engine_of("vllm==0.13.2").async_scheduling  # type: ignore[union-attr]
    assert engine_of("vllm==0.14") == engine_of("vllm==0.30") == engine_of("vllm")


@pytest.mark.parametrize(
    "name", ["vllm==", "vllm==x", "none==1", "vllm==0.3.", "llamacpp==1", "==1", "sglang==1==2", f"vllm=={'9' * 5000}"]
)
def test_other_names_of_engines_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="NAME==VERSION") as caught:
        make_config({**MODEL, "engine": name})
    assert caught.value.field == "engine"


def test_what_was_not_measured_is_said_to_be_unmeasured() -> None:
    """No published measurement is of a TPU; of a given cost model, a report says nothing."""
    report = replay(WORKLOAD, make_config({"model": "llama-3.1-8b", "device": "tpu-v6e"}))
    assert report.summary["uncertainty"] == {}
    assert "unmeasured" in render_table(report.summary)
    assert "unmeasured" not in render_table(replay(WORKLOAD, make_config(MODEL)).summary)
    given = replay(WORKLOAD, make_config({**MODEL, "cost": "linear:step_ms=7"}))
    assert "uncertain" not in render_table(given.summary)


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


# SGLang ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "says"), [
    ({"async_scheduling": True}, "overlaps steps unless"),
    ({"stop_tokens": True}, "not modelled"),
    ({"scheduling_policy": "priority"}, "vLLM's"),
    ({"watermark": 0.1}, "vLLM's"),
    ({"prefill_schedule_interval": 2}, "vLLM's"),
    ({"page_size": 16, "max_batched_tokens": 100}, "multiple of"),
    ({"max_itl_ms": 50}, "not modelled"),
    ({"schedule_conservativeness": -1.0}, "schedule_conservativeness"),
    ({"engine": "vllm", "max_prefill_tokens": 100}, "no effect without"),
    ({"engine": "vllm", "radix_eviction_policy": "lfu"}, "no effect without"),
    ({"retraction_policy": "priority"}, "no effect without"),
    ({"enable_priority_scheduling": True, "schedule_policy": "lpm"}, "does not go with"),
    ({"radix_eviction_policy": "tlru"}, "needs a threshold above"),
    ({"radix_eviction_policy": "slru", "radix_eviction_policy_config": '{"threshold": 3}'}, "protected_threshold"),
    ({"radix_eviction_policy": "slru", "radix_eviction_policy_config": "3"}, "JSON object of whole numbers"),
    ({"engine": "vllm", "hicache_ratio": 2.0}, "no effect without"),
    ({"hicache_write_policy": "write_back"}, "no effect without host memory"),
    ({"hicache_ratio": 2.0, "hicache_write_policy": "write_around"}, "write_through_selective, write_back"),
    ({"hicache_ratio": -1.0}, "hicache_ratio"),
    ({"hicache_ratio": 2.0, "hicache_size": 30.0}, "is given beside hicache_size"),
    ({"hicache_ratio": 2.0, "offload.host_pages": 100}, "beside another size of host memory"),
    ({"hicache_ratio": 2.0, "radix_eviction_policy": "lfu"}, "other orders of eviction above host memory"),
    ({"hicache_ratio": 2.0, "schedule_policy": "dfs-weight"}, "dfs-weight above it is not modelled"),
    ({"offload.host_pages": 100, "enable_priority_scheduling": True}, "preemption above host memory"),
    ({"offload.host_pages": 100, "offload.policy": "lazy"}, "rules of its own"),
    ({"offload.host_pages": 100, "offload.disk_pages": 100}, "its storage has no limit of size"),
    ({"hicache_storage_backend": "file"}, "needs host memory above it"),
    ({**STORAGE, "hicache_storage_backend": "tape"}, "Use one of none, file"),
    ({**STORAGE, "hicache_write_policy": "write_back"}, "can run out of memory"),
    ({**STORAGE, "hicache_storage_prefetch_policy": "never"}, "best_effort, wait_complete, timeout"),
    ({"hicache_ratio": 2.0, "hicache_storage_prefetch_policy": "best_effort"}, "no effect without"),
    ({**STORAGE, "hicache_storage_backend_extra_config": '{"prefetch_threshold": 2.5}'}, "object of numbers"),
    ({**STORAGE, "hicache_storage_backend_extra_config": '{"max_size": "10G"}'}, "max_size, and a limit of size"),
    ({**STORAGE, "hicache_storage_backend_extra_config": "@storage.json"}, "must be a JSON object"),
    ({**STORAGE, "hicache_storage_prefetch_retry_max_attempts": -1}, "max_attempts"),
    ({"engine": "vllm", "sliding_window_size": 127}, "no effect without"),
    ({"swa_full_tokens_ratio": 0.5}, "no effect without sliding windows"),
    ({**WINDOWS, "swa_full_tokens_ratio": 1.5}, "swa_full_tokens_ratio"),
    ({**WINDOWS, "swa_full_tokens_ratio": 0.01}, "327 pages of KV for windows of 127 tokens, .* may need 643"),
    ({**WINDOWS, "radix_eviction_policy": "lfu"}, "not modelled for a model with sliding windows"),
    ({**WINDOWS, "enable_priority_scheduling": True}, "not modelled for a model with sliding windows"),
    ({**WINDOWS, "hicache_ratio": 2.0}, "below which host memory is not modelled"),
    ({"engine": "vllm", "max_mamba_cache_size": 200}, "no effect without"),
    ({"mamba_track_interval": 64}, "no effect without states"),
    ({**STATES, "max_seqs": 41}, "200 slots are fewer than the 205 for states of 41 requests.*max_seqs of 40 or less"),
    ({**STATES, "mamba_full_memory_ratio": 0.0}, "mamba_full_memory_ratio"),
    ({**QWEN, "mamba_full_memory_ratio": -1.0}, "must be above 0"),
    ({**QWEN, "max_mamba_cache_size": -5}, "must be at least 0"),
    ({**QWEN, "max_mamba_cache_size": 4}, "4 slots for states of .* a request needs 5 slots"),
    ({**QWEN, "max_mamba_cache_size": 2000}, "leave 0 bytes"),
    ({**QWEN, "hicache_ratio": 2.0}, "hicache_ratio: states have slots"),
    ({"model": "qwen3-8b", "device": "h200", "max_mamba_cache_size": 50}, "no effect without states"),
    ({**STATES, "mamba_radix_cache_strategy": "extra_buffer_lazy"}, "Use one of auto, no_buffer, extra_buffer"),
    ({**STATES, "mamba_radix_cache_strategy": "no_buffer"}, "pages of one token without the overlap schedule"),
    ({**STATES, "page_size": 16, "mamba_track_interval": 40}, "multiple of page_size, 16"),
    ({**STATES, "page_size": 16, "mamba_chunk_size": 40}, "multiple of page_size, 16, or divide it"),
    ({**STATES, "radix_eviction_policy": "lfu"}, "not modelled for a model with states"),
    ({**STATES, "enable_priority_scheduling": True}, "not modelled for a model with states"),
    ({**STATES, **WINDOWS}, "not modelled for a model with states"),
    ({**STATES, "hicache_ratio": 2.0}, "below which host memory is not modelled"),
])  # fmt: skip
def test_what_sglangs_engine_does_not_do_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_config({"engine": "sglang", **changes}, sections=(*SECTIONS, *TABLES))
    with pytest.raises(ConfigError, match="not modelled"):
        ReplayConfig(engine="sglang", eviction="auto")


def test_sglang_takes_a_chunk_that_is_smaller_than_its_number_of_requests() -> None:
    config = make_config({"engine": "sglang", "max_batched_tokens": 16, "max_seqs": 32})
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.page_size) == (16, 32, 1)
    assert make_config({**MODEL, "engine": "sglang", "max_batched_tokens": 1024}).max_num_seqs == 2048
    with pytest.raises(ConfigError, match="cannot each get a token"):
        make_config({"max_batched_tokens": 16, "max_seqs": 32})


LEAPS: list[dict[str, Any]] = [
    {},
    {"disable_overlap_schedule": True},
    {"schedule_conservativeness": 0.1},
    {"scheduler_recv_interval": 7},
    {"scheduler_recv_interval": 30, "disable_overlap_schedule": True, "frontend_ms": 3},
    {"schedule_policy": "dfs-weight", "radix_eviction_policy": "slru"},
    {"enable_priority_scheduling": True, "schedule_conservativeness": 0.3, "max_seqs": 8, "concurrency": 20},
    WINDOWS,
    {"sliding_window_size": 15, "swa_full_tokens_ratio": 0.5, "schedule_conservativeness": 0.1},
    {"sliding_window_size": 300, "disable_overlap_schedule": True},
    STATES,
    {**STATES, "mamba_chunk_size": 16, "mamba_track_interval": 32, "schedule_conservativeness": 0.1},
    {**STATES, "mamba_chunk_size": 1, "mamba_track_interval": 16, "disable_overlap_schedule": True},
    {"hicache_ratio": 0.5},
    {"hicache_ratio": 2.0, "hicache_write_policy": "write_back", "disable_overlap_schedule": True},
    {**STORAGE, "hicache_storage_prefetch_policy": "wait_complete", "disable_overlap_schedule": True},
    {**STORAGE, "hicache_storage_prefetch_policy": "best_effort"},
    {**STORAGE, "hicache_storage_backend_extra_config": '{"prefetch_threshold": 16, "prefetch_timeout_base": 0.1}'},
]


@pytest.mark.parametrize("changes", LEAPS)
@pytest.mark.parametrize(("page_size", "pages"), [(1, 3_000), (16, 200)])
def test_leaps_of_sglang_are_its_steps(changes: dict[str, Any], page_size: int, pages: int) -> None:
    """Law L5, in memory that is short, so that whole runs are evicted between leaps."""
    cost = "linear:step_ms=5,decode_ms=0.1"
    config = make_config({"engine": "sglang", "page_size": page_size, "pages": pages, "cost": cost, **changes})
    load = TURNS if "hicache_ratio" in changes else WORKLOAD
    fast, slow = (
        replay(load, msgspec.structs.replace(config, step_by_step=step_by_step)) for step_by_step in (False, True)
    )
    assert fast.summary == slow.summary
    for columns in ("steps", "requests"):
        ours, theirs = (dict(getattr(each, columns)) for each in (fast, slow))
        assert [str(list(values)) for values in ours.values()] == [str(list(values)) for values in theirs.values()]
    assert fast.summary["num_steps"] > 100


SIZES = [
    ("gpt-oss-20b", 127, 12, 12),
    ("gemma-4-31b", 1023, 10, 50),
    ("llama-4-scout", 8192, 12, 36),
    ("gemma-3-27b", 0, 62, 0),
    ("llama-3.1-8b", 0, 32, 0),
]
"""Models, what SGLang calls the size of their windows, and their layers with full attention and with windows."""


@pytest.mark.parametrize(("model", "window", "num_full", "num_windowed"), SIZES)
def test_windows_have_the_pool_that_sglang_gives_them(
    model: str, window: int, num_full: int, num_windowed: int
) -> None:
    """Memory is divided so that the second pool has 0.8 times the tokens of the first (`_cell_size`)."""
    asked = {"model": model, "device": "h200", "tensor_parallel": 8, "engine": "sglang", "kv_memory": "40GiB"}
    config = make_config(asked)
    rules = config.batches
    assert rules is not None and rules.window == config.window == window
    assert num_full + num_windowed == load_geometry(model).num_attending_layers
    groups = {group.layer.span: group.page_bytes for group in local_kv_groups(
        load_geometry(model), page_size=1, tensor_parallel=8)}  # fmt: skip
    full, windowed = groups.pop(None), sum(groups.values())
    if not window:
        assert config.num_pages == (40 << 30) // (full + windowed)
        return
    assert config.num_pages == int((40 << 30) // (full + 0.8 * windowed))
    assert rules.window_pages == int(config.num_pages * 0.8)
    half = make_config({**asked, "swa_full_tokens_ratio": 0.5})
    assert half.num_pages == int((40 << 30) // (full + 0.5 * windowed)) > config.num_pages
    assert half.batches is not None and half.batches.window_pages == half.num_pages // 2
    whole = make_config({**asked, "disable_hybrid_swa_memory": True})
    assert whole.num_pages == (40 << 30) // (full + windowed)
    assert whole.batches is not None and not whole.batches.window


STATEFUL = [
    ("qwen3-next-80b-a3b", 77_266_944, 64, 12),
    ("nemotron-3-nano-30b-a3b", 49_082_368, 128, 6),
    ("qwen3.5-35b-a3b", 64_389_120, 64, 10),
]
"""Models; the bytes of a state of theirs in SGLang (`mamba_cache_per_req`), with its chunks; and the other layers."""


@pytest.mark.parametrize(("model", "slot_bytes", "chunk", "num_full"), STATEFUL)
def test_states_have_the_slots_that_sglang_gives_them(model: str, slot_bytes: int, chunk: int, num_full: int) -> None:
    """States have 0.9 times the memory of KV, and a slot more; five slots for a request (`_calculate_mamba_ratio`)."""
    asked = {"model": model, "device": "h200", "tensor_parallel": 2, "engine": "sglang", "kv_memory": "30GiB"}
    config = make_config(asked)
    rules, slot_bytes, kv_bytes = config.batches, slot_bytes // 2, 30 << 30
    num_slots = int(kv_bytes * 0.9 / 1.9 - slot_bytes) // slot_bytes
    assert load_geometry(model).num_attending_layers == num_full
    assert rules is not None and (rules.slots, rules.state_buffers, rules.state_chunk) == (num_slots, 2, chunk)
    assert rules.track_interval == 256
    token_bytes = config.placement.kv_bytes_per_token if config.placement is not None else 0
    assert config.num_pages == (kv_bytes - (num_slots + 1) * slot_bytes) // token_bytes
    assert config.max_num_seqs == num_slots // 5
    with pytest.raises(ConfigError, match="fewer than"):
        make_config({**asked, "max_seqs": 2048})
    half = make_config({**asked, "max_mamba_cache_size": num_slots // 2})
    assert half.num_pages > config.num_pages and half.max_num_seqs == num_slots // 2 // 5
    alone = make_config({**asked, "disable_overlap_schedule": True})
    assert alone.max_num_seqs == num_slots // 3 and alone.batches is not None and not alone.batches.state_buffers
    narrow = make_config({**asked, "mamba_ssm_dtype": "bfloat16"})
    assert narrow.batches is not None and 1.8 < narrow.batches.slots / num_slots < 2
    whole = make_config({**asked, "kv_groups": "off", "max_seqs": 40})
    assert whole.batches is not None and not whole.batches.slots


def above_host(changes: dict[str, Any]) -> ReplayConfig:
    """Return SGLang's engine with little memory on the device."""
    base = {"engine": "sglang", "page_size": 1, "pages": 3_000, "cost": "linear:step_ms=5,decode_ms=0.1"}
    return make_config({**base, **changes}, sections=(*SECTIONS, *TABLES))


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_sglang_finds_in_host_memory_what_the_device_has_evicted(policy: str) -> None:
    """A larger host memory never makes this load find less; `host_pages` and the ratio mean the same."""
    alone = replay(TURNS, above_host({})).summary
    ratio = replay(TURNS, above_host({"hicache_ratio": 4.0, "hicache_write_policy": policy}))
    pages = replay(TURNS, above_host({"offload.host_pages": 12_001, "hicache_write_policy": policy}))
    assert ratio.summary == pages.summary
    by_tier = ratio.summary["prefix_hit_ratio_by_tier"]
    assert ratio.summary["prefix_hit_ratio"] > alone["prefix_hit_ratio"]
    assert by_tier["host"] > 0
    moved = ratio.summary["transfers"]
    assert moved["num_loads"] > 0
    assert moved["bytes"]["h2d"] >= sum(ratio.requests["host_tokens"]) * 131_072 > 0
    assert ratio.summary["config"]["offload"]["host_pages"] == 12_001


def test_storage_below_host_memory_has_what_both_have_evicted() -> None:
    """Requests that wait for all of it find more than without; a report's settings give the same replay again."""
    slow = {"offload.disk_read": "100MB/s"}
    asked = {**STORAGE, **slow, "hicache_storage_prefetch_policy": "wait_complete"}
    without = replay(TURNS, above_host({"hicache_ratio": 0.4}))
    found = replay(TURNS, above_host(asked))
    summary = found.summary
    assert summary["prefix_hit_ratio_by_tier"]["disk"] > 0
    assert sum(found.requests["disk_tokens"]) > 0
    assert summary["prefix_hit_ratio"] > without.summary["prefix_hit_ratio"]
    moved = summary["transfers"]["bytes"]
    assert moved["disk_read"] >= sum(found.requests["disk_tokens"]) * 131_072
    assert 0 < moved["disk_write"] <= moved["d2h"]
    assert summary["config"]["offload"]["disk_pages"] is None
    again = above_host({**asked, "hicache_ratio": 0.0, "offload.host_pages": 1_201})
    assert replay(TURNS, again).summary == summary


def test_steps_of_sglang_wait_for_slow_copies() -> None:
    """The last layer of a load may arrive late; with write_back, the device waits for copies of what it evicts."""
    host = {"hicache_ratio": 4.0, "hicache_write_policy": "write_back"}
    fast, slow = (
        replay(TURNS, above_host({**host, "offload.h2d": rate, "offload.d2h": rate})).summary
        for rate in ("1000GB/s", "1GB/s")
    )
    assert slow["duration_ms"] > fast["duration_ms"]
