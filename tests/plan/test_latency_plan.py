"""Options of a plan: replaying the command of one gives what the plan says of it, and one step less does not do."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.cost.polynomial import LinearCost
from kvarts.plan.cache import CachePlan
from kvarts.plan.latency import LatencyPlan, first_that, lowest_known
from kvarts.sim.config import ReplayConfig, Slo
from kvarts.sim.traffic.trace import Trace

from builders.plan_traces import small_traces

SAMPLE = Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))
COST = "linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,context_token_ms=0"


def replayed(asked: Callable[..., Any], command: str) -> Any:
    words = shlex.split(command)
    assert words[:2] == ["kvarts", "replay"]
    return asked(*words[1:], "--json")


@pytest.mark.long
def test_each_router_has_its_fewest_replicas_and_one_less_is_too_few(
    tmp_path: Path, asked: Callable[..., Any], run_command: Callable[..., int]
) -> None:
    """Commands say what the plan says, also where replicas, a router and a rate were given already."""
    trace = tmp_path / "trace.jsonl"
    assert run_command("trace", "slice", SAMPLE, "--count", 100, "-o", trace) == 0
    setting = ["--cost", COST, "--page-size", 512, "--pages", 250, "--slo-ttft-ms", 3000, "--slo-share", 0.9]
    more = ["--replicas", 2, "--router", "least-loaded", "--set", "speedup=4", "--at", 250]
    latency = asked("plan", trace, *setting, *more, "--json")["latency"]
    rows = latency["replicas"]["by_router"]
    assert [row["router"] for row in rows] == ["least-loaded", "round-robin", "prefix"]
    for row in rows:
        summary = replayed(asked, row["command"])
        assert summary["config"]["replicas"] == row["replicas"] > 1
        assert summary["config"]["router"] == row["router"]
        assert summary["goodput"]["ratio"] == row["slo_ratio"] >= 0.9 > row["one_less"]["slo_ratio"]
    for point in latency["points"]:
        summary = replayed(asked, point["command"])
        assert summary["goodput"]["ratio"] == point["slo_ratio"]
        assert [summary["config"][name] for name in ("replicas", "pages", "speedup")] == [
            point["replicas"],
            point["pages"],
            point["rate"],
        ]


@pytest.mark.slow
def test_longer_steps_never_make_the_answer_cheaper(
    tmp_path: Path, asked: Callable[..., Any], run_command: Callable[..., int]
) -> None:
    trace = tmp_path / "trace.jsonl"
    assert run_command("trace", "slice", SAMPLE, "--count", 100, "-o", trace) == 0
    setting = ["--cost", COST, "--page-size", 512, "--pages", 400, "--slo-ttft-ms", 3000, "--slo-share", 0.9]
    more = ["--set", "speedup=2", "--set", "cost_error=0.5", "--at", 400]
    latency = asked("plan", trace, *setting, *more, "--json")["latency"]
    cheapest = latency["options"][0]
    steps = [(answer["cheapest"]["replicas"], answer["cheapest"]["pages"]) for answer in _answers(latency)]
    assert steps[0] <= (cheapest["replicas"], cheapest["pages"]) <= steps[1]
    assert steps[0] < steps[1]
    for answer, factor in zip(_answers(latency), (0.5, 1.5), strict=True):
        summary = replayed(asked, answer["command"])
        assert summary["config"]["cost_factor"] == factor
        assert summary["goodput"]["ratio"] == answer["slo_ratio"]
    assert len(cheapest["would_change"]) == 6
    assert [option["name"] for option in latency["options"]] == ["cheapest", "knee", "best"]
    assert all(option["would_change"] and option["limited_by"] for option in latency["options"])


@pytest.mark.long
def test_worlds_are_counted_by_replays(
    tmp_path: Path, asked: Callable[..., Any], run_command: Callable[..., int]
) -> None:
    """The SLO is kept in five of ten worlds for certain, and in each slower one whose replay keeps it."""
    trace = tmp_path / "trace.jsonl"
    assert run_command("trace", "slice", SAMPLE, "--count", 100, "-o", trace) == 0
    setting = ["--cost", COST, "--page-size", 512, "--slo-ttft-ms", 3000, "--slo-share", 0.9, "--set", "speedup=2"]
    for error in (0.1, 0.5):
        latency = asked("plan", trace, *setting, "--pages", 400, "--set", f"cost_error={error}", "--at", 400, "--json")[
            "latency"
        ]
        step, worlds = latency["options"][0], latency["sensitivity"]["worlds"]
        kept = 5
        for middle in (0.55, 0.65, 0.75, 0.85, 0.95):
            factor = (1 + error) ** (NormalDist().inv_cdf(middle) / NormalDist().inv_cdf(0.9))
            summary = replayed(asked, f"{step['command']} --set cost_factor={factor:.3f}")
            kept += summary["goodput"]["ratio"] >= 0.9
        assert worlds == {"kept": kept, "of": 10}
        assert any(text.startswith(f"it keeps the SLO in {kept} of 10 worlds") for text in step["would_change"])


def _answers(latency: dict[str, Any]) -> list[dict[str, Any]]:
    return latency["sensitivity"]["answers"]  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("slo_ms", [3000, 8000])
def test_the_recommendation_for_the_conversation_trace_keeps_its_slo(
    conversation_trace: Path, asked: Callable[..., Any], slo_ms: int
) -> None:
    setting = ["--page-size", 512, "--model", "llama-3.1-8b", "--device", "h100-80gb", "--slo-ttft-ms", slo_ms]
    latency = asked("plan", conversation_trace, *setting, "--slo-share", 0.95, "--json")["latency"]
    cheapest = latency["options"][0]
    assert cheapest["name"] == "cheapest"
    assert replayed(asked, cheapest["command"])["goodput"]["ratio"] >= 0.95
    below = cheapest["step_below"]
    assert replayed(asked, below["command"])["goodput"]["ratio"] == below["slo_ratio"] < 0.95


@pytest.mark.long
def test_the_recommendation_for_the_bundled_sample_keeps_its_slo(asked: Callable[..., Any]) -> None:
    latency = asked("plan", "--slo-ttft-ms", 3000, "--slo-share", 0.9, "--json")["latency"]
    cheapest = latency["options"][0]
    assert replayed(asked, cheapest["command"])["goodput"]["ratio"] >= 0.9
    assert replayed(asked, cheapest["step_below"]["command"])["goodput"]["ratio"] < 0.9
    largest = latency["largest_rate"]
    assert replayed(asked, largest["command"])["goodput"]["ratio"] >= 0.9
    assert largest["fails_at"] <= largest["rate"] * (1 + largest["tolerance"]) * (1 + 1e-9)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 39), st.booleans())
def test_searches_end_at_a_place_that_keeps_next_to_one_that_does_not(
    keeps: list[bool], start: int, is_monotone: bool
) -> None:
    if is_monotone:
        keeps = sorted(keeps)
    start = min(start, len(keeps) - 1)
    tried = []

    def ask(place: int) -> bool:
        tried.append(place)
        return keeps[place]

    found = first_that(ask, start, len(keeps))
    if found is None:
        assert not keeps[start] and not keeps[-1]
    else:
        assert keeps[found] and found in tried
        assert found == 0 or (not keeps[found - 1] and found - 1 in tried)
        assert not is_monotone or found == keeps.index(True)


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.sets(st.integers(0, 19)), st.integers(0, 19))
def test_no_place_below_the_answer_is_known_to_keep_it(keeps: list[bool], known: set[int], start: int) -> None:
    known = {place for place in known if place < len(keeps)}

    def ask(place: int) -> bool:
        known.add(place)
        return keeps[place]

    found = first_that(ask, min(start, len(keeps) - 1), len(keeps))
    found = lowest_known(ask, found, lambda place: place in known, range(len(keeps)))
    assert not any(keeps[place] for place in known if found is None or place < found)
    assert found is None or (keeps[found] and (found == 0 or not keeps[found - 1]))


@settings(max_examples=25)
@given(small_traces(most_requests=10), st.integers(1, 4), st.integers(8, 40), st.integers(1, 60), st.integers(1, 4))
@pytest.mark.long
def test_of_all_steps_replayed_the_cheapest_is_the_lowest_that_keeps_the_slo(
    trace: Trace, page_size: int, num_pages: int, ttft_ms: int, share: int
) -> None:
    config = ReplayConfig(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=4,
        cost=LinearCost(step_ms=3.0, chunk_token_ms=2.0, decode_ms=1.0),
        speedup=1000.0,
        slo=Slo(ttft_ms=ttft_ms),
    )
    plan = LatencyPlan(CachePlan(trace, page_size), config, command=repr, slo_share=share / 4)
    found = plan.to_builtins()
    least: dict[tuple[float, str | None], tuple[int, int]] = {}
    for point in found["points"]:
        if point["rate"] == 1000.0 and point["slo_ratio"] >= share / 4:
            key = (point["cost_factor"], point["router"] if point["replicas"] > 1 else None)
            least[key] = min(least.get(key, (99, 0)), (point["replicas"], point["pages"]))
    lowest = min((least[key] for key in ((1.0, None), (1.0, "prefix")) if key in least), default=None)
    first = found["options"][0]
    if first["name"] != "cheapest":
        assert lowest is None
        return
    assert lowest == (first["replicas"], first["pages"])
    assert lowest is not None
    assert "step_below" not in first or first["step_below"]["slo_ratio"] < share / 4
    best = found["options"][-1]
    assert first["keeps_slo"]
    assert best["keeps_slo"] or (best["replicas"], best["pages"]) > lowest  # more may be worse
    for row in found["replicas"]["by_router"]:
        assert row["replicas"] is None or row["slo_ratio"] >= share / 4
        assert "one_less" not in row or row["one_less"]["slo_ratio"] < share / 4
    for answer in found["sensitivity"]["answers"]:
        assert answer["cheapest"] is None or answer["cheapest"]["is_same"] == (
            (answer["cheapest"]["replicas"], answer["cheapest"]["pages"]) == lowest
        )


def test_without_an_slo_there_are_latencies_and_no_cheapest_option(asked: Callable[..., Any], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:60]))
    latency = asked("plan", trace, "--cost", COST, "--pages", 20_000, "--json")["latency"]
    assert [option["name"] for option in latency["options"]] == ["knee", "best"]
    assert latency["largest_rate"] is None
    assert all(point["slo_ratio"] is None for point in latency["points"])


@pytest.mark.parametrize("page_size", [1, 512, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "rows",
    [
        [{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}],
        [{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [7]}],
        [{"timestamp": row, "input_length": 700, "output_length": 9, "hash_ids": [row, 99]} for row in range(4)],
    ],
    ids=["one request", "one token", "nothing in common"],
)
def test_traces_with_nothing_to_hit_have_options_too(
    tmp_path: Path, asked: Callable[..., Any], rows: list[dict[str, Any]], page_size: int
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    setting = ["--cost", COST, "--page-size", page_size, "--pages", 900, "--slo-ttft-ms", 4000, "--price", "host=1"]
    plan = asked("plan", trace, *setting, "--json")
    assert [option["name"] for option in plan["latency"]["options"]] == ["cheapest", "knee", "best"]
    for option in plan["latency"]["options"]:
        assert option["keeps_slo"]
        assert replayed(asked, option["command"])["num_completed"] == len(rows)


@pytest.mark.slow
def test_a_request_that_is_refused_does_not_keep_the_slo(tmp_path: Path, asked: Callable[..., Any]) -> None:
    """Three of four requests fit into no replica, and the one that does is fast."""
    lengths = (500, 5000, 6000, 7000)
    rows = [
        {"timestamp": 0, "input_length": n, "output_length": 2, "hash_ids": [n * 100 + i for i in range(-(-n // 512))]}
        for n in lengths
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    setting = ["--cost", COST, "--page-size", 512, "--pages", 2, "--slo-ttft-ms", 100_000, "--at", 2]
    latency = asked("plan", trace, *setting, "--slo-share", 0.5, "--json")["latency"]
    assert {point["slo_ratio"] for point in latency["points"]} == {0.25}
    assert [option["name"] for option in latency["options"]] == ["knee", "best"]
    assert not any(option["keeps_slo"] for option in latency["options"])
    assert latency["options"][0]["notes"][0].startswith("0.0 % hits")
    setting = ["--cost", COST, "--page-size", 256, "--pages", 1, "--slo-ttft-ms", 100_000, "--at", 1]
    latency = asked("plan", trace, *setting, "--json")["latency"]
    assert latency["options"][0]["notes"][0].startswith("unknown hits")


def test_curves_alone_replay_nothing(asked: Callable[..., Any]) -> None:
    assert "latency" not in asked("plan", "curve", SAMPLE, "--page-size", 512, "--json")
    assert "latency" not in asked("plan", SAMPLE, "--page-size", 512, "--json")
