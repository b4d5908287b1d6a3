"""The description of a part, and what it is opened with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvarts.combines import FEATURES, REFUSED, Refusal
from kvarts.config import EngineConfig
from kvarts.sched.hooks import Acts
from kvarts.sched.plan import Batch

if TYPE_CHECKING:
    from kvarts.sched.drafts import Drafter
    from kvarts.sched.handoffs import Handoffs
    from kvarts.sched.loads import Loads
    from kvarts.sched.scheduler import Scheduler

__all__ = ["Opening", "Part"]


class Opening(NamedTuple):
    """One scheduler, and what was made or asked for around it. None where the engine does not have it.

    `num_kept`: blocks that an admission leaves free if a request runs. `step_ns`: the expected
    duration of a step. `num_draft_slots`: the most tokens of a draft, if drafts come before prompts.
    """

    scheduler: Scheduler
    config: EngineConfig
    loads: Loads | None = None
    handoffs: Handoffs | None = None
    drafter: Drafter | None = None
    num_draft_slots: int = 0
    step_ns: Callable[[Batch], int] | None = None
    num_kept: int = 0


class Part(NamedTuple):
    """What only some engines do. `summary`: a clause for people. `settings`: the names of settings that ask for it.

    `features`: its rows in the table of combinations, where users can ask for it by name. `open`: returns where it acts
    in the steps of a scheduler, or None if nothing asks for it.
    """

    name: str
    summary: str
    open: Callable[[Opening], Acts | None]
    settings: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The places where it exists, as keys of PLACES; empty where no feature names it."""
        names: dict[str, None] = {}
        for feature in self.features:
            names.update(dict.fromkeys(FEATURES[feature].places))
        return tuple(names)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What it does not combine with, and why."""
        return tuple(refusal for refusal in REFUSED if any(feature in refusal.together for feature in self.features))
