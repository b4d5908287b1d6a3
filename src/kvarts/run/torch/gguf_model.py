"""Models of GGUF files: the config that a file describes, and its weights by transformers' names.

A standard decoder is read without transformers; any other model into transformers' code.

llama.cpp's converter changes some weights, and each change is undone here: it permutes the rows of Llama's queries and
keys, and adds 1 to Gemma's norms. It stores the factors of a rotation as a tensor, which is applied to the model's
frequencies.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvarts.base.errors import ConfigError, InputError
from kvarts.run.torch.decoder import Decoder, DecoderConfig
from kvarts.run.torch.gguf_file import BFLOAT16, GgufFile, StoredTensor
from kvarts.run.torch.huge_pages import allocate

__all__ = ["KNOWN", "read_model"]

Numbers = npt.NDArray[Any]

WHOLE = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OF_GEMMA_LAYER = OF_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROTATION = "rope_freqs.weight"
ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)
"""Special tokens that end an answer, if the vocabulary has them."""
NUMBERS = {1: torch.float16, 28: torch.float64, BFLOAT16: torch.bfloat16}
"""Number formats of tensors, by their types; all others are read as float32."""
CONTROL = 3
"""The type of special tokens."""
GEMMA_PATTERN = 6
"""Every sixth layer of Gemma 3 attends to all tokens; GGUF files do not contain this number."""
GEMMA_LOCAL_BASE = 10_000.0


def read_model(file: GgufFile, dtype: torch.dtype | None, *, model_impl: str = "auto") -> Any:
    """Return the model of a file, in evaluation mode. `dtype`: None for that of the file's matrices if 16-bit, else
    float32. `model_impl`: `auto` for a Decoder where the file is one, `transformers` for transformers' code always.

    Raise ConfigError for an unknown architecture, InputError for a file with missing or unexpected tensors.
    """
    describe = KNOWN.get(file.architecture)
    if describe is None:
        raise ConfigError(
            f"architecture {file.architecture!r} is not read from GGUF; known: {', '.join(KNOWN)}",
            path=file.path,
            hint="Give the model's directory with config.json and safetensors.",
        )
    settings = _common(file) | describe(file)
    weights = _weights(file, settings)
    if dtype is None:
        dtype = next((one.dtype for one in weights.values() if one.dtype in (torch.float16, torch.bfloat16)), None)
    is_standard = settings["model_type"] in HEAD_NORMS and settings["rope_parameters"]["rope_type"] != "yarn"
    load = _load_decoder if is_standard and model_impl == "auto" else _load_transformers
    model, report = load(settings, weights, dtype or torch.float32)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(what):
            names = ", ".join(sorted(map(str, report[what]))[:3])
            raise InputError(f"weights have {what.replace('_', ' ')}: {names}", path=file.path)
    _rotate(model, file)
    model.generation_config.eos_token_id = _ends(file)
    return model.eval()


def _load_transformers(
    settings: dict[str, Any], weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """Return a model of transformers, and the names of weights that do not fit, by kind."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.for_model(**settings)
    loaded: tuple[Any, dict[str, Any]] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    return loaded


