"""Sequences that retain pages by the attention that they received, besides their sink and window (heavy hitters)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvarts.errors import ConfigError
from kvarts.kv.sink_window import SinkWindow

__all__ = ["SCORINGS", "HeavyPages", "Scoring"]

DECISION_TOKENS = 64
"""Tokens between two decisions, rounded up to whole pages."""


class Scoring(msgspec.Struct, frozen=True):
    """How a page earns its place: by the attention weight that queries gave to its tokens, summed over layers and
    heads.

    `num_observed`: only the last queries before a decision count; None: all do. `adds_up`: scores of before the last
    decision still count.
    """

    num_observed: int | None
    adds_up: bool

    def observed(self, start: int, end: int, interval: int) -> range:
        """Return the positions of [start, end) whose attention counts; no decision is due between them."""
        if self.num_observed is None:
            return range(start, end)
        decision = start // interval * interval + interval
        return range(min(end, max(start, decision - self.num_observed)), end)


SCORINGS = {"h2o": Scoring(None, adds_up=True), "snapkv": Scoring(32, adds_up=False)}
"""By name: H2O (Zhang et al., NeurIPS 2023) adds up all attention; SnapKV (Li et al., NeurIPS 2024) observes the last
queries of a window. Both are applied here to pages, which all layers and heads share."""


class HeavyPages(SinkWindow, frozen=True, kw_only=True):
    """The pages of the first `sink` tokens, the pages of the last `window` tokens, and `num_heavy` pages between them.

    Every `interval` tokens, when the token at position b = k * interval is next, is decided which pages stay: of those
    that end at b - `window` or before, the pages of the sink, and the `num_heavy` with the highest scores by `keep`, a
    name of SCORINGS; of equal ones the later. Tokens from b on see all tokens before them in the pages that stay.
    """

    num_heavy: int
    keep: str
    page_size: int

    def __post_init__(self) -> None:
        if self.keep not in SCORINGS:
            raise ConfigError(f"must be window or {' or '.join(SCORINGS)}, got {self.keep!r}", field="keep")

    @property
    def is_scored(self) -> bool:
        """Whether the pages that stay are chosen by the attention that they receive."""
        return True

    @property
    def scoring(self) -> Scoring:
        """How pages are scored."""
        return SCORINGS[self.keep]

    @property
    def interval(self) -> int:
        """The number of tokens between two decisions."""
        return -(-DECISION_TOKENS // self.page_size) * self.page_size

    def decided_at(self, position: int) -> int:
        """Return the position of the last decision before the token at `position` is computed."""
        return position // self.interval * self.interval

    def num_until_decision(self, start: int) -> int:
        """Return how many tokens from `start` on are computed before the next decision."""
        return self.interval - start % self.interval

    def observed(self, start: int, end: int) -> range:
        """Return the positions of [start, end) whose attention is scored."""
        return self.scoring.observed(start, end, self.interval)

    def choose(self, scores: Sequence[float]) -> list[int]:
        """Return the places of the pages that stay, in order, of candidates with `scores`, in order of position."""
        ranked = sorted(range(len(scores)), key=lambda place: (scores[place], place), reverse=True)
        return sorted(ranked[: self.num_heavy])

    @property
    def most_seen(self) -> int:
        """The number of tokens before its own that a token of a long sequence sees, at most."""
        return self.sink + self.num_heavy * self.page_size + self.window + self.interval

    def first_seen(self, position: int) -> int:
        """Return the first position of the pages of the window of the token at `position`."""
        return max(0, self.decided_at(position) - self.window) // self.page_size * self.page_size

    def sees(self, positions: Any, num_tokens: int) -> Any:
        """Return, elementwise, whether later tokens see `positions` of held pages: always."""
        return positions >= 0

    def num_retained(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens are retained until the next is computed."""
        front = self.num_sink_pages(self.page_size) * self.page_size
        between = max(0, self.first_seen(max(0, num_tokens - 1)) - front)
        return num_tokens - between + min(between, self.num_heavy * self.page_size)

    def most_pages(self, page_size: int) -> int:
        """Return the most pages that a sequence holds between steps."""
        return super().most_pages(page_size) + self.num_heavy + self.interval // page_size

    def places(self, page_size: int) -> set[int]:
        """Return the places in a page at which pages may be dropped: decisions fall on the first."""
        return {0}
