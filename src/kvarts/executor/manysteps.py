"""Helpers of cost models that answer for many steps at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvarts.limits import LATEST_NS, TooLateError

__all__ = ["FEW_STEPS", "whole_ns"]

FEW_STEPS = 30
"""Below this many steps a Python loop is faster than NumPy's calls."""


def whole_ns(ns: npt.NDArray[np.floating]) -> list[int]:
    """Return `ns` rounded half to even, as `round` does. Overwrites `ns`, which rises, falls or stays.

    Raise TooLateError for a step that is longer than virtual time.
    """
    if len(ns) and not (ns[0] <= LATEST_NS and ns[-1] <= LATEST_NS):
        raise TooLateError
    durations: list[int] = np.rint(ns, out=ns).astype(np.int64).tolist()
    return durations
