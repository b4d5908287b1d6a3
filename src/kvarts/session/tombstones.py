"""What is remembered of sessions that are gone."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import msgspec

from kvarts.session.errors import SessionGoneError, UnknownSessionError

__all__ = ["GoneReason", "Tombstone", "Tombstones"]

GoneReason = Literal["closed", "evicted", "expired"]


class Tombstone(msgspec.Struct, frozen=True):
    """A session that is gone: its owner, why, since when, the length of its history, and what checks had counted."""

    owner: str
    reason: GoneReason
    time_ns: int
    history_length: int
    inv1_violations: int = 0
    inv2_violations: int = 0


class Tombstones:
    """Owner of at most `most` tombstones, each for `ttl_s` seconds."""

    def __init__(self, *, most: int = 10_000, ttl_s: float = 3600.0) -> None:
        self._most = most
        self._ttl_ns = round(ttl_s * 1e9)
        self._by_id: OrderedDict[str, Tombstone] = OrderedDict()
        self.num_gone = {"closed": 0, "evicted": 0, "expired": 0}
        """By reason, since the beginning."""
        self.inv1_violations = 0
        self.inv2_violations = 0

    def add(self, session_id: str, tombstone: Tombstone) -> None:
        """Remember a session that is gone."""
        self._by_id[session_id] = tombstone
        self.num_gone[tombstone.reason] += 1
        self.inv1_violations += tombstone.inv1_violations
        self.inv2_violations += tombstone.inv2_violations
        while len(self._by_id) > self._most:
            self._by_id.popitem(last=False)

    def error(self, owner: str, session_id: str, now_ns: int) -> UnknownSessionError:
        """Return what to tell `owner` of a session that is not there: no more than that, if it was another's."""
        tombstone = self._by_id.get(session_id)
        if tombstone is not None and now_ns - tombstone.time_ns > self._ttl_ns:
            del self._by_id[session_id]
            tombstone = None
        if tombstone is None or tombstone.owner != owner:
            return UnknownSessionError(
                f"there is no session {_shown(session_id)}", field="session_id", hint="Create one."
            )
        ago_s = (now_ns - tombstone.time_ns) / 1e9
        return SessionGoneError(
            f"session {_shown(session_id)} was {tombstone.reason} {ago_s:.1f} s ago, with a history of "
            f"{tombstone.history_length} tokens"
            if tombstone.reason != "expired"
            else f"session {_shown(session_id)} expired {ago_s:.1f} s ago, with a history of "
            f"{tombstone.history_length} tokens",
            field="session_id",
            hint="Create another.",
        )


def _shown(session_id: str) -> str:
    """Return an id as it may stand in one line, whatever a client sent."""
    return repr(session_id if len(session_id) <= 40 else session_id[:40] + "...")
