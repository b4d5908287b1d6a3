"""Models with a latent: it is kept as it is, tokens are those of the model, and all say what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvarts.executor.torch.loading import load_model
from kvarts.executor.torch.probe import examine
from kvarts.hardware.model_config import load_geometry
from kvarts.llm.llm import LLM
from kvarts.offload.config import OffloadConfig

from builders.real_models import GREEDY, VOCABULARY, engine_of, prompts_with_prefixes, undisturbed

Kvarts = Callable[..., tuple[int, str, str]]
LAYERS, HEADS, RANK, NOPE, ROPE = 2, 4, 24, 16, 8


@pytest.fixture(scope="module", params=[8, 32], ids=["small-values", "large-values"])
def deepseek(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The directory of a small DeepSeek-V3, and how many numbers a value of it has."""
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=RANK,
        q_lora_rank=24,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=request.param,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=512,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    path = tmp_path_factory.mktemp("deepseek")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path, request.param


def test_what_is_allocated_is_what_the_geometry_says_of_a_run(deepseek: tuple[Path, int]) -> None:
    """To the byte, and in bfloat16 half of it; a group of full layers with one head of latents."""
    path, value_dim = deepseek
    geometry = load_geometry(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    numbers = LAYERS * HEADS * 2 * max(NOPE + ROPE, value_dim)
    assert geometry.expanded_kv_bytes_per_token("float32") == 4 * numbers
    assert geometry.expanded_kv_bytes_per_token("bfloat16") == 2 * numbers
    assert geometry.kv_bytes_per_token("float32") == 4 * LAYERS * (RANK + ROPE)
    for keeps in ("off", "all"):
        engine = engine_of(model, num_pages=12, kv_groups=keeps)
        assert engine.kv_bytes() == 12 * 4 * engine.host().token_bytes == 12 * 4 * 4 * LAYERS * (RANK + ROPE)
        assert engine.latent_token_bytes == 4 * LAYERS * (RANK + ROPE)
    assert engine.kv_blocks["kv_groups"] == [{"kind": "full", "layers": LAYERS, "part_blocks": 1}]


@pytest.mark.parametrize("attention", ["sdpa", "numba"])
@pytest.mark.parametrize(
    "settings", [{}, {"offload": OffloadConfig(host_pages=100)}, {"kv_groups": "all"}, {"speculative_config": "ngram"}]
)
def test_tokens_are_those_of_the_model(deepseek: tuple[Path, int], attention: str, settings: dict[str, Any]) -> None:
    """Of attention to expanded keys and values: in chunks, after hits, preemptions and loads."""
    path, _ = deepseek
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = prompts_with_prefixes()
    engine = engine_of(model, num_pages=40, budget=16, attention=attention, **settings)
    for _ in range(2):
        for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
    engine.check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loaded_models_keep_latents(deepseek: tuple[Path, int], dtype: str) -> None:
    """The matrix that expands latents is not laid out for other code, or quantized."""
    path, _ = deepseek
    model = load_model(path, dtype=dtype, quantization="int8" if dtype == "float32" else None)
    assert all(layer.is_latent for layer in examine(model).layers)
    engine = engine_of(model, num_pages=12)
    assert engine.host().token_bytes == getattr(torch, dtype).itemsize * LAYERS * (RANK + ROPE)
    assert len(engine.generate([[1, 2, 3]], GREEDY)[0].tokens) == GREEDY.max_tokens


def test_latents_that_are_expanded_in_another_way_are_not_kept(deepseek: tuple[Path, int]) -> None:
    path, value_dim = deepseek
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    attention = type(model.model.layers[0].self_attn)
    own = attention.expand_kv

    class Other(attention):  # type: ignore[valid-type, misc]
        def expand_kv(self, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = own(self, latents, rotated)
            return keys, 2 * values

    for layer in model.model.layers:
        layer.self_attn.__class__ = Other
    assert not any(layer.is_latent for layer in examine(model).layers)
    engine = engine_of(model, num_pages=12)
    assert engine.host().token_bytes == 4 * LAYERS * HEADS * 2 * max(NOPE + ROPE, value_dim)


def test_a_model_without_a_latent_says_nothing_of_one(tiny: Callable[[str], Path]) -> None:
    assert load_geometry("qwen3-8b").expanded_kv_bytes_per_token() is None
    assert LLM.from_pretrained(tiny("qwen3"), kv_memory="1MiB").latent_token_bytes is None


def test_commands_say_what_is_kept(kvarts: Kvarts, deepseek: tuple[Path, int]) -> None:
    path, value_dim = deepseek
    expanded, latent = 4 * LAYERS * HEADS * 2 * max(NOPE + ROPE, value_dim), 4 * LAYERS * (RANK + ROPE)
    code, shown, _ = kvarts("model", "show", path, "--kv-dtype", "float32")
    assert code == 0
    assert f"= {latent:,} bytes" in shown and f"{expanded:,} bytes if it is expanded to keys and values" in shown
    values = json.loads(kvarts("model", "show", path, "--kv-dtype", "float32", "--json")[1])
    assert (values["kv_bytes_per_token"], values["expanded_kv_bytes_per_token"]) == (latent, expanded)
    options: tuple[Any, ...] = ("--prompts", 2, "--max-tokens", 4, "--kv-groups", "all", "--attention", "sdpa")
    code, checked, said = kvarts("model", "check", path, *options)
    assert code == 0, said
    assert f"{latent:,} bytes of latents" in checked
    values = json.loads(kvarts("model", "check", path, *options, "--json")[1])
    assert (values["kv_bytes_per_token"], values["latent_bytes_per_token"]) == (latent, latent)
