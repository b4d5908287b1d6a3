"""Where parts act on the steps of a scheduler: gates, and hooks before, within and after a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from kvarts.request import Request
from kvarts.sched.step import Ask, Gate, Step, Verdict

__all__ = ["Acts", "Hooks"]

OnStep: TypeAlias = Callable[[Step], None]
NO_GATES: Final[Mapping[str, Gate]] = {}


class Acts:
    """What one part does. `gates`: by their place in the order of gates. In the order of a step:

    `before`: before its turns. `turns`: takes the pages of decodes, and returns whether it has. `resumes`: after the
    chunked requests, for requests that need not wait for memory. `entries`: before the queue is looked at. `starts`:
    the head starts, and holds what it found. `started`: it has started. `blocked`: the head waits; AGAIN to look at the
    queue again, TAKEN if not the head is what waits. `closing`: nothing more is taken in this step. `planned`: the
    memory in use was noted.

    `ending`: a step, or the last of several, ends at a time. `after`: it has ended; with the requests that computed the
    last of their known tokens in it. `finishes`: a request has generated its last token; returns whether the part keeps
    it. `given_up`: a request is about to be cancelled. `drops`: a request is cancelled that does not run; returns
    whether the part had it. `changes`: returns whether the next step differs from the last one. `has_any`: returns
    whether the part has requests that neither run nor wait in the queue.
    """

    __slots__ = (
        "after",
        "before",
        "blocked",
        "changes",
        "closing",
        "drops",
        "ending",
        "entries",
        "finishes",
        "gates",
        "given_up",
        "has_any",
        "planned",
        "resumes",
        "started",
        "starts",
        "turns",
    )

    def __init__(
        self,
        *,
        gates: Mapping[str, Gate] = NO_GATES,
        before: OnStep | None = None,
        turns: Callable[[Step], bool] | None = None,
        resumes: OnStep | None = None,
        entries: OnStep | None = None,
        starts: Callable[[Ask, Step], None] | None = None,
        started: Callable[[Request, Step], None] | None = None,
        blocked: Callable[[Step], Verdict] | None = None,
        closing: OnStep | None = None,
        planned: OnStep | None = None,
        ending: Callable[[int], None] | None = None,
        after: Callable[[list[Request], int], None] | None = None,
        finishes: Callable[[Request, int], bool] | None = None,
        drops: Callable[[Request], bool] | None = None,
        given_up: Callable[[Request], None] | None = None,
        changes: Callable[[], bool] | None = None,
        has_any: Callable[[], bool] | None = None,
    ) -> None:
        self.gates = gates
        self.before = before
        self.turns = turns
        self.resumes = resumes
        self.entries = entries
        self.starts = starts
        self.started = started
        self.blocked = blocked
        self.closing = closing
        self.planned = planned
        self.ending = ending
        self.after = after
        self.finishes = finishes
        self.drops = drops
        self.given_up = given_up
        self.changes = changes
        self.has_any = has_any


class Hooks:
    """The gates of an engine, and the hooks of all its parts in their order."""

    __slots__ = Acts.__slots__

    def __init__(self, gates: Iterable[Gate] = (), parts: Sequence[Acts] = ()) -> None:
        self.gates = tuple(gates)
        self.before = tuple([part.before for part in parts if part.before is not None])
        self.turns = tuple([part.turns for part in parts if part.turns is not None])
        self.resumes = tuple([part.resumes for part in parts if part.resumes is not None])
        self.entries = tuple([part.entries for part in parts if part.entries is not None])
        self.starts = tuple([part.starts for part in parts if part.starts is not None])
        self.started = tuple([part.started for part in parts if part.started is not None])
        self.blocked = tuple([part.blocked for part in parts if part.blocked is not None])
        self.closing = tuple([part.closing for part in parts if part.closing is not None])
        self.planned = tuple([part.planned for part in parts if part.planned is not None])
        self.ending = tuple([part.ending for part in parts if part.ending is not None])
        self.after = tuple([part.after for part in parts if part.after is not None])
        self.finishes = tuple([part.finishes for part in parts if part.finishes is not None])
        self.drops = tuple([part.drops for part in parts if part.drops is not None])
        self.given_up = tuple([part.given_up for part in parts if part.given_up is not None])
        self.has_any = tuple([part.has_any for part in parts if part.has_any is not None])
        self.changes = tuple([part.changes for part in parts if part.changes is not None])
