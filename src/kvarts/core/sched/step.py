"""Where parts act on the steps of a scheduler: the step being planned, the head of the queue, gates and hooks.

A *gate* judges the head of the waiting queue. The gates of an engine stand in one tuple, and their order is the rule:
the head is admitted if all of them let it pass. A *hook* is called before, within or after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias, TypedDict

from kvarts.core.events import Blocked, Preemption
from kvarts.core.kv.cache import Match
from kvarts.core.request import Request
from kvarts.core.sched.plan import Chunk

__all__ = [
    "AGAIN",
    "FOR_BUDGET",
    "FOR_SEQS",
    "PASS",
    "TAKEN",
    "Acts",
    "Ask",
    "Gate",
    "Hooks",
    "Step",
    "Verdict",
    "Wait",
]


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
    `num_padded`: the tokens of a draft that its first token has room for. `below`: the last pages of `match`, by the
    name of the tier that they are loaded from while it computes.
    """

    __slots__ = (
        "below",
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

    def __init__(self) -> None:
        self.below: tuple[tuple[str, int], ...] | None = None


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
        "held",
        "is_cut",
        "is_idle",
        "known_tokens",
        "now_ns",
        "num_accepted",
        "num_decodes",
        "num_drafted",
        "num_joined",
        "num_leaving",
        "preempted",
        "rests",
    )

    def __init__(self, now_ns: int) -> None:
        self.ask = Ask()
        self.budget = 0
        self.num_drafted = self.num_accepted = 0
        """Tokens of drafts that have taken their pages before prompts; and those that are right, if foreseen."""
        self.held: list[int] = []
        """Decodes that compute nothing in the step, by index. Written by a part for every step."""
        self.num_decodes = 0
        self.known_tokens = 0
        """The tokens that all its decodes know."""
        self.num_joined = 0
        """Its decodes that were not decodes in the step before."""
        self.num_leaving = 0
        """Running requests that left when it was planned: it computes their tokens, in their memory."""
        self.is_cut = False
        """Whether a request preempted itself: none that was admitted after it computes."""
        self.rests = False
        """Whether its decodes compute nothing. Written by a part for every step; False in an engine without that."""
        self.is_idle = False
        """Whether it computes nothing and takes the time of a step. Written like `rests`."""
        self.has_loaded = False
        """Whether a request can go on whose load has ended or can be used."""
        self.begin(now_ns)

    def begin(self, now_ns: int) -> None:
        """Begin the plan of the step that starts at `now_ns`. The other fields are written for every step."""
        self.now_ns = now_ns
        self.chunks: list[Chunk] = []
        self.admitted: list[int] = []
        self.preempted: tuple[Preemption, ...] = NO_PREEMPTIONS
        """Requests that were preempted for this step, in order, after those that were before it, for other models."""


Gate: TypeAlias = Callable[[Ask, Step], Verdict]

OnStep: TypeAlias = Callable[[Step], None]


class Acts(TypedDict, total=False):
    """What one part does. `gates`: by their place in the order of gates. In the order of a step:

    `before`: before its turns. `turns`: takes the pages of decodes, and returns whether it has. `resumes`: after the
    chunked requests, for requests that need not wait for memory. `entries`: before the queue is looked at. `starts`:
    the head starts, and holds what it found. `started`: it has started. `blocked`: the head waits; AGAIN to look at the
    queue again, TAKEN if not the head is what waits. `closing`: nothing more is taken in this step. `planned`: the
    memory in use was noted.

    `ending`: a step, or the last of several, ends at a time. `after`: it has ended; with the requests that computed the
    last of their known tokens in it. `finishes`: a request has generated its last token; returns whether the part keeps
    it. `reports`: requests have finished; returns those whose ends are reported now. `leaving`: a request that was kept
    so is about to be released. `given_up`: a request is about to be cancelled. `drops`: a request is cancelled that
    does not run; returns whether the part had it. `changes`: returns whether the next step differs from the last one.
    `bounds`: returns how many of a number of identical steps are certain. `has_any`: returns whether the part has
    requests that neither run nor wait in the queue.
    """

    gates: Mapping[str, Gate]
    before: OnStep
    turns: Callable[[Step], bool]
    resumes: OnStep
    entries: OnStep
    starts: Callable[[Ask, Step], None]
    started: Callable[[Request, Step], None]
    blocked: Callable[[Step], Verdict]
    closing: OnStep
    planned: OnStep
    ending: Callable[[int], None]
    after: Callable[[list[Request], int], None]
    finishes: Callable[[Request, int], bool]
    reports: Callable[[list[Request]], list[Request]]
    leaving: Callable[[Request], None]
    drops: Callable[[Request], bool]
    given_up: Callable[[Request], None]
    changes: Callable[[], bool]
    bounds: Callable[[int], int]
    has_any: Callable[[], bool]


class Hooks:
    """The gates of an engine, and the hooks of all its parts in their order."""

    __slots__ = tuple(Acts.__annotations__)

    def __init__(self, gates: Iterable[Gate] = (), parts: Sequence[Acts] = ()) -> None:
        self.gates = tuple(gates)
        self.before = tuple([part["before"] for part in parts if "before" in part])
        self.turns = tuple([part["turns"] for part in parts if "turns" in part])
        self.resumes = tuple([part["resumes"] for part in parts if "resumes" in part])
        self.entries = tuple([part["entries"] for part in parts if "entries" in part])
        self.starts = tuple([part["starts"] for part in parts if "starts" in part])
        self.started = tuple([part["started"] for part in parts if "started" in part])
        self.blocked = tuple([part["blocked"] for part in parts if "blocked" in part])
        self.closing = tuple([part["closing"] for part in parts if "closing" in part])
        self.planned = tuple([part["planned"] for part in parts if "planned" in part])
        self.ending = tuple([part["ending"] for part in parts if "ending" in part])
        self.after = tuple([part["after"] for part in parts if "after" in part])
        self.finishes = tuple([part["finishes"] for part in parts if "finishes" in part])
        self.reports = tuple([part["reports"] for part in parts if "reports" in part])
        self.leaving = tuple([part["leaving"] for part in parts if "leaving" in part])
        self.drops = tuple([part["drops"] for part in parts if "drops" in part])
        self.given_up = tuple([part["given_up"] for part in parts if "given_up" in part])
        self.has_any = tuple([part["has_any"] for part in parts if "has_any" in part])
        self.bounds = tuple([part["bounds"] for part in parts if "bounds" in part])
        self.changes = tuple([part["changes"] for part in parts if "changes" in part])
