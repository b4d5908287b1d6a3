"""Calibration: fit a cost model to a measured engine, and state how far a replay is from the measurement."""

from __future__ import annotations

from kvarts.calibrate.comparison import Comparison, compare
from kvarts.calibrate.fitting import Calibration, calibrate, calibrate_runs
from kvarts.calibrate.measured import Measured, load_measured
from kvarts.calibrate.run import MeasuredRun
from kvarts.calibrate.series import Series, load_series
from kvarts.calibrate.stepfit import StepFit, fit_steps

__all__ = [
    "Calibration",
    "Comparison",
    "Measured",
    "MeasuredRun",
    "Series",
    "StepFit",
    "calibrate",
    "calibrate_runs",
    "compare",
    "fit_steps",
    "load_measured",
    "load_series",
]
