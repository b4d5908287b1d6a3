"""Storage of the steps of one engine, in spans: equal consecutive steps are one row.

What differs between the steps of a span, the duration and the allocated pages, is stored as the rule that gives it,
where an event has one, and else per step. A StepLog computes the rest on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
from mypy_extensions import mypyc_attr

from kvarts.base.columns import Column, Rows
from kvarts.core.events import AtRest, Event, LeapDone, Preemption, StepDone
from kvarts.core.events.steps import BLOCKED, StepRow
from kvarts.core.sched.wheel import PagesDue
from kvarts.cost.mocker_formula import MockerTimes
from kvarts.sim.report.packed import PackedColumn

__all__ = ["HOW_FIELDS", "LEAP", "LISTED_PAGES", "LISTED_TIMES", "SPAN_FIELDS", "StepSpans", "field_of"]

SPAN_FIELDS = (
    "num_steps",
    "start_ns",
    "used",
    "cached",
    "released",
    "running",
    "waiting",
    "blocked",
    "decodes",
    "tokens",
    "preempted",
    "admitted",
    "is_leap",
    "loading",
)
HOW_FIELDS = ("took_ns", "known_tokens", "how")
"""More columns of spans, which say how the steps of a span differ: its duration, or -1 if that is the sum of listed
ones; the tokens that its decodes know in the first step, for a rule; and flags."""
_STORED_FIELDS = (
    "took_ns",
    "first",
    "second",
    "flags",
    "start_ns",
    "used",
    "cached",
    "released",
    "running",
    "waiting",
    "loading",
    "others",
)
"""The columns from which `field_of` makes those of HOW_FIELDS and SPAN_FIELDS.

