"""Loads one model, unmodified but for paged attention, from a directory, a GGUF file or the hub's cache.

A model has a fingerprint of its computation, so that pages in files are read only by the model that wrote them.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvarts.base.errors import ConfigError, InputError, MissingFileError, first_line
from kvarts.cost.hardware.model_config import check_config
from kvarts.run.torch.gguf_file import FileTokenizer, GgufFile, find_gguf, read_tokenizer
from kvarts.run.torch.gguf_model import read_model
from kvarts.run.torch.packing import pack_linears
from kvarts.run.torch.probe import examine
from kvarts.run.torch.quantized import check_scheme, quantize
from kvarts.run.torch.standard_directory import read_standard, read_standard_tokenizer

__all__ = ["fingerprint", "kv_fingerprint", "load_model", "load_tokenizer"]

_log = logging.getLogger(__name__)
DTYPES = ("auto", "float32", "bfloat16", "float16")
REMOTE_CODE_HINT = "Read that code; --set trust_remote_code=true runs it, and it can do whatever you can."
NUM_SAMPLES = 1024
"""Elements sampled from each weight."""


def fingerprint(model: Any, changed: str = "") -> str:
    """Return a hash of a model's config, number format, and evenly spaced elements of each weight.

    It is computed once per model and remembered; the first call must precede any re-layout of the weights for a device.
    `changed`: describes changes made to the weights afterwards.
    """
    if model not in _known:
        config = model.config.to_dict()
        for name in ("_name_or_path", "transformers_version", "_attn_implementation"):
            config.pop(name, None)
        digest = blake2b(digest_size=16)
        digest.update(f"{sorted(config.items(), key=str)} {model.dtype}{changed and f' {changed}'}".encode())
        with torch.inference_mode():
            for name, weight in model.named_parameters():
                flat = weight.detach().reshape(-1)
                samples = flat[:: max(1, len(flat) // NUM_SAMPLES)].float().cpu().numpy()
                digest.update(f"{name} {tuple(weight.shape)}".encode())
                digest.update(samples.tobytes())
        _known[model] = digest.hexdigest()
    return _known[model]


def kv_fingerprint(model: Any, kv_dtype: str, *, has_latents: bool = False) -> str:
    """Return the fingerprint of a model's pages with KV in `kv_dtype`. `has_latents`: latents are kept as they are."""
    parts = (fingerprint(model), *([] if kv_dtype == "auto" else [kv_dtype]), *(["latent"] if has_latents else []))
    return "-".join(parts)