def _load_decoder(
    settings: dict[str, Any], weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[Decoder, dict[str, Any]]:
    """Return a Decoder, and the names of weights that do not fit, by kind; without weights if some do not."""
    config = DecoderConfig(
        **settings, has_head_norms=HEAD_NORMS[settings["model_type"]], qkv_bias=settings["model_type"] == "qwen2"
    )
    model = Decoder(config)
    expected = {name: weight.shape for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    both = expected.keys() & weights.keys()
    report = {
        "missing_keys": expected.keys() - both,
        "unexpected_keys": weights.keys() - both,
        "mismatched_keys": {name for name in both if weights[name].shape != expected[name]},
    }
    if not any(report.values()):
        model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, strict=False, assign=True)
        model.tie_weights()
    return model, report


# Configs of files ---------------------------------------------------------------------------------------------


def _common(file: GgufFile) -> dict[str, Any]:
    """Return the settings that all architectures share."""
    heads, hidden_size = file.need("attention.head_count"), file.need("embedding_length")
    shapes = {tensor.name: tensor.shape for tensor in file.tensors()}
    if "token_embd.weight" not in shapes:
        raise InputError("has no tensor 'token_embd.weight'", path=file.path)
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": file.need("feed_forward_length"),
        "num_hidden_layers": file.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.value("attention.head_count_kv", heads),
        "head_dim": file.value("attention.key_length", hidden_size // heads),
        "max_position_embeddings": file.need("context_length"),
        "rms_norm_eps": _short(file.need("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": _rope(file),
        "bos_token_id": file.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.values.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.values.get("tokenizer.ggml.padding_token_id"),
    }


def _rope(file: GgufFile) -> dict[str, Any]:
    kind, base = file.value("rope.scaling.type", "none"), _short(file.value("rope.freq_base", 10_000.0))
    if kind == "none":
        return {"rope_type": "default", "rope_theta": base}
    factor = _short(file.need("rope.scaling.factor"))
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    if kind == "yarn":
        length = file.need("rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": factor,
            "original_max_position_embeddings": length,
        }
    raise ConfigError(f"{kind!r} is not read", path=file.path, field=f"{file.architecture}.rope.scaling.type")


def _llama(file: GgufFile) -> dict[str, Any]:
    if file.value("expert_count"):
        raise ConfigError("a Llama with experts is not read from GGUF", path=file.path)
    names = file.names()
    return {
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
    }


def _qwen2(file: GgufFile) -> dict[str, Any]:
    return {"model_type": "qwen2"}


def _qwen3(file: GgufFile) -> dict[str, Any]:
    return {"model_type": "qwen3"}


def _gemma3(file: GgufFile) -> dict[str, Any]:
    num_layers, head_dim = file.need("block_count"), file.need("attention.key_length")
    if file.value("final_logit_softcapping"):
        raise ConfigError("a Gemma 3 with capped logits is not read from GGUF", path=file.path)
    # The largest model scales scores by the width of the model divided by its heads, not by the width of a head.
    is_largest = num_layers == 62
    scale = file.need("embedding_length") // file.need("attention.head_count") if is_largest else head_dim
    return {
        "model_type": "gemma3_text",
        "sliding_window": file.need("attention.sliding_window"),
        "layer_types": [
            "full_attention" if number % GEMMA_PATTERN == GEMMA_PATTERN - 1 else "sliding_attention"
            for number in range(num_layers)
        ],
        "query_pre_attn_scalar": scale,
        "rope_parameters": {
            "full_attention": _rope(file),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": _short(file.value("rope.freq_base_swa", GEMMA_LOCAL_BASE)),
            },
        },
    }


KNOWN: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}
"""Known architectures by llama.cpp's names; llama includes Mistral 7B, SmolLM2 and others of that shape."""


HEAD_NORMS = {"llama": False, "qwen2": False, "qwen3": True}
"""Model types that a Decoder computes, and whether they norm queries and keys per head."""


# Weights ------------------------------------------------------------------------------------------------------


def _weights(file: GgufFile, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a file by their names in transformers."""
    of_layer = OF_GEMMA_LAYER if file.architecture.startswith("gemma") else OF_LAYER
    stored: dict[str, StoredTensor] = {}
    for tensor in file.tensors():
        if tensor.name == ROTATION:
            continue
        name = _name(tensor.name, of_layer)
        if name is None:
            raise InputError(f"has a tensor {tensor.name!r}, which {file.architecture} has not", path=file.path)
        stored[name] = tensor
    weights = allocate({name: (one.shape, NUMBERS.get(one.kind, torch.float32)) for name, one in stored.items()})
    for name, tensor in stored.items():
        weight = weights[name]
        target = weight.view(torch.int16).numpy() if weight.dtype == torch.bfloat16 else weight.numpy()
        if tensor.kind == BFLOAT16:
            target[...] = tensor.data.view(np.int16).reshape(tensor.shape)
        else:
            tensor.read_into(target)
        if file.architecture == "llama" and ".attn_q." in tensor.name:
            target[...] = _in_halves(target, settings["num_attention_heads"])
        elif file.architecture == "llama" and ".attn_k." in tensor.name:
            target[...] = _in_halves(target, settings["num_key_value_heads"])
        elif file.architecture.startswith("gemma") and name.endswith("norm.weight"):
            weights[name] = weight.float() - 1.0
    return weights


def _name(name: str, of_layer: dict[str, str]) -> str | None:
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None:
        return None
    layer, what, kind = found.groups()
    named = WHOLE.get(what) if layer is None else of_layer.get(what)
    if named is None:
        return None
    return f"{named}.{kind}" if layer is None else f"model.layers.{layer}.{named}.{kind}"


def _in_halves(numbers: Numbers, num_heads: int) -> Numbers:
    """Return rows of queries or keys with the two halves of each head apart; files interleave them."""
    rest = numbers.shape[1:]
    return numbers.reshape(num_heads, -1, 2, *rest).swapaxes(1, 2).reshape(numbers.shape)


def _rotate(model: Any, file: GgufFile) -> None:
    """Divide the rotation's frequencies by the file's factors, if it has any."""
    factors = next((tensor for tensor in file.tensors() if tensor.name == ROTATION), None)
    if factors is None:
        return
    rotation = model.model.rotary_emb
    divided = rotation.inv_freq.double() / torch.from_numpy(np.array(factors.numbers(), np.float64))
    rotation.inv_freq = divided.float()
    if hasattr(rotation, "original_inv_freq"):  # a copy in transformers' models
        rotation.original_inv_freq = rotation.inv_freq.clone()


def _ends(file: GgufFile) -> list[int]:
    """Return the ids of the tokens that end an answer."""
    values = file.values
    known = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = {token for token in known if token is not None}
    kinds = values.get("tokenizer.ggml.token_type") or ()
    for token, (text, kind) in enumerate(zip(values.get("tokenizer.ggml.tokens") or (), kinds, strict=False)):
        if kind == CONTROL and text in ENDS:
            ids.add(token)
    return sorted(ids)


def _short(value: float) -> float:
    """Return the shortest decimal number with the same float32 value: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))
