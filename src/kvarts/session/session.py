"""One session, as used in the engine's thread."""

from __future__ import annotations

import time

from kvarts.content import Content
from kvarts.session.pages import SessionPages
from kvarts.session.values import SessionSettings

__all__ = ["Session"]


class Session:
    """A history of tokens, and the KV that is kept of it. Written by SessionTable and Turns.

    `content`: the whole history. `num_computed`: number of its tokens that were computed. `pages`: its own pages, if it
    is bounded. `pin`: the pin of its pages, if it is unbounded and pins them. `request`: the index of the current
    request, or None. `touched_ns`: time of its last activity.
    """

    __slots__ = (
        "content",
        "created_s",
        "furthest",
        "inv1_violations",
        "inv2_violations",
        "is_written",
        "num_computed",
        "num_computed_tokens",
        "num_counted",
        "num_turns",
        "owner",
        "pages",
        "pin",
        "request",
        "restored",
        "session_id",
        "settings",
        "state",
        "touched_ns",
    )

    def __init__(
        self,
        session_id: str,
        owner: str,
        settings: SessionSettings,
        content: Content,
        pages: SessionPages | None,
        now_ns: int,
    ) -> None:
        self.session_id = session_id
        self.owner = owner
        self.settings = settings
        self.content = content
        self.pages = pages
        self.touched_ns = now_ns
        self.created_s = time.time()
        self.state = "idle"
        self.request: int | None = None
        self.pin: int | None = None
        self.num_computed = 0
        self.furthest = 0
        """The most tokens computed of the present history."""
        self.num_turns = 0
        self.num_computed_tokens = 0
        self.num_counted = 0
        """Tokens of the history counted in its owner's account. Written by Capacity."""
        self.inv1_violations = 0
        self.inv2_violations = 0
        self.restored: str | None = None
        self.is_written = True
        """Whether its history on disk, if any, equals this one; False after a failed write."""

    @property
    def history_length(self) -> int:
        """The number of its tokens."""
        return self.content.num_known_tokens

    @property
    def num_retained(self) -> int:
        """The number of tokens with KV that a later token can see."""
        retained = self.settings if self.pages is None else self.pages.keeps
        return retained.num_retained(self.num_computed)

    def __repr__(self) -> str:
        return f"Session({self.session_id[:8]}, {self.state}, {self.num_computed} of {self.history_length} computed)"
