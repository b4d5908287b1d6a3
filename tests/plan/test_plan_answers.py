"""The answer of a plan, compared with a grid of replays over devices, host memory and store policies."""

from __future__ import annotations

import json
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvarts
from kvarts import ConfigError, FleetConfig, PoolConfig
from kvarts.cli.argument_lines import options_of, settings_of_line
from kvarts.cost.polynomial import LinearCost
from kvarts.plan import Plan
from kvarts.plan.cache import CachePlan
from kvarts.plan.confidence import Goal, cost_error_of
from kvarts.plan.fleets import plan_fleets
from kvarts.plan.latency import LatencyPlan
from kvarts.plan.purchases import (
    FEW,
    OF_HICACHE,
    Prices,
    given_host_bytes,
    given_policy,
    host_sizes,
    load_prices,
    policies_of,
    with_memory,
)
from kvarts.plan.replays import PlanProgress, share_kept
from kvarts.plan.routers import RoutersPlan
from kvarts.plan.serve_lines import serve_lines
from kvarts.plan.users import UsersPlan
from kvarts.sim.config import ReplayConfig, Slo
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.editing import share_of_agents, sliced, with_share_of_agents
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell

from builders.plan_traces import small_traces

MOST = FEW
"""Replicas of the grid: up to so many, what more replicas do changes nothing."""


@pytest.mark.laws
@settings(deadline=None)
@given(
    trace=small_traces(most_requests=12),
    num_pages=st.integers(8, 20),
    ttft_ms=st.integers(5, 60),
    share=st.integers(2, 4),
)
def test_the_answer_is_the_cheapest_of_a_grid_within_one_step(
    trace: Trace, num_pages: int, ttft_ms: int, share: int
) -> None:
    config = ReplayConfig(
        num_pages=num_pages,
        page_size=4,
        max_num_seqs=4,
        cost=LinearCost(step_ms=1.0, chunk_token_ms=2.0, decode_ms=0.1),
        speedup=50.0,
        slo=Slo(ttft_ms=ttft_ms),
    )
    prices = Prices(host_gib=10.0)
    curves = CachePlan(trace, 4)
    reused = curves.curve.most_pages
    plan = LatencyPlan(
        curves, config, Goal(share / 4, prices=prices or Prices(), is_quick=True), command=repr, reused_pages=reused
    )
    found = plan.to_builtins()
    sizes = host_sizes(config, reused)

    def keeps(replicas: int, size: int, policy: str) -> bool:
        made = with_memory(config, size, policy) if size else config
        router = "prefix" if replicas > 1 else "round-robin"
        summary = replay(trace, msgspec.structs.replace(made, replicas=replicas, router=router)).summary
        return (share_kept(summary) or 0.0) >= share / 4

    kept = {
        (replicas, size, policy)
        for replicas in range(1, MOST + 1)
        for size, policy in [(0, ""), *product(sizes, policies_of(config) if sizes else ())]
        if keeps(replicas, size, policy)
    }
    if not kept:
        return
    best = min(prices.of(replicas, size) for replicas, size, _ in kept)
    first = found["options"][0]
    assert first["slo_ratio"] >= share / 4
    # Where more of a replay's means hurts, the search may end at another edge between kept and not kept.
    policies = policies_of(config) if sizes else []
    larger = {
        (more, larger, policy or other)
        for replicas, size, policy in kept
        for more, other in product(range(replicas, MOST + 1), policies or [""])
        for larger in [0, *sizes]
        if larger >= size
    }
    if all((replicas, size, policy if size else "") in kept for replicas, size, policy in larger):
        assert first["price_per_hour"] == pytest.approx(best)


