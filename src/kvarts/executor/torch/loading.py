"""A model from a directory, or from the hub's cache, unchanged, with paged attention in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvarts.errors import ConfigError, InputError, MissingFileError
from kvarts.executor.torch.attention import ATTENTION
from kvarts.executor.torch.fingerprint import fingerprint
from kvarts.executor.torch.packing import pack_linears

__all__ = ["load_model"]

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(path: str | Path, *, dtype: str = "auto", device: str = "auto") -> Any:
    """Return the model in `path`: a directory with config.json and safetensors, or a name in the hub's cache.

    `dtype`: `auto` for that of the weights, or float32, bfloat16, float16. `device`: `auto`, or what torch calls it.
    Raise MissingFileError for what is not there, InputError for weights that cannot be read or do not fit the config,
    ConfigError for an architecture with layers that are not all attention over what came before.
    """
    directory = Path(path)
    if not directory.is_dir() and (directory.suffix or directory.is_absolute() or str(path).startswith(".")):
        raise MissingFileError(
            "no such directory", path=path, hint="Give a directory with a model, or `kvarts model tiny`."
        )
    if directory.is_dir() and not (directory / "config.json").exists():
        raise MissingFileError("no such file", path=directory / "config.json", hint="Is this a model's directory?")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"is no model that transformers knows: {_first_line(error)}", path=path) from error
    check_architecture(config, path)
    if dtype not in DTYPES:
        raise ConfigError(f"must be auto, float32, bfloat16 or float16, got {dtype!r}", field="dtype")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=ATTENTION,
            output_loading_info=True,
            local_files_only=True,
        )
    except FileNotFoundError as error:
        raise MissingFileError(_first_line(error), path=path) from error
    except Exception as error:  # transformers and safetensors raise many kinds for broken files
        raise InputError(f"weights cannot be read: {_first_line(error)}", path=path) from error
    for what in ("missing_keys", "mismatched_keys"):
        if report.get(what):
            names = ", ".join(sorted(map(str, report[what]))[:3])
            raise InputError(f"weights have {what.replace('_', ' ')}: {names}", path=path)
    model.requires_grad_(False)
    model.eval()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    fingerprint(model)
    pack_linears(model)
    return model


def check_architecture(config: Any, path: str | Path) -> None:
    """Raise ConfigError for what cannot be run: encoders, state spaces, latent KV."""
    kind = getattr(config, "model_type", "?")
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{kind} has an encoder; only decoders are supported", path=path, field="model_type")
    types = set(getattr(text, "layer_types", None) or ["full_attention"])
    unknown = types - {"full_attention", "sliding_attention"}
    if unknown or hasattr(text, "ssm_cfg") or hasattr(text, "state_size"):
        names = ", ".join(sorted(unknown)) or "state_space"
        raise ConfigError(f"{kind} has {names} layers, which keep no KV in pages", path=path, field="layer_types")
    if getattr(text, "kv_lora_rank", None):
        raise ConfigError(f"{kind} keeps latent KV, which is not supported", path=path, field="kv_lora_rank")
    if getattr(text, "num_key_value_heads", getattr(text, "num_attention_heads", None)) is None:
        raise ConfigError(f"{kind} says nothing of attention heads", path=path, field="num_attention_heads")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
