"""Sessions that keep pages by attention, by definition: whole forward passes of transformers, and sets of pages."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["naive_heavy"]

INTERVAL = 64


def naive_heavy(
    reference: Any, tokens: list[int], *, sink: int, window: int, heavy: int, page_size: int, keep: str
) -> tuple[list[int], list[int]]:
    """Return the pages that are held when the last of `tokens` is computed, and the likeliest token after each."""
    interval = -(-INTERVAL // page_size) * page_size
    sinks = set(range(-(-sink // page_size)))
    chosen: set[int] = set()
    scores: dict[int, float] = {}
    gone: set[int] = set()
    sees = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for start in range(0, len(tokens), interval):
        end = min(len(tokens), start + interval)
        held = [page for page in range(-(-end // page_size)) if page not in gone]
        for position in range(start, end):
            for page in held:
                sees[position, page * page_size : (page + 1) * page_size] = True
            sees[position, position + 1 :] = False
        logits, weights = _pass(reference, tokens[:end], sees[:end, :end])
        if end < start + interval:
            break
        # A token at `end` is next: the attention of this interval, or of its last tokens, counts.
        since = start if keep == "h2o" else end - 32
        received = weights[since:end].sum(0)
        if keep != "h2o":
            scores.clear()
        for page in held:
            scores[page] = scores.get(page, 0.0) + float(received[page * page_size : (page + 1) * page_size].sum())
        if end == len(tokens):
            break
        first_of_window = max(0, end - window) // page_size
        candidates = [page for page in held if page < first_of_window and page not in sinks]
        best = sorted(candidates, key=lambda page: (scores[page], page), reverse=True)
        chosen = set(best[: -(-heavy // page_size)])
        gone |= set(candidates) - chosen
    return held, logits.argmax(-1).tolist()


def _pass(reference: Any, tokens: list[int], sees: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [tokens, vocabulary], and attention weights [tokens, tokens] summed over layers and heads."""
    mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        out = reference(
            input_ids=torch.tensor([tokens]),
            attention_mask=mask,
            position_ids=torch.arange(len(tokens))[None],
            use_cache=False,
            output_attentions=True,
        )
    # Layers with a state have none.
    return out.logits[0], sum(weights[0].sum(0) for weights in out.attentions if weights is not None)
