"""Real models that hold only what their windows see: the same tokens, and the bytes that the groups say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvarts.errors import ConfigError
from kvarts.executor.torch.attention import ATTENTION
from kvarts.executor.torch.backend import BACKENDS
from kvarts.executor.torch.block_cut import BlockCut, cut_blocks
from kvarts.executor.torch.flash import FlashBackend
from kvarts.executor.torch.flex import FlexBackend
from kvarts.llm.llm import LLM
from kvarts.llm.room import KVRoom
from kvarts.request import RequestState
from kvarts.sampling import SamplingParams

from builders.flash_standin import flash_module
from builders.real_models import GREEDY, PAGE_SIZE, VOCABULARY, Ids, engine_of, prompts_with_prefixes, undisturbed

WINDOW = 8
FULL, SLIDING = "full_attention", "sliding_attention"
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"num_hidden_layers": 3},
    "gemma2": {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
    "gemma3_text": {"layer_types": [SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING]},
    "gpt_oss": {"layer_types": [SLIDING, FULL, SLIDING, FULL], "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"num_hidden_layers": 2},
}
"""Windows everywhere, in every other layer, in most, with sinks that are learned, and none at all."""


@pytest.fixture(scope="module")
def windowed() -> Callable[[str], tuple[Any, Any]]:
    """A model of a family, with small windows, that attends through pages; and the same with transformers' cache."""
    made: dict[str, tuple[Any, Any]] = {}

    def pair(family: str) -> tuple[Any, Any]:
        if family not in made:
            changes = FAMILIES[family]
            config = AutoConfig.for_model(
                family,
                **{
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": len(changes.get("layer_types", ())) or 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 8,
                    "vocab_size": VOCABULARY,
                    "max_position_embeddings": 512,
                    "initializer_range": 0.3,
                    "eos_token_id": 256,
                    "pad_token_id": 256,
                    "bos_token_id": None,
                    **({} if family == "qwen3" else {"sliding_window": WINDOW}),
                    **changes,
                },
            )
            with torch.random.fork_rng():
                torch.manual_seed(3)
                model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager").eval()
                if family == "gpt_oss":
                    for layer in model.model.layers:
                        torch.nn.init.normal_(layer.self_attn.sinks)
            paged = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
            paged.load_state_dict(model.state_dict())
            made[family] = paged, model
        return made[family]

    return pair


