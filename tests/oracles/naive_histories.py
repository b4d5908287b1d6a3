"""Session histories in a dictionary: what `Histories` must be, without a disk."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvarts.run.sessions.values import (
    SessionNotReadyError,
    SessionValueError,
    StoredSession,
    Tombstone,
    UnknownSessionError,
    Usage,
)


@dataclass
class NaiveHistories:
    sessions: dict[str, StoredSession] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    tombstones: dict[str, Tombstone] = field(default_factory=dict)

    def of(self, session_id: str) -> list[int]:
        if session_id not in self.tokens:
            raise UnknownSessionError(session_id)
        return self.tokens[session_id]

    def create(self, session: StoredSession) -> None:
        if session.session_id in self.tokens:
            raise SessionValueError(session.session_id)
        self.sessions[session.session_id] = session
        self.tokens[session.session_id] = []

    def append(self, session_id: str, expected_length: int, tokens: list[int]) -> int:
        if len(self.of(session_id)) != expected_length:
            raise SessionNotReadyError(session_id)
        self.tokens[session_id] += tokens
        return len(self.tokens[session_id])

    def truncate(self, session_id: str, length: int) -> int:
        if not 0 <= length <= len(self.of(session_id)):
            raise SessionNotReadyError(session_id)
        del self.tokens[session_id][length:]
        return length

    def fork(self, parent_id: str, child: StoredSession) -> int:
        if not 0 <= child.length <= len(self.of(parent_id)):
            raise SessionNotReadyError(parent_id)
        tokens = self.tokens[parent_id][: child.length]
        self.create(child)
        self.tokens[child.session_id] = tokens
        return child.length

    def note(self, session_id: str, usage: Usage) -> None:
        self.of(session_id)
        self.sessions[session_id] = msgspec.structs.replace(self.sessions[session_id], usage=usage)

    def end(self, session_id: str, reason: str, ended_s: float) -> int:
        length = len(self.of(session_id))
        session = self.sessions.pop(session_id)
        del self.tokens[session_id]
        inv1, inv2 = session.usage.inv1_violations, session.usage.inv2_violations
        self.tombstones[session_id] = Tombstone(
            session_id=session_id, owner=session.owner, reason=reason,  # type: ignore[arg-type]
            ended_s=ended_s, length=length, inv1_violations=inv1, inv2_violations=inv2,
        )  # fmt: skip
        return length

    def forget(self, before_s: float) -> int:
        old = [key for key, tombstone in self.tombstones.items() if tombstone.ended_s < before_s]
        for key in old:
            del self.tombstones[key]
        return len(old)
