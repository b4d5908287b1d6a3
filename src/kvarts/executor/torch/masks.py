"""Finds the windows of the masks that a model asks transformers for, and which call of attention gets which mask."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["AskedMasks"]

OWN = "has a mask of its own"


class AskedMasks:
    """Owner of the masks made for one forward pass. Positions up to `most_position` are examined."""

    def __init__(self, most_position: int) -> None:
        self._most_position = most_position
        self._made: list[tuple[torch.Tensor, torch.Tensor, str | None, int | None]] = []

    def make(self, asked: dict[str, Any]) -> torch.Tensor:
        """Return the additive mask that `asked` describes, in the keywords of transformers' mask functions."""
        from transformers.masking_utils import causal_mask_function, eager_mask

        reason, window = self._window(asked.get("mask_function", causal_mask_function))
        mask: torch.Tensor = eager_mask(
            **{**asked, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )
        self._made.append((mask, mask.clone(), reason, window))
        return mask

    def window_of(self, mask: Any) -> tuple[str | None, int | None]:
        """Return (None, window) of a call with `mask`, window None for all tokens; or (reason it cannot run, None)."""
        if mask is None:
            return "gets no mask", None
        for made, as_made, reason, window in self._made:
            is_same = isinstance(mask, torch.Tensor) and mask.data_ptr() == made.data_ptr()
            if is_same and mask.shape == as_made.shape and torch.equal(mask, as_made):
                return reason, window
        return OWN, None

    def _window(self, function: Any) -> tuple[str | None, int | None]:
        """Return the same for a mask function; a reason if its window is not equal at all positions."""
        windows: set[int] = set()
        furthest = 0
        last = self._most_position - 1
        for position in sorted({0, 1, 2, 3, 20, last // 7, last // 3, last // 2 + 1, last}):
            if position > last:
                continue
            places = torch.arange(position + 2)
            zero = torch.zeros_like(places)
            try:
                seen = torch.as_tensor(function(zero, zero, zero + position, places))
                seen = seen.expand(places.shape)
            except (RuntimeError, TypeError, IndexError, ValueError):
                return OWN, None
            if bool(seen[position + 1]):
                return "sees tokens that come after", None
            first = int(seen.to(torch.int8).argmax())
            if not bool(seen[first : position + 1].all()):
                return OWN, None
            if first:
                windows.add(position - first + 1)
            else:
                furthest = max(furthest, position + 1)
        if not windows:
            return None, None
        if len(windows) > 1 or furthest > min(windows):
            return "sees chunks, and not a window", None
        return None, windows.pop()
