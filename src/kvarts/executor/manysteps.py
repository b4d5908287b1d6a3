"""Helpers of cost models that answer for many steps at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["FEW_STEPS", "whole_ns"]

FEW_STEPS = 30
"""Below this many steps a Python loop is faster than NumPy's calls."""


def whole_ns(ns: npt.NDArray[np.floating]) -> list[int]:
    """Return `ns` rounded half to even, as `round` does. Overwrites `ns`."""
    durations: list[int] = np.rint(ns, out=ns).astype(np.int64).tolist()
    return durations
