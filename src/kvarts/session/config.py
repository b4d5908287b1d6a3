"""Settings of a session runtime."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvarts.errors import ConfigError
from kvarts.limits import MOST_BYTES, MOST_COUNT, MOST_SECONDS, check_number, check_whole
from kvarts.session.values import SessionSettings

__all__ = ["MOST_HISTORY_TOKENS", "AtCapacity", "SessionsConfig"]

MOST_HISTORY_TOKENS = 1 << 24
"""128 MiB."""

AtCapacity = Literal["refuse", "evict"]


class SessionsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What sessions have together.

    `defaults`: the settings of a session for which none are given. `max_sessions`: how many there may be; None: as
    many as fit. `memory_bytes`: KV memory for bounded sessions; None: all there is. `max_pages`: the same in pages, or
    of a model with KV groups in blocks; where both are given, both hold. `max_history_tokens`: tokens of all histories,
    8 bytes each. `at_capacity`: refuse one more, or evict the
    idle one that was used longest ago. `chunk_tokens`: tokens of sessions that a step may compute at most, beside one
    for each that generates; their pages are there once, for all sessions. `tombstone_ttl_s`: for how long it is
    remembered what became of a session. `reap_every_s`: how often it is looked for sessions that have expired.

    Raises ConfigError for a value out of range.
    """

    defaults: SessionSettings = SessionSettings()
    max_sessions: int | None = None
    memory_bytes: int | None = None
    max_pages: int | None = None
    max_history_tokens: int = MOST_HISTORY_TOKENS
    at_capacity: AtCapacity = "refuse"
    chunk_tokens: int = 512
    tombstone_ttl_s: float = 3600.0
    reap_every_s: float = 1.0

    def __post_init__(self) -> None:
        for field in ("max_sessions", "memory_bytes", "max_pages", "max_history_tokens", "chunk_tokens"):
            value = getattr(self, field)
            if value is not None:
                check_whole(value, field, most=MOST_BYTES if field == "memory_bytes" else MOST_COUNT)
        if self.at_capacity not in ("refuse", "evict"):
            raise ConfigError(f"must be 'refuse' or 'evict', got {self.at_capacity!r}", field="at_capacity")
        for field in ("tombstone_ttl_s", "reap_every_s"):
            check_number(getattr(self, field), field, above=True, most=MOST_SECONDS)