def test_the_line_of_vllm_is_the_configuration() -> None:
    """Reading the line again gives the settings that were replayed, and vLLM has each option."""
    config = ReplayConfig.for_device(
        "qwen3-30b-a3b",
        "h100-80gb",
        tensor_parallel=1,
        data_parallel=2,
        expert_parallel=2,
        max_seqs=64,
        memory_fraction=0.85,
    )
    lines = serve_lines(config, {"host_bytes": 3 << 30, "policy": "eager"})
    words = shlex.split(lines["vllm"])
    assert words[:3] == ["vllm", "serve", "Qwen/Qwen3-30B-A3B"]
    known = {name for names in options_of("--vllm-args").values() for name in names}
    assert {word[2:] for word in words if word.startswith("--")} - known - {"enable-expert-parallel"} == set()
    again = [word for word in words if word != "--enable-expert-parallel"]
    found = dict(settings_of_line(shlex.join(again), "--vllm-args", lambda key: True, say=lambda _: None))
    assert found == {
        "model": "Qwen/Qwen3-30B-A3B",
        "data_parallel": "2",
        "memory_fraction": "0.85",
        "max_seqs": "64",
        "max_batched_tokens": str(config.max_num_batched_tokens),
        "page_size": "16",
    }
    assert "--attn-dp-size 2 --ep-size 2" in lines["sglang"] and "--hicache-size 4" in lines["sglang"]
    known = {name for names in options_of("--sglang-args").values() for name in names}
    assert {word[2:] for word in shlex.split(lines["sglang"]) if word.startswith("--")} <= known
    assert set(serve_lines(config, {"host_bytes": 3 << 30, "policy": "lazy"})) == {"vllm"}
    assert serve_lines(config, {"host_bytes": 3 << 30, "policy": "exclusive"}) == {}


def lines_of(model: str, device: str, **settings: Any) -> dict[str, str]:
    config = ReplayConfig.for_device(model, device, **settings)
    return serve_lines(config, {"host_bytes": 0, "policy": None})


def test_lines_of_servers_name_the_repository_that_was_given() -> None:
    """GLM-4.6 and GLM-4.7 have one config, and one name of a preset."""
    lines = lines_of("zai-org/GLM-4.6", "8xH200")
    assert " zai-org/GLM-4.6 " in lines["vllm"] and " zai-org/GLM-4.6 " in lines["sglang"]
    assert " zai-org/GLM-4.7 " in lines_of("glm-4.7", "8xH200")["vllm"]


def test_lines_of_servers_have_what_was_given() -> None:
    """Host memory, the size of KV memory, formats and drafts, without which another server would start."""
    lines = lines_of("llama-3.1-8b", "h100-80gb", host_memory="20GiB", weight_dtype="fp8", kv_dtype="fp8")
    assert '"host_memory": "20GiB"' in lines["vllm"] and "--hicache-size 22" in lines["sglang"]
    assert "--kv-cache-dtype fp8 " in lines["vllm"] and "--kv-cache-dtype fp8_e4m3 " in lines["sglang"]
    assert all("--quantization fp8" in line for line in lines.values())
    lines = lines_of("deepseek-v3", "8xH200", speculative_tokens=1, acceptance="0.8", kv_memory="40GiB")
    assert '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\'' in lines["vllm"]
    assert f"--kv-cache-memory-bytes {40 << 30}" in lines["vllm"]
    assert "--speculative-num-draft-tokens 2" in lines["sglang"] and "--max-total-tokens " in lines["sglang"]
    assert "--num-gpu-blocks-override 5001 " in lines_of("llama-3.1-8b", "h100-80gb", pages=5000)["vllm"]
    assert lines_of("llama-3.1-8b", "h100-80gb", weight_dtype="int4") == {}
    lines = lines_of("llama-3.1-8b", "h100-80gb", kv_dtype="int8")
    assert [*lines] == ["vllm"] and "--kv-cache-dtype int8_per_token_head" in lines["vllm"]
    assert [*lines_of("llama-3.1-8b", "h100-80gb", engine="sglang")] == ["sglang"]
    assert lines_of("llama-3.1-8b", "h100-80gb", engine="tensorrt-llm") == {}


