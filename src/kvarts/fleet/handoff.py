"""One request on its way through a fleet, and when it was where."""

from __future__ import annotations

from kvarts.request import Request
from kvarts.traffic.trace import TraceRequest

__all__ = ["TIMES", "Handoff"]

TIMES = (
    "prefill_admitted_ns",
    "held_ns",
    "reserved_ns",
    "activated_ns",
    "decode_admitted_ns",
    "released_ns",
)
"""The times that are kept of a request beside arrival, first and last token; -1 where it never came to that."""


class Handoff:
    """A request with a prompt that `source` computes; `target` goes on with it. -1: it was not sent there yet.

    `prefill` and `decode` are what the two engines have of it; the first is None where one worker does both. `order`:
    its place among the reservations of its target.
    """

    __slots__ = (
        "activated_ns",
        "at_source",
        "at_target",
        "decode",
        "held_ns",
        "is_ended",
        "is_given_up",
        "is_recomputed",
        "is_reported",
        "num_bytes",
        "num_restarts",
        "order",
        "prefill",
        "released_ns",
        "reserved_ns",
        "row",
        "source",
        "target",
        "transfer_ns",
    )

    def __init__(self, decode: Request, row: TraceRequest, prefill: Request | None) -> None:
        self.decode = decode
        self.row = row
        self.prefill = prefill
        self.source = -1
        self.target = -1
        self.order = -1
        self.held_ns = -1
        self.reserved_ns = -1
        self.transfer_ns = -1
        """When its transfer began."""
        self.activated_ns = -1
        self.released_ns = -1
        self.num_bytes = 0
        self.num_restarts = 0
        """How often a worker or a link failed, and it went on elsewhere."""
        self.at_source = False
        """Whether `source` has anything of it: a place in its queue, or pages."""
        self.at_target = False
        """Whether `target` has anything of it."""
        self.is_ended = False
        """Whether all its tokens were generated."""
        self.is_given_up = False
        """Whether its client has given it up."""
        self.is_recomputed = False
        """Whether the target computed the prompt, since its KV was lost."""
        self.is_reported = False
        """Whether the log has it already, as refused or failed."""

    @property
    def is_held(self) -> bool:
        """Whether its source holds the KV of its prompt, which its target does not have yet."""
        return self.at_source and self.held_ns >= 0 and self.activated_ns < 0

    def never_came(self) -> None:
        """Take note that its target gets no KV from its source, or has none any more."""
        self.reserved_ns = self.transfer_ns = self.activated_ns = -1
        self.num_bytes = 0

    def is_without_kv(self) -> None:
        """Take note that the target begins with the prompt, which was computed before."""
        if self.prefill is not None and not self.decode.num_admissions:
            self.is_recomputed = True
            self.decode.furthest_computed = self.decode.num_prompt_tokens

    @property
    def is_waited_for(self) -> bool:
        """Whether its client waits for more of it."""
        return not (self.is_ended or self.is_given_up or self.is_reported)

    def times(self) -> tuple[int, ...]:
        """Return the values of TIMES."""
        if self.prefill is None:
            return (self.decode.first_admitted_ns, -1, -1, -1, self.decode.first_admitted_ns, -1)
        return (
            self.prefill.first_admitted_ns,
            self.held_ns,
            self.reserved_ns,
            self.activated_ns,
            self.decode.first_admitted_ns,
            self.released_ns,
        )
