"""The executor as an engine sees it, the cost model as an executor does, and what several of either need."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvarts.base.limits import LATEST_NS, TooLateError
from kvarts.core.sched.plan import Batch, StepPlan, StepResult

__all__ = ["CostModel", "Executor", "VirtualExecutor", "are_many", "no_rotation", "whole_ns"]

FEW_STEPS = 30
"""Below this many steps a Python loop is faster than NumPy's calls."""


class Executor(Protocol):
    """Carries out plans in the order given; reads nothing but the plan and allocates no pages.

    Writes the KV of every token in the plan into the pages that the plan names before it reads them. Samples one token
    per decode and per chunk that ends its sequence. If a plan has drafts, an executor that produces tokens also samples
    after each drafted token that it accepts, and returns the last token of each row.
    """

    @property
    def needs_page_ids(self) -> bool:
        """Whether plans must name pages, rows and tokens. If True, this executor receives every plan and does
        transfers.
        """

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one step and return its result."""


class VirtualExecutor(Executor, Protocol):
    """An Executor for virtual time, which also predicts how long decodes take."""

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of `num_steps` steps of decodes; the arguments are those of CostModel."""


class CostModel(Protocol):
    """Duration of steps. Promises to be pure: the same batch costs the same in any process."""

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step that computes `batch`."""

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of `num_steps` steps of `num_decodes` decodes each.

        In the first step the decodes know `known_tokens` tokens in total; each later step adds `num_decodes`.
        """


def are_many(num_steps: int) -> bool:
    """Return whether NumPy is faster than a loop for `num_steps` steps."""
    return num_steps >= FEW_STEPS


def whole_ns(ns: npt.NDArray[np.floating]) -> list[int]:
    """Return `ns` rounded half to even, as `round` does. Overwrites `ns`, which must be monotone.

    Raise TooLateError if a step is longer than virtual time.
    """
    if len(ns) and not (ns[0] <= LATEST_NS and ns[-1] <= LATEST_NS):
        raise TooLateError
    durations: list[int] = np.rint(ns, out=ns).astype(np.int64).tolist()
    return durations


def no_rotation() -> None:
    """Do nothing: an executor that computes no keys rotates none late."""
