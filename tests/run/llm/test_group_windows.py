"""Pages that windows give back, by every attention backend: no token misses them, and one token earlier it would."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch

from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.run.torch.block_cut import BlockCut, cut_blocks
from kvarts.run.torch.executor import BACKENDS
from kvarts.run.torch.flash import FlashBackend
from kvarts.run.torch.llm import LLM

from builders.flash_standin import flash_module
from builders.real_models import GREEDY, VOCABULARY, engine_of, prompts_with_prefixes, undisturbed
from builders.windowed_models import config_of, forgetting, models_of

ATTENTION = ("numba", "sdpa", "flash")
FAST = [*(("gemma2", name) for name in ATTENTION), ("gpt_oss", "numba")]


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention by what it says it computes, for pages of any size."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_module())
    monkeypatch.setitem(BACKENDS, "flash", (FlashBackend, lambda pools: None))


def too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let windows end one token before their time, in what memory is kept for and not in what is read."""

    def cut(*args: Any, **kwargs: Any) -> BlockCut:
        made = cut_blocks(*args, **kwargs)
        groups = tuple(
            replace(group, layer=replace(group.layer, span=group.layer.span - 1)) if group.layer.span else group
            for group in made.memory.groups
        )
        return replace(made, memory=replace(made.memory, groups=groups))

    monkeypatch.setattr("kvarts.run.torch.room.cut_blocks", cut)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(family, attention, marks=[] if (family, attention) in FAST else pytest.mark.long)
        for family in ("gemma2", "gpt_oss", "gemma4_text")
        for attention in ATTENTION
    ],
)
def test_all_backends_say_the_same_and_not_if_a_page_goes_back_too_early(
    windowed: Callable[[str], tuple[Any, Any]], family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6 and its control, one token before the time: with windows, soft caps, learned sinks, and KV of two shapes."""
    model, reference = windowed(family)
    prompts = prompts_with_prefixes()[1:3]
    expected = [undisturbed(reference, prompt, GREEDY.max_tokens) for prompt in prompts]
    for is_control in (False, True):
        if is_control:
            too_early(monkeypatch)
        engine = forgetting(engine_of(model, num_pages=40, budget=16, attention=attention, kv_groups="tails"))
        said = [list(completion.tokens) for completion in engine.generate(prompts, GREEDY)]
        assert (said == expected) is (not is_control)


@pytest.mark.laws
@settings(max_examples=3)
@given(
    seed=st.integers(0, 1 << 20),
    family=st.sampled_from(["gemma3_text", "gpt_oss", "mimo_v2_flash"]),
    window=st.sampled_from([2, 3, 4, 5, 8, 11, 16, 200]),
    page_size=st.sampled_from([1, 3, 4, 8, 16]),
    attention=st.sampled_from(["sdpa", "flash"]),
    keeps=st.sampled_from(["all", "tails"]),
)
def test_windows_and_pages_of_any_size(
    seed: int, family: str, window: int, page_size: int, attention: str, keeps: str
) -> None:
    """Windows below, at, above and beside the size of a page; prompts of a token and up to page ends; answers of a
    token; chunks of a token more than a page."""
    if family == "mimo_v2_flash" and page_size % 2:
        page_size += 1  # a page of its full layers is half as large, and may be two of theirs
    random = Random(seed)
    model, reference = models_of(config_of(family, window, swa_window_size=window))
    lengths = [1, page_size, 2 * page_size + 1, random.randrange(1, 40), 3 * page_size]
    prompts = [[random.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    prompts.append([*prompts[-1][: 2 * page_size], 5])
    config = EngineConfig(
        num_pages=-(-64 // page_size) + 4,
        page_size=page_size,
        max_num_batched_tokens=page_size + 1,
        max_num_seqs=min(3, page_size + 1),
    )
    engine = forgetting(LLM(model, None, config, audit=True, attention=attention, kv_groups=keeps))
    for num_tokens in (1, 9):
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
            assert list(completion.tokens) == undisturbed(reference, prompt, num_tokens)
    assert engine.kv_live_bytes() == 0
    engine.check()


@pytest.mark.parametrize(("family", "attention"), [("gemma3_text", "numba"), ("gemma4_text", "sdpa")])
def test_in_16_bits_groups_change_no_token(family: str, attention: str) -> None:
    """Beside the same engine without groups, in memory that has room for all, so that steps are alike."""
    model, _ = models_of(config_of(family), torch.bfloat16)
    prompts = prompts_with_prefixes()[:5]  # without those of which more is found without groups
    said = []
    for keeps in ("off", "all", "tails"):
        engine = engine_of(model, budget=48, attention=attention, kv_groups=keeps)
        if keeps != "off":
            forgetting(engine)
        said.append([list(completion.tokens) for completion in engine.generate(prompts, GREEDY)])
    assert said[0] == said[1] == said[2]
