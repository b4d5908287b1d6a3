"""Storage of the steps of one engine, in spans: equal consecutive steps are one row.

Only the duration and the allocated pages are stored per step; the rest is computed on demand by a StepLog.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mypy_extensions import mypyc_attr

from kvarts.columns import Rows
from kvarts.events import AtRest, Event, LeapDone, Preemption, StepDone
from kvarts.report.packed import PackedColumn

if TYPE_CHECKING:
    pass

__all__ = ["StepSpans"]

_SPAN_FIELDS = (
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
_REST_FIELDS = ("step", "time_ns", "used", "cached", "released", "reserved")


@mypyc_attr(allow_interpreted_subclasses=True)
class StepSpans:
    """Stores the steps of one engine of `num_pages` pages, from step 0 on, from its events.

    Pages are as at each step's mark.

    `tiers`: pages of each tier below the device, by name; their counts are columns `NAME_used` and `NAME_cached`.
    `memory`: description of a memory with KV groups, where pages are counted in blocks; parts of each group are columns
    `group0_used`, `group0_cached` and so on.
    """

    wants_details = False

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
        self._span_fields = _SPAN_FIELDS + side_fields
        self._rest_fields = _REST_FIELDS + side_fields
        self._spans = Rows(len(self._span_fields))
        self._rests = Rows(len(self._rest_fields))
        self._durations_ns = PackedColumn("q")
        self._pages_taken = PackedColumn("i")
        if self.num_groups:
            from kvarts.report.packed import PartSteps

            self.part_steps = PartSteps(self.memory)
        self._num_reserved = 0
        # Changes of the reserved pages: the step, and the pages from then on.
        self._reserved = Rows(2)

    def observe(self, events: Sequence[Event]) -> None:
        """Store the steps and rests in `events`, in one loop without calls: in virtual time, all events are these."""
        spans: list[int] = []
        durations_ns, pages_taken = self._durations_ns.recent, self._pages_taken.recent
        for event in events:
            if isinstance(event, StepDone):
                if event.num_reserved != self._num_reserved:
                    self._note_reserved(event.step, event.num_reserved)
                preemptions = event.preemptions
                if preemptions:
                    self.preemptions += [(event.step, preemption) for preemption in preemptions]
                spans += (
                    1,
                    event.start_ns,
                    event.num_used,
                    event.num_cached,
                    event.num_released,
                    event.num_running,
                    event.num_waiting,
                    event.blocked,
                    event.num_decodes,
                    event.num_tokens,
                    len(preemptions),
                    event.num_admitted,
                    0,
                    event.num_loading,
                )
                spans += event.tiers
                durations_ns.append(event.duration_ns)
                pages_taken.append(0)
            elif isinstance(event, LeapDone):
                if event.num_reserved != self._num_reserved:
                    self._note_reserved(event.step, event.num_reserved)
                num_decodes = event.num_running
                spans += (
                    len(event.durations_ns),
                    event.start_ns,
                    event.num_used,
                    event.num_cached,
                    event.num_released,
                    num_decodes,
                    event.num_waiting,
                    event.blocked,
                    num_decodes,
                    num_decodes,
                    0,
                    0,
                    1,
                    event.num_loading,
                )
                spans += event.tiers
                if event.parts is not None:
                    self.part_steps.add(event.parts)
                durations_ns += event.durations_ns
                pages_taken += event.pages_taken
            elif isinstance(event, AtRest):
                counts = event.num_used, event.num_cached, event.num_released
                self._rests.add((event.step, event.time_ns, *counts, event.num_reserved, *event.tiers))
        if spans:
            self._spans.add(spans)
            self._durations_ns.settle()
            self._pages_taken.settle()

    def _note_reserved(self, step: int, num_pages: int) -> None:
        self._num_reserved = num_pages
        self._reserved.add((step, num_pages))

    @property
    def tokens_lost(self) -> int:
        """Computed tokens that preempted requests lost."""
        return sum(preemption.num_computed_tokens for _, preemption in self.preemptions)

    def __len__(self) -> int:
        return len(self._durations_ns)
