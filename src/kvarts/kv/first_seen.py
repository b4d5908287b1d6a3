"""The first page that a token attends to in a layer, computed for every chunk and every match."""

from __future__ import annotations

from kvarts.hardware.kv_groups import KvLayer

__all__ = ["FirstSeen"]

FAR = 1 << 40
"""A position after any window."""


class FirstSeen:
    """Attended positions of `layer`, in pages of `page_size` tokens."""

    __slots__ = ("_lag", "_layer", "_page_size")

    def __init__(self, layer: KvLayer, page_size: int) -> None:
        self._layer = layer
        self._page_size = page_size
        # The reach of a window is the same at every position; in other layers it is not.
        self._lag = FAR - layer.first_seen(FAR) if layer.kind == "window" else -1

    def page(self, position: int) -> int:
        """Return the page of the first token after the sink that the token at `position` attends to."""
        lag = self._lag
        if lag < 0:
            return self._layer.first_seen(position) // self._page_size
        return (position - lag) // self._page_size if position > lag else 0