`flags`: `how`, from LEAP on `is_leap`, and from BLOCKED on `blocked`. `first`, `second`: of a leap, `known_tokens` and
`num_steps`, and its running requests are its decodes and tokens; of a step, `decodes` and `tokens`. `others`:
`admitted`, and from PREEMPTED on `preempted`.
"""
LEAP: Final = 4
PREEMPTED: Final = 1 << 31
LISTED_TIMES: Final = 1
"""The durations are listed, one per step. Otherwise a single step takes `took_ns`, and several are by the rule."""
LISTED_PAGES: Final = 2
"""The pages taken are listed, one number per step. Otherwise they are those of `_pages_due`, or none."""
_REST_FIELDS = ("step", "time_ns", "used", "cached", "released", "reserved")


_MADE_FIELDS = ("how", "blocked", "is_leap", "known_tokens", "num_steps", "decodes", "tokens")
"""Those that `field_of` makes from `flags`."""


def field_of(name: str, read: Callable[[str], Column]) -> Column:
    """Return a column of HOW_FIELDS and SPAN_FIELDS, or another stored one, from those that `read` returns by name."""
    if name == "admitted":
        return read("others") % PREEMPTED
    if name == "preempted":
        return read("others") // PREEMPTED
    if name not in _MADE_FIELDS:
        return read(name)
    flags = read("flags")
    if name == "how":
        return flags % LEAP
    if name == "blocked":
        return flags // BLOCKED
    if name == "is_leap":
        return flags % BLOCKED // LEAP
    is_leap = flags & LEAP
    nothing = is_leap - is_leap
    if name == "known_tokens":
        return np.where(is_leap, read("first"), nothing)
    if name == "num_steps":
        return np.where(is_leap, read("second"), nothing + 1)
    return np.where(is_leap, read("running"), read("first" if name == "decodes" else "second"))


_STATE = (
    "preemptions",
    "_spans",
    "_rests",
    "_num_steps",
    "_durations_ns",
    "_pages_taken",
    "_rule",
    "_period",
    "_num_spans",
    "_pages_due",
    "_num_reserved",
    "_reserved",
)
"""The attributes of a log that its events change."""


def _made_again(
    kind: type[Any], num_pages: int, tiers: dict[str, int], memory: dict[str, Any], state: dict[str, Any]
) -> Any:
    log = kind(num_pages, tiers, memory)
    for name, value in state.items():
        setattr(log, name, value)
    return log


@mypyc_attr(allow_interpreted_subclasses=True)
class StepSpans:
    """Stores the steps of one engine of `num_pages` pages, from step 0 on, from its events.

    Pages are as at each step's mark.

    `tiers`: pages of each tier below the device, by name; their counts are columns `NAME_used` and `NAME_cached`.
    `memory`: description of a memory with KV groups, where pages are counted in blocks; parts of each group are columns
    `group0_used`, `group0_cached` and so on.
    """

    wants_details = False
    takes_rows = True

    def __init__(
        self,
        num_pages: int,
        tiers: Mapping[str, int] | None = None,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        self.memory = dict(memory or {})
        self.num_groups = len(self.memory.get("kv_groups", ()))
        self.num_pages = num_pages
        self.tiers = dict(tiers or {})
        self.tier_fields = tuple(f"{name}_{what}" for name in self.tiers for what in ("used", "cached"))
        self.group_fields = tuple(
            f"group{group}_{what}" for group in range(self.num_groups) for what in ("used", "cached")
        )
        side_fields = self.tier_fields + self.group_fields
        self.preemptions: list[tuple[int, Preemption]] = []
        """The preemptions in order, each with its step."""
        self.late: tuple[Preemption, ...] = ()
        """Preemptions for other models after the last step."""
        self._span_fields = SPAN_FIELDS + side_fields
        self._stored_fields = _STORED_FIELDS + side_fields
        self._rest_fields = _REST_FIELDS + side_fields
        self._spans = Rows(len(self._stored_fields))
        self._rests = Rows(len(self._rest_fields))
        self._num_steps = 0
        self._durations_ns = PackedColumn("q")
        self._pages_taken = PackedColumn("i")
        self._rule: MockerTimes | None = None
        """The rule of the engine's durations, if any were given by one."""
        self._period = 1
        self._num_spans = 0
        # Pages that are due in some steps of a span: the span, the first of these steps in it, the pages. They are due
        # again every `_period` steps.
        self._pages_due = Rows(3)
        if self.num_groups:
            from kvarts.sim.report.part_steps import PartSteps

            self.part_steps = PartSteps(self.memory)
        self._num_reserved = 0
        # Changes of the reserved pages: the step, and the pages from then on.
        self._reserved = Rows(2)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes the log: `pickle` does not find the state of native objects."""
        state = {name: getattr(self, name) for name in _STATE}
        if self.num_groups:
            state["part_steps"] = self.part_steps
        return _made_again, (type(self), self.num_pages, self.tiers, self.memory, state)

    def observe(self, events: Sequence[Event | StepRow]) -> None:
        """Store the steps and rests in `events`, in one loop: in virtual time, all events are these."""
        spans: list[int] = []
        durations_ns, pages_taken = self._durations_ns.recent, self._pages_taken.recent
        num_rows = 0
        for event in events:
            if isinstance(event, tuple):
                spans += event
                num_rows += 1
            elif isinstance(event, StepDone):
                if event.num_reserved != self._num_reserved:
                    self._note_reserved(event.step, event.num_reserved)
                others = event.num_admitted
                if event.preemptions:
                    self.preemptions += [(event.step, preemption) for preemption in event.preemptions]
                    others += len(event.preemptions) * PREEMPTED
                spans += (
                    event.duration_ns,
                    event.num_decodes,
                    event.num_tokens,
                    event.blocked * BLOCKED,
                    event.start_ns,
                    event.num_used,
                    event.num_cached,
                    event.num_released,
                    event.num_running,
                    event.num_waiting,
                    event.num_loading,
                    others,
                )
                if event.tiers:
                    spans += event.tiers
                self._num_spans += 1
                self._num_steps += 1
            elif isinstance(event, LeapDone):
                times, taken = event.durations_ns, event.pages_taken
                if event.num_reserved != self._num_reserved:
                    self._note_reserved(event.step, event.num_reserved)
                took_ns, known_tokens, flags = -1, 0, LEAP
                if isinstance(times, list):
                    flags += LISTED_TIMES
                    durations_ns += times
                else:
                    self._rule = rule = cast(MockerTimes, times)
                    took_ns, known_tokens = rule.total_ns, rule.known_tokens
                if isinstance(taken, PagesDue):
                    self._note_due(taken, self._num_spans + num_rows)
                else:
                    flags += LISTED_PAGES
                    pages_taken += taken
                flags += event.blocked * BLOCKED
                num_steps = len(times)
                self._num_spans += 1
                self._num_steps += num_steps
                spans += (
                    took_ns,
                    known_tokens,
                    num_steps,
                    flags,
                    event.start_ns,
                    event.num_used,
                    event.num_cached,
                    event.num_released,
                    event.num_running,
                    event.num_waiting,
                    event.num_loading,
                    0,
                )
                if event.tiers:
                    spans += event.tiers
                if event.parts is not None:
                    self.part_steps.add(event.parts)
            elif isinstance(event, AtRest):
                counts = event.num_used, event.num_cached, event.num_released
                self._rests.add((event.step, event.time_ns, *counts, event.num_reserved, *event.tiers))
        if spans:
            self._num_spans += num_rows
            self._num_steps += num_rows
            self._spans.add(spans)
            self._durations_ns.settle()
            self._pages_taken.settle()

    def _note_due(self, due: PagesDue, span: int) -> None:
        self._period = due.period
        if due.offsets:
            rows: list[int] = []
            offsets, counts = due.offsets, due.counts
            for place in range(len(offsets)):
                rows += (span, offsets[place], counts[place])
            self._pages_due.add(rows)

    def _note_reserved(self, step: int, num_pages: int) -> None:
        self._num_reserved = num_pages
        self._reserved.add((step, num_pages))

    @property
    def tokens_lost(self) -> int:
        """Computed tokens that preempted requests lost."""
        all_of_them = [*self.late, *(preemption for _, preemption in self.preemptions)]
        return sum(preemption.num_computed_tokens for preemption in all_of_them)

    def __len__(self) -> int:
        return self._num_steps
