"""Cost of attention in a group of identical layers."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LayerCost"]


class LayerCost(NamedTuple):
    """Layers that attend to the same span. `span`: the largest number of tokens attended to; None for all.

    `work`, `read`: arithmetic and bytes per attended token in one of these layers, relative to the model's first layer;
    `decode`: the relative cost per attended token of all these layers in a decode.
    """

    span: int | None
    num_layers: int
    work: float
    read: float
    decode: float
