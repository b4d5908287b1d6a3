"""Greedy tokens of a session by definition: a forward pass of transformers over the whole history for every token."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["masked_choices", "masked_greedy"]


def masked_greedy(reference: Any, history: list[int], num_tokens: int, *, sink: int, window: int) -> list[int]:
    """Return the next `num_tokens` tokens, each token seeing itself, the first `sink` and the `window` before it."""
    tokens = list(history)
    for _ in range(num_tokens):
        tokens += masked_choices(reference, tokens, 0, sink=sink, window=window)
    return tokens[len(history) :]


def masked_choices(reference: Any, tokens: list[int], num_last: int, *, sink: int, window: int) -> list[int]:
    """Return the likeliest token in the place of each of the `num_last` last tokens, and after them."""
    with torch.no_grad():
        logits = reference(
            input_ids=torch.tensor([tokens]),
            attention_mask=_masks(reference, len(tokens), sink, window),
            position_ids=torch.arange(len(tokens))[None],
            use_cache=False,
        ).logits
    likeliest: list[int] = logits[0, -1 - num_last :].float().argmax(-1).tolist()
    return likeliest


def _masks(reference: Any, length: int, sink: int, window: int) -> Any:
    """Return what is added to scores: for models with layers of two kinds, by kind."""
    config = reference.config.get_text_config(decoder=True)
    p, q = torch.arange(length)[:, None], torch.arange(length)[None, :]
    seen = (q <= p) & ((q < sink) | (q >= p - window))
    sliding = seen & (q > p - (getattr(config, "sliding_window", None) or length))
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds == {"full_attention", "sliding_attention"}:
        return {"full_attention": _added(seen, reference), "sliding_attention": _added(sliding, reference)}
    slides = config.model_type == "mistral" or kinds == {"sliding_attention"}
    return _added(sliding if slides else seen, reference)


def _added(seen: torch.Tensor, reference: Any) -> torch.Tensor:
    least = torch.finfo(reference.dtype).min
    return torch.where(seen, 0.0, least).to(reference.dtype)[None, None]
