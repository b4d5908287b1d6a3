"""KV in 8 bits: an element's error is bounded, a step's result depends on the tokens alone, and memory is counted as it
is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.tiers.config import OffloadConfig
from kvarts.run.torch.attention import AttentionCall, attending
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.pools import decode, encode
from kvarts.run.torch.probe import examine
from kvarts.run.torch.recorded_calls import Packed

from builders.real_models import GREEDY, PAGE_SIZE, prompts_with_prefixes


@pytest.mark.laws
@given(st.integers(1, 80), st.floats(1e-30, 1e30), st.integers(0, 1 << 20), st.sampled_from(["float32", "bfloat16"]))
def test_an_element_is_off_by_a_254th_of_the_largest_of_its_head(
    head_dim: int, scale: float, seed: int, name: str
) -> None:
    dtype = getattr(torch, name)
    states = torch.randn(3, 2, head_dim, generator=torch.Generator().manual_seed(seed)).mul(scale).to(dtype)
    stored = encode(states, "int8")
    assert stored.dtype == torch.int8 and stored.shape[-1] % 4 == 0 and stored.shape[-1] <= head_dim + 7
    largest = states.float().abs().amax(-1, keepdim=True)
    error = (decode(stored, head_dim, torch.float32, "int8") - states.float()).abs()
    assert bool((error <= largest / 253).all())
    assert decode(stored, head_dim, dtype, "int8").dtype == dtype
    assert not decode(encode(torch.zeros(1, 1, head_dim), "int8"), head_dim, dtype, "int8").any()


@pytest.mark.laws
@given(st.integers(1, 80), st.floats(1e-4, 1e4), st.integers(0, 1 << 20), st.sampled_from(["float32", "bfloat16"]))
def test_an_element_in_fp8_is_off_by_a_sixteenth(head_dim: int, scale: float, seed: int, name: str) -> None:
    dtype = getattr(torch, name)
    states = torch.randn(3, 2, head_dim, generator=torch.Generator().manual_seed(seed)).mul(scale).to(dtype)
    stored = encode(states, "fp8")
    assert stored.shape == states.shape and stored.element_size() == 1
    told, wide = decode(stored, head_dim, torch.float32, "fp8"), states.float()
    assert bool(((told - wide.clamp(-448, 448)).abs() <= torch.maximum(wide.abs() / 16, torch.tensor(2.0**-10))).all())
    assert decode(stored, head_dim, dtype, "fp8").dtype == dtype


class Quantized(Packed):
    """Attention to keys and values as `kv_dtype` holds them."""

    kv_dtype = "int8"

    def answer(self, call: AttentionCall) -> torch.Tensor:
        def stored(states: torch.Tensor) -> torch.Tensor:
            return decode(encode(states, self.kv_dtype), states.shape[-1], states.dtype, self.kv_dtype)

        call.key, call.value = stored(call.key), stored(call.value)
        return super().answer(call)


def chosen(model: Any, tokens: list[int], num_prompt_tokens: int, kv_dtype: str) -> list[int]:
    """The likeliest token at each place after the prompt, as one pass over all tokens computes them."""
    sequences, positions = torch.zeros(len(tokens), dtype=torch.long), torch.arange(len(tokens))
    attention = Quantized(sequences, positions, examine(model).layers)
    attention.kv_dtype = kv_dtype
    with torch.inference_mode(), attending(attention):
        logits = model(input_ids=torch.tensor([tokens]), position_ids=positions[None], use_cache=False).logits[0]
    best: list[int] = logits.argmax(-1).tolist()
    return best[num_prompt_tokens - 1 : -1]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_pages": 40, "max_num_batched_tokens": 16},
        {"num_pages": 40, "offload": OffloadConfig(host_pages=100, policy="eager"), "kv_groups": "off"},
        {"speculative_config": "ngram"},
        {"kv_dtype": "fp8", "num_pages": 40, "offload": OffloadConfig(host_pages=100), "kv_groups": "off"},
    ],
    ids=["plain", "preempted", "host memory", "guessed", "fp8"],
)
def test_tokens_are_those_of_attention_to_rounded_numbers(
    models: Callable[[str], tuple[Any, Any]], family: str, settings: dict[str, Any]
) -> None:
    model, _ = models(family)
    settings = {"kv_dtype": "int8", **settings}
    config = EngineConfig(
        num_pages=settings.pop("num_pages", 256),
        page_size=PAGE_SIZE,
        max_num_batched_tokens=settings.pop("max_num_batched_tokens", 64),
        max_num_seqs=4,
    )
    llm = LLM(model, None, config, audit=True, **settings)
    prompts = prompts_with_prefixes()
    for _ in range(2):  # the second time, prefixes are found
        told = llm.generate(prompts, GREEDY)
        for prompt, one in zip(prompts, told, strict=True):
            assert list(one.tokens) == chosen(model, [*prompt, *one.tokens], len(prompt), settings["kv_dtype"])
    if config.num_pages == 256:
        assert sum(one.cached_tokens for one in told) > 0
    assert llm.attention == "sdpa" and llm.kv_live_bytes() == 0
    llm.check()


def test_memory_is_counted_as_it_is(models: Callable[[str], tuple[Any, Any]]) -> None:
    """With heads of 16 elements: 20 or 16 bytes and not 64."""
    model, _ = models("qwen3")
    plain, small, least = (
        LLM(model, None, kv_memory="1MiB", page_size=4, kv_dtype=name) for name in ("auto", "int8", "fp8")
    )
    assert least.host().token_bytes == 4 * 2 * 2 * 16
    assert plain.host().token_bytes == 4 * 2 * 2 * 16 * 4 and small.host().token_bytes == 4 * 2 * 2 * 20
    assert small.config.num_pages == (1 << 20) // (small.host().token_bytes * 4)
    assert 0.99 * (1 << 20) < small.kv_bytes() == small._executor.pools.num_bytes <= 1 << 20
    assert plain.host().fingerprint() != small.host().fingerprint()


def test_what_is_not_supported_says_so(models: Callable[[str], tuple[Any, Any]], tiny: Callable[[str], Path]) -> None:
    model, _ = models("qwen3")
    with pytest.raises(ConfigError, match="auto, int8 or fp8, got 'fp4'"):
        LLM(model, None, kv_dtype="fp4")
    with pytest.raises(ConfigError, match="numba cannot be had: it reads no KV in int8"):
        LLM(model, None, kv_dtype="int8", attention="numba")
    with pytest.raises(ConfigError, match="layers that keep a state"):
        LLM(tiny("qwen3-next"), kv_dtype="int8")
