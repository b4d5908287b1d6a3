"""Helpers of cost models that return many steps at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarts.few import arrays_pay
from kvarts.limits import LATEST_NS, TooLateError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["are_many", "whole_ns"]

FEW_STEPS = 30
"""Below this many steps a Python loop is faster than NumPy's calls."""


def are_many(num_steps: int) -> bool:
    """Return whether NumPy is faster than a loop for `num_steps` steps."""
    return num_steps >= FEW_STEPS and arrays_pay(num_steps)


def whole_ns(ns: npt.NDArray[np.floating]) -> list[int]:
    """Return `ns` rounded half to even, as `round` does. Overwrites `ns`, which must be monotone.

    Raise TooLateError if a step is longer than virtual time.
    """
    import numpy as np

    if len(ns) and not (ns[0] <= LATEST_NS and ns[-1] <= LATEST_NS):
        raise TooLateError
    durations: list[int] = np.rint(ns, out=ns).astype(np.int64).tolist()
    return durations
