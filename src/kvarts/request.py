"""A request on its way through one engine.

The first fields are what was asked for and never change. The rest is written by the scheduler alone; everyone else
reads. A request is *known* up to its prompt plus what was generated, and *computed* as far as the KV of its tokens is
in pages: the scheduler makes computed catch up with known.
"""

from __future__ import annotations

from kvarts.content import Content
from kvarts.kv.cache import Holding

__all__ = ["Request"]


class Request:
    """One request. `index` is its place in arrival order and ends every sort key; times are integer nanoseconds.

    `num_output_tokens` is how many tokens it generates, unless it stops before.
    """

    __slots__ = (
        "admission",
        "arrival_ns",
        "cached_tokens",
        "content",
        "first_admitted_ns",
        "first_token_ns",
        "furthest_computed",
        "hit_tokens",
        "holding",
        "index",
        "largest_hit_tokens",
        "last_token_ns",
        "num_admissions",
        "num_computed",
        "num_made",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "recomputed_tokens",
        "row",
        "stop_step",
        "wheel_base",
    )

    def __init__(
        self,
        index: int,
        content: Content,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        arrival_ns: int = 0,
        priority: int = 0,
    ) -> None:
        self.index = index
        self.content = content
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.arrival_ns = arrival_ns
        self.priority = priority
        # Progress. While the request decodes, `num_computed` and `num_made` are as of when it joined the wheel.
        self.num_made = 0
        self.num_computed = 0
        self.holding: Holding | None = None
        self.admission = -1
        """Its place in admission order while it runs, else -1."""
        self.row = -1
        """Its row in the executor's batch while it runs, where an executor needs rows, else -1."""
        # Written by the wheel.
        self.wheel_base = 0
        self.stop_step = -1
        # The account.
        self.first_admitted_ns = -1
        self.first_token_ns = -1
        self.last_token_ns = -1
        self.num_admissions = 0
        self.num_preemptions = 0
        self.hit_tokens = 0
        """Hit in the present admission."""
        self.largest_hit_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens whose KV others had left; what it found of its own after a preemption is not in here."""
        self.recomputed_tokens = 0
        self.furthest_computed = 0
        """Tokens it had in pages before its last preemption."""

    @property
    def num_known(self) -> int:
        """Prompt and generated tokens. While it decodes: as of when it joined the wheel."""
        return self.num_prompt_tokens + self.num_made

    def __repr__(self) -> str:
        return f"Request({self.index}, {self.num_computed} of {self.num_known} tokens computed)"
