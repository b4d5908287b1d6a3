"""Preempted requests: their pages go to host memory, and come back where that is sooner than computing them."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_never_hurts import RATES, WORSE, config_of, longest_step_ms

from kvarts.core.events import LoadStarted, PagesRemoved, PagesStored
from kvarts.core.kv.groups import PartGroup
from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.replaying import replay
from kvarts.sim.report.requests import CANCELLED
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.case import Case, Row
from builders.grouped import FULL, STATES, WINDOW
from builders.outcome import Outcome, run_kvarts

NS_PER_S = 1_000_000_000


GROUPS = (PartGroup(FULL, 1000), PartGroup(WINDOW.layer, 1000))
WITH_STATES = (PartGroup(FULL, 1000), PartGroup(STATES[1].layer, 1000))
EITHER = pytest.mark.parametrize(
    "groups", [None, GROUPS, WITH_STATES], ids=["whole pages", "KV groups", "layers with a state"]
)


def outcome_of(mode: Any, policy: Any, groups: Any, cancel_after_ms: int | None = None) -> Outcome:
    """Two requests, the second of which loses its pages, and most are evicted before it can run again."""
    rows = [Row(index, [index], 16, num_output, None, 0, None) for index, num_output in enumerate((100, 60))]
    rows[1].cancel_after_ms = cancel_after_ms
    num_pages = {None: 36, GROUPS: 21, WITH_STATES: 37}[groups]
    case = Case(rows, 16, 4, num_pages, 16, 8, "default", 1)
    offload = OffloadConfig(host_pages=100, policy=policy, kv_bytes_per_token=1000, preemption_mode=mode)
    if groups is None:
        return run_kvarts(case, offload=offload)
    return run_kvarts(case, offload=offload, groups=groups, kv_groups="tails")


def num_cached(outcome: Outcome) -> int:
    """The pages in host memory; with KV groups, its blocks."""
    tiers = outcome.engines[0].scheduler.tiers
    assert tiers is not None
    return sum(tiers.num_pages()[1::2])


@EITHER
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_pages_of_generated_tokens_come_back_from_host_memory(policy: Any, groups: Any) -> None:
    outcomes = [outcome_of(mode, policy, groups) for mode in ("recompute", "swap")]
    recomputed, swapped = (outcome.requests.columns for outcome in outcomes)
    assert recomputed["preemptions"].sum() == swapped["preemptions"].sum() == 1
    assert swapped["recomputed_tokens"].sum() < recomputed["recomputed_tokens"].sum() / 3
    loads = [event for event in outcomes[1].events[0] if isinstance(event, LoadStarted)]
    assert sum(count for event in loads for _, count in event.by_tier) > 16 // 4, "more than the prompt"


@EITHER
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_host_memory_drops_them_when_their_request_ends(policy: Any, groups: Any) -> None:
    outcome = outcome_of("swap", policy, groups)
    below = [event for event in outcome.events[0] if isinstance(event, PagesStored | PagesRemoved)]
    private = {True: 0, False: 0}
    for event in below:
        if event.medium == "host":
            first = max(event.start_page, event.content.num_known_pages)
            private[isinstance(event, PagesStored)] += max(0, event.end_page - first)
    assert private[True] == private[False] > 0
    assert num_cached(outcome) <= (1 if groups is None else 2) * 2 * 16 // 4


@EITHER
def test_a_cancelled_request_leaves_none(groups: Any) -> None:
    end_ns = int(outcome_of("swap", "eager", groups).requests.columns["last_token_ns"][1])
    outcome = outcome_of("swap", "eager", groups, cancel_after_ms=end_ns // 1_000_000 - 100)
    assert outcome.requests.columns["preemptions"].sum() == 1
    assert outcome.requests.columns["status"][1] == CANCELLED
    assert num_cached(outcome) <= (1 if groups is None else 2) * 2 * 16 // 4


def unnamed(seed: int, num_requests: int, prompt_tokens: int, output_tokens: int, per_s: float) -> Trace:
    """Prompts that share nothing, with outputs whose tokens no one knows."""
    random = Random(seed)
    rows, arrival_s, start = [], 0.0, 0
    for index in range(num_requests):
        arrival_s += random.expovariate(per_s)
        num_prompt = round(prompt_tokens * random.uniform(0.5, 1.5))
        num_output = round(output_tokens * random.uniform(0.2, 1.8))
        tokens = range(start, start + num_prompt)
        rows.append(TraceRequest(index, round(arrival_s * NS_PER_S), (tokens,), num_prompt, num_output))
        start += num_prompt
    return Trace(rows)


@pytest.mark.slow
@pytest.mark.laws
@given(
    st.sampled_from(
        [
            ("qwen3-8b", None, 0),
            ("gpt-oss-20b", "tails", 0),
            ("gemma-3-27b", "all", 0),
            ("qwen3-next-80b-a3b", "tails", 600),  # the memory of three states
        ]
    ),
    st.sampled_from([(60, 500, 700), (40, 2000, 300), (30, 100, 1500)]),
    st.sampled_from([1.2, 2.0, 4.0]),
    st.sampled_from(["eager", "lazy"]),
    st.sampled_from(RATES),
    st.sampled_from([0.1, 1.0, 10.0]),
)
def test_swapping_never_hurts(
    model: tuple[str, str | None, int],
    shape: tuple[int, int, int],
    num_longest: float,
    policy: Any,
    rate: str,
    num_devices: float,
) -> None:
    """L13 for requests that are preempted: TTFT and the time to the last token, means over several arrivals."""
    num_requests, prompt_tokens, output_tokens = shape
    name, keeps, state_pages = model
    num_pages = round((1.5 * prompt_tokens + 1.8 * output_tokens) / 16 * num_longest) + 2 + state_pages
    config = config_of(name, num_pages, keeps)
    offload = OffloadConfig(host_pages=max(64, round(num_pages * num_devices)), policy=policy, h2d=rate, d2h=rate)
    alone_ms, swapped_ms = [0.0, 0.0], [0.0, 0.0]
    step_ms = 0.0
    for seed in range(4):
        trace = unnamed(seed, num_requests, prompt_tokens, output_tokens, 4.0)
        for sums, each in ((alone_ms, config), (swapped_ms, msgspec.structs.replace(config, offload=offload))):
            report = replay(trace, each)
            step_ms = max(step_ms, longest_step_ms(report))
            for place, latency in enumerate(("ttft_ms", "e2e_ms")):
                sums[place] += report.summary[latency]["mean"] / 4
    for alone, swapped in zip(alone_ms, swapped_ms, strict=True):
        assert swapped <= WORSE * alone + step_ms
