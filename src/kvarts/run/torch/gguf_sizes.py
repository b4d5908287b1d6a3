"""The geometry of a model in a GGUF file, from its metadata: no tensor is read, and PyTorch is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvarts.base.errors import ConfigError
from kvarts.cost.hardware.model_config import LAYOUT_HINT, read_geometry
from kvarts.run.torch.gguf_file import BFLOAT16, PLAIN, GgufFile

if TYPE_CHECKING:
    from pathlib import Path

    from kvarts.cost.hardware.geometry import Geometry

__all__ = ["geometry_of_gguf"]

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "gemma2": "gemma2",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "phi3": "phi3",
}
"""Model types of transformers, by llama.cpp's names of architectures."""
FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "max_position_embeddings": "context_length",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}


def geometry_of_gguf(path: Path) -> Geometry:
    """Return the geometry of a file, with the bytes of its tensors as they are stored, and KV in 16 bits.

    Raise InputError for a file that is not GGUF, ConfigError for an unknown architecture.
    """
    file = GgufFile(path)
    family = FAMILIES.get(file.architecture)
    if family is None or (family == "llama" and file.value("expert_count")):
        raise ConfigError(
            f"architecture {file.architecture!r} is not understood; known: {', '.join(FAMILIES)}",
            path=path,
            hint=LAYOUT_HINT,
        )
    shapes, kinds, first = file.layout()
    values: dict[str, Any] = {field: file.value(key) for field, key in FIELDS.items()}
    values = {field: value for field, value in values.items() if value is not None}
    if "head_dim" not in values and family != "phi3":
        values["head_dim"] = file.need("embedding_length") // file.need("attention.head_count")
    values |= {
        "model_type": family,
        "vocab_size": shapes.get("token_embd.weight", (file.value("vocab_size"),))[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes and family == "llama",
        "dtype": "bfloat16" if BFLOAT16 in kinds and not kinds - {*PLAIN, BFLOAT16} else "float16",
    }
    return read_geometry(path.stem, str(path), values, path, path.stat().st_size - first)
