"""Rotations that depend on the length of a sequence: one set of factors up to a length, another beyond it.

transformers chooses the factors by the largest position of a row. In a step, a row has many sequences, so each token's
factors are chosen here, by the length of its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvarts.errors import ConfigError

__all__ = ["RopeSwitch", "find_switch"]

NEAR = (0, 1, 2, 3)


class RopeSwitch:
    """The rotary modules of a model, patched to choose factors per token. `length`: the longest short sequence.

    Outside of `chosen`, all modules behave as before.
    """

    def __init__(self, modules: list[Any], length: int) -> None:
        self.length = length
        self._are_long: torch.Tensor | None = None
        for module in modules:
            self._replace(module, module.forward)

    @contextmanager
    def chosen(self, are_long: torch.Tensor) -> Iterator[None]:
        """Rotate by the factors of long sequences where `are_long` [tokens] is set, for one forward pass."""
        self._are_long = are_long
        try:
            yield
        finally:
            self._are_long = None

    def _replace(self, module: Any, forward: Any) -> None:
        def by_token(states: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            are_long = self._are_long
            if are_long is None:
                return forward(states, position_ids, *args, **kwargs)
            # The largest position decides: one extra position makes all long, and zeros for long sequences make all
            # short.
            beyond = position_ids.new_full((*position_ids.shape[:-1], 1), self.length)
            long = forward(states, torch.cat((position_ids, beyond), dim=-1), *args, **kwargs)
            short = forward(states, torch.where(are_long, 0, position_ids), *args, **kwargs)
            choose = are_long[None, :, None]
            return tuple(torch.where(choose, a[..., :-1, :], b) for a, b in zip(long, short, strict=True))

        module.forward = by_token


def find_switch(model: Any, most_position: int, device: torch.device) -> RopeSwitch | None:
    """Return the RopeSwitch of a model; None if its rotation does not depend on the length of a sequence.

    Raise ConfigError for a rotation with more than two sets of factors.
    """
    found: list[tuple[Any, int]] = []
    for module in model.modules():
        is_rotary = any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
        if not is_rotary:
            continue
        for kind in _kinds(module):
            length = _length(module, kind, most_position, model, device)
            if length is not None:
                found.append((module, length))
    if not found:
        return None
    lengths = {length for _, length in found}
    if len(lengths) > 1:
        raise ConfigError(f"has rotations that change at {sorted(lengths)} tokens", field="model_type")
    modules = list({id(module): module for module, _ in found}.values())
    return RopeSwitch(modules, lengths.pop())


def _kinds(module: Any) -> list[str | None]:
    """Return the kinds of layers that a module has rotations for; [None] for a module with one rotation."""
    kinds = getattr(module, "rope_type", None)
    return list(kinds) if isinstance(kinds, dict) else [None]


def _length(module: Any, kind: str | None, most_position: int, model: Any, device: torch.device) -> int | None:
    """Return the length of the longest sequence that uses the short factors; None if all use the same."""

    def near(furthest: int) -> torch.Tensor:
        positions = torch.tensor([[*NEAR, furthest]], device=device)
        states = torch.zeros(1, len(NEAR) + 1, 1, dtype=torch.float32, device=device)
        out = module(states, positions) if kind is None else module(states, positions, kind)
        parts = out if isinstance(out, tuple) else (out,)
        return torch.cat([part[..., : len(NEAR), :].float().flatten() for part in parts])

    try:
        short = near(NEAR[-1] + 1).clone()
        long = near(most_position - 1).clone()
    except Exception:  # a model's code may raise anything
        return None  # a rotation with another signature: the model is examined as a whole
    if torch.equal(short, long):
        return None
    low, high = NEAR[-1] + 1, most_position - 1
    while high - low > 1:
        middle = (low + high) // 2
        if torch.equal(near(middle), short):
            low = middle
        else:
            high = middle
    # A position p belongs to a sequence of p + 1 tokens.
    if not torch.equal(near(high), long) or not torch.equal(near(low), short):
        raise ConfigError(
            f"{model.config.model_type} rotates by the longest sequence of a step",
            field="model_type",
            hint="Only rotations with one set of factors for short sequences and one for long ones can be run.",
        )
    return low + 1
