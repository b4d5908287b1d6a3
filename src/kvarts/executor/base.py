"""What an engine asks of an executor."""

from __future__ import annotations

from typing import Protocol

from kvarts.sched.plan import StepPlan, StepResult

__all__ = ["Executor", "VirtualExecutor"]


class Executor(Protocol):
    """Promises: carries out plans in the order given, reads nothing but the plan, and keeps no pages of its own.

    Writes the KV of every token in the plan into the pages the plan names before it reads them. Samples one token for
    every decode and for every chunk that is its sequence's last.
    """

    @property
    def needs_page_ids(self) -> bool:
        """Whether plans have to name pages, rows and tokens. Then it is given every plan, and carries out transfers."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one step."""


class VirtualExecutor(Executor, Protocol):
    """An Executor for virtual time: it also says beforehand how long decodes take."""

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of `num_steps` steps of decodes; see CostModel for the arguments."""
