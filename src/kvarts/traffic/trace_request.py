"""One request of a trace."""

from __future__ import annotations

import msgspec

__all__ = ["TraceRequest", "Units"]

Units = bytes | tuple[range, ...]
"""Ids of 8 bytes each, or ranges of single token ids that are spelled out only while the request is alive."""


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One row of a trace. `row` is its place in the file, `arrival_ns` counted from the first arrival.

    A turn of a session (`session_id`) waits for the turn before it, and then for `delay_ns`; without a delay it
    arrives at its time, or when the turn before it is done, whichever is later.
    """

    row: int
    arrival_ns: int
    units: Units
    num_prompt_tokens: int
    num_output_tokens: int
    output_units: Units | None = None
    """The tokens it generates, one a unit, where they are known: then later prompts can hit them."""
    priority: int = 0
    session_id: str | None = None
    delay_ns: int | None = None
    request_id: str | None = None
    tenant: str | None = None