@pytest.mark.parametrize(
    ("method", "of_vllm", "of_sglang"),
    [
        ("ngram", {"method": "ngram"}, "--speculative-algorithm NGRAM --speculative-num-draft-tokens 3"),
        ("eagle3", {"method": "eagle3", "model": "DRAFT_MODEL"}, "--speculative-algorithm EAGLE3"),
        ("mtp", {"method": "mtp"}, "--speculative-algorithm EAGLE "),
    ],
)
def test_lines_of_servers_draft_by_the_method_that_was_given(
    method: str, of_vllm: dict[str, str], of_sglang: str
) -> None:
    """Layers of another checkpoint are named by a placeholder: a plan does not know it."""
    drafts = {"speculative_tokens": 2, "acceptance": "0.8,0.6", "speculative_method": method}
    lines = lines_of("llama-3.1-8b", "h100-80gb", **drafts)
    asked = shlex.split(lines["vllm"])
    assert json.loads(asked[asked.index("--speculative-config") + 1]) == of_vllm | {"num_speculative_tokens": 2}
    assert of_sglang in lines["sglang"]
    assert ("DRAFT_MODEL" in lines["sglang"]) is (method == "eagle3")


def test_vllm_starts_where_a_request_of_the_model_s_length_does_not_fit() -> None:
    assert "--max-model-len auto" in lines_of("moonshotai/Kimi-K2-Instruct", "8xH200")["vllm"]
    assert "--max-model-len" not in lines_of("llama-3.1-8b", "h100-80gb")["vllm"]


def test_each_pool_of_a_fleet_has_its_lines() -> None:
    each = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb")
    fleet = FleetConfig(pools=(PoolConfig(role="prefill", each=each), PoolConfig(role="decode", each=each)))
    apart = serve_lines(fleet, {"host_bytes": 0, "policy": None})
    assert [*apart] == ["vllm prefill", "sglang prefill", "vllm decode", "sglang decode"]
    assert "NixlConnector" in apart["vllm decode"] and "--disaggregation-mode prefill" in apart["sglang prefill"]


def test_a_stage_on_each_node_is_part_of_the_line() -> None:
    lines = lines_of("deepseek-v3", "h200-141gb", tensor_parallel=8, pipeline_parallel=2)
    assert "--pipeline-parallel-size 2 --nnodes 2 --node-rank 0" in lines["vllm"]
    assert "--pp-size 2 --nnodes 2 --node-rank 0" in lines["sglang"]


def test_a_short_name_of_a_device_is_the_device(tmp_path: Path) -> None:
    """Measurements and prices of H100 are those of h100-80gb."""
    configs = [ReplayConfig.for_device("llama-3.1-8b", name) for name in ("h100-80gb", "H100", "1xh100")]
    agents = load_trace("sample:agents")
    assert {config.cost.evidence for config in configs} == {"measured"}
    assert len({cost_error_of(config, agents) for config in configs}) == 1
    path = tmp_path / "prices.toml"
    path.write_text('date = "2026-11-01"\ncurrency = "EUR"\n[per_hour]\nh100-80gb = 2.5\nhost_gib = 0.004\n')
    assert load_prices(path, "H100").device == load_prices(path, "h100-80gb").device == 2.5


@pytest.mark.parametrize(
    ("engine", "policies"),
    [
        ("none", ["eager", "lazy"]),
        ("vllm", ["eager", "lazy"]),
        ("tensorrt-llm", ["exclusive"]),
        ("trtllm", ["exclusive"]),
        ("sglang", ["write_through", "write_through_selective", "write_back"]),
    ],
)
def test_a_plan_tries_the_store_policies_of_the_engine(engine: str, policies: list[str]) -> None:
    config = ReplayConfig.of_options(model="llama-3.1-8b", device="h100-80gb", engine=engine)
    assert policies_of(config) == policies
    found = with_memory(config, 3 << 30, policies[-1])
    assert given_host_bytes(found) in range(3 << 29, (3 << 30) + 1)
    assert given_policy(found) == policies[-1]
    if engine == "sglang":
        assert found.host is not None and found.host.policy == policies[-1]


