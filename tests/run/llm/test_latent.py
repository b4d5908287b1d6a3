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

from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.loading import load_model
from kvarts.run.torch.probe import examine

from builders.real_models import GREEDY, PAGE_SIZE, VOCABULARY, engine_of, prompts_with_prefixes, undisturbed

Kvarts = Callable[..., tuple[int, str, str]]
LAYERS, HEADS, RANK, NOPE, ROPE = 2, 4, 24, 16, 8


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": RANK,
    "q_lora_rank": 24,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3-small-values": ("deepseek_v3", {"v_head_dim": 8, "first_k_dense_replace": 1, "initializer_range": 0.02}),
    "v3-large-values": ("deepseek_v3", {"v_head_dim": 32, "first_k_dense_replace": 1, "initializer_range": 0.02}),
    "v2": (
        "deepseek_v2",
        {"v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "v2-lite": (
        "deepseek_v2",
        {"v_head_dim": 16, "first_k_dense_replace": 1, "q_lora_rank": None, "rope_parameters": YARN},
    ),
}
"""DeepSeek's latents, rotated in the two ways that they have, with and without a latent of queries."""


def written(directory: Path, family: str, changes: dict[str, Any]) -> Path:
    """A directory with a small model with random weights."""
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=list(MODELS))
def deepseek(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The directory of a small DeepSeek, and how many numbers a value of it has."""
    family, changes = MODELS[request.param]
    return written(tmp_path_factory.mktemp("deepseek"), family, changes), changes["v_head_dim"]


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


def test_sequences_that_are_preempted_are_computed_again(deepseek: tuple[Path, int]) -> None:
    path, _ = deepseek
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = [[seed * 20 + place for place in range(17)] for seed in range(1, 4)]
    engine = engine_of(model, num_pages=26, budget=64, seqs=3)
    requests = [engine.request(engine.submit(prompt, GREEDY)) for prompt in prompts]
    done = {}
    while engine.has_work:
        done.update({completion.index: completion for completion in engine.step()})
        engine.check()
    for request, prompt in zip(requests, prompts, strict=True):
        assert list(done[request.index].tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
    assert sum(request.num_preemptions for request in requests) >= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loaded_models_keep_latents(deepseek: tuple[Path, int], dtype: str) -> None:
    """The matrix that expands latents is not laid out for other code, or quantized."""
    path, _ = deepseek
    model = load_model(path, dtype=dtype, quantization="int8" if dtype == "float32" else None)
    assert all(layer.is_latent for layer in examine(model).layers)
    engine = engine_of(model, num_pages=12)
    assert engine.host().token_bytes == getattr(torch, dtype).itemsize * LAYERS * (RANK + ROPE)
    assert len(engine.generate([[1, 2, 3]], GREEDY)[0].tokens) == GREEDY.max_tokens


@pytest.mark.parametrize(("rank", "keeps"), [(RANK, "all"), (RANK, "off"), (40, "off")])
def test_latents_in_layers_with_windows(tmp_path: Path, rank: int, keeps: str) -> None:
    """Layers with windows have latents of another size, which no block of one size may hold: then all keep all."""
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 24, "kv_lora_rank": rank}
    heads = {"head_dim": NOPE + ROPE, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": 16}
    changes = {
        **{name: size for name, size in heads.items() if name not in SIZES},
        **{f"swa_{name}": size for name, size in {**sizes, **heads}.items()},
        "num_hidden_layers": 4,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 16,
        "sliding_window": 12,
        "use_dsa": False,
    }
    path = written(tmp_path, "dots3_note_text", changes)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    dims = [RANK + ROPE] * 2 + [rank + ROPE] * 2
    assert [(one.head_dim, one.window) for one in examine(model).layers] == list(
        zip(dims, (None, None, 12, 12), strict=True)
    )
    engine = engine_of(model, num_pages=40, budget=16, kv_groups=None if keeps == "off" and rank != RANK else keeps)
    assert engine.latent_token_bytes == 4 * sum(dims)
    assert engine.kv_bytes() == 40 * PAGE_SIZE * 4 * sum(dims)
    prompts = prompts_with_prefixes()
    for _ in range(2):
        for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
    engine.check()


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
    code, shown, _ = kvarts("model", "show", path, "--set", "kv_dtype=float32")
    assert code == 0
    assert f"= {latent:,} bytes" in shown and f"{expanded:,} bytes if it is expanded to keys and values" in shown
    values = json.loads(kvarts("model", "show", path, "--set", "kv_dtype=float32", "--json")[1])
    assert (values["kv_bytes_per_token"], values["expanded_kv_bytes_per_token"]) == (latent, expanded)
    options: tuple[Any, ...] = ("--prompts", 2, "--max-tokens", 4, "--set", "kv_groups=all", "--set", "attention=sdpa")
    code, checked, said = kvarts("model", "check", path, *options)
    assert code == 0, said
    assert f"{latent:,} bytes of latents" in checked
    values = json.loads(kvarts("model", "check", path, *options, "--json")[1])
    assert (values["kv_bytes_per_token"], values["latent_bytes_per_token"]) == (latent, latent)
