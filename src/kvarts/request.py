"""A request on its way through one engine.

The first fields are what was asked for and never change. The rest is written by the scheduler alone; everyone else
reads. A request is *known* up to its prompt plus what was generated, and *computed* as far as the KV of its tokens is
in pages: the scheduler makes computed catch up with known.
"""

from __future__ import annotations

import msgspec

from kvarts.content import Content
from kvarts.kv.cache import Holding

__all__ = ["Request"]


class Request(msgspec.Struct, eq=False):
    """One request. `index` is its place in arrival order and ends every sort key; times are integer nanoseconds.

    `num_output_tokens` is how many tokens it generates, unless it stops before.
    """

    index: int
    content: Content
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_ns: int = 0
    priority: int = 0
    request_id: str | None = None
    """What it is called outside."""

    # Progress. While the request decodes, `num_computed` and `num_made` are as of when it joined the wheel.
    num_made: int = 0
    num_computed: int = 0
    holding: Holding | None = None
    admission: int = -1
    """Its place in admission order while it runs, else -1."""
    row: int = -1
    """Its row in the executor's batch while it runs, where an executor needs rows, else -1."""

    # Written by the wheel.
    wheel_base: int = 0
    stop_step: int = -1

    # The account.
    first_admitted_ns: int = -1
    first_token_ns: int = -1
    last_token_ns: int = -1
    num_admissions: int = 0
    num_preemptions: int = 0
    hit_tokens: int = 0
    """Hit in the present admission."""
    largest_hit_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV others had left; what it found of its own after a preemption is not in here."""
    cached_tokens_below: tuple[int, ...] = ()
    """Those of `cached_tokens` that each tier below the device had; empty for none."""
    recomputed_tokens: int = 0
    furthest_computed: int = 0
    """Tokens it had in pages before its last preemption."""

    @property
    def num_known(self) -> int:
        """Prompt and generated tokens. While it decodes: as of when it joined the wheel."""
        return self.num_prompt_tokens + self.num_made

    def __repr__(self) -> str:
        return f"Request({self.index}, {self.num_computed} of {self.num_known} tokens computed)"
