"""What a client says about how long the KV of a request is worth keeping; eviction orders may use it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvarts.limits import MOST_COUNT, MOST_MS

__all__ = ["MOST_TOOL_CHARS", "Hints", "Priority"]

MOST_TOOL_CHARS = 256

Priority = Annotated[int, msgspec.Meta(ge=-MOST_COUNT, le=MOST_COUNT)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_MS)]
Name = Annotated[str, msgspec.Meta(max_length=MOST_TOOL_CHARS)]

NS_PER_MS = 1e6


class Hints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Hints of one request, all optional. They change no result, and no engine has to follow them.

    `priority`: larger values are kept longer. `ttl_ms`: how long after its end the KV is worth keeping. `pause_ms`:
    about how long after its end the client returns, as when a tool runs. `tool`: the tool it runs until then.
    """

    priority: Priority | None = None
    ttl_ms: Milliseconds | None = None
    pause_ms: Milliseconds | None = None
    tool: Name | None = None

    @property
    def ttl_ns(self) -> int | None:
        """`ttl_ms` in nanoseconds."""
        return None if self.ttl_ms is None else round(self.ttl_ms * NS_PER_MS)

    @property
    def pause_ns(self) -> int | None:
        """`pause_ms` in nanoseconds."""
        return None if self.pause_ms is None else round(self.pause_ms * NS_PER_MS)
