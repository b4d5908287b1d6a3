"""A name for a model by what it computes, so that pages in files are read only by the model that wrote them."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch

__all__ = ["fingerprint"]

NUM_SAMPLES = 1024
"""Numbers of each weight that are looked at."""


def fingerprint(model: Any, changed: str = "") -> str:
    """Return the name of a model: of its config, its number format, and evenly spaced numbers of each weight.

    It is taken once, which must be before weights are laid out anew for a device. `changed`: what is done to them
    afterwards.
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


_known: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
