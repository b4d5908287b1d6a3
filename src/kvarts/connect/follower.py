"""Puts batches in order: asks again for what was lost, and notices an engine that began anew.

It does no input or output: batches are handed in, and what it asks for is answered by an `Asker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

__all__ = ["FULL_STATE", "Asker", "Followed", "Follower", "Follows", "Numbered"]

FULL_STATE = -2
"""Asks for everything that there is. An engine that does not know it answers with nothing."""

Numbered = tuple[int, bytes]
"""The number of a batch, and its payload."""


class Asker(Protocol):
    """Answers requests for past batches."""

    def ask(self, start: int) -> Sequence[Numbered] | None:
        """Return the batches from `start` on that are left, or full state for FULL_STATE; None without an answer."""


class Follows(Protocol):
    """Is told of batches in order."""

    def begin(self, *, is_complete: bool) -> None:
        """Forget everything. Where it `is_complete`, nothing is there; otherwise what is there is not known."""

    def apply(self, seq: int, payload: bytes) -> None:
        """Take the next batch."""

    def lose(self, first: int, last: int) -> None:
        """Take note that these batches cannot be had."""


class Followed(msgspec.Struct):
    """What happened to numbers so far."""

    num_gaps: int = 0
    """Times that batches were missing."""
    num_replayed: int = 0
    """Batches that came late, because they were asked for."""
    num_lost: int = 0
    num_duplicates: int = 0
    num_restarts: int = 0
    num_states: int = 0
    """Times that full state was taken."""


class Follower:
    """Owner of the number of the last batch that `follows` was told of. `asker`: None without a replay endpoint."""

    def __init__(self, follows: Follows, asker: Asker | None = None) -> None:
        self._follows = follows
        self._asker = asker
        self.counts = Followed()
        self.last: int | None = None
        """The number of the last batch that was applied; None before the first."""
        self._last_live: int | None = None
        self._digest: bytes | None = None
        """Of the last batch, by which an engine is known again; None after full state."""

    def start(self) -> None:
        """Find out what is there before the first batch comes."""
        self.last = self._last_live = self._digest = None
        if self._take_state():
            return
        past = self._ask(0)
        self._follows.begin(is_complete=bool(past) and past[0][0] == 0)
        for seq, payload in past:
            self._apply(seq, payload)
            self.counts.num_replayed += 1

    def reconnected(self) -> None:
        """Find out whether the engine is still the same, and what was missed."""
        past = None if self.last is None or self._asker is None else self._asker.ask(self.last)
        if past is None:
            return  # the next batch will tell
        # The same engine has at least the last batch.
        if not past or self._is_another(past):
            self.counts.num_restarts += 1
            self.start()
        elif self._digest is not None and past[0][0] == self.last:
            self._catch_up(past)
        else:
            self.start()  # it may be another: the last batch is not there to tell

    def receive(self, seq: int, payload: bytes) -> None:
        """Take a batch as it came."""
        if self._last_live is not None and seq <= self._last_live:
            # What is published is numbered upwards: another engine has begun.
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
        """Ask for what is missing before batch `seq`. Return False if another engine answers."""
        assert self.last is not None
        self.counts.num_gaps += 1
        past = self._ask(self.last)
        if self._is_another(past):
            return False
        if next((number for number, _ in past if number > self.last), seq) > self.last + 1:
            # Not all of them are left. What there is now is better than not to know what was lost.
            first = self.last + 1
            if self._take_state():
                self._lose(first, min(seq, self.last) - 1)
                return True
        self._catch_up(past)
        return True

    def _take_state(self) -> bool:
        """Take full state in place of everything before; return False if the engine does not tell it."""
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
        """Whether what was answered has something else under the number of the last batch."""
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
