"""What layers keep of a sequence, by looking at every token of every layer: slow, and without a formula.

A layer says which tokens a token attends to. A token is kept while some token that is computed now or later attends to
it; a page is kept while one of its tokens is.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.core.kv.groups import SinkWindow
from kvarts.core.kv.layers import KvLayer

__all__ = ["kept_bits", "kept_for", "kept_pages", "kept_tokens", "seen_by", "seen_by_both"]


def seen_by(layer: KvLayer, position: int) -> set[int]:
    """Return the positions that the token at `position` attends to, itself included."""
    before = range(position + 1)
    if layer.kind in ("full", "latent"):
        return set(before)
    span = layer.span or 0
    if layer.kind in ("window", "state"):  # a state by page is needed as long as a window of two tokens
        return {other for other in before if other < layer.sink or position - other < span}
    if layer.kind == "chunk":
        return {other for other in before if other // span == position // span}
    return set()


def kept_tokens(layer: KvLayer, num_tokens: int, num_new: int) -> set[int]:
    """Return the positions that are kept while the last `num_new` of `num_tokens` tokens are computed."""
    first = max(0, num_tokens - num_new)
    kept: set[int] = set()
    # A token later than a window or a chunk from here attends to no token that those before it do not.
    for position in range(first, num_tokens + (layer.span or 0) + 1):
        kept |= seen_by(layer, position)
    return {position for position in kept if position < num_tokens} if num_tokens else set()


def kept_pages(layer: KvLayer, num_tokens: int, page_size: int, num_new: int) -> set[int]:
    """Return the pages, by number, that hold one of those tokens."""
    return {position // page_size for position in kept_tokens(layer, num_tokens, num_new)}


def kept_bits(layers: Sequence[KvLayer], num_tokens: int, page_size: int, num_new: int, number_bits: int) -> int:
    """Return the bits of the pages and states of all layers, one layer after the other."""
    bits = 0
    for layer in layers:
        if layer.kind == "state" and num_tokens:
            bits += 8 * layer.state_bytes
        for _ in kept_pages(layer, num_tokens, page_size, num_new):
            for _ in range(page_size):
                bits += layer.num_heads * layer.head_numbers * number_bits
    return bits


def seen_by_both(layer: KvLayer, whole: SinkWindow, position: int) -> set[int]:
    """Return what the token at `position` attends to in a layer, in a sequence that retains a sink and a window."""
    return {
        other
        for other in seen_by(layer, position)
        if other < whole.sink or other >= position - whole.window or other == position
    }


def kept_for(layer: KvLayer, whole: SinkWindow, position: int) -> set[int]:
    """Return the positions before `position` that are kept for the token there and all later ones.

    The sink of the sequence is kept as a whole where a layer reaches back farther than the window of the sequence, and
    that of the layer where it is the window that reaches farther, as long as more is seen of it than is seen for ever.
    """
    seen: set[int] = set()
    for later in range(position, position + (layer.span or 0) + whole.window + whole.sink + layer.sink + 2):
        seen |= seen_by_both(layer, whole, later)
    if layer.span is None or layer.span - 1 > whole.window:
        sink = whole.sink
    else:
        sink = layer.sink if layer.span - 1 < whole.window else 0
    for_ever = seen_by_both(layer, whole, position + 1000) if layer.span is not None else set()
    if any(other < sink and other not in for_ever for other in seen):
        seen |= set(range(sink))
    return {other for other in seen if other < position}
