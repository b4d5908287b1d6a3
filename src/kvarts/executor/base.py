"""The executor protocol."""

from __future__ import annotations

from typing import Protocol

from kvarts.sched.plan import StepPlan, StepResult

__all__ = ["Executor"]


class Executor(Protocol):
    """Promises: carries out plans in the order given, reads nothing but the plan, and keeps no pages of its own.

    Writes the KV of every token in the plan into the pages the plan names before it reads them. Samples one token for
    every decode and for every chunk that is its sequence's last.
    """

    def execute(self, plan: StepPlan) -> StepResult:
        """Carries out one step."""