def test_a_plan_of_sglang_buys_host_memory_whose_line_starts_its_server() -> None:
    """Six conversations return in turn, and the device holds two of them."""
    rows = [
        TraceRequest(
            row,
            arrival_ns=row * 10**9,
            units=(range(row % 6 * 1000, row % 6 * 1000 + 400),),
            num_prompt_tokens=400,
            num_output_tokens=4,
        )
        for row in range(48)
    ]
    config = ReplayConfig(
        engine="sglang",
        num_pages=1400,
        page_size=1,
        max_num_batched_tokens=400,
        slo=Slo(ttft_ms=100),
        cost=LinearCost(step_ms=1.0, chunk_token_ms=1.0),
    )
    trace = Trace(rows, unit_tokens=1)
    curves = CachePlan(trace, 1)
    plan = LatencyPlan(
        curves, config, Goal(0.8, prices=Prices(host_gib=1e-6)), command=repr, reused_pages=curves.curve.most_pages
    )
    found = plan.to_builtins()
    (best, *_) = found["options"]
    assert best["host_bytes"] and best["policy"] in OF_HICACHE and best["keeps_slo"]
    tried = {point["policy"] for point in found["points"]}
    assert tried >= set(OF_HICACHE)


def test_a_line_of_sglang_has_its_settings_and_its_host_memory() -> None:
    of_sglang: dict[str, Any] = {
        "engine": "sglang",
        "schedule_policy": "lpm",
        "disable_overlap_schedule": True,
        "hicache_write_policy": "write_back",
    }
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", page_size=16, hicache_size=20.5, **of_sglang)
    for option in ({"host_bytes": 0, "policy": None}, {"host_bytes": 21 * 10**9, "policy": "write_back"}):
        line = serve_lines(config, option)["sglang"]
        words = shlex.split(line)
        assert "--enable-hierarchical-cache" in words and words.count("--hicache-size") == 1
        found = dict(settings_of_line(shlex.join(words[2:]), "--sglang-args", lambda key: True, say=lambda _: None))
        assert {name: found[name] for name in ("schedule_policy", "hicache_size", "hicache_write_policy")} == {
            "schedule_policy": "lpm",
            "hicache_size": "21",
            "hicache_write_policy": "write_back",
        }
        assert "disable_overlap_schedule" in found


def test_a_line_of_sglang_has_options_of_its_server_only() -> None:
    """The size of a window is that of the model's layers, and no option."""
    known = {name for names in options_of("--sglang-args").values() for name in names}
    given = {"swa_full_tokens_ratio": 0.5, "scheduler_recv_interval": 8}
    config = ReplayConfig.for_device("gpt-oss-20b", "h100-80gb", engine="sglang", **given)
    line = serve_lines(config, {"host_bytes": 0, "policy": None})["sglang"]
    names = {word[2:] for word in shlex.split(line) if word.startswith("--")}
    assert {"swa-full-tokens-ratio", "scheduler-recv-interval"} <= names <= known


class Stop:
    """Interrupts the search at an answer that begins so, as Ctrl-C does."""

    def __init__(self, begins: str) -> None:
        self.begins = begins
        self.answers: list[str] = []

    def __call__(self, answer: str, num_left: int) -> None:
        """Keep the answer."""
        if answer:
            self.answers.append(answer)
        if answer.startswith(self.begins):
            raise KeyboardInterrupt


def test_an_interrupt_leaves_what_is_known() -> None:
    """After the fewest replicas are known, an interrupt leaves them as the answer."""
    trace, stop = small_trace(), Stop("1 replica")
    config = ReplayConfig(num_pages=64, page_size=16, slo=Slo(ttft_ms=60_000), cost=LinearCost(step_ms=1.0))
    plan = LatencyPlan(CachePlan(trace, 16), config, Goal(0.5), command=repr, progress=PlanProgress(on_answer=stop))
    found = plan.to_builtins()
    assert not plan.is_complete and found["confidence"] is None
    assert [option["named"] for option in found["options"]] == ["1 replica"]
    assert stop.answers == ["1 replica"]


