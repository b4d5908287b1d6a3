"""The coefficients of a roofline as a search sees them: logarithms between bounds, and how sure it can be of them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.errors import ConfigError
from kvarts.executor.roofline import COEFFICIENTS, RooflineCost

__all__ = ["BOUNDS", "cost_of", "log_bounds", "logs_of", "needs_scipy", "not_identified", "uncertainty_of"]

Values = npt.NDArray[np.float64]

BOUNDS: Mapping[str, tuple[float, float]] = {
    "compute_efficiency": (0.2, 1.0),
    "bandwidth_efficiency": (0.3, 1.0),
    "attention_efficiency": (0.1, 1.0),
    "step_us": (50.0, 20_000.0),
    "sequence_us": (0.5, 200.0),
}
UNFELT = 1e-3
"""A direction that changes the residuals this much less than the strongest does not change them."""
PART = 0.5
"""What moves at least this much of what moves most in such a direction is not known either."""
UNSURE = 0.2
"""A coefficient that the data leave uncertain by more than this share is not identified by them."""


def needs_scipy() -> None:
    """Raises ConfigError where SciPy, an extra, is not installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise ConfigError("calibration needs SciPy", hint="Install it: pip install 'kvarts[calibrate]'.") from None


def log_bounds() -> tuple[Values, Values]:
    """The lowest and the highest of each, in logarithms."""
    low, high = (np.log([BOUNDS[name][side] for name in COEFFICIENTS]) for side in (0, 1))
    return low, high


def logs_of(cost: RooflineCost) -> Values:
    """Those of `cost`, brought within the bounds."""
    low, high = log_bounds()
    values = [max(getattr(cost, name), 1e-9) for name in COEFFICIENTS]
    logs: Values = np.clip(np.log(values), low, high)
    return logs


def cost_of(cost: RooflineCost, logs: Values) -> RooflineCost:
    """`cost` with these instead of its own."""
    return msgspec.structs.replace(cost, **dict(zip(COEFFICIENTS, map(float, np.exp(logs)), strict=True)))


def uncertainty_of(residuals: Values, jacobian: Values) -> dict[str, float]:
    """How far each could go before `residuals` would notice, as a share of it: that of least squares, to first order.

    `jacobian`: shape [residuals, coefficients], by logarithms. Infinite for what changes nothing, by itself or together
    with others: where every step reads all weights once, nobody can tell their time from that of the step itself.
    """
    spare = max(1, len(residuals) - jacobian.shape[1])
    # The diagonal of (J^T J)^+ as sums of squares, which rounding cannot make negative.
    variances = np.square(np.linalg.pinv(jacobian, rcond=1e-6)).sum(axis=1)
    errors = np.sqrt((residuals**2).sum() / spare * variances)
    _, strengths, directions = np.linalg.svd(jacobian, full_matrices=True)
    strengths = np.append(strengths, np.zeros(jacobian.shape[1] - len(strengths)))
    for direction in np.abs(directions[strengths <= UNFELT * max(strengths.max(), UNFELT)]):
        # Along it, the one that moves most can be anything; the others go as far as they do with it.
        moves = direction / direction.max()
        errors = np.where(moves > PART, np.inf, np.maximum(errors, moves))
    return dict(zip(COEFFICIENTS, map(float, errors), strict=True))


def not_identified(uncertainty: Mapping[str, float]) -> list[str]:
    """Coefficients that the data say little about."""
    return [name for name, share in uncertainty.items() if not share <= UNSURE]
