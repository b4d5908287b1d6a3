"""What attention costs in the layers of a model that attend alike."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LayerCost"]


class LayerCost(NamedTuple):
    """Layers that attend alike. `span`: the most tokens they attend to; None for all.

    `work`, `read`: what a token attended to costs one of them in arithmetic and in bytes, with the first layer of the
    model as 1; `decode`: what it costs all of them in a decode.
    """

    span: int | None
    num_layers: int
    work: float
    read: float
    decode: float
