"""The values that the parts of a scheduler share: the step being planned, the head of the queue, and verdicts on it.

A *gate* judges the head of the waiting queue. The gates of an engine stand in one tuple, and their order is the rule:
the head is admitted if all of them let it pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from kvarts.events import Blocked, Preemption
from kvarts.kv.cache import Match
from kvarts.request import Request
from kvarts.sched.plan import Chunk

__all__ = ["AGAIN", "FOR_BUDGET", "FOR_SEQS", "PASS", "TAKEN", "Ask", "Gate", "Step", "Verdict", "Wait"]


class Verdict:
    """A gate's answer: PASS, AGAIN, TAKEN, or a Wait."""

    __slots__ = ("num_blocks", "reason")

    def __init__(self, reason: Blocked = Blocked.NOT, num_blocks: int = 0) -> None:
        self.reason = reason
        self.num_blocks = num_blocks


class Wait(Verdict):
    """The head waits because of `reason`. `num_blocks`: the blocks that it needs, if it waits for memory."""

    __slots__ = ()


PASS: Final = Verdict()
"""The next gate judges the head; after the last one it starts."""
AGAIN: Final = Verdict()
"""Something has changed: the head is examined again from the first gate on."""
TAKEN: Final = Verdict()
"""The head has left the queue, by the gate that says so."""
FOR_SEQS: Final = Wait(Blocked.SEQS)
FOR_BUDGET: Final = Wait(Blocked.BUDGET)
NO_PREEMPTIONS: Final[tuple[Preemption, ...]] = ()


class Ask:
    """The head of the queue, as far as the step being planned has looked at it. Written by gates.

    `match`: the pages that it finds. `hit_tokens`: the tokens that it need not compute, of `num_known`. `num_new`: the
    most tokens of its first chunk; `num_most`: the same, where chunks may end anywhere. `num_wanted`: the blocks that
    it needs, `num_kept` of them to be left free; `least`: a lower bound of that for as long as it waits for memory.
    `num_padded`: the tokens of a draft that its first token has room for.
    """

    __slots__ = (
        "hit_tokens",
        "least",
        "match",
        "num_kept",
        "num_known",
        "num_most",
        "num_new",
        "num_padded",
        "num_wanted",
        "request",
    )

    request: Request
    match: Match
    hit_tokens: int
    num_known: int
    num_new: int
    num_most: int
    num_kept: int
    num_wanted: int
    least: int
    num_padded: int


class Step:
    """The step being planned, and then the step that was planned last. Written by the scheduler and its parts.

    `budget`: the tokens that it may still compute. `chunks`: of prompts, in order. `admitted`: requests, by index.
    `ask`: the head of the queue.
    """

    __slots__ = (
        "admitted",
        "ask",
        "budget",
        "chunks",
        "has_loaded",
        "is_cut",
        "known_tokens",
        "now_ns",
        "num_decodes",
        "num_drafted",
        "num_joined",
        "num_leaving",
        "preempted",
    )

    def __init__(self, now_ns: int) -> None:
        self.ask = Ask()
        self.budget = 0
        self.num_drafted = 0
        """Tokens of drafts that have taken their pages before prompts."""
        self.num_decodes = 0
        self.known_tokens = 0
        """The tokens that all its decodes know."""
        self.num_joined = 0
        """Its decodes that were not decodes in the step before."""
        self.num_leaving = 0
        """Running requests that left when it was planned: it computes their tokens, in their memory."""
        self.is_cut = False
        """Whether a request preempted itself: none that was admitted after it computes."""
        self.has_loaded = False
        """Whether a request can go on whose load has ended or can be used."""
        self.begin(now_ns)

    def begin(self, now_ns: int) -> None:
        """Begin the plan of the step that starts at `now_ns`. Who writes one of the other fields does so every time."""
        self.now_ns = now_ns
        self.chunks: list[Chunk] = []
        self.admitted: list[int] = []
        self.preempted: tuple[Preemption, ...] = NO_PREEMPTIONS
        """Requests that were preempted for this step, in order, after those that were before it, for other models."""


Gate: TypeAlias = Callable[[Ask, Step], Verdict]
