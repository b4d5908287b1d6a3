"""Puts batches in order: requests lost ones again, and detects a restarted engine.

It does no input or output: batches are passed in, and its requests are answered by an `Asker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

__all__ = ["FULL_STATE", "Asker", "Followed", "Follower", "Follows", "Numbered"]

FULL_STATE = -2
"""Number that requests the full state. An engine without support for it returns no batches."""

Numbered = tuple[int, bytes]
"""The number of a batch, and its payload."""


class Asker(Protocol):
    """Answers requests for past batches."""

    def ask(self, start: int) -> Sequence[Numbered] | None:
        """Return the batches available from `start` on, or the full state for FULL_STATE; None without an answer."""


class Follows(Protocol):
    """Receives batches in order."""

    def begin(self, *, is_complete: bool) -> None:
        """Forget everything. If `is_complete`, nothing is stored; otherwise the contents are unknown."""

    def apply(self, seq: int, payload: bytes) -> None:
        """Process the next batch."""

    def lose(self, first: int, last: int) -> None:
        """Record that these batches are not available."""


class Followed(msgspec.Struct):
    """Counts of missing, repeated and replayed batches so far."""

    num_gaps: int = 0
    """Number of gaps in the sequence of batches."""
    num_replayed: int = 0
    """Batches received late, on request."""
    num_lost: int = 0
    num_duplicates: int = 0
    num_restarts: int = 0
    num_states: int = 0
    """Number of full states received."""


class Follower:
    """Owner of the number of the last batch passed to `follows`. `asker`: None without a replay endpoint."""

    def __init__(self, follows: Follows, asker: Asker | None = None) -> None:
        self._follows = follows
        self._asker = asker
        self.counts = Followed()
        self.last: int | None = None
        """Number of the last batch applied; None before the first."""
        self._last_live: int | None = None
        self._digest: bytes | None = None
        """Digest of the last batch, by which the same engine is recognized; None after full state."""

    def start(self) -> None:
        """Find out the contents before the first batch arrives."""
        self.last = self._last_live = self._digest = None
        if self._take_state():
            return
        past = self._ask(0)
        self._follows.begin(is_complete=bool(past) and past[0][0] == 0)
        for seq, payload in past:
            self._apply(seq, payload)
            self.counts.num_replayed += 1

    def reconnected(self) -> None:
        """Find out whether the engine is still the same, and request missed batches."""
        past = None if self.last is None or self._asker is None else self._asker.ask(self.last)
        if past is None:
            return  # the next batch will show whether it is another
        # The same engine has at least the last batch.
        if not past or self._is_another(past):
            self.counts.num_restarts += 1
            self.start()
        elif self._digest is not None and past[0][0] == self.last:
            self._catch_up(past)
        else:
            self.start()  # it may be another: the last batch is not available for comparison

    def receive(self, seq: int, payload: bytes) -> None:
        """Process a batch as it arrived."""
        if self._last_live is not None and seq <= self._last_live:
            # Batch numbers only increase, so another engine has started.
            self._restart(seq, payload)
            return
        if self.last is None and seq:
            self.start()  # batches before this one were missed since
        if self.last is None:
            self._follows.begin(is_complete=seq == 0)
        elif seq > self.last + 1 and not self._mend(seq):
            self._restart(seq, payload)
            return
        self._last_live = seq
        if self.last is not None and seq <= self.last:
            self.counts.num_duplicates += 1
            return
        self._apply(seq, payload)

    # Inside -----------------------------------------------------------------------------------------------

    def _restart(self, seq: int, payload: bytes) -> None:
        self.counts.num_restarts += 1
        if seq == 0:
            self.last = None
            self._follows.begin(is_complete=True)
        else:
            self.start()
        self._last_live = seq
        if self.last is None:
            if seq:
                self._follows.begin(is_complete=False)
            self._apply(seq, payload)
        elif seq > self.last:
            self._apply(seq, payload)

    def _mend(self, seq: int) -> bool:
        """Request the batches missing before batch `seq`. Return False if another engine answers."""
        assert self.last is not None
        self.counts.num_gaps += 1
        past = self._ask(self.last)
        if self._is_another(past):
            return False
        if next((number for number, _ in past if number > self.last), seq) > self.last + 1:
            # Some are no longer available: the full state is better than unknown contents.
            first = self.last + 1
            if self._take_state():
                self._lose(first, min(seq, self.last) - 1)
                return True
        self._catch_up(past)
        return True

    def _take_state(self) -> bool:
        """Replace everything with the full state; return False if the engine does not provide it."""
        state = self._ask(FULL_STATE)
        if not state:
            return False
        self.counts.num_states += 1
        self._follows.begin(is_complete=True)
        for seq, payload in state:
            self._follows.apply(seq, payload)
            self.last = seq
        self._digest = None
        return True

    def _is_another(self, past: Sequence[Numbered]) -> bool:
        """Return whether the answer has another payload under the number of the last batch."""
        if not past or past[0][0] != self.last or self._digest is None:
            return False
        return _digest(past[0][1]) != self._digest

    def _catch_up(self, past: Sequence[Numbered]) -> None:
        for seq, payload in past:
            if self.last is not None and seq > self.last:
                self._apply(seq, payload)
                self.counts.num_replayed += 1

    def _apply(self, seq: int, payload: bytes) -> None:
        if self.last is not None and seq > self.last + 1:
            self._lose(self.last + 1, seq - 1)
            self._follows.begin(is_complete=False)
        self._follows.apply(seq, payload)
        self.last = seq
        self._digest = _digest(payload)

    def _lose(self, first: int, last: int) -> None:
        self.counts.num_lost += last - first + 1
        self._follows.lose(first, last)

    def _ask(self, start: int) -> Sequence[Numbered]:
        answer = None if self._asker is None else self._asker.ask(start)
        return answer or ()


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()
