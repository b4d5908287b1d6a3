"""Small models with random weights, to try everything without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvarts.base.errors import ConfigError, OutputError
from kvarts.base.files import make_directory

__all__ = ["FAMILIES", "write_tiny"]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # wide enough that outputs depend on attention, and not on the last token alone
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "gemma2": ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"sliding_window": 24, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2}),
    "qwen3-next": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
}
"""By name: transformers' model type, and further settings of its config."""


def write_tiny(family: str, directory: Path | str, *, seed: int = 0, dtype: str = "float32") -> None:
    """Write a model of four layers, its config, weights and a byte tokenizer, to `directory`.

    The same family and seed give the same weights. Raise ConfigError for an unknown family, OutputError for a directory
    that cannot be written.
    """
    if family not in FAMILIES:
        raise ConfigError(f"{family!r} is not known", field="family", hint=f"Known: {', '.join(FAMILIES)}.")
    directory = Path(directory)
    model_type, changes = FAMILIES[family]
    tokenizer = byte_tokenizer()
    config = AutoConfig.for_model(
        model_type,
        **SIZES,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.eos_token_id,
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    try:
        make_directory(directory)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot be written: {getattr(error, 'strerror', error)}", path=directory) from error


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and one for the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
