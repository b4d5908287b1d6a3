"""Models with a latent: what is kept is what it is expanded to, with and without KV groups, and all say so."""

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

from kvarts.hardware.model_config import load_geometry
from kvarts.llm.llm import LLM

from builders.real_models import VOCABULARY, engine_of

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
    """To the byte, and in bfloat16 half of it; a group of full layers with expanded heads."""
    path, value_dim = deepseek
    geometry = load_geometry(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    numbers = LAYERS * HEADS * 2 * max(NOPE + ROPE, value_dim)
    assert geometry.expanded_kv_bytes_per_token("float32") == 4 * numbers
    assert geometry.expanded_kv_bytes_per_token("bfloat16") == 2 * numbers
    assert geometry.kv_bytes_per_token("float32") == 4 * LAYERS * (RANK + ROPE)
    for keeps in ("off", "all"):
        engine = engine_of(model, num_pages=12, kv_groups=keeps)
        assert engine.kv_bytes() == 12 * 4 * 4 * numbers
        assert engine.latent_token_bytes == 4 * LAYERS * (RANK + ROPE)
    assert engine.kv_blocks["kv_groups"] == [{"kind": "full", "layers": LAYERS, "part_blocks": 1}]


def test_a_model_without_a_latent_says_nothing_of_one(tiny: Callable[[str], Path]) -> None:
    assert load_geometry("qwen3-8b").expanded_kv_bytes_per_token() is None
    assert LLM.from_pretrained(tiny("qwen3"), kv_memory="1MiB").latent_token_bytes is None


def test_commands_say_what_is_kept(kvarts: Kvarts, deepseek: tuple[Path, int]) -> None:
    path, value_dim = deepseek
    expanded, latent = 4 * LAYERS * HEADS * 2 * max(NOPE + ROPE, value_dim), 4 * LAYERS * (RANK + ROPE)
    code, shown, _ = kvarts("model", "show", path, "--kv-dtype", "float32")
    assert code == 0
    assert f"= {latent:,} bytes" in shown and f"keeps keys and values, {expanded:,} bytes" in shown
    values = json.loads(kvarts("model", "show", path, "--kv-dtype", "float32", "--json")[1])
    assert (values["kv_bytes_per_token"], values["expanded_kv_bytes_per_token"]) == (latent, expanded)
    options: tuple[Any, ...] = ("--prompts", 2, "--max-tokens", 4, "--kv-groups", "all", "--attention", "sdpa")
    code, checked, said = kvarts("model", "check", path, *options)
    assert code == 0, said
    assert f"{expanded:,} bytes of keys and values; the latent that they come from would be {latent:,}" in checked
    values = json.loads(kvarts("model", "check", path, *options, "--json")[1])
    assert (values["kv_bytes_per_token"], values["latent_bytes_per_token"]) == (expanded, latent)
