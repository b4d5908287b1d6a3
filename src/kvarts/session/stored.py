"""The stored form of sessions on disk, both current and ended."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvarts.session.values import SessionSettings

__all__ = ["EndReason", "StoredSession", "Tombstone", "Usage"]

EndReason = Literal["closed", "evicted", "expired"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a session, since it was created. `last_used_s`: Unix time."""

    last_used_s: float
    num_turns: int = 0
    num_computed_tokens: int = 0
    inv1_violations: int = 0
    inv2_violations: int = 0


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session without its tokens. `length`: their number; `created_s`: Unix time; `parent`: origin of a fork."""

    session_id: str
    owner: str
    settings: SessionSettings
    created_s: float
    usage: Usage
    parent: str | None = None
    length: int = 0


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended: the reason, the time (Unix time), and the length of its history."""

    session_id: str
    owner: str
    reason: EndReason
    ended_s: float
    length: int
    inv1_violations: int
    inv2_violations: int
