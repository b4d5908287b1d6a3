"""Preempted requests: their pages go to host memory, and come back where that is sooner than computing them."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_never_hurts import RATES, WORSE, config_of, longest_step_ms

from kvarts.events import LoadStarted, PagesRemoved, PagesStored
from kvarts.offload.config import OffloadConfig
from kvarts.report.requests import CANCELLED
from kvarts.sim.replay import replay
from kvarts.traffic.trace import Trace, TraceRequest

from builders.case import Case, Row
from builders.outcome import Outcome, run_kvarts
from builders.tiers import offloader_of

NS_PER_S = 1_000_000_000


def outcome_of(mode: Any, policy: Any, cancel_after_ms: int | None = None) -> Outcome:
    """Two requests, the second of which loses its pages, and most are evicted before it can run again."""
    rows = [Row(index, [index], 16, num_output, None, 0, None) for index, num_output in enumerate((100, 60))]
    rows[1].cancel_after_ms = cancel_after_ms
    case = Case(rows, 16, 4, 36, 8192, 8, "default", 1)
    offload = OffloadConfig(host_pages=100, policy=policy, kv_bytes_per_token=1000, preemption_mode=mode)
    return run_kvarts(case, offload=offload)


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_pages_of_generated_tokens_come_back_from_host_memory(policy: Any) -> None:
    outcomes = [outcome_of(mode, policy) for mode in ("recompute", "swap")]
    recomputed, swapped = (outcome.requests.columns for outcome in outcomes)
    assert recomputed["preemptions"].sum() == swapped["preemptions"].sum() == 1
    assert swapped["recomputed_tokens"].sum() < recomputed["recomputed_tokens"].sum() / 3
    loads = [event for event in outcomes[1].events[0] if isinstance(event, LoadStarted)]
    assert sum(count for event in loads for _, count in event.by_tier) > 16 // 4, "more than the prompt"


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_host_memory_drops_them_when_their_request_ends(policy: Any) -> None:
    outcome = outcome_of("swap", policy)
    below = [event for event in outcome.events[0] if isinstance(event, PagesStored | PagesRemoved)]
    private = {True: 0, False: 0}
    for event in below:
        if event.medium == "host":
            first = max(event.start_page, event.content.num_known_pages)
            private[isinstance(event, PagesStored)] += max(0, event.end_page - first)
    assert private[True] == private[False] > 0
    assert offloader_of(outcome.engines[0]).tiers[0].num_cached_blocks <= 2 * 16 // 4


def test_a_cancelled_request_leaves_none() -> None:
    end_ns = int(outcome_of("swap", "eager").requests.columns["last_token_ns"][1])
    outcome = outcome_of("swap", "eager", cancel_after_ms=end_ns // 1_000_000 - 100)
    assert outcome.requests.columns["preemptions"].sum() == 1
    assert outcome.requests.columns["status"][1] == CANCELLED
    assert offloader_of(outcome.engines[0]).tiers[0].num_cached_blocks <= 2 * 16 // 4


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


@pytest.mark.laws
@given(
    st.sampled_from([(60, 500, 700), (40, 2000, 300), (30, 100, 1500)]),
    st.sampled_from([1.2, 2.0, 4.0]),
    st.sampled_from(["eager", "lazy"]),
    st.sampled_from(RATES),
    st.sampled_from([0.1, 1.0, 10.0]),
)
def test_swapping_never_hurts(
    shape: tuple[int, int, int], num_longest: float, policy: Any, rate: str, num_devices: float
) -> None:
    """L13 for requests that are preempted: TTFT and the time to the last token, means over several arrivals."""
    num_requests, prompt_tokens, output_tokens = shape
    num_pages = round((1.5 * prompt_tokens + 1.8 * output_tokens) / 16 * num_longest) + 2
    config = config_of("qwen3-8b", num_pages, None)
    offload = OffloadConfig(host_pages=max(64, round(num_pages * num_devices)), policy=policy, h2d=rate, d2h=rate)
    alone_ms, swapped_ms = [0.0, 0.0], [0.0, 0.0]
    step_ms = 0.0
    for seed in range(4):
        trace = unnamed(seed, num_requests, prompt_tokens, output_tokens, 4.0)
        for sums, each in ((alone_ms, config), (swapped_ms, msgspec.structs.replace(config, offload=offload))):
            report = replay(trace, each)
            step_ms = max(step_ms, longest_step_ms(report))
            for place, name in enumerate(("ttft_ms", "e2e_ms")):
                sums[place] += report.summary[name]["mean"] / 4
    for alone, swapped in zip(alone_ms, swapped_ms, strict=True):
        assert swapped <= WORSE * alone + step_ms
