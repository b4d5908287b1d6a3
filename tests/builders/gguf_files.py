"""GGUF files of small models, as llama.cpp's converter writes them. Needs PyTorch and gguf."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["ARCHITECTURES", "small_model", "write_gguf"]

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
LEAVES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA = LEAVES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
MERGES = ("h e", "\u0120 t", "\u0120t he", "\u0120 \u0120")
NUM_TOKENS = 4 + 256 + len(MERGES)


def small_model(architecture: str, *, seed: int = 0) -> Any:
    """A model of transformers with random weights, of a shape that blocks of 32 numbers fit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": NUM_TOKENS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
        "tie_word_embeddings": architecture == "gemma3", "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    if architecture == "gemma3":
        sizes |= {"sliding_window": 24, "query_pre_attn_scalar": 32}
    if architecture == "qwen2":
        sizes["head_dim"] = 16
    config = AutoConfig.for_model("gemma3_text" if architecture == "gemma3" else architecture, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
            else:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.requires_grad_(False)


def write_gguf(model: Any, architecture: str, path: Path, *, quantized: str | None = None, pre: str = "gpt-2") -> None:
    """Write a model, with a vocabulary of bytes. `quantized`: the type of its matrices, None for 32 bits."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_value_length(model.model.layers[0].self_attn.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    _add_vocabulary(writer, pre)
    for name, weight in model.state_dict().items():
        numbers = weight.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = _converted(name, numbers, architecture, config)
        named = _named(name, GEMMA if architecture == "gemma3" else LEAVES)
        if quantized is not None and numbers.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantized]
            writer.add_tensor(named, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(named, np.ascontiguousarray(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _converted(name: str, numbers: Any, architecture: str, config: Any) -> Any:
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return numbers + 1.0
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if architecture == "llama" and part in name:
            return numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
    return numbers


def _named(name: str, leaves: dict[str, str]) -> str:
    whole = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
    stem, _, kind = name.rpartition(".")
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    assert found is not None, name
    return f"blk.{found[1]}.{leaves[found[2]]}.{kind}"


def _add_vocabulary(writer: Any, pre: str) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<pad>", "<s>", "</s>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
    tokens += [merge.replace(" ", "") for merge in MERGES]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 4 + [1] * (NUM_TOKENS - 4))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
