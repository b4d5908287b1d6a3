"""The tokens that a bounded sequence retains in each KV group: those that both the sequence and the layers allow.

The token at p attends in a layer to positions that the layer attends to, and among these only to its own, to q >= p -
window and to q < sink. So layers with a reach no longer than the window of the sequence retain their own window, with
the part of the sink that is in it; others retain the window and, for as long as they reach it, the sink.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any

import msgspec

from kvarts.combines import check_combination
from kvarts.hardware.kv_groups import KvLayer
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.sink_window import SinkWindow

__all__ = ["GroupKeeps", "most_blocks", "retained_by_group"]


class GroupKeeps(msgspec.Struct, frozen=True):
    """Retention of a sequence that retains `whole`, in layers that keep `layer`.

    A sink that is out of reach of all later tokens is released as a whole; it stays as long as one of its tokens is in
    reach.
    """

    whole: SinkWindow
    layer: KvLayer

    @property
    def _reach(self) -> int | None:
        """The most tokens before its own that a token attends to in these layers; None for all."""
        return None if self.layer.span is None else self.layer.span - 1

    @property
    def sink(self) -> int:
        """The number of first tokens kept apart from the last ones; 0 if layers see nothing beyond the window."""
        reach = self._reach
        return self.whole.sink if reach is None or reach > self.whole.window else 0

    @property
    def window(self) -> int:
        """The most tokens before its own, sink excluded, that a token attends to."""
        reach = self._reach
        return self.whole.window if reach is None else min(reach, self.whole.window)

    @property
    def sink_until(self) -> int | None:
        """The first position from which on no token sees the sink; None without one."""
        sink, span = self.sink, self.layer.span
        if not sink or span is None or self.whole.rotates_late:  # then the distance to the sink never grows
            return None
        return sink + span - 1 if self.layer.kind == "window" else -(-sink // span) * span

    def first_seen(self, position: int) -> int:
        """Return the first position after the sink that the token at `position` attends to."""
        return max(0, position - self.whole.window, self.layer.first_seen(position))

    def sink_seen(self, position: int) -> int:
        """Return the number of tokens of the sink that are kept for the token at `position` and later ones."""
        until = self.sink_until
        return self.sink if until is None or position < until else 0

    def sees(self, positions: Any, num_tokens: int) -> Any:
        """Return, elementwise, whether a token after the first `num_tokens` can see `positions` of held pages."""
        return (positions < self.sink_seen(num_tokens)) | (positions >= self.first_seen(num_tokens))

    def num_retained(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens are kept for later ones."""
        first = min(num_tokens, self.first_seen(num_tokens))
        return num_tokens - first + min(first, self.sink_seen(num_tokens))

    def num_sink_pages(self, page_size: int) -> int:
        """Return the pages that hold the sink."""
        return -(-self.sink // page_size)

    def num_dropped(self, position: int, page_size: int) -> int:
        """Return how many pages after those of the sink no token at `position` or later can see."""
        return max(0, self.first_seen(position) // page_size - self.num_sink_pages(page_size))

    def places(self, page_size: int) -> set[int]:
        """Return the places in a page at which a token no longer needs a page that the token before it needed."""
        places = {self.window % page_size}
        if self.layer.kind == "chunk":
            places.update(range(0, page_size, gcd(self.layer.span or 1, page_size)))
        if self.sink_until is not None:
            places.add(self.sink_until % page_size)
        return places

    def most_pages(self, page_size: int) -> int:
        """Return the most pages that a sequence holds between steps, however long it becomes."""
        return _most_pages(self, page_size)


@cache
def _most_pages(keeps: GroupKeeps, page_size: int) -> int:
    if keeps.layer.span is None:
        return keeps.whole.most_pages(page_size)
    window, until = keeps.window, keeps.sink_until
    num_sink_pages = keeps.num_sink_pages(page_size)
    latest = page_size - 1
    """The latest place in a page at which the attended range of a token can begin."""
    if keeps.layer.kind == "chunk":
        step = gcd(keeps.layer.span, page_size)
        latest = min(latest, page_size - step + keeps.layer.span - 1 - window)
    of_window = (latest + window) // page_size + 1
    if until is None:
        return num_sink_pages + of_window
    # While the sink is in reach, the number of pages is largest when a token begins one.
    with_sink = max(
        position // page_size + 1 - keeps.num_dropped(position, page_size) for position in range(0, until, page_size)
    )
    return max(with_sink, of_window)


def retained_by_group(memory: GroupMemory, whole: SinkWindow) -> list[tuple[GroupKeeps, int]]:
    """Return, per group, the retention of a sequence that retains `whole`, and the blocks of a part.

    Raise ConfigError for a model that cannot have such sequences.
    """
    for group in memory.groups:
        if group.is_state:
            check_combination({"windows": "window", "states": "kv_groups"})
        if group.layer.sink:
            check_combination({"windows": "window", "sinks": "kv_groups"})
    return [(GroupKeeps(whole, group.layer), group.part_bytes // memory.block_bytes) for group in memory.groups]


def most_blocks(memory: GroupMemory, whole: SinkWindow, page_size: int) -> int:
    """Return the most blocks that a sequence holds between steps: the sum over groups of the most pages, in blocks."""
    return sum(blocks * keeps.most_pages(page_size) for keeps, blocks in retained_by_group(memory, whole))
