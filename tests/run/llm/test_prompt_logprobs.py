"""Log-probabilities of prompts are those of transformers, whatever is cached, chunked, preempted or run beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")

import torch

from kvarts.base.errors import ConfigError
from kvarts.core.sampling import SamplingParams
from kvarts.run.torch.llm import LLM

from builders.real_models import engine_of

PROMPTS = [[token * 11 % 250 for token in range(start, start + length)] for start, length in ((0, 37), (0, 50), (9, 2))]


def expected_logprobs(reference: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def assert_scored(told: Any, reference: Any, prompt: list[int], num_top: int) -> None:
    assert told is not None and told.values[0] is None and len(told.values) == len(prompt)
    logprobs = expected_logprobs(reference, prompt)
    for place in range(1, len(prompt)):
        row = logprobs[place - 1]
        assert told.values[place] == pytest.approx(float(row[prompt[place]]), abs=1e-4)
        assert [value for _, value in told.top[place]] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert abs(told.ranks[place] - int((row >= row[prompt[place]]).sum())) <= 1


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"layers": "model", "speculative_config": "ngram"}),
        ("qwen3", {"num_pages": 32}),
        ("gemma3", {"kv_groups": "all"}),
    ],
)
def test_scores_are_those_of_transformers(
    models: Callable[[str], tuple[Any, Any]], family: str, settings: dict[str, Any]
) -> None:
    """In chunks of 16 tokens, beside requests that generate, after the same prompts were cached."""
    model, reference = models(family)
    llm = engine_of(model, budget=16, **settings)
    plain = SamplingParams(max_tokens=20, ignore_eos=True)
    alone = llm.generate(PROMPTS, plain)
    scored = SamplingParams(max_tokens=5, ignore_eos=True, prompt_logprobs=2)
    told = llm.generate([*PROMPTS, *PROMPTS], [scored] * 3 + [plain] * 3)
    for prompt, one, whole in zip(PROMPTS, told, alone, strict=False):
        assert_scored(one.prompt_logprobs, reference, prompt, 2)
        assert one.tokens == whole.tokens[:5]
        assert one.cached_tokens == 0
    assert [one.tokens for one in told[3:]] == [one.tokens for one in alone]
    assert all(one.prompt_logprobs is None for one in told[3:])
    assert llm.kv_live_bytes() == 0
    llm.check()


def test_no_tokens_are_generated_where_none_are_asked_for(models: Callable[[str], tuple[Any, Any]]) -> None:
    model, reference = models("qwen3")
    (told,) = engine_of(model).generate([PROMPTS[0]], SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=True))
    assert (told.tokens, told.text, told.finish_reason, told.logprobs) == ((), "", "length", ())
    assert_scored(told.prompt_logprobs, reference, PROMPTS[0], 0)
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens: must be at least 1"):
        SamplingParams(max_tokens=0)


def test_parameters_of_each_prompt(tiny: Callable[[str], Path]) -> None:
    llm = LLM(tiny("qwen3"))
    several = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
    assert [len(one.tokens) for one in llm.generate(PROMPTS, several)] == [1, 2, 3]
    with pytest.raises(ConfigError, match="params: there are 2 for 3 prompts"):
        llm.generate(PROMPTS, several[:2])
