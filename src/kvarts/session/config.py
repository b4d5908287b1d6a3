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
    """Settings shared by all sessions.

    `defaults`: the settings of sessions created without any. `max_sessions`: limit on their number; None: as many as
    fit. `memory_bytes`: KV memory for bounded sessions; None: all of it. `max_pages`: the same in pages, or in blocks
    for a model with KV groups; if both are given, both apply. `max_history_tokens`: tokens of all histories, 8 bytes
    each. `at_capacity`: refuse a further session, or evict the idle session that was used longest ago. `chunk_tokens`:
    most tokens of sessions that a step may compute in addition to one for each generating session; the pages for them
    are reserved once for all sessions. `tombstone_ttl_s`: how long the end of a session is remembered. `reap_every_s`:
    interval of the search for expired sessions.

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
