"""One request on its way through a fleet, and the times of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvarts.core.request import Request
from kvarts.core.tiers.links import LinkTransfer
from kvarts.sim.traffic.trace import TraceRequest

__all__ = ["TIMES", "Computed", "Handoff"]

TIMES = (
    "prefill_admitted_ns",
    "held_ns",
    "reserved_ns",
    "activated_ns",
    "decode_admitted_ns",
    "released_ns",
)
"""Times recorded per request besides arrival, first and last token; -1 if the request never reached that stage."""


class Computed(NamedTuple):
    """KV of a prompt that a step computes, layer by layer; at once if it was there when the prompt was admitted."""

    start_ns: int
    end_ns: int
    num_bytes: int


class Handoff(LinkTransfer):
    """A request whose prompt `source` computes and which `target` continues. -1: no such worker was chosen yet.

    `prefill` and `decode` are its Request objects in the two engines; `prefill` is None if one worker does both.
    `order`: its place among the reservations of its target. `model`: the place of the routers of its model;
    -1: no worker has it.
    """

    __slots__ = (
        "activated_ns",
        "at_source",
        "at_target",
        "below",
        "computed",
        "decode",
        "fetches",
        "held_ns",
        "is_counted",
        "is_ended",
        "is_given_up",
        "is_left",
        "is_local",
        "is_recomputed",
        "is_reported",
        "model",
        "num_bytes",
        "num_computed_bytes",
        "num_restarts",
        "order",
        "placed",
        "planned",
        "prefill",
        "released_ns",
        "reserved_ns",
        "routed",
        "row",
        "transfer_ns",
    )

    def __init__(self, decode: Request, row: TraceRequest, model: int = 0) -> None:
        super().__init__(-1, -1)
        self.decode = decode
        self.model = model
        self.row = row
        self.prefill: Request | None = None
        direct = row.direct
        self.placed = -1 if direct is None else direct.worker
        """The worker that its client chose; -1 if the routers choose."""
        self.is_left = direct is not None and direct.is_left
        """Whether the worker that its client chose only computes the prompt, and holds it for another request."""
        self.fetches: int | None = None if direct is None else direct.fetches
        """The row of the request whose held pages it continues with, if it names one."""
        self.planned = -1
        """The worker that was chosen on arrival to generate, until the prompt is computed elsewhere; -1 without one."""
        self.routed = -1
        """The worker that a router has chosen after the request waited there, until it is sent to it."""
        self.is_local = False
        """Whether a worker that generates computes the prompt, because it has most of it."""
        self.order = -1
        self.held_ns = -1
        self.reserved_ns = -1
        self.transfer_ns = -1
        """When its transfer began."""
        self.activated_ns = -1
        self.released_ns = -1
        self.num_bytes = 0
        self.computed: list[Computed] = []
        """The steps in which `source` has computed the prompt so far, if layers are sent one by one."""
        self.num_computed_bytes = 0
        """The bytes of `computed`."""
        self.below: dict[str, int] = {}
        """Tokens that were loaded from each tier below the workers that it was on, by its name."""
        self.num_restarts = 0
        """How often it restarted elsewhere because a worker or a link failed."""
        self.at_source = False
        """Whether it occupies `source`: a place in the queue, or pages."""
        self.at_target = False
        """Whether it occupies `target`."""
        self.is_ended = False
        """Whether all its tokens were generated."""
        self.is_given_up = False
        """Whether its client has given up."""
        self.is_recomputed = False
        """Whether the target computed the prompt because the KV was lost."""
        self.is_reported = False
        """Whether it is already logged as refused or failed."""
        self.is_counted = False
        """Whether the account of the request includes that of the computation of its prompt elsewhere."""

    def let_compute(self) -> Request:
        """Return what a worker that only computes prompts has of it."""
        if self.prefill is None:
            decode = self.decode
            self.prefill = Request(
                decode.index,
                decode.content,
                decode.num_prompt_tokens,
                1,
                decode.arrival_ns,
                decode.priority,
                decode.request_id,
            )
            self.prefill.is_handed_over = True
        return self.prefill

    def do_both(self) -> None:
        """Let one worker compute the prompt, and generate."""
        if self.prefill is not None:
            self.decode.furthest_computed = max(self.decode.furthest_computed, self.prefill.furthest_computed)
            self.decode.recomputed_tokens += self.prefill.recomputed_tokens
            self.decode.num_preemptions += self.prefill.num_preemptions
            self.prefill = None

    def count_prefill(self) -> None:
        """Add the account of the computation of the prompt elsewhere to that of the request, once both are final."""
        request, prefill = self.decode, self.prefill
        if prefill is None or self.is_counted or self.fetches is not None:
            return  # the request that a fetched prompt was computed for has an account of its own
        self.is_counted = True
        if self.is_recomputed:
            request.cached_tokens = 0  # its hits are pages of its own prompt
        request.cached_tokens += prefill.cached_tokens
        request.largest_hit_tokens = max(request.largest_hit_tokens, prefill.largest_hit_tokens)
        request.num_admissions += prefill.num_admissions
        request.num_preemptions += prefill.num_preemptions
        request.recomputed_tokens += prefill.recomputed_tokens
        request.furthest_computed = max(prefill.num_computed, prefill.furthest_computed, request.furthest_computed)

    def note_below(self, request: Request, tier_names: Sequence[str]) -> None:
        """Count what `request` has loaded from the tiers `tier_names` of the worker that it leaves.

        Pages of its own prompt that a worker loads, because the KV was lost, do not count as hits.
        """
        loaded, request.cached_tokens_below = request.cached_tokens_below, ()
        if loaded and not (self.is_recomputed and request is self.decode):
            for name, num_tokens in zip(tier_names, loaded, strict=False):
                self.below[name] = self.below.get(name, 0) + num_tokens

    @property
    def is_coming(self) -> bool:
        """Whether the target has pages for the prompt's KV, which is not there yet."""
        return self.reserved_ns >= 0 and self.activated_ns < 0

    @property
    def is_held(self) -> bool:
        """Whether the source holds the prompt's KV and the target does not have it yet."""
        return self.at_source and self.held_ns >= 0 and self.activated_ns < 0

    @property
    def is_from_source(self) -> bool:
        """Whether the source computes or holds the prompt's KV and the target does not have it yet."""
        return self.at_source and self.activated_ns < 0

    def compute(self, start_ns: int, end_ns: int, num_bytes: int) -> Computed | None:
        """Record that the first `num_bytes` bytes of KV are computed by `end_ns`; return the new part, if any."""
        if num_bytes <= self.num_computed_bytes:
            return None
        computed = Computed(start_ns, end_ns, num_bytes - self.num_computed_bytes)
        self.computed.append(computed)
        self.num_computed_bytes = num_bytes
        return computed

    def forget_computed(self) -> None:
        """Record that the source has nothing of the prompt any more."""
        if self.computed:
            self.computed = []
            self.num_computed_bytes = 0

    def never_came(self) -> None:
        """Reset the transfer: the target does not receive KV from the source, or has lost it."""
        self.reserved_ns = self.transfer_ns = self.activated_ns = -1
        self.num_bytes = 0

    def is_without_kv(self) -> None:
        """Mark a prompt that was computed elsewhere as recomputed, because the target starts without its KV."""
        if self.prefill is not None and not self.decode.num_admissions:
            self.is_recomputed = True
            is_whole = self.held_ns >= 0
            self.decode.furthest_computed = (
                self.decode.num_prompt_tokens if is_whole else self.prefill.furthest_computed
            )

    @property
    def is_waited_for(self) -> bool:
        """Whether the client still waits for tokens."""
        return not (self.is_ended or self.is_given_up or self.is_reported)

    def times(self) -> tuple[int, int, int, int, int, int]:
        """Return the values of TIMES."""
        if self.prefill is None:
            return (self.decode.first_admitted_ns, -1, -1, -1, self.decode.first_admitted_ns, -1)
        # A prompt that was held before is there as soon as the request that fetches it.
        earliest_ns = -1 if self.fetches is None else self.decode.arrival_ns
        return (
            max(self.prefill.first_admitted_ns, earliest_ns),
            max(self.held_ns, earliest_ns),
            self.reserved_ns,
            self.activated_ns,
            self.decode.first_admitted_ns,
            self.released_ns,
        )
