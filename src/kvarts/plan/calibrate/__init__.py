r"""Calibration: fit a cost model to a measured engine, and state how far a replay is from the measurement.

The package is callable: `kvarts.calibrate(run, config)` returns a Calibration, and of vLLM's log of iterations a
StepFit:

>>> from pathlib import Path
>>> import kvarts
>>> line = (
...     "Iteration({0}): 0 context requests, 0 context tokens, {1} generation requests, {1} generation tokens, "
...     "iteration elapsed time: {2}.0 ms, GPU KV cache usage: 1.0%\n"
... )
>>> head = "GPU KV cache size: 41,392 tokens\n"
>>> _ = Path("steps.log").write_text(head + "".join(line.format(n, n % 8 + 1, 20 + n % 8) for n in range(64)))
>>> config = kvarts.ReplayConfig.for_device("llama-3.1-8b", "rtx-4090", pages=2_587)
>>> kvarts.calibrate("steps.log", config).num_steps
64
"""

from __future__ import annotations

import sys
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING

from kvarts.plan.calibrate.calibrating import fit
from kvarts.plan.calibrate.comparison import Comparison, compare
from kvarts.plan.calibrate.fitting import Calibration, calibrate_runs
from kvarts.plan.calibrate.recorded_run import Measured, Series, load_measured, load_series
from kvarts.plan.calibrate.run import CalibrationRun
from kvarts.plan.calibrate.stepfit import StepFit, fit_steps

if TYPE_CHECKING:
    from kvarts.plan.calibrate.calibrating import fit as calibrate
else:
    calibrate = sys.modules[__name__]

__all__ = [
    "Calibration",
    "CalibrationRun",
    "Comparison",
    "Measured",
    "Series",
    "StepFit",
    "calibrate",
    "calibrate_runs",
    "compare",
    "fit_steps",
    "load_measured",
    "load_series",
]


class CallableCalibrate(ModuleType):
    """The type of this package, which is called as `fit`."""

    __call__ = staticmethod(fit)
    __signature__ = signature(fit)


sys.modules[__name__].__class__ = CallableCalibrate
