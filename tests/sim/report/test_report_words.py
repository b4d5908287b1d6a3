"""What outputs begin with, and how they state uncertainty."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.sim.report.run_directory import RunReport, Spread
from kvarts.sim.report.words import UNCERTAIN, facts, opening, wrapped

ROOFLINE = {"model": "roofline", "llm": "qwen3-8b", "device": "h200", "tensor_parallel": 1}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["qwen3-8b on h200; rules of vLLM; step times: roofline"]),
        (
            {"cost": {**ROOFLINE, "weight_dtype": "fp8", "kv_dtype": "fp8", "tensor_parallel": 2}},
            ["qwen3-8b (weights fp8, KV fp8) on 2 x h200; rules of vLLM; step times: roofline"],
        ),
        (
            {"engine": "trtllm", "cost": {**ROOFLINE, "weight_dtype": "fp8"}},
            ["qwen3-8b (weights fp8) on h200", "rules of vLLM, defaults of TensorRT-LLM; step times: roofline"],
        ),
        (
            {"engine": "sglang", "cost": "polynomial", "model": None, "device": None},
            [
                "No --model: generic step times (polynomial, of Dynamo's mocker)",
                "rules and defaults of SGLang",
                "  name yours: --model llama-3.1-8b --device h100-80gb",
            ],
        ),
    ],
)
def test_an_output_begins_with_what_was_replayed(changes: dict[str, Any], lines: list[str]) -> None:
    config = {"model": "qwen3-8b", "device": "h200", "profile": "default", "cost": ROOFLINE, **changes}
    assert opening(config) == lines


def test_a_latency_is_shown_with_its_uncertainty_and_what_that_is() -> None:
    ttft = Spread(mean=20.0, p50=22.0, p90=51.7, p95=60.0, p99=84.3, max=90.0)
    sure = dict(facts(RunReport(ttft_ms=ttft)))
    assert sure["TTFT"] == "p50 22.0 ms, p90 51.7 ms, p99 84.3 ms" and UNCERTAIN[0] not in sure
    unsure = dict(facts(RunReport(ttft_ms=ttft, uncertainty={"ttft_ms": Spread(p50=2.8, p99=10.9)})))
    assert unsure["TTFT"] == "p50 22.0 ms ± 2.8 ms, p90 51.7 ms, p99 84.3 ms ± 10.9 ms"
    assert unsure[UNCERTAIN[0]] == UNCERTAIN[1]


WORDS = st.sampled_from(["a", "of", "2.5", "%", "", "half-open", "a\xa0b", "\t", "a\nb", "\r", "e" * 40, "x" * 81])


@pytest.mark.laws
@given(st.lists(WORDS).map(" ".join), st.sampled_from(["", "warning       "]), st.sampled_from(["", "  ", " " * 14]))
def test_lines_are_those_of_textwrap(text: str, first: str, rest: str) -> None:
    whole = text.replace(" %", "\xa0%")
    lines = wrap(
        whole, width=80, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )
    assert wrapped(text, first, rest) == [line.replace("\xa0", " ") for line in lines]
