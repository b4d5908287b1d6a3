"""Directories with a standard decoder, read without transformers, whose import takes seconds.

Only a config and a tokenizer whose every setting is known here are read; any other is left to transformers, which stays
the reference: tests compare weights, logits, tokens and texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from kvarts.base.decoders import UNDECODED
from kvarts.run.torch.decoder import Decoder, DecoderConfig
from kvarts.run.torch.huge_pages import allocate
from kvarts.run.torch.packing import is_packed

__all__ = ["read_standard", "read_standard_tokenizer"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NEEDED = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
}  # fmt: skip
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "rope_scaling": (None,),
    "layer_types": (None,),
    "tie_word_embeddings": (True, False),
}
"""The values of settings for which a decoder is a standard one. A window without `use_sliding_window` has no effect."""
WITHOUT_EFFECT = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_window_layers", "model_type", "pad_token_id", "pretraining_tp", "torch_dtype", "transformers_version",
    "use_cache",
}  # fmt: skip
"""Settings that do not change what is computed for a text, or that are read."""
OPTIONAL = {"head_dim", "attention_bias", "mlp_bias", "rope_theta", "rope_parameters"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MATRICES = ("_proj.weight", "lm_head.weight")
FILES_OF_OTHERS = ("adapter_config.json", "chat_templates", "additional_chat_templates")
"""With one of these, transformers reads more than is read here."""


def read_standard(directory: Path, dtype: str) -> Decoder | None:
    """Return the model of a directory, or None if it is not known to be a standard decoder that is stored whole.

    `dtype`: as for `load_model`.
    """
    settings = _json(directory / "config.json")
    if settings is None or (directory / "adapter_config.json").exists():
        return None
    try:
        config = _config(settings)
        if config is None:
            return None
        return _with_weights(directory, config, dtype if dtype != "auto" else _dtype(settings))
    except Exception:  # whatever is wrong with the files, transformers says it
        return None


def _json(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, *UNDECODED):
        return None


def _dtype(settings: Any) -> str | None:
    named = settings.get("dtype", settings.get("torch_dtype"))
    return named if named in DTYPES else None


def _config(settings: Any) -> DecoderConfig | None:
    kind = settings.get("model_type")
    if kind not in ARCHITECTURES or settings.get("architectures") != [ARCHITECTURES[kind]]:
        return None
    num_layers, heads = settings.get("num_hidden_layers"), settings.get("num_attention_heads")
    if settings.get("layer_types") == ["full_attention"] * (num_layers or 0):
        settings = {**settings, "layer_types": None}
    if kind == "qwen2" and settings.get("use_sliding_window") is False:
        settings = {**settings, "sliding_window": None}
    if kind == "qwen3" and ("head_dim" not in settings or settings.get("use_sliding_window") is not False):
        return None
    if settings.keys() - NEEDED - ONLY.keys() - WITHOUT_EFFECT - OPTIONAL or NEEDED - settings.keys():
        return None
    if any(settings[name] not in values for name, values in ONLY.items() if name in settings):
        return None
    rope = settings.get("rope_parameters") or {"rope_theta": settings.get("rope_theta"), "rope_type": "default"}
    if rope.keys() != {"rope_theta", "rope_type"} or rope["rope_type"] != "default" or not rope["rope_theta"]:
        return None
    return DecoderConfig(
        **{name: settings[name] for name in NEEDED},
        model_type=kind,
        head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
        tie_word_embeddings=settings.get("tie_word_embeddings", False),
        rope_parameters=rope,
        bos_token_id=settings.get("bos_token_id"),
        eos_token_id=settings.get("eos_token_id"),
        pad_token_id=settings.get("pad_token_id"),
        attention_bias=kind != "qwen2" and settings.get("attention_bias", False),
        qkv_bias=kind == "qwen2",
        mlp_bias=kind == "llama" and settings.get("mlp_bias", False),
        has_head_norms=kind == "qwen3",
    )


def _with_weights(directory: Path, config: DecoderConfig, dtype: str | None) -> Decoder | None:
    """Return the model with the weights of its files, or None if these do not fit it."""
    from safetensors import safe_open

    files = [directory / "model.safetensors"]
    if not files[0].exists():
        index = _json(directory / "model.safetensors.index.json")
        if index is None:
            return None
        files = [directory / name for name in sorted(set(index["weight_map"].values()))]
    opened: list[Any] = [safe_open(file, framework="pt") for file in files]
    of_file = {name: file for file in opened for name in file.keys()}  # noqa: SIM118  # no mapping
    slices = {name: file.get_slice(name) for name, file in of_file.items()}
    stored = {name: (tuple(one.get_shape()), STORED.get(one.get_dtype())) for name, one in slices.items()}
    model = Decoder(config)
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    kinds = [kind for _, kind in stored.values()]
    if expected != {name: shape for name, (shape, _) in stored.items()} or None in kinds:
        return None
    target = kinds[0] if dtype is None else DTYPES[dtype]
    # Packing copies matrices, so that their file is only mapped; any other weight must not change with its file.
    mapped = {name for name, kind in zip(stored, kinds, strict=True) if name.endswith(MATRICES) and kind == target}
    if not is_packed(target):
        mapped = set()
    weights = allocate({name: (shape, target) for name, shape in expected.items() if name not in mapped})
    for name, weight in weights.items():
        weight.copy_(of_file[name].get_tensor(name))
    weights |= {name: of_file[name].get_tensor(name) for name in mapped}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    generation = _json(directory / "generation_config.json")
    if isinstance(generation, dict):
        model.generation_config.eos_token_id = generation.get("eos_token_id")
    return model


# Tokenizers ---------------------------------------------------------------------------------------------------

AS_STORED = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that use tokenizer.json as it is."""
QWEN2 = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
"""Classes that build a tokenizer from its vocabulary and merges, as in `_is_that_of_qwen2`."""
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
TOKENIZER_SETTINGS = {
    *NAMED, "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens",
    "backend", "chat_template", "clean_up_tokenization_spaces", "errors", "extra_special_tokens", "is_local",
    "legacy", "local_files_only", "model_input_names", "model_max_length", "padding_side", "special_tokens_map_file",
    "split_special_tokens", "tokenizer_class", "truncation_side",
}  # fmt: skip
MERGE_SETTINGS: dict[str, tuple[Any, ...]] = {
    "type": ("BPE",),
    "dropout": (None,),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "fuse_unk": (False,),
    "byte_fallback": (False,),
    "ignore_merges": (False,),
}


