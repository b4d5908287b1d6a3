"""A bound on inter-token latency changes no token of a real model, and cuts its prompts into chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")

from kvarts.core.config import EngineConfig
from kvarts.core.executor import Executor
from kvarts.core.sampling import SamplingParams
from kvarts.core.sched.plan import Batch, StepPlan, StepResult
from kvarts.run.torch import llm as llm_module
from kvarts.run.torch.llm import LLM
from kvarts.run.wrappers import MeasuredCost

from builders.real_models import undisturbed

PROMPTS = [[token * 7 % 250 for token in range(start, start + 40 * (start + 1))] for start in range(4)]


class Seen:
    """Keeps what every step computed, which it says took a millisecond per token."""

    def __init__(self, executor: Executor) -> None:
        self.needs_page_ids = executor.needs_page_ids
        self.batches: list[Batch] = []
        self._executor = executor

    def execute(self, plan: StepPlan) -> StepResult:
        self.batches.append(plan.batch)
        result = self._executor.execute(plan)
        return StepResult(plan.batch.num_tokens * 1_000_000, *[getattr(result, name) for name in FIELDS])


FIELDS = StepResult.FIELDS[1:]


def test_chunks_keep_the_bound_and_tokens_stay(
    models: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = models("qwen3")
    monkeypatch.setattr(llm_module, "MeasuredCost", lambda _: MeasuredCost([(1, 0.001), (64, 0.064)]))
    seen: list[Seen] = []

    def wrap(executor: Executor) -> Executor:
        seen.append(Seen(executor))
        return seen[0]

    config = EngineConfig(num_pages=256, page_size=4, max_num_batched_tokens=64, max_num_seqs=4, max_itl_ms=20.0)
    llm = LLM(model, None, config, audit=True, wrap=wrap)
    told = llm.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    for prompt, one in zip(PROMPTS, told, strict=True):
        assert list(one.tokens) == undisturbed(reference, prompt, 24)
    mixed = [batch for batch in seen[0].batches if batch.num_decodes and batch.chunks]
    assert mixed and all(batch.num_tokens <= 20 for batch in mixed)
    assert max(batch.num_tokens for batch in mixed) > 12  # the rest is the mean error of the estimate
    assert max(batch.num_tokens for batch in seen[0].batches) == 64  # without decodes, the budget is the limit


def test_a_bound_may_be_an_argument(models: Callable[[str], tuple[Any, Any]]) -> None:
    model, reference = models("qwen3")
    llm = LLM(model, None, kv_memory="1MiB", max_itl_ms=5.0)
    told = llm.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))
    assert [list(one.tokens) for one in told] == [undisturbed(reference, prompt, 8) for prompt in PROMPTS]
    assert llm.config.max_itl_ms == 5.0