BUSY = ReplayConfig(
    num_pages=64, page_size=16, slo=Slo(ttft_ms=110), cost=LinearCost(step_ms=1.0, chunk_token_ms=2.0), speedup=1000.0
)
"""One replica is too slow for `small_trace`, and 3 are enough: 2 and 4 are replayed before that is known."""


def test_the_curve_is_the_first_answer_and_then_what_replays_show() -> None:
    stop = Stop("never")
    found = kvarts.plan(small_trace(), BUSY, slo_share=0.7, quick=True, progress=PlanProgress(on_answer=stop)).values
    assert found["is_complete"] and found["latency"]["options"][0]["named"] == "3 replicas"
    assert "the working set" in stop.answers[0]
    assert stop.answers[1:4] == [
        "1 replica would not be enough",
        "2 replicas would not be enough",
        "at most 4 replicas; 2 replicas would not be enough",
    ]
    assert stop.answers[4] == "3 replicas" and stop.answers[-1].startswith("3 replicas, in ")


def test_an_interrupted_search_names_the_cheapest_that_it_has_found() -> None:
    found = kvarts.plan(
        small_trace(), BUSY, slo_share=0.7, progress=PlanProgress(on_answer=Stop("at most 4 replicas"))
    ).values
    assert not found["is_complete"] and found["advice"] == "4 replicas keep the SLO for 70.0 % of requests"
    assert "Interrupted: this is what was known by then." in Plan(found).to_text()
    found = kvarts.plan(
        small_trace(), BUSY, slo_share=0.7, progress=PlanProgress(on_answer=Stop("1 replica would"))
    ).values
    assert found["advice"].startswith("Nothing that was tried keeps the SLO for 70.0 % of requests: 1 replica for ")
    found = kvarts.plan(
        small_trace(), BUSY, slo_share=0.7, progress=PlanProgress(on_answer=lambda *_: interrupt())
    ).values
    assert "the working set" in found["advice"] and "latency" not in found


def interrupt() -> None:
    raise KeyboardInterrupt


def mixed_trace(num_agents: int, num_single: int) -> Trace:
    """Agents of three turns a second apart, and single requests, all of 20 pages."""
    turns = [(agent * 3 + turn, agent, turn) for agent in range(num_agents) for turn in range(3)]
    requests = [
        TraceRequest(
            row,
            arrival_ns=(agent * 2 + turn) * 10**9,
            units=(range(100 * agent, 100 * agent + 20),),
            num_prompt_tokens=320,
            num_output_tokens=4,
            session_id=f"agent-{agent}",
        )
        for row, agent, turn in turns
    ]
    requests += [
        TraceRequest(
            3 * num_agents + single,
            arrival_ns=single * 10**9,
            units=(range(10**6 + 100 * single, 10**6 + 100 * single + 20),),
            num_prompt_tokens=320,
            num_output_tokens=4,
        )
        for single in range(num_single)
    ]
    return Trace(sorted(requests, key=lambda each: each.arrival_ns), unit_tokens=16)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.floats(0, 1))
def test_a_share_of_agents_is_kept_to_a_session_and_copies_share_nothing(
    agents: int, single: int, share: float
) -> None:
    trace = mixed_trace(agents, single)
    changed = with_share_of_agents(trace, share)
    num_agents = round((share_of_agents(changed) or 0.0) * len(list(changed)))
    assert abs(num_agents - share * len(list(trace))) <= 1.5
    assert abs(len(list(changed)) - len(list(trace))) <= 2
    sessions: dict[str, set[int]] = {}
    for number, request in enumerate(changed):
        ids = {int(each) for each in np.frombuffer(spell(request.units), np.uint64)}
        sessions.setdefault(request.session_id or f"single-{number}", set()).update(ids)
    assert sum(map(len, sessions.values())) == len(set().union(*sessions.values()))
    assert sorted(request.arrival_ns for request in changed) == [request.arrival_ns for request in changed]


