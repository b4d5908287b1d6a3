"""A request in one engine.

The first fields belong to the caller and never change. The others are written only by the scheduler. Tokens of a
request are *known* up to the end of its prompt and generated tokens, and *computed* as far as their KV is in pages. The
scheduler makes computed catch up with known.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvarts.core.content import Content
from kvarts.core.kv.cache import BlockTable

if TYPE_CHECKING:
    from kvarts.core.kv.groups import PagesOfSession

__all__ = ["NEXT_STATES", "Request", "RequestState"]


class RequestState(IntEnum):
    """The state of a request. NEXT_STATES lists the legal transitions."""

    NEW = 0
    WAITING = 1
    PREEMPTED = 2
    """It lost its pages and waits again."""
    LOADING = 3
    """It has pages, and waits for a transfer to fill the first of them, from a tier below or from another engine."""
    LOADED = 4
    """Its load has ended; it runs as soon as the token budget permits."""
    PREFILLING = 5
    """It runs, and has more than one token to compute, or computes the last of its known tokens in this step."""
    DECODING = 6
    """It runs, and computes one token per step."""
    ABANDONED = 7
    """It was cancelled during its load; its pages are freed when the load ends."""
    FINISHED = 8
    CANCELLED = 9
    REJECTED = 10
    HELD = 11
    """Its prompt is computed, and its pages stay in use until another engine has copied them."""


_S = RequestState

NEW: Final = RequestState.NEW
ABANDONED: Final = RequestState.ABANDONED
_NEXT: Final = {
    _S.NEW: frozenset({_S.WAITING, _S.LOADING, _S.REJECTED, _S.CANCELLED}),
    _S.WAITING: frozenset({_S.PREFILLING, _S.LOADING, _S.CANCELLED}),
    _S.PREEMPTED: frozenset({_S.PREFILLING, _S.LOADING, _S.CANCELLED}),
    _S.LOADING: frozenset({_S.LOADED, _S.ABANDONED, _S.WAITING}),
    _S.LOADED: frozenset({_S.PREFILLING, _S.WAITING, _S.CANCELLED}),
    _S.PREFILLING: frozenset({_S.DECODING, _S.PREEMPTED, _S.HELD, _S.FINISHED, _S.CANCELLED}),
    _S.DECODING: frozenset({_S.PREFILLING, _S.PREEMPTED, _S.FINISHED, _S.CANCELLED}),
    _S.ABANDONED: frozenset({_S.CANCELLED}),
    _S.FINISHED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.REJECTED: frozenset(),
    _S.HELD: frozenset({_S.FINISHED, _S.CANCELLED}),
}
NEXT_STATES: Final[tuple[frozenset[RequestState], ...]] = tuple(_NEXT[state] for state in RequestState)
"""The states that may follow each state."""


class Request:
    """One request. `index` is its position in arrival order and ends every sort key; times are integer nanoseconds.

    `max_tokens`: number of tokens it generates, unless it stops earlier. `request_id`: its id outside this engine.
    `own`: pages that it brings along; it takes no others, hits none, is never preempted, and leaves them unchanged.
    `start`: number of its tokens already computed in these pages. `computes_only`, `is_handed_over` and
    `stops` are set before it is submitted.
    """

    __slots__ = (
        "admission",
        "arrival_ns",
        "cached_tokens",
        "cached_tokens_below",
        "cancelled_ns",
        "computes_only",
        "content",
        "first_admitted_ns",
        "first_token_ns",
        "front_tokens",
        "furthest_computed",
        "goes_first",
        "has_lost_front",
        "has_unread",
        "hit_tokens",
        "index",
        "is_handed_over",
        "largest_hit_tokens",
        "last_token_ns",
        "max_tokens",
        "num_admissions",
        "num_computed",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "own",
        "priority",
        "recomputed_tokens",
        "request_id",
        "row",
        "seniority",
        "stalls_ns",
        "start",
        "state",
        "stop_step",
        "stops",
        "table",
        "wheel_base",
    )

    def __init__(
        self,
        index: int,
        content: Content,
        num_prompt_tokens: int,
        max_tokens: int,
        arrival_ns: int = 0,
        priority: int = 0,
        request_id: str | None = None,
        own: PagesOfSession | None = None,
        start: int = 0,
    ) -> None:
        self.index = index
        self.content = content
        self.num_prompt_tokens = content.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.arrival_ns = arrival_ns
        self.priority = priority
        self.request_id = request_id
        self.own = own
        self.start = start
        self.computes_only = False
        """It ends when its prompt is computed, without sampling; `max_tokens` is 0."""
        self.is_handed_over = False
        """Its pages stay in use when it ends, and another engine continues with them; `max_tokens` is 1."""
        self.stops = False
        """Its last token is one that ends it: an engine that plans ahead computes that one too, as it does not know it
        in time."""

        self.state: RequestState = NEW
        """Written only by `become`."""

        # Progress. While the request decodes, `num_computed` and `num_output_tokens` have their values from when it
        # joined the wheel.
        self.num_output_tokens = 0
        """Number of tokens generated so far."""
        self.num_computed = 0
        self.table: BlockTable | None = None
        self.admission = -1
        """Its position in admission order while it runs, else -1."""
        self.seniority = -1
        """Its position in the order of preemption, the first is preempted last: that of its admission, or of the start
        of its load. -1 if it neither runs nor loads."""
        self.row = -1
        """Its row in the executor's batch while it runs, if the executor needs rows, else -1."""

        # Written by the wheel.
        self.has_unread = False
        """It computed a token last whose id was not known when that step was planned, as the next step is planned while
        one runs. Not up to date while it is on the wheel."""
        self.wheel_base = 0
        self.stop_step = -1

        # The account.
        self.first_admitted_ns = -1
        self.first_token_ns = -1
        self.last_token_ns = -1
        self.cancelled_ns = -1
        """When the engine dropped it. Written by the engine."""
        self.num_admissions = 0
        self.goes_first = False
        """It has waited for another request's load as head of the queue, so it has precedence within its priority."""
        self.num_preemptions = 0
        self.front_tokens = 0
        """Tokens that were computed for the first time while pages after them were loaded, until it runs."""
        self.has_lost_front = False
        """Whether such a load failed before it ran: `cached_tokens` has the tokens hit until then."""
        self.hit_tokens = 0
        """Tokens hit in the current admission."""
        self.largest_hit_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens hit in KV of other requests; its own KV, found again after a preemption, does not count."""
        self.cached_tokens_below: tuple[int, ...] = ()
        """The part of `cached_tokens` loaded from each tier below the device; empty if nothing was loaded."""
        self.recomputed_tokens = 0
        self.furthest_computed = 0
        """Tokens it had in pages before its last preemption, or before a load failed behind its front."""
        self.stalls_ns: tuple[int, ...] = ()
        """For each token sampled first after a preemption, the time since the previous token."""

    @property
    def num_known(self) -> int:
        """Number of prompt and generated tokens. While the request decodes, the value from when it joined the wheel."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def is_over(self) -> bool:
        """Whether it has ended. A cancelled request has, even while a transfer still fills its pages."""
        return self.state >= ABANDONED

    def become(self, state: RequestState) -> None:
        """Enter `state`, which must be a legal next state."""
        assert state in NEXT_STATES[self.state], f"{self!r} cannot become {state.name}"
        self.state = state

    def __repr__(self) -> str:
        return f"Request({self.index}, {self.state.name}, {self.num_computed} of {self.num_known} tokens computed)"
