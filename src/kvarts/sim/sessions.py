"""Settings of sessions in a replay."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvarts.base.limits import MOST_SECONDS, check_number
from kvarts.base.settings import AtLeastOne, SettingError, setting
from kvarts.core.config import AtCapacity, SessionRetention
from kvarts.core.kv.groups import SinkWindow

__all__ = ["SessionReplay"]


class SessionReplay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sessions on the server: a turn sends only new tokens, and is routed to the replica that has its session.

    With a `window`, sessions are bounded: each keeps the KV of its first `sink` and its last `window` tokens in
    separate pages, which are reserved as long as it lives. Without one, `retention` is where the KV of a session is
    between turns: in the prefix cache, like that of all requests; pinned, until a request needs the memory; or in the
    host tier, to which every page is copied when it is complete.

    A session ends with its last turn in the trace, or after `ttl_s` seconds of idleness. `at_capacity`: if there is no
    room for a turn of a bounded session, refuse it, or evict the session idle longest. `chunk_tokens`: see
    SessionsConfig. Raises ConfigError for a value out of range.
    """

    window: Annotated[
        int | None,
        setting(
            "Keep the KV of each session's last N tokens, and of its first ones, in pages of its own.",
            flag="--session-window",
            metavar="N",
            default="all tokens",
        ),
    ] = None
    sink: Annotated[
        int, setting("Of bounded sessions: the first tokens that are kept.", flag="--session-sink", metavar="N")
    ] = 4
    retention: Annotated[
        SessionRetention,
        setting("Of sessions without a window: where KV is between turns.", flag="--session-retention"),
    ] = "cache"
    ttl_s: Annotated[
        float | None,
        setting(
            "A session that is idle for so long ends: its next turn computes all.",
            flag="--session-ttl",
            metavar="SECONDS",
            default="never",
        ),
    ] = None
    at_capacity: Annotated[
        AtCapacity,
        setting(
            "Of bounded sessions: refuse a turn for which there is no room, or evict the session idle longest.",
            flag="--session-at-capacity",
        ),
    ] = "refuse"
    chunk_tokens: Annotated[
        AtLeastOne,
        setting("Of bounded sessions: tokens that a step may compute beside one of each that generates.", flag=None),
    ] = 512

    def __post_init__(self) -> None:
        if self.sink < 0:
            raise SettingError(f"must not be negative, got {self.sink}", "sink")
        if self.window is not None and self.window < 1:
            raise SettingError(f"must be at least 1, got {self.window}", "window")
        if self.retention not in ("pin", "cache", "host"):
            raise SettingError(f"must be 'pin', 'cache' or 'host', got {self.retention!r}", "retention")
        if self.window is not None and self.retention != "cache":
            raise SettingError(
                "is of sessions without a window",
                "retention",
                hint="A bounded session keeps its pages. Leave {retention} out.",
            )
        if self.ttl_s is not None:
            check_number(self.ttl_s, "ttl_s", above=True, most=MOST_SECONDS)
        if self.at_capacity not in ("refuse", "evict"):
            raise SettingError(f"must be 'refuse' or 'evict', got {self.at_capacity!r}", "at_capacity")

    @property
    def keeps(self) -> SinkWindow | None:
        """The tokens that a bounded session keeps; None without a window."""
        return None if self.window is None else SinkWindow(self.sink, self.window)

    @property
    def holds_pages(self) -> bool:
        """Whether pages are kept in use between turns."""
        return self.window is not None or self.retention == "pin"
