"""Fitting a cost model to a measured engine, and saying how far off a replay is."""

from __future__ import annotations

from kvarts.calibrate.comparison import Comparison, compare
from kvarts.calibrate.fitting import Calibration, calibrate
from kvarts.calibrate.measured import Measured, load_measured
from kvarts.calibrate.series import Series, load_series
from kvarts.calibrate.stepfit import StepFit, fit_steps

__all__ = [
    "Calibration",
    "Comparison",
    "Measured",
    "Series",
    "StepFit",
    "calibrate",
    "compare",
    "fit_steps",
    "load_measured",
    "load_series",
]
