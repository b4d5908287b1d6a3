"""What a plan says of a trace: where each token went, knees, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.plan.cache import Breakdown, CachePlan
from kvarts.plan.curve import concave_hull, find_knees, lru_curve, stack_distances
from kvarts.plan.reuse import find_reuse
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.plan_traces import small_traces
from oracles.naive_plan import naive_requests

SAMPLE = Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))
COMMANDS = ("  kvarts replay", "  --kv-transfer-config", "  vllm serve ", "  python -m sglang.launch_server ")


@given(small_traces(most_requests=20), st.integers(1, 8), st.integers(1, 40))
def test_every_prompt_token_is_counted_once(trace: Trace, page_size: int, num_pages: int) -> None:
    reuse = find_reuse(trace, page_size)
    distances = stack_distances(reuse)
    point = Breakdown(trace, find_reuse(trace, 1), reuse, distances).at(num_pages)
    assert point["hit_tokens"] == lru_curve(reuse, distances).hit_pages(num_pages) * page_size
    assert all(tokens >= 0 for tokens in point["computed_tokens"].values())
    assert point["hit_tokens"] + sum(point["computed_tokens"].values()) == reuse.num_prompt_tokens
    for key in ("by_origin", "by_age", "by_turn", "by_tenant"):
        if key in point:
            assert sum(part["hit_tokens"] for part in point[key].values()) == point["hit_tokens"]
            lost = sum(part["evicted_tokens"] for part in point[key].values())
            assert lost == point["computed_tokens"]["evicted"]
    for key in ("by_turn", "by_tenant"):
        if key in point:
            assert sum(part["prompt_tokens"] for part in point[key].values()) == reuse.num_prompt_tokens


@given(small_traces(most_requests=20), st.integers(1, 5))
def test_where_a_page_was_before(trace: Trace, page_size: int) -> None:
    """By its session alone, by others alone, or by both; a request without a session has no history of its own."""
    requests = list(trace)
    seen_by: dict[object, set[object]] = {}
    counted = {"own_history": 0, "other_requests": 0, "shared_prefix": 0}
    for request, naive in zip(requests, naive_requests(trace, page_size), strict=True):
        session = request.session_id
        for place, page in enumerate(naive.pages):
            before = seen_by.get(page)
            if before is not None and place < naive.num_findable:
                if session is None or session not in before:
                    origin = "other_requests"
                else:
                    origin = "own_history" if before == {session} else "shared_prefix"
                counted[origin] += page_size
        for page in naive.pages:
            seen_by.setdefault(page, set()).add(session if session is not None else object())
    reuse = find_reuse(trace, page_size)
    point = Breakdown(trace, find_reuse(trace, 1), reuse, stack_distances(reuse)).at(10**6)
    assert {name: part["hit_tokens"] for name, part in point["by_origin"].items()} == counted


@given(small_traces(most_requests=25), st.integers(1, 4))
def test_gains_fall_along_the_hull_and_knees_lie_on_it(trace: Trace, page_size: int) -> None:
    curve = lru_curve(find_reuse(trace, page_size))
    sizes, hits = (column.tolist() for column in concave_hull(curve, 0))
    gains = [(b - a) / (d - c) for a, b, c, d in zip(hits, hits[1:], sizes, sizes[1:], strict=False)]
    assert gains == sorted(gains, reverse=True)
    assert all(curve.hit_pages(size) == hit for size, hit in zip(sizes, hits, strict=True))
    knees = find_knees(curve)
    assert knees == sorted(set(knees))
    assert set(knees) <= set(sizes)


def test_a_loop_has_one_knee_where_it_fits() -> None:
    """Eight prompts in turn: LRU finds nothing until all of them fit, and everything from then on."""
    rows = [TraceRequest(row, row, (range(row % 8 * 100, row % 8 * 100 + 11),), 11, 1) for row in range(80)]
    plan = CachePlan(Trace(rows), page_size=1)
    assert plan.curve.most_pages == 87
    assert plan.curve.hit_pages(77) == 0
    assert plan.curve.hit_pages(87) == 720
    assert plan.knees == [87]
    assert plan.optimum.hit_pages(44) >= 300


def test_sizes_are_answered_as_shares_of_prompt_tokens(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run_command("plan", SAMPLE, "--page-size", 512, "--at", "500,2000", "--json") == 0
    printed = capsysbinary.readouterr().out
    plan = json.loads(printed)
    curve = lru_curve(find_reuse(load_trace(SAMPLE), 512))
    assert [point["pages"] for point in plan["at"]] == [500, 2000]
    assert [point["hit_ratio"] for point in plan["at"]] == [curve.hit_ratio(500), curve.hit_ratio(2000)]
    assert all(point["hit_ratio"] <= point["optimum_hit_ratio"] <= plan["most_hit_ratio"] for point in plan["at"])
    assert run_command("plan", SAMPLE, "--page-size", 512, "--at", "500,2000", "--json") == 0
    assert capsysbinary.readouterr().out == printed


@pytest.mark.long
def test_the_bundled_sample_is_planned_without_arguments(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run_command("plan") == 0
    printed = capsysbinary.readouterr().out.decode()
    assert "knee" in printed
    assert "from own session" in printed
    assert max(len(line) for line in printed.splitlines() if not line.startswith(COMMANDS)) <= 80


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere.jsonl"], 3, "nowhere.jsonl: no such file"),
        ([SAMPLE, "--at", "0"], 2, "--at"),
        ([SAMPLE, "--at", "1,x"], 2, "--at"),
        ([SAMPLE, "--page-size", "0"], 2, "--page-size"),
    ],
)
def test_what_is_wrong_is_named(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[object], code: int, said: str
) -> None:
    assert run_command("plan", *arguments) == code
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out
