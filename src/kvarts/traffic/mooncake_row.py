"""Schema of a line of a Mooncake trace."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvarts.hints import Hints
from kvarts.limits import LATEST_NS, MOST_COUNT

__all__ = ["MooncakeRow"]

Count = Annotated[int, msgspec.Meta(le=MOST_COUNT)]
Priority = Annotated[int, msgspec.Meta(ge=-MOST_COUNT, le=MOST_COUNT)]


class MooncakeRow(msgspec.Struct, gc=False):
    """One request as decoded from JSON; traffic/mooncake.py documents the fields and checks their values."""

    input_length: Count
    hash_ids: list[int] | None = None
    output_length: Count | None = None
    timestamp: int | float | None = None
    delay: int | float | None = None
    session_id: str | int | None = None
    priority: Priority = 0
    output_token_ids: list[int] | None = None
    request_id: str | int | None = None
    tenant: str | int | None = None
    wait_for: list[str | int] | None = None
    tool_wait_ms: int | float | None = None
    cancel_after_ms: Annotated[float, msgspec.Meta(ge=0, le=LATEST_NS / 1e6)] | None = None
    hints: Hints | None = None