_known: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
    trust_remote_code: bool = False,
    model_impl: str = "auto",
) -> Any:
    """Return the model in `path`: a directory with config.json and safetensors, a GGUF file or a directory with one, or
    a name in the hub's cache.

    `dtype`: `auto` for that of the weights, or float32 if a file has them quantized; or float32, bfloat16, float16.
    `device`: `auto`, or a name that torch accepts. `quantization`: int8 or int4, the bits per weight, done by
    kvarts.run.torch.quantized. `trust_remote_code`: run Python code that ships with the weights, with the
    caller's permissions. `model_impl`: `transformers` for transformers' code even where a model is read without it.

    Raise MissingFileError for a missing path, InputError for weights that cannot be read or do not fit the config,
    ConfigError for an architecture with layers other than attention over earlier tokens.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"must be auto, float32, bfloat16 or float16, got {dtype!r}", field="dtype")
    check_scheme(quantization)
    target = check_device(device)
    gguf = find_gguf(path)
    if gguf is None:
        if (config := Path(path) / "config.json").is_file():
            check_config(config)
        model = read_standard(Path(path), dtype) if model_impl == "auto" and target.type == "cpu" else None
        if model is None:
            model = _read_directory(path, dtype, trust_remote_code=trust_remote_code)
    else:
        model = _read_gguf(gguf, None if dtype == "auto" else getattr(torch, dtype), model_impl)
    model.requires_grad_(False)
    model.eval()
    model = model.to(target)
    fingerprint(model, quantization or "")
    if quantization is not None:
        _log.info("%s", quantize(model, quantization))
    pack_linears(model)
    examine(model)
    return model


def _read_directory(path: str | Path, dtype: str, *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = Path(path)
    if not directory.is_dir() and (directory.suffix or directory.is_absolute() or str(path).startswith(".")):
        raise MissingFileError(
            "no such directory", path=path, hint="Give a directory with a model, or `kvarts model tiny`."
        )
    if directory.is_dir() and not (directory / "config.json").exists():
        raise MissingFileError("no such file", path=directory / "config.json", hint="Is this a model's directory?")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types for fields of a wrong type
        if "trust_remote_code" in str(error):
            raise InputError(
                "the model comes with code of its own, which was not run", path=path, hint=REMOTE_CODE_HINT
            ) from None
        raise InputError(f"is no model that transformers knows: {first_line(error)}", path=path) from error
    check_architecture(config, path)
    if directory.is_dir():
        _check_sizes(config, directory)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except FileNotFoundError as error:
        raise MissingFileError(first_line(error), path=path) from error
    except Exception as error:  # transformers and safetensors raise many types for broken files
        if "weights_only" in str(error):  # PyTorch's message advises to load it anyway
            raise InputError(
                "weights are a pickle that holds more than tensors, which could run code: it is not loaded",
                path=path,
                hint="Convert them to safetensors.",
            ) from error
        raise InputError(f"weights cannot be read: {first_line(error)}", path=path) from error
    for what in ("missing_keys", "mismatched_keys"):
        if report.get(what):
            names = ", ".join(sorted(map(str, report[what]))[:3])
            raise InputError(f"weights have {what.replace('_', ' ')}: {names}", path=path)
    return model


def _check_sizes(config: Any, directory: Path) -> None:
    """Raise InputError if a matrix that each model has could not be in the files of its weights, at a bit per element.

    transformers makes the matrices that a config asks for before it compares them with those of the files.
    """
    text = config.get_text_config(decoder=True)
    most = 8 * sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    hidden_size, heads = (getattr(text, name, None) or 1 for name in ("hidden_size", "num_attention_heads"))
    head_dim = getattr(text, "head_dim", None) or 1
    vocab_size, width = (getattr(text, name, None) or 1 for name in ("vocab_size", "intermediate_size"))
    for field, size in (("vocab_size", vocab_size), ("intermediate_size", width), ("head_dim", heads * head_dim)):
        if isinstance(size, int) and size * hidden_size > most > 0:
            what = f"the weights have less than a matrix of {size:,} x {hidden_size:,} (hidden_size)"
            raise InputError(what, path=directory / "config.json", field=field)


def _read_gguf(path: Path, dtype: torch.dtype | None, model_impl: str) -> Any:
    try:
        import gguf  # noqa: F401  # the types of quantized tensors
    except ImportError as error:
        raise ConfigError("needs gguf, which is not installed", path=path, hint="pip install gguf") from error
    return read_model(GgufFile(path), dtype, model_impl=model_impl)


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of the model in `path`, which is as for `load_model`, or None if it lacks one.

    Raise ConfigError for a GGUF file with a tokenizer of an unknown kind.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        return read_tokenizer(GgufFile(gguf))

    def of_transformers() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)

    found = read_standard_tokenizer(Path(path))
    if found is not None:
        backend, chat_template = found
        return FileTokenizer(backend, of_transformers, chat_template=chat_template)
    try:
        return of_transformers()
    except RecursionError:
        raise InputError("is nested too deeply", path=Path(path) / "tokenizer.json") from None
    except (OSError, ValueError):
        return None


def check_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` chooses a GPU if PyTorch finds one.

    Raise ConfigError if it is unknown or not available.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    hint = "Give auto or cpu, or cuda where PyTorch finds a GPU."
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{name!r} is no device that PyTorch knows", field="device", hint=hint) from error
    if device.type == "meta":
        raise ConfigError("'meta' holds no numbers", field="device", hint=hint)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"{name!r} is not there: {first_line(error)}", field="device", hint=hint) from error
    return device


def check_architecture(config: Any, path: str | Path) -> None:
    """Raise ConfigError if the config shows, before weights are read, that the model is not a decoder with
    attention.
    """
    kind = getattr(config, "model_type", "?")
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{kind} has an encoder; only decoders are supported", path=path, field="model_type")
    if hasattr(text, "ssm_cfg") or hasattr(text, "state_size"):
        raise ConfigError(f"{kind} has state_space layers, which keep no KV in pages", path=path, field="layer_types")
