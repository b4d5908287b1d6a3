"""The coefficients of a roofline: during a search as logarithms, with a prior and their uncertainty; fitted, as text.

A fitted cost model is also written as JSON-able values, and as the file that `kvarts replay --cost` reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.errors import ConfigError
from kvarts.base.files import toml_text
from kvarts.cost.roofline import RooflineCost
from kvarts.cost.roofline_settings import COEFFICIENTS, Constants, shipped_constants

__all__ = [
    "BOUNDS",
    "OF_RUNS",
    "OF_STEPS",
    "at_limit",
    "beyond_transfer",
    "coefficients_text",
    "cost_of",
    "cost_toml",
    "cost_values",
    "finite",
    "log_bounds",
    "logs_of",
    "names_of",
    "needs_scipy",
    "not_identified",
]

KEPT = ("tensor_parallel", "graph_tokens", *COEFFICIENTS)
"""Fields that are written to a file even at their default, which other releases may change."""


__all__ += ["uncertainty_of", "widths_of"]

Values = npt.NDArray[np.float64]

BOUNDS: Mapping[str, tuple[float, float]] = {
    "compute_efficiency": (0.2, 1.0),
    "bandwidth_efficiency": (0.3, 1.0),
    "attention_efficiency": (0.1, 1.0),
    "step_us": (50.0, 20_000.0),
    "sequence_us": (0.5, 200.0),
    "expert_efficiency": (0.1, 2.0),
    "link_efficiency": (0.02, 1.0),
    "link_us": (1.0, 500.0),
    "layer_us": (1.0, 500.0),
    "expert_layer_us": (1.0, 500.0),
    "expert_half_mb": (0.05, 50.0),
    "exchange_us": (1.0, 500.0),
    "eager_layer_us": (5.0, 5_000.0),
    "eager_expert_layer_us": (5.0, 5_000.0),
    "fp8_compute": (0.2, 1.2),
    "fp8_bandwidth": (0.4, 1.2),
    "fp4_compute": (0.1, 1.2),
    "fp4_bandwidth": (0.3, 1.2),
    "attention_compute": (0.1, 1.2),
    "sparse_layer_us": (1.0, 500.0),
    "quantize_us": (0.1, 100.0),
    "expert_compute": (0.1, 1.2),
}
OF_STEPS = COEFFICIENTS[:8]
"""Constants fitted to recorded steps of one model."""
OF_RUNS = (*OF_STEPS, "layer_us", "expert_layer_us")
"""Constants fitted to runs. The others concern number formats, kernels and links. No run can separate these, so they
keep their prior values."""
TRANSFERS = 2.0
"""A constant that a fit moves by more than this many standard deviations of the prior may not hold for other models."""
UNFELT = 1e-3
"""A direction that changes the residuals by less than this share of the strongest one counts as having no effect."""
PART = 0.5
"""A coefficient that moves by at least this share of the largest move in such a direction counts as unknown too."""
UNSURE = 0.2
"""A coefficient with an uncertainty above this share is not identified by the data."""


def needs_scipy() -> None:
    """Raise ConfigError if SciPy, an extra, is not installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise ConfigError("calibration needs SciPy", hint="Install it: pip install 'kvarts[calibrate]'.") from None


def names_of(costs: Sequence[RooflineCost], among: Sequence[str] = OF_RUNS) -> tuple[str, ...]:
    """Return those of `among` that any of `costs` depends on."""
    active = {name for cost in costs for name in cost.active_coefficients}
    return tuple(name for name in among if name in active)


def log_bounds(names: Sequence[str]) -> tuple[Values, Values]:
    """Return the lower and upper bounds of the coefficients, as logarithms."""
    low, high = (np.log([BOUNDS[name][side] for name in names]) for side in (0, 1))
    return low, high


def widths_of(names: Sequence[str], prior: Constants | None = None) -> Values:
    """Return the standard deviations of the prior; default: that of the built-in constants."""
    deviations = (prior or shipped_constants()).deviations
    return np.array([deviations[name] for name in names])


def beyond_transfer(moves: Mapping[str, float], widths: Mapping[str, float]) -> list[str]:
    """Return the constants that a fit moved, in logarithms, farther than is expected to hold for other models."""
    return [name for name, move in moves.items() if abs(move) > TRANSFERS * widths[name]]


def logs_of(costs: Sequence[RooflineCost], names: Sequence[str]) -> Values:
    """Return the logarithms of the coefficients, clipped to the bounds, each from the first cost that depends on it."""
    low, high = log_bounds(names)
    firsts = [next(cost for cost in costs if name in cost.active_coefficients) for name in names]
    values = [max(cost.coefficient(name), 1e-9) for cost, name in zip(firsts, names, strict=True)]
    logs: Values = np.clip(np.log(values), low, high)
    return logs