class _AddedToken(msgspec.Struct, frozen=True):
    content: str
    id: int | None = None
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class _TokenizerFile(msgspec.Struct, frozen=True):
    """tokenizer.json without its vocabulary."""

    truncation: Any = None
    padding: Any = None
    added_tokens: list[_AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    model: _Merges | None = None


class _Merges(msgspec.Struct, frozen=True):
    """The settings of a model of merges."""

    type: str | None = None
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


def read_standard_tokenizer(directory: Path) -> tuple[Any, str | None] | None:
    """Return the tokenizer of the library `tokenizers` and the chat template of a directory.

    None if transformers might not use its tokenizer.json as it is.
    """
    try:
        return _read_tokenizer(directory)
    except Exception:  # whatever is wrong with the files, transformers says it
        return None


def _read_tokenizer(directory: Path) -> tuple[Any, str | None] | None:
    from tokenizers import Tokenizer

    config, settings = _json(directory / "config.json"), _json(directory / "tokenizer_config.json")
    path = directory / "tokenizer.json"
    if config is None or settings is None or "auto_map" in config:
        return None
    if any((directory / name).exists() for name in FILES_OF_OTHERS) or settings.keys() - TOKENIZER_SETTINGS:
        return None
    file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    added = msgspec.convert(settings.get("added_tokens_decoder") or {}, dict[str, _AddedToken])
    kind, given = config.get("model_type"), settings.get("tokenizer_class")
    if kind not in ARCHITECTURES or file.model is None or file.truncation is not None or file.padding is not None:
        return None
    is_as_stored = given in AS_STORED and kind != "qwen2"
    if not is_as_stored and not (kind != "llama" and given in (*AS_STORED, *QWEN2) and _is_that_of_qwen2(file)):
        return None
    known = {token.content: token for token in file.added_tokens}
    special = {token.content for token in file.added_tokens if token.special}
    names = [settings.get(name) for name in NAMED]
    more = [settings.get(name) or [] for name in ("additional_special_tokens", "extra_special_tokens")]
    if not all(isinstance(one, list) for one in more):
        return None
    names += [name for several in more for name in several]
    if any(name is not None and not (isinstance(name, str) and name in special) for name in names):
        return None
    if any(msgspec.structs.replace(token, id=int(index)) != known.get(token.content) for index, token in added.items()):
        return None
    if settings.get("clean_up_tokenization_spaces") or settings.get("split_special_tokens"):
        return None
    adds = [settings.get(name) for name in ("add_bos_token", "add_eos_token", "add_prefix_space")]
    if any(adds):
        return None
    if any(one is not None for one in adds[:2]) and not _adds_nothing(file.post_processor):
        return None
    template = _template(directory, settings)
    if template is not None and not isinstance(template, str):
        return None
    return Tokenizer.from_file(str(path)), template


def _template(directory: Path, settings: dict[str, Any]) -> Any:
    try:
        return (directory / "chat_template.jinja").read_text()
    except OSError:
        return settings.get("chat_template")


def _adds_nothing(post_processor: Any) -> bool:
    """Return whether a post-processor leaves the tokens of a text as they are."""
    kind = None if post_processor is None else post_processor.get("type")
    return kind in (None, "ByteLevel") or (kind == "TemplateProcessing" and not post_processor.get("special_tokens"))


def _is_that_of_qwen2(file: _TokenizerFile) -> bool:
    """Return whether a file is what transformers' class makes of its vocabulary."""
    assert file.model is not None
    if any(getattr(file.model, name) not in values for name, values in MERGE_SETTINGS.items()):
        return False
    steps = (file.pre_tokenizer or {}).get("pretokenizers") or []
    if len(steps) != 2:
        return False
    split, level = steps
    decoder = file.decoder or {}
    return (
        (file.normalizer or {}).get("type") == "NFC"
        and split == {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
        and (level.get("type"), level.get("add_prefix_space"), level.get("use_regex")) == ("ByteLevel", False, False)
        and decoder.get("type") == "ByteLevel"
        and _adds_nothing(file.post_processor)
    )
