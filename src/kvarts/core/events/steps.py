"""Events of steps. Every replay makes them, so they are native classes in the compiled build."""

from __future__ import annotations

from typing import ClassVar, Final

from kvarts.base.records import Value
from kvarts.core.events.details import PartsMoved, PerStep, Preemption, Turns

__all__ = ["BLOCKED", "LeapDone", "StepDone", "StepRow"]

StepRow = tuple[int, ...]
"""A StepDone without preemptions and drafts, as a StepLog stores it: `duration_ns`, `num_decodes`, `num_tokens`,
`blocked` times BLOCKED, `start_ns`, `num_used`, `num_cached`, `num_released`, `num_running`, `num_waiting`,
`num_loading` and `num_admitted`, then `tiers`."""
BLOCKED: Final = 8
"""A row contains its reason times this number; the smaller numbers are flags of the log."""


class StepDone(Value):
    """A scheduled step. Pages are counted at the step's mark: the first moment with the most pages in use.

    `num_released`: pages that have ceased to be in use since the engine began. `blocked`: why the head of the queue
    waits. `tiers`: pages used and pages cached in each tier below the device, one pair per tier; with KV groups, parts
    used and parts cached in each group, and pages are counted in blocks. `num_withheld`: pages that are not used here
    and could not be taken before the step, because other models on the device use or claim them. `num_reserved`: pages
    that remain in use when no request runs. `num_loading`: waiting requests that wait for a load. `num_drafted`: how
    many of the tokens were drafted; `num_accepted`: how many of these were accepted.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (
        "step",
        "start_ns",
        "duration_ns",
        "num_used",
        "num_cached",
        "num_released",
        "num_running",
        "num_waiting",
        "blocked",
        "num_decodes",
        "num_tokens",
        "num_admitted",
        "preemptions",
        "tiers",
        "num_withheld",
        "num_reserved",
        "num_loading",
        "num_drafted",
        "num_accepted",
    )
    __slots__ = FIELDS

    def __init__(
        self,
        step: int,
        start_ns: int,
        duration_ns: int,
        num_used: int,
        num_cached: int,
        num_released: int,
        num_running: int,
        num_waiting: int,
        blocked: int,
        num_decodes: int,
        num_tokens: int,
        num_admitted: int,
        preemptions: tuple[Preemption, ...],
        tiers: tuple[int, ...] = (),
        num_withheld: int = 0,
        num_reserved: int = 0,
        num_loading: int = 0,
        num_drafted: int = 0,
        num_accepted: int = 0,
    ) -> None:
        self.step = step
        self.start_ns = start_ns
        self.duration_ns = duration_ns
        self.num_used = num_used
        self.num_cached = num_cached
        self.num_released = num_released
        self.num_running = num_running
        self.num_waiting = num_waiting
        self.blocked = blocked
        self.num_decodes = num_decodes
        self.num_tokens = num_tokens
        self.num_admitted = num_admitted
        self.preemptions = preemptions
        self.tiers = tiers
        self.num_withheld = num_withheld
        self.num_reserved = num_reserved
        self.num_loading = num_loading
        self.num_drafted = num_drafted
        self.num_accepted = num_accepted


class LeapDone(Value):
    """Consecutive steps with the same decodes and nothing else.

    `durations_ns` and `pages_taken` are per step; `num_used` and `num_cached` are as before the first. `turns`: only
    for an engine that shares its device. `parts`: only with KV groups; `tiers` is then the parts used and cached before
    the first step.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (
        "step",
        "start_ns",
        "durations_ns",
        "pages_taken",
        "num_used",
        "num_cached",
        "num_released",
        "num_running",
        "num_waiting",
        "blocked",
        "tiers",
        "turns",
        "num_reserved",
        "num_loading",
        "parts",
    )
    __slots__ = FIELDS

    def __init__(
        self,
        step: int,
        start_ns: int,
        durations_ns: PerStep,
        pages_taken: PerStep,
        num_used: int,
        num_cached: int,
        num_released: int,
        num_running: int,
        num_waiting: int,
        blocked: int,
        tiers: tuple[int, ...] = (),
        turns: Turns | None = None,
        num_reserved: int = 0,
        num_loading: int = 0,
        parts: PartsMoved | None = None,
    ) -> None:
        self.step = step
        self.start_ns = start_ns
        self.durations_ns = durations_ns
        self.pages_taken = pages_taken
        self.num_used = num_used
        self.num_cached = num_cached
        self.num_released = num_released
        self.num_running = num_running
        self.num_waiting = num_waiting
        self.blocked = blocked
        self.tiers = tiers
        self.turns = turns
        self.num_reserved = num_reserved
        self.num_loading = num_loading
        self.parts = parts
