"""Fingerprint of a model's computation, so that pages in files are read only by the model that wrote them."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch

__all__ = ["fingerprint", "kv_fingerprint"]

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
