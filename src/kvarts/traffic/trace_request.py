"""One request of a trace."""

from __future__ import annotations

import msgspec

__all__ = ["After", "TraceRequest", "Units"]

Units = bytes | tuple[range, ...]
"""Ids of 8 bytes each, or ranges of single token ids that are spelled out only while the request is alive."""


class After(msgspec.Struct, frozen=True, gc=False):
    """A request waits for the request of `row`: it arrives `delay_ns` after that is done, or at the earliest then.

    `of_arrival`: the delay counts from the arrival of that request, not from its end.
    """

    row: int
    delay_ns: int = 0
    of_arrival: bool = False


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One row of a trace. `row` is its place in the file, `arrival_ns` counted from the first arrival.

    A turn of a session (`session_id`) waits for the turn before it, and then for `delay_ns`; without a delay it
    arrives at its time, or when the turn before it is done, whichever is later. `after`: what it waits for instead of
    the turn before it, each with its own delay; then a `delay_ns` of 0 says that its time does not matter.
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
    after: tuple[After, ...] = ()
    cancel_after_ns: int | None = None
    """Its client gives it up so long after it was sent, unless it has ended by then."""
    answered_units: bytes | None = None
    """Units of the prompt and what it generates, where a later prompt tells that: then later prompts can hit it."""