def test_the_share_of_agents_moves_until_the_slo_breaks() -> None:
    """Only the first turn of an agent is computed, so the fewer agents, the more there is to compute."""
    config = ReplayConfig(
        num_pages=500, page_size=16, slo=Slo(ttft_ms=500), cost=LinearCost(step_ms=1.0, chunk_token_ms=1.5)
    )
    found = kvarts.plan(mixed_trace(6, 8), config, slo_share=0.6).values["latency"]
    agents = found["sensitivity"]["agents"]
    assert agents["share"] == pytest.approx(18 / 26)
    assert agents["down_to"] < agents["share"] and agents["up_to"] == 1.0 and agents["fails_above"] is None
    (text,) = (each for each in found["options"][0]["would_change"] if each.startswith("share of agents"))
    assert text.startswith(f"share of agents: {100 * agents['down_to']:.1f} % to 100.0 %")
    kept = {round(point["share_of_agents"], 3) for point in found["points"] if point["share_of_agents"] is not None}
    assert round(agents["down_to"], 3) in kept | {round(agents["share"], 3)}


@pytest.mark.parametrize(
    ("trace", "why"),
    [
        (mixed_trace(2, 0), "every request is of a session with several turns"),
        (mixed_trace(0, 3), "the trace does not tell sessions apart"),
    ],
)
def test_a_share_of_agents_that_cannot_be_changed_is_said(trace: Trace, why: str) -> None:
    config = ReplayConfig(num_pages=500, page_size=16, slo=Slo(ttft_ms=60_000))
    option = kvarts.plan(trace, config).options[0]
    assert f"share of agents: n/a, {why}" in option["would_change"]
    with pytest.raises(ConfigError, match="needs sessions"):
        with_share_of_agents(trace, 0.5)


class InterruptAt:
    """Interrupts before a replay, by its number."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self) -> None:
        """Count one more."""
        self.left -= 1
        if not self.left:
            interrupt()


def test_interrupted_searches_for_users_fleets_and_routers_have_what_was_replayed() -> None:
    agents = sliced(load_trace("sample:agents"), count=40)
    settings: dict[str, Any] = {"model": "llama-3.1-8b", "device": "h100-80gb", "slo_ttft_ms": 5_000}
    config = ReplayConfig.for_device(**settings, replicas=2)

    users = UsersPlan(agents, config, (1, 8), Goal(0.5), progress=PlanProgress(InterruptAt(3))).to_builtins()
    assert not users["is_complete"] and [point["users"] for point in users["points"]] == [1, 2]
    kept = [point["users"] for point in users["points"] if point["slo_ratio"] >= 0.5]
    assert users["fits"] == max(kept, default=None) and users["host"] is None
    names = ["prefix", "session", "least-loaded"]
    routers = RoutersPlan(agents, config, names, progress=PlanProgress(InterruptAt(2))).to_builtins()
    assert not routers["is_complete"] and [point["router"] for point in routers["points"]] == names[:2]
    fleets = plan_fleets(agents, 2, slo_share=0.9, progress=PlanProgress(InterruptAt(3)), **settings).values["fleets"]
    assert not fleets["is_complete"] and fleets["num_replayed"] == 3 and fleets["options"]


def small_trace() -> Trace:
    requests = [
        TraceRequest(
            row, arrival_ns=row * 10**9, units=(range(40 + row),), num_prompt_tokens=40 + row, num_output_tokens=4
        )
        for row in range(5)
    ]
    return Trace(requests, unit_tokens=1)


def test_given_host_memory_is_part_of_the_answer_and_its_price() -> None:
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", host_memory="20GiB", slo_ttft_ms=60_000)
    trace = small_trace()
    found = LatencyPlan(CachePlan(trace, 16), config, Goal(0.5, is_quick=True), command=repr).to_builtins()
    (option,) = found["options"]
    assert option["named"] == "1 GPU and 20 GiB of host memory (eager stores)"
    assert option["price_per_hour"] == pytest.approx(1 + 20 / 1024, abs=1e-3)
