"""One request of a trace, and the schema of a line of a Mooncake trace."""

# Annotations are evaluated when this module is imported: msgspec would compile their texts one by one.
from typing import Annotated, Literal

import msgspec

from kvarts.base.limits import LATEST_NS, MOST_COUNT
from kvarts.core.hints import Hints
from kvarts.sim.traffic.bounds import Priority, SpanMs, Tokens

__all__ = ["NS_PER_MS", "After", "DirectRequest", "MooncakeRow", "PlainRow", "TraceRequest", "Units"]

NS_PER_MS = 1_000_000

Units = bytes | tuple[range, ...]
"""Ids of 8 bytes each, or ranges of token ids that are expanded only while the request is alive."""
Length = Annotated[int, msgspec.Meta(le=MOST_COUNT)]


class After(msgspec.Struct, frozen=True, gc=False):
    """A wait for the request of `row`: the earliest arrival is `delay_ns` after that request is done.

    `of_arrival`: the delay counts from the arrival of that request, not from its end.
    """

    row: int
    delay_ns: int = 0
    of_arrival: bool = False


class DirectRequest(msgspec.Struct, frozen=True, gc=False):
    """The worker of a fleet to which a client sent a request, past the routers.

    `is_left`: the worker only computes the prompt, and holds its pages for a request that fetches them. `fetches`: the
    row of such a request, whose pages this one continues with.
    """

    worker: int
    is_left: bool = False
    fetches: int | None = None


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One row of a trace. `row`: its position in the file. `arrival_ns`: time since the first arrival.

    A turn of a session (`session_id`) waits for the previous turn, and then for `delay_ns`; without a delay it arrives
    at its own time, or when the previous turn is done, whichever is later. `after`: requests it waits for instead of
    the previous turn, each with its own delay; a `delay_ns` of 0 then means that `arrival_ns` is ignored.

    >>> from kvarts import TraceRequest
    >>> TraceRequest(0, arrival_ns=0, units=(range(600),), num_prompt_tokens=600, num_output_tokens=8).num_prompt_tokens
    600
    """

    row: int
    arrival_ns: int
    units: Units
    num_prompt_tokens: int
    num_output_tokens: int
    output_units: Units | None = None
    """The generated tokens, one per unit, if known; later prompts can then hit them."""
    priority: int = 0
    session_id: str | None = None
    delay_ns: int | None = None
    request_id: str | None = None
    tenant: str | None = None
    after: tuple[After, ...] = ()
    cancel_after_ns: int | None = None
    """Time after sending at which the client abandons the request, unless it has ended."""
    answered_units: bytes | None = None
    """Units of the prompt and its answer, if a later prompt reveals them; later prompts can then hit them."""
    hints: Hints | None = None
    direct: DirectRequest | None = None
    model: str | None = None
    """The name of the model that it asks for."""
    is_measured: bool = True
    """Whether a report counts it: a request of a warm-up is not."""
    stops: bool = False
    """Whether it ended before all tokens that it asked for, which a plan made ahead does not foresee."""


class MooncakeRow(msgspec.Struct, gc=False):
    """One request as decoded from JSON; sim/traffic/mooncake.py documents the fields and checks their values."""

    input_length: Length
    hash_ids: list[int] | None = None
    output_length: Length | None = None
    timestamp: int | float | None = None
    delay: int | float | None = None
    session_id: str | int | None = None
    priority: Priority = 0
    output_token_ids: list[int] | None = None
    request_id: str | int | None = None
    tenant: str | int | None = None
    wait_for: list[str | int] | None = None
    tool_wait_ms: int | float | None = None
    cancel_after_ms: SpanMs | None = None
    hints: Hints | None = None
    model: str | int | None = None


class PlainRow(msgspec.Struct, gc=False):
    """A request of which only time, lengths and ids are given: all that most rows have. Another row is not decoded."""

    input_length: Tokens
    output_length: Tokens
    timestamp: Annotated[int, msgspec.Meta(ge=0, le=LATEST_NS // NS_PER_MS)]
    hash_ids: list[int]
    delay: None = None
    session_id: None = None
    priority: Literal[0] = 0
    output_token_ids: None = None
    request_id: None = None
    tenant: None = None
    wait_for: None = None
    tool_wait_ms: int | float | None = None
    cancel_after_ms: None = None
    hints: None = None
    model: None = None
