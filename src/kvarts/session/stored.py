"""The stored form of sessions on disk, current and ended, and the memory of sessions that have ended."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Literal

import msgspec

from kvarts.session.values import SessionGoneError, SessionSettings, UnknownSessionError

__all__ = ["EndReason", "StoredSession", "Tombstone", "Tombstones", "Usage"]

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


class Tombstones:
    """Owner of at most `most` tombstones, each valid for `ttl_s` seconds."""

    def __init__(self, *, most: int = 10_000, ttl_s: float = 3600.0) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._by_id: OrderedDict[str, Tombstone] = OrderedDict()
        self.num_gone = {"closed": 0, "evicted": 0, "expired": 0}
        """Number of ended sessions by reason, since the start."""
        self.inv1_violations = 0
        self.inv2_violations = 0

    def add(self, tombstone: Tombstone) -> None:
        """Remember a session that has ended."""
        self._by_id[tombstone.session_id] = tombstone
        self.num_gone[tombstone.reason] += 1
        self.inv1_violations += tombstone.inv1_violations
        self.inv2_violations += tombstone.inv2_violations
        while len(self._by_id) > self._most:
            self._by_id.popitem(last=False)

    def error(self, owner: str, session_id: str) -> UnknownSessionError:
        """Return the error for a session that does not exist; it gives details only to the session's former owner."""
        tombstone = self._by_id.get(session_id)
        now_s = time.time()
        if tombstone is not None and now_s - tombstone.ended_s > self._ttl_s:
            del self._by_id[session_id]
            tombstone = None
        if tombstone is None or tombstone.owner != owner:
            return UnknownSessionError(
                f"there is no session {_shown(session_id)}", field="session_id", hint="Create one."
            )
        what = "expired" if tombstone.reason == "expired" else f"was {tombstone.reason}"
        return SessionGoneError(
            f"session {_shown(session_id)} {what} {max(0.0, now_s - tombstone.ended_s):.1f} s ago, with a history of "
            f"{tombstone.length} tokens",
            field="session_id",
            hint="Create another.",
        )


def _shown(session_id: str) -> str:
    """Return an id for use in a one-line message, whatever a client sent."""
    return repr(session_id if len(session_id) <= 40 else session_id[:40] + "...")