def cost_of(cost: RooflineCost, logs: Values, names: Sequence[str]) -> RooflineCost:
    """Return `cost` with the coefficients given by `logs`."""
    return msgspec.structs.replace(cost, uncertainty=None, **dict(zip(names, map(float, np.exp(logs)), strict=True)))


def uncertainty_of(residuals: Values, jacobian: Values, names: Sequence[str] = OF_STEPS[:5]) -> dict[str, float]:
    """Return the relative uncertainty of each coefficient: that of least squares, to first order.

    `jacobian`: shape [residuals, coefficients], by logarithms. The uncertainty is infinite for a coefficient that has
    no effect, alone or in combination. For example, if every step reads all weights once, the time to read them cannot
    be separated from the constant time per step.
    """
    spare = max(1, len(residuals) - jacobian.shape[1])
    # The diagonal of (J^T J)^+ as sums of squares, which rounding cannot make negative.
    variances = np.square(np.linalg.pinv(jacobian, rcond=1e-6)).sum(axis=1)
    errors = np.sqrt((residuals**2).sum() / spare * variances)
    _, strengths, directions = np.linalg.svd(jacobian, full_matrices=True)
    strengths = np.append(strengths, np.zeros(jacobian.shape[1] - len(strengths)))
    for direction in np.abs(directions[strengths <= UNFELT * max(strengths.max(), UNFELT)]):
        # Along it, the coefficient that moves most is undetermined, and the others change in proportion.
        moves = direction / direction.max()
        errors = np.where(moves > PART, np.inf, np.maximum(errors, moves))
    return dict(zip(names, map(float, errors), strict=True))


def at_limit(cost: RooflineCost, names: Iterable[str]) -> list[str]:
    """Return the fitted coefficients at the ends of their bounds, which a wider search might have moved further."""
    return [
        name for name in names if any(math.isclose(cost.coefficient(name), end, rel_tol=1e-3) for end in BOUNDS[name])
    ]


def not_identified(uncertainty: Mapping[str, float]) -> list[str]:
    """Return the coefficients with an uncertainty above UNSURE."""
    return [name for name, share in uncertainty.items() if not share <= UNSURE]


def cost_values(cost: RooflineCost) -> dict[str, Any]:
    """Return the fields of a cost model, without its uncertainty."""
    values: dict[str, Any] = msgspec.to_builtins(cost)
    del values["uncertainty"]
    return values


def finite(shares: Mapping[str, float]) -> dict[str, float | None]:
    """Return `shares` with infinite values replaced by None."""
    return {name: share if share < float("inf") else None for name, share in shares.items()}


def coefficients_text(
    cost: RooflineCost,
    uncertainty: Mapping[str, float],
    not_identified: Sequence[str],
    why: str,
    beyond_transfer: Sequence[str] = (),
) -> str:
    """Return a line per fitted coefficient, with a line end. `why`: the note on those that are not identified."""
    limited = at_limit(cost, uncertainty)
    lines = [f"{cost.llm} on {cost.device}"]
    for name, share in uncertainty.items():
        unsure = "these data do not say" if share == float("inf") else f"± {share:.0%}"
        if name in not_identified and share < float("inf"):
            unsure += f", {why}"
        if name in beyond_transfer:
            unsure += ", farther from its prior than holds for other models"
        if name in limited:
            unsure += ", at the limit of the search: is the device what was measured?"
        lines.append(f"  {name:<22}{cost.coefficient(name):>12.4g}   {unsure}")
    return "\n".join(lines) + "\n"


def cost_toml(cost: RooflineCost, uncertainty: Mapping[str, float], measured: Sequence[str]) -> str:
    """Return a cost model as the text of a file. `measured`: names of the measurements it was fitted to."""
    head = [
        f"Fitted by kvarts calibrate to {', '.join(measured)}.",
        "The uncertainty is a share of each coefficient; left out, these data do not say.",
    ]
    defaults = {field.name: field.default for field in msgspec.structs.fields(cost)}
    tables: dict[str, Any] = {
        "cost": {
            name: value
            for name, value in cost_values(cost).items()
            if name in KEPT or value != defaults.get(name, msgspec.NODEFAULT)
        },
        "uncertainty": finite(uncertainty),
    }
    if cost.uncertainty is not None:
        head.append("The posterior is of the logarithms: the uncertainty of replays follows from it.")
        tables["posterior"] = msgspec.to_builtins(cost.uncertainty)
    return toml_text(head, tables)
