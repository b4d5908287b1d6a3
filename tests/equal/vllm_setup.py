"""What benchmarks give to vLLM where no model runs: a small model's configuration, and KV groups."""

# mypy: ignore-errors
from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import ModelConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def model_config(max_model_len: int) -> ModelConfig:
    """Return the configuration of a small model without weights or tokenizer."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({**MODEL, "max_position_embeddings": max_model_len}))
    return ModelConfig(model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, max_model_len=max_model_len)


def cache_config(
    groups: list[tuple[str, int | None]],
    num_blocks: int,
    page_size: int,
    *,
    state_tokens: int = 0,
    saves_inside: bool = False,
    num_drafts: int = 0,
) -> KVCacheConfig:
    """Return the configuration of KV groups, each a kind and a span, in one memory of `num_blocks` blocks.

    `state_tokens`: the maximum number of tokens of a request; a group "state" keeps one state for all of them. Groups
    "states" and "aligned" keep states as `mamba_cache_mode` "all" and "align". `saves_inside`: prefill saves states of
    the latter inside chunks. `num_drafts`: drafted tokens, for each of which a request has a further state.
    """
    specs = [
        KVCacheGroupSpec([f"layer.{place}"], _spec(kind, span, page_size, state_tokens, saves_inside, num_drafts))
        for place, (kind, span) in enumerate(groups)
    ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=specs)


def _spec(
    kind: str, span: int | None, page_size: int, state_tokens: int, saves_inside: bool, num_drafts: int
) -> object:
    common = {"block_size": page_size, "num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16}
    if kind == "latent":
        return MLAAttentionSpec(**common)
    if kind == "latent-window":
        return SlidingWindowMLASpec(sliding_window=span, **common)
    if kind == "window":
        return SlidingWindowSpec(sliding_window=span, **common)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(attention_chunk_size=span, **common)
    if kind in ("states", "aligned"):
        mode = "all" if kind == "states" else "align"
        more = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if saves_inside else {}
        more["num_speculative_blocks"] = num_drafts
        return MambaSpec(block_size=page_size, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode=mode, **more)
    if kind == "state":
        return MambaSpec(block_size=state_tokens, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode="none")
    return FullAttentionSpec(**common)
