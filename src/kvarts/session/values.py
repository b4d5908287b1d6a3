"""What is said of sessions: settings, states, and the updates of a generation."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec

from kvarts.errors import ConfigError
from kvarts.limits import MOST_SECONDS, MOST_UINT32, check_number, check_whole
from kvarts.sampling import TopLogprobs

__all__ = [
    "Done",
    "Positions",
    "Retention",
    "SessionCounts",
    "SessionInfo",
    "SessionSettings",
    "StopReason",
    "Token",
    "Truncated",
    "Update",
]

Positions = Literal["global", "cache"]
Retention = Literal["pin", "cache", "host"]


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session keeps, and for how long.

    Of its KV it keeps the first `sink` and the last `window` tokens: the token at position p attends to itself, and to
    positions q < p with q < sink or q >= p - window. A `window` of None keeps all; then `retention` says where pages
    are between turns: pinned, in the prefix cache, or in host memory.

    `positions`: `global` counts from the beginning of the history, and equals plain attention until the first token is
    dropped; `cache` counts places among the retained tokens, so that a session never leaves the positions that the
    model was trained for. `past_max_positions`: with global positions, go on beyond the model's
    `max_position_embeddings` instead of ending the generation as truncated.

    `ttl_s`: seconds of idleness after which the session expires; None: never. `eos_token_ids`: tokens that end a
    generation, beside those of the model. `label`: the client's own name for it.

    Raises ConfigError for a value out of range.
    """

    sink: int = 4
    window: int | None = 64
    positions: Positions = "global"
    past_max_positions: bool = False
    retention: Retention = "cache"
    ttl_s: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        check_whole(self.sink, "sink", least=0, most=MOST_UINT32)
        if self.window is not None:
            check_whole(self.window, "window", most=MOST_UINT32)
        if self.positions not in ("global", "cache"):
            raise ConfigError(f"must be 'global' or 'cache', got {self.positions!r}", field="positions")
        if self.positions == "cache" and self.window is None:
            raise ConfigError("'cache' needs a window: an unbounded session drops no tokens", field="positions")
        if self.retention not in ("pin", "cache", "host"):
            raise ConfigError(f"must be 'pin', 'cache' or 'host', got {self.retention!r}", field="retention")
        if self.ttl_s is not None:
            check_number(self.ttl_s, "ttl_s", above=True, most=MOST_SECONDS)

    def num_retained(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens are retained."""
        return num_tokens if self.window is None else min(num_tokens, self.sink + self.window)


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it is now. Bytes are those of tensors over all layers.

    `state`: `idle`, `appending` or `generating`. `history_length`: tokens it was given or has generated.
    `num_retained`: tokens with KV that is kept; `kv_live_bytes`: what they take; `kv_allocated_bytes`: whole pages;
    `kv_peak_bytes`: the most it has had allocated, within a step; `kv_bound_bytes`: the most it may have allocated
    between steps, None where it is unbounded. `num_dropped`: tokens with KV that was dropped for good.

    Violations are counted by an independent look at the page tables, and outlive the session: `inv1_violations`: what
    pages hold is not what should be retained; `inv2_violations`: a position fell. `restored`: after a restart, whether
    its KV came from a checkpoint (`kv`) or is computed again (`tokens`); None in the process that made it.

    `num_computed_tokens`: tokens computed for it so far, those computed again included; `num_turns`: generations.
    """

    session_id: str
    label: str
    settings: SessionSettings
    state: str
    history_length: int
    num_retained: int
    num_dropped: int
    kv_live_bytes: int
    kv_allocated_bytes: int
    kv_peak_bytes: int
    kv_bound_bytes: int | None
    inv1_violations: int
    inv2_violations: int
    idle_s: float
    num_turns: int
    num_computed_tokens: int
    restored: str | None


class SessionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """All sessions together: how many there are, the pages, or blocks of a model with KV groups, that are reserved for
    them whether they are full or not, and the tokens of their histories, 8 bytes each; and how many have ended since
    the beginning, by why.
    """

    num_sessions: int
    num_reserved_pages: int
    num_history_tokens: int
    ended_by_reason: dict[str, int]


class StopReason(IntEnum):
    """Why a generation ended."""

    MAX_TOKENS = 1
    EOS = 2
    CANCELLED = 3
    TRUNCATED = 4
    """The session cannot go on: the model was not trained for later positions."""


class Truncated(msgspec.Struct, frozen=True):
    """Before the first token of a generation: `num_dropped` tokens of the history are no longer attended to."""

    num_dropped: int


class Token(msgspec.Struct, frozen=True):
    """A generated token. `logprob`, and `top_logprobs` of the likeliest in its place: where they are asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: TopLogprobs = ()


class Done(msgspec.Struct, frozen=True):
    """The end of a generation of `num_tokens` tokens. `prefill_s`: from its beginning to the first token."""

    stop_reason: StopReason
    num_tokens: int
    prefill_s: float
    total_s: float


Update = Truncated | Token | Done