@pytest.mark.parametrize("keeps", ["all", "tails"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_pages", "budget"), [(256, 2048), (40, 16), (28, 7)])
def test_greedy_tokens_are_those_of_an_undisturbed_run(
    windowed: Callable[[str], tuple[Any, Any]], family: str, num_pages: int, budget: int, keeps: str
) -> None:
    """L6: whole prompts and chunks, prefixes that others left, and memory that is too small for all."""
    model, reference = windowed(family)
    prompts = prompts_with_prefixes()
    engine = engine_of(model, num_pages=num_pages, budget=budget, kv_groups=keeps)
    completions = engine.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
    if num_pages == 256 and keeps == "all":
        assert sum(completion.cached_tokens for completion in completions) >= 24
    assert engine.kv_live_bytes() == 0
    engine.check()


@pytest.mark.parametrize("attention", ["sdpa", "flash", "flex"])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_all_backends_say_the_same(
    windowed: Callable[[str], tuple[Any, Any]], family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6, with FlashAttention by what it says it computes, and FlexAttention uncompiled."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_module())
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    makers: dict[str, Any] = {"flash": FlashBackend, "flex": partial(FlexBackend, is_compiled=False)}
    if attention in makers:
        monkeypatch.setitem(BACKENDS, attention, (makers[attention], lambda pools: None))
    model, reference = windowed(family)
    prompts = prompts_with_prefixes()[1:]
    engine = engine_of(model, num_pages=40, budget=16, attention=attention, kv_groups="all")
    for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)


@pytest.mark.laws
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 30), family=st.sampled_from(sorted(FAMILIES)), keeps=st.sampled_from(["all", "tails"]))
def test_requests_come_and_go_at_any_time(
    windowed: Callable[[str], tuple[Any, Any]], seed: int, family: str, keeps: str
) -> None:
    """L6, L8: random arrivals, cancels, priorities and memory, and the laws of accounting after every step."""
    model, reference = windowed(family)
    random = Random(seed)
    shared = [random.randrange(VOCABULARY) for _ in range(30)]
    engine = engine_of(
        model,
        num_pages=random.choice([14, 20, 60]),
        budget=random.choice([5, 16, 256]),
        seqs=random.choice([1, 3, 6]),
        kv_groups=keeps,
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts: dict[int, Ids] = {}
    done = {}
    for _ in range(40):
        if random.random() < 0.25:
            prompt = shared[: random.randrange(31)] + [
                random.randrange(VOCABULARY) for _ in range(random.randrange(1, 9))
            ]
            prompts[engine.submit(prompt, params, priority=random.choice([0, 0, 1]))] = prompt
        if prompts and random.random() < 0.08:
            engine.cancel(random.choice(list(prompts)))
        if engine.has_work:
            done.update({completion.index: completion for completion in engine.step()})
    while engine.has_work:
        done.update({completion.index: completion for completion in engine.step()})
    for index, completion in done.items():
        if completion.finish_reason != "cancelled":
            assert list(completion.tokens) == undisturbed(reference, prompts[index], params.max_tokens)
    assert engine.kv_live_bytes() == 0
    engine.check()


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_a_page_that_goes_back_too_early_changes_what_is_said(
    windowed: Callable[[str], tuple[Any, Any]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: windows that end a page early. If that did not matter, the tests above would prove nothing."""
    model, reference = windowed(family)
    prompts = prompts_with_prefixes()[1:4]

    def too_short(*args: Any, **kwargs: Any) -> BlockCut:
        cut = cut_blocks(*args, **kwargs)
        groups = tuple(
            replace(group, layer=replace(group.layer, span=PAGE_SIZE)) if group.layer.span else group
            for group in cut.memory.groups
        )
        return replace(cut, memory=replace(cut.memory, groups=groups))

    monkeypatch.setattr("kvarts.llm.room.cut_blocks", too_short)
    engine = engine_of(model, num_pages=40, budget=16, kv_groups="all")
    expected = [undisturbed(reference, prompt, GREEDY.max_tokens) for prompt in prompts]
    assert [list(completion.tokens) for completion in engine.generate(prompts, GREEDY)] != expected


# Memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_allocated_tensors_are_what_the_groups_say(family: str, dtype: torch.dtype, windowed: Any) -> None:
    model = deepcopy(windowed(family)[0]).to(dtype)
    plain = engine_of(model, num_pages=10)
    engine = engine_of(model, num_pages=10, kv_groups="all")
    cut = KVRoom(model, PAGE_SIZE, "all").cut
    assert cut is not None
    memory = cut.memory
    assert engine.kv_bytes() == memory.num_blocks(10) * memory.block_bytes == 10 * memory.page_bytes
    assert engine.kv_bytes() == plain.kv_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_holds_what_later_tokens_see(family: str, windowed: Any) -> None:
    """Token by token and layer by layer: pages with a token that the next one attends to, and no other."""
    model, _ = windowed(family)
    types = getattr(model.config, "layer_types", None) or [FULL] * model.config.num_hidden_layers
    if family == "mistral":
        types = [SLIDING] * model.config.num_hidden_layers
    heads = 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    engine = engine_of(model, num_pages=64, kv_groups="all")
    engine.submit(list(range(30)), GREEDY)
    engine.step()
    for num_tokens in range(31, 31 + GREEDY.max_tokens - 2):
        engine.step()
        # What is computed is one token behind what is known; the next token sees itself and those before it.
        num_pages = 0
        for kind in types:
            first_seen = 0 if kind == FULL else max(0, num_tokens - WINDOW + 1)
            num_pages += len({token // PAGE_SIZE for token in range(first_seen, num_tokens)})
        assert engine.kv_live_bytes() == num_pages * PAGE_SIZE * heads


def test_more_sequences_run_in_the_same_memory(windowed: Any) -> None:
    model, _ = windowed("gemma3_text")
    prompts = [[row] * 60 for row in range(8)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    most = {}
    for keeps in ("off", "all"):
        engine = engine_of(model, num_pages=60, seqs=8, kv_groups=keeps)
        requests = [engine.request(engine.submit(prompt, params)) for prompt in prompts]
        most[keeps] = 0
        while engine.has_work:
            engine.step()
            most[keeps] = max(most[keeps], sum(request.state is RequestState.DECODING for request in requests))
    assert most["all"] >= 2 * most["off"]


def test_what_does_not_go_with_it_is_refused(windowed: Any) -> None:
    model, _ = windowed("gemma2")
    refused: dict[str, dict[str, Any]] = {
        "speculative_config": {"speculative_config": "ngram"},
        "kv_groups": {"kv_groups": "some"},
        "layers": {"layers": "compiled"},
    }
    for field, given_ in refused.items():
        with pytest.raises(ConfigError) as error:
            LLM(model, None, kv_memory=1 << 20, **{"kv_groups": "all", **given_})
        assert error.value.field == field
