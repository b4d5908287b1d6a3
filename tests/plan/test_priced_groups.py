"""Plans of models whose layers keep less: policies, bounds and tiers by parts, beside naive ones and replays."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvarts.base.processes import Processes
from kvarts.core.content import pack_units
from kvarts.core.kv.group_needs import GroupNeeds
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.cost.polynomial import LinearCost
from kvarts.plan.cache import CachePlan, GroupHits, GroupPlan, PricedTier, TiersPlan
from kvarts.sim.config import ReplayConfig
from kvarts.sim.eviction import ALL_POLICIES, order_maker
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.grouped import FULL, WINDOW, group_settings, part_groups
from builders.plan_traces import small_traces
from oracles.naive_grouped import needed_pages
from oracles.naive_plan import best_of_all, best_of_all_parts, naive_requests

SAMPLE = Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))
GEMMA = ("--model", "gemma-3-27b", "--device", "h100-80gb", "--page-size", 512)
PART = 4
ONE_FULL = (PartGroup(FULL, PART),)


def config_of(page_size: int, **changes: Any) -> ReplayConfig:
    return ReplayConfig(num_pages=1, page_size=page_size, cost=LinearCost(step_ms=1.0), **changes)


def plans_of(trace: Trace, page_size: int, **changes: Any) -> tuple[CachePlan, GroupPlan]:
    plan = CachePlan(trace, page_size)
    return plan, GroupPlan(plan, config_of(page_size, **changes))


def alone(trace: Trace) -> Trace:
    """The same without sessions, whose turns would come before other requests of the trace."""
    requests = [msgspec.structs.replace(request, session_id=None) for request in trace]
    return Trace(requests, unit_tokens=trace.unit_tokens, has_output_tokens=trace.has_output_tokens)


def computed(trace: Trace) -> list[int]:
    return [request.num_prompt_tokens + request.num_output_tokens - 1 for request in trace]


# Policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.laws
@given(
    trace=small_traces(most_requests=16),
    more=group_settings(),
    page_size=st.sampled_from([1, 2, 4]),
    num_pages=st.integers(1, 40),
    name=st.sampled_from(ALL_POLICIES),
)
def test_hits_under_a_policy_are_those_of_a_closed_loop_of_one_and_none_is_above_the_bound(
    trace: Trace, more: dict[str, Any], page_size: int, num_pages: int, name: str
) -> None:
    trace = alone(trace)
    make = order_maker(name, trace)
    _, groups = plans_of(trace, page_size, **more)
    (hits,) = groups.hits_under([(make, num_pages)], Processes(shared=trace))
    config = config_of(page_size, **more, concurrency=1, max_num_seqs=1, eviction=make)
    report = replay(trace, msgspec.structs.replace(config, num_pages=num_pages))
    found = report.request_columns["cached_tokens"][report.request_columns["status"] == 0].sum()
    assert hits <= groups.most_hit_pages(num_pages)
    # Orders of hints and sessions read the clock, which decodes move; whole pages are cut into other runs.
    if name in ("lru", "auto"):
        assert hits * page_size == found


@pytest.mark.laws
@given(
    trace=small_traces(most_requests=4, most_units=2),
    groups=part_groups(),
    num_pages=st.integers(1, 6),
)
def test_no_choice_of_parts_is_above_the_bound(trace: Trace, groups: tuple[PartGroup, ...], num_pages: int) -> None:
    page_size = 2
    assume(sum(tokens // page_size for tokens in computed(trace)) * len(groups) <= 10)
    _, plan = plans_of(trace, page_size, kv_groups="all", groups=groups)
    memory = config_of(page_size, kv_groups="all", groups=groups).memory
    needs = GroupNeeds(memory, page_size=page_size, most_new=8192)
    most = best_of_all_parts(
        naive_requests(trace, page_size),
        [(group.layer, group.part_bytes // memory.block_bytes) for group in groups],
        num_blocks=memory.num_blocks(num_pages),
        num_tokens=computed(trace),
        fits=[
            needs.of_request(request.num_prompt_tokens, request.num_output_tokens) <= memory.num_blocks(num_pages)
            for request in trace
        ],
        page_size=page_size,
    )
    assert most <= plan.most_hit_pages(num_pages)


@given(trace=small_traces(most_requests=4, most_units=3), page_size=st.integers(1, 3), more=st.integers(0, 6))
def test_the_bound_of_one_full_group_is_the_optimum_of_whole_pages(trace: Trace, page_size: int, more: int) -> None:
    _, groups = plans_of(trace, page_size, kv_groups="all", groups=ONE_FULL)
    num_pages = groups.least_pages + more
    with_outputs = CachePlan(trace, page_size, count_outputs=True)
    assert groups.most_hit_pages(num_pages) == with_outputs.most_hit_pages(num_pages)
    requests = naive_requests(trace, page_size, count_outputs=True)
    if sum(len(request.pages) for request in requests) <= 10:
        assert groups.most_hit_pages(num_pages) == best_of_all(requests, num_pages)


@pytest.mark.laws
@given(trace=small_traces(), page_size=st.sampled_from([1, 2, 4]), more=st.integers(0, 12))
def test_one_full_group_finds_what_whole_pages_do(trace: Trace, page_size: int, more: int) -> None:
    trace = alone(trace)
    _, groups = plans_of(trace, page_size, kv_groups="all", groups=ONE_FULL)
    num_pages = groups.least_pages + more
    whole = config_of(page_size, concurrency=1, max_num_seqs=1)
    report = replay(trace, msgspec.structs.replace(whole, num_pages=num_pages))
    assert groups.hit_pages(num_pages) * page_size == report.request_columns["cached_tokens"].sum()
    assert groups.hit_pages(num_pages) <= CachePlan(trace, page_size).hit_pages(num_pages)


def test_more_memory_can_find_less() -> None:
    """A longer hit computes less, so it leaves fewer parts of windows that a prompt which ends earlier could need."""
    lengths = [(1, 12), (0, 10), (1, 14), (1, 11)]
    rows = [
        TraceRequest(row, row, pack_units([which * 100 + place for place in range(length)]), length, 1)
        for row, (which, length) in enumerate(lengths)
    ]
    groups = (PartGroup(FULL, 1), PartGroup(WINDOW.layer, 2))
    trace = Trace(rows)
    _, plan = plans_of(trace, 2, kv_groups="all", groups=groups)
    assert plan.least_pages <= 10
    assert (plan.hit_pages(10), plan.hit_pages(11)) == (8, 7)
    config = config_of(2, concurrency=1, kv_groups="all", groups=groups)
    reports = (replay(trace, msgspec.structs.replace(config, num_pages=num_pages)) for num_pages in (10, 11))
    assert [report.request_columns["cached_tokens"].sum() for report in reports] == [16, 14]


# Curves -----------------------------------------------------------------------------------------------------------


@given(trace=small_traces(), more=group_settings(), page_size=st.sampled_from([1, 2, 4]))
def test_a_curve_is_the_most_of_what_was_simulated_up_to_there(
    trace: Trace, more: dict[str, Any], page_size: int
) -> None:
    _, plan = plans_of(trace, page_size, **more)
    curve, hits = plan.curve, GroupHits(trace, config_of(page_size, **more))
    sizes = curve.sizes.tolist()
    assert sizes == sorted(set(sizes)) and sizes[:2] == [0, max(1, plan.least_pages)]
    simulated = [hits.hit_pages(size) for size in sizes[1:]]
    assert curve.hits.tolist() == [0, *accumulate(simulated, max)]
    assert curve.hits[-1] >= hits.hit_pages(10_000), "more is found where nothing is evicted"
    assert set(plan.knees) <= set(sizes)
    for size in plan.default_sizes():
        assert size >= plan.least_pages


# Tiers ------------------------------------------------------------------------------------------------------------


@given(
    trace=small_traces(),
    more=group_settings(),
    page_size=st.sampled_from([1, 2, 4]),
    sizes=st.lists(st.integers(0, 20), min_size=3, max_size=3),
)
def test_tiers_find_what_the_device_and_a_list_of_tails_find_and_load_what_is_needed(
    trace: Trace, more: dict[str, Any], page_size: int, sizes: list[int]
) -> None:
    _, plan = plans_of(trace, page_size, **more)
    config = config_of(page_size, **more)
    memory = config.memory
    device, *below = sizes
    share = sum(group.part_bytes for group in memory.groups if not (group.is_state or group.is_bounded))
    in_list = device if more["kv_groups"] == "tails" else device * share // memory.page_bytes
    tails = GroupHits(trace, msgspec.structs.replace(config, kv_groups="tails"), only_known=True)
    reached = [[0] * len(computed(trace)), GroupHits(trace, config).by_request(device).tolist()]
    for tier in below:
        in_list += tier
        found = tails.by_request(in_list).tolist() if tier else reached[-1]
        reached.append([max(pair) for pair in zip(reached[-1], found, strict=True)])
    expected = []
    for above, down in pairwise(reached):
        loads = [
            group.part_bytes
            * len(needed_pages(group.layer, end * page_size, page_size) - held(group, start, page_size))
            for group in memory.groups
            for start, end in zip(above, down, strict=True)
            if start < end
        ]
        expected.append((sum(down) - sum(above), sum(loads)))
    found_in = plan.in_tiers(sizes, memory.page_bytes)
    assert [num_pages for num_pages, _ in found_in] == [num_pages for num_pages, _ in expected]
    for (num_pages, token_bytes), (_, num_bytes) in zip(found_in, expected, strict=True):
        if num_pages:
            assert token_bytes * num_pages * page_size == pytest.approx(num_bytes)


def held(group: PartGroup, num_pages: int, page_size: int) -> frozenset[int]:
    """The pages whose parts a hit of `num_pages` pages has: a state is of its last page only."""
    if group.is_bounded or group.is_state:
        return needed_pages(group.layer, num_pages * page_size, page_size)
    return frozenset(range(num_pages))


@given(trace=small_traces(), page_size=st.sampled_from([1, 2, 4]), host=st.integers(0, 20), more=st.integers(1, 20))
def test_tiers_of_one_full_group_find_what_whole_pages_do(trace: Trace, page_size: int, host: int, more: int) -> None:
    """Not more, as a page that is computed again takes room beside its copy; as much where nothing is evicted."""
    whole, groups = plans_of(trace, page_size, kv_groups="tails", groups=ONE_FULL)
    device = groups.least_pages + more
    for size, is_enough in ((host, False), (1000, True)):
        tiers = [PricedTier(name="device", pages=device), PricedTier(name="host", pages=size, bytes_per_s=100)]
        by_parts, by_pages = (
            TiersPlan(plan, tiers, page_bytes=PART, s_per_token=1.0).to_builtins() for plan in (groups, whole)
        )
        found = [sum(each["now"]["hit_ratio"].values()) for each in (by_parts, by_pages)]
        assert found[0] <= found[1] + 1e-9
        if is_enough:
            assert found[0] == pytest.approx(found[1]) == whole.curve.most_hit_ratio
            assert by_parts["load_us_per_token"] == pytest.approx(by_pages["load_us_per_token"])
            assert by_parts["kv_bytes_per_token"] == by_pages["kv_bytes_per_token"]


def test_a_hit_that_needs_a_state_loads_it_once() -> None:
    """Two prompts with the same first 8 tokens: 4 pages of the full layers, a window of 6 tokens, and a state."""
    rows = [TraceRequest(row, row, pack_units([*range(8), 100 + row]), 9, 1) for row in range(2)]
    window, state = PartGroup(WINDOW.layer, 3), PartGroup(KvLayer(kind="state", state_bytes=1), 50)
    full = PartGroup(FULL, 5)
    for groups, num_bytes in (((full, window), 4 * 5 + 3 * 3), ((full, state), 4 * 5 + 50)):
        _, plan = plans_of(Trace(rows), 2, kv_groups="all", groups=groups)
        num_pages, token_bytes = plan.in_tiers([0, 1000], 1)[1]
        assert (num_pages, token_bytes * 8) == (4, num_bytes)


# On the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path, run_command: Callable[..., int]) -> Path:
    path = tmp_path / "trace.jsonl"
    assert run_command("trace", "slice", SAMPLE, "--set", "count=40", "-o", path) == 0
    return path


def test_policies_are_compared_by_parts_and_replay_to_what_the_plan_says(
    trace: Path,
    asked: Callable[..., Any],
    run_command: Callable[..., int],
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    options = (*GEMMA, "--at", 60, "--policy", "hinted", "--policy", "auto")
    capsysbinary.readouterr()
    assert run_command("plan", "policies", trace, *options, "--json") == 0
    said = capsysbinary.readouterr()
    assert b"whole" not in said.err
    plan = json.loads(said.out)
    assert plan["config"]["kv_groups"] == "all" and "whole_pages" not in plan["config"]
    one_by_one = [row for row in plan["league"] if "replayed" not in row]
    assert [row["policy"] for row in one_by_one] == ["lru", "hinted", "auto"]
    (point,) = plan["at"]
    for row in one_by_one:
        assert row["lru_hit_ratio"] == point["group_hit_ratio"]
        assert row["hit_ratio"] <= row["optimum_hit_ratio"] == point["group_optimum_hit_ratio"]
    replayed = [row for row in plan["league"] if "replayed" in row]
    for row in replayed:
        summary = asked(*shlex.split(row["command"])[1:], "--json")
        assert summary["config"]["kv_groups"] == "all"
        assert (summary["prefix_hit_ratio"], summary["ttft_ms"]) == (row["hit_ratio"], row["ttft_ms"])


@pytest.mark.parametrize(
    "model",
    [
        pytest.param((*GEMMA, "--host-memory", "4GiB"), id="windows"),
        pytest.param(
            ("--model", "granite-4.0-h-tiny", "--device", "h100-80gb", "--page-size", 512, "--set", "kv_memory=16GiB"),
            id="states",
        ),
        pytest.param(
            ("--model", "gpt-oss-120b", "--device", "h200-141gb", "--page-size", 512, "--set", "kv_memory=4GiB"),
            id="one-window",
        ),
    ],
)
def test_tiers_are_planned_by_parts_and_replay_to_what_the_plan_says(
    model: tuple[object, ...],
    trace: Path,
    asked: Callable[..., Any],
    run_command: Callable[..., int],
    capsysbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('date = "2026-11-01"\ncurrency = "EUR"\n[per_hour]\ndevice = 800\nhost_gib = 1\ndisk_gib = 0.1\n')
    options = (*model, "--prices", prices)
    plan = asked("plan", trace, *options, "--json")
    tiers, page_bytes = plan["tiers"], plan["config"]["page_bytes"]
    assert tiers["kv_bytes_per_token"] * 512 == page_bytes
    device = tiers["curve"][0]
    assert device["pages"]["device"] * page_bytes / (1 << 30) == device["gib"]["device"]
    assert plan["groups"]["most_hit_ratio"] >= device["hit_ratio"]["device"]
    replayed = [point for curve in ("curve", "disk_curve") for point in tiers[curve] if point["replayed"]]
    assert len(replayed) >= 2
    for point in (replayed[0], replayed[len(replayed) // 2], replayed[-1]):
        summary = asked(*shlex.split(point["command"])[1:], "--json")
        assert summary["prefix_hit_ratio"] == point["replayed"]["hit_ratio"]
        assert summary["ttft_ms"] == point["replayed"]["ttft_ms"]
    prices_of_next = {each["tier"]: each["price"] for each in tiers["next_gib"]}
    assert prices_of_next.pop("device") == pytest.approx(800 / (141 if "h200-141gb" in model else 80))
    assert prices_of_next == {"host": 1, "disk": 0.1}
    page = tmp_path / "plan.html"
    capsysbinary.readouterr()
    assert run_command("plan", trace, *options, "--html", page) == 0
    text = capsysbinary.readouterr().out.decode()
    assert "each size was simulated" in " ".join(text.split())
    tables = text[: text.index("the next GiB saves")].splitlines()
    assert max(map(len, tables)) <= 80
    assert b"KV groups counted" in page.read_bytes()


def test_workers_do_not_change_a_byte(
    trace: Path, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    printed = []
    for workers in (1, 2):
        capsysbinary.readouterr()
        assert (
            run_command(
                "plan",
                "policies",
                trace,
                *GEMMA,
                "--at",
                60,
                "--policy",
                "auto",
                "--set",
                f"workers={workers}",
                "--json",
            )
            == 0
        )
        printed.append(capsysbinary.readouterr().out)
    assert printed[0] == printed[1]
