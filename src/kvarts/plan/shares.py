"""Divides memory among several models: by marginal gain, compared with equal and weighted shares.

Each model has a curve of hits over bytes. Along the concave hull of a curve, gains per byte only fall, so giving the
memory piece by piece to the model that gains most gives the most hits in total. The reported hits of a share are those
of the curve itself, which meets the hull wherever a whole piece was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvarts.plan.cache import CachePlan
from kvarts.plan.curve import concave_hull

__all__ = ["ModelMemory", "divide"]


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A model, its trace and curve, and the KV bytes per token."""

    name: str
    plan: CachePlan
    kv_bytes_per_token: int
    weight: float = 1.0

    @property
    def page_bytes(self) -> int:
        """Size of a page in bytes."""
        return self.plan.page_size * self.kv_bytes_per_token


def divide(models: Sequence[ModelMemory], num_bytes: int) -> dict[str, Any]:
    """Return equal, weighted and marginal shares of `num_bytes`, and the hits of each, JSON-able."""
    total_weight = sum(model.weight for model in models)
    ways = {
        "equal": [num_bytes // len(models)] * len(models),
        "weighted": [int(num_bytes * model.weight / total_weight) for model in models],
        "marginal": _by_gain(models, num_bytes),
    }
    num_tokens = sum(model.plan.num_prompt_tokens for model in models) or 1
    found: dict[str, Any] = {"bytes": num_bytes, "shares": {}}
    for way, sizes in ways.items():
        hits = [
            model.plan.curve.hit_pages(size // model.page_bytes) * model.plan.page_size
            for model, size in zip(models, sizes, strict=True)
        ]
        found["shares"][way] = {
            "hit_ratio": sum(hits) / num_tokens,
            "models": {
                model.name: {
                    "bytes": size,
                    "pages": size // model.page_bytes,
                    "hit_ratio": hit / (model.plan.num_prompt_tokens or 1),
                    "fits_every_request": size // model.page_bytes >= model.plan.least_pages,
                }
                for model, size, hit in zip(models, sizes, hits, strict=True)
            },
        }
    return found


def _by_gain(models: Sequence[ModelMemory], num_bytes: int) -> list[int]:
    """Return bytes for each model: first the need of its largest request, then pieces in order of gain per byte.

    If the largest requests do not all fit, each model gets the same fraction of its need. Memory left at the end is
    divided equally.
    """
    sizes = [model.plan.least_pages * model.page_bytes for model in models]
    if sum(sizes) > num_bytes:
        return [int(size * num_bytes / sum(sizes)) for size in sizes]
    left = num_bytes - sum(sizes)
    pieces: list[tuple[float, int, int]] = []
    for place, model in enumerate(models):
        pages, hits = (column.tolist() for column in concave_hull(model.plan.curve, model.plan.least_pages))
        for low, high, low_hits, high_hits in zip(pages, pages[1:], hits, hits[1:], strict=False):
            piece = (high - low) * model.page_bytes
            pieces.append((-(high_hits - low_hits) * model.plan.page_size / piece, place, piece))
    # Gains fall along each hull, so the pieces of a model stay in order; the sort is stable among equals.
    for gain, place, piece in sorted(pieces, key=lambda each: each[:2]):
        given = min(piece, left)
        if gain < 0:
            sizes[place] += given
            left -= given
    return [size + left // len(models) for size in sizes]
