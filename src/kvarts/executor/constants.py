"""The constants of rooflines, with their uncertainty: the default ones, and those that a calibration has fitted.

`constants.toml` ships with the package and is the output of a command (docs/accuracy.md names it). A file of the same
form, written by `kvarts calibrate --points TABLE --out FILE`, can replace it as the prior of a calibration.

`Uncertainty` is that of a fitted roofline's coefficients, and of its predictions for another model or device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvarts.errors import ConfigError, InputError, parts_of
from kvarts.files import read_toml
from kvarts.limits import check_whole

__all__ = [
    "COEFFICIENTS",
    "FAR",
    "LINKS",
    "NEAR",
    "OWN",
    "Constants",
    "HeldOut",
    "MeasuredOn",
    "Uncertainty",
    "load_constants",
    "shipped_constants",
]

COEFFICIENTS = (
    "compute_efficiency",
    "bandwidth_efficiency",
    "attention_efficiency",
    "step_us",
    "sequence_us",
    "expert_efficiency",
    "link_efficiency",
    "link_us",
    "layer_us",
    "expert_layer_us",
    "expert_half_mb",
    "exchange_us",
    "eager_layer_us",
    "eager_expert_layer_us",
    "fp8_compute",
    "fp8_bandwidth",
    "fp4_compute",
    "fp4_bandwidth",
    "attention_compute",
    "sparse_layer_us",
    "quantize_us",
)
"""The names of all constants. `RooflineCost.active_coefficients` lists those that a step's time depends on."""

# Over PCIe without peer access, data pass through host memory: NCCL then reaches about a fifth of the rate. With peer
# access, a collective takes 5 to 15 us, at 0.4 to 0.6 of the rate.
OTHER_LINKS = {
    "pcie": {"link_efficiency": 0.2, "link_us": 30.0, "exchange_us": 30.0},
    "pcie-peer": {"link_efficiency": 0.5, "link_us": 10.0, "exchange_us": 10.0},
}
"""Unfitted values for the kinds of link other than NVLink."""

LINKS = ("link_efficiency", "link_us", "exchange_us")
"""The constants that depend on the kind of link."""

Share = Annotated[float, msgspec.Meta(gt=0, le=100)]
OWN, NEAR, FAR = 0.01, 0.05, 0.10
"""Relative error of step times beyond the coefficients' uncertainty: if model, device and parallelism were measured; if
the device was measured, with another model or parallelism; and if the device was not measured. Guesses, which
docs/accuracy.md compares with measurements."""
LEAST_AXIS = 1e-3
"""Axes with a smaller standard deviation, in logarithms of coefficients, are not worth a replay."""
# Exponents of each coefficient under a slowdown of all steps by a common factor.
SLOWER = {
    "compute_efficiency": -1.0,
    "bandwidth_efficiency": -1.0,
    "attention_efficiency": -1.0,
    "step_us": 1.0,
    "sequence_us": 1.0,
    "link_efficiency": -1.0,
    "link_us": 1.0,
    "exchange_us": 1.0,
    "layer_us": 1.0,
    "expert_layer_us": 1.0,
}
Finite = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Relative errors of predictions for measurements that the constants were not fitted to.

    `kind`: dense, or experts. `metric`: tpot, ttft or e2e. `one_sigma`: 68 % of the errors are smaller; `median`: half.
    """

    kind: str
    metric: str
    median: Share
    one_sigma: Share
    num_points: int


class Constants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values by name, the standard deviations of their logarithms, and the errors of held-out predictions."""

    values: dict[str, Annotated[float, msgspec.Meta(gt=0, le=1e9)]]
    deviations: dict[str, Annotated[float, msgspec.Meta(gt=0, le=10)]]
    held_out: list[HeldOut] = []

    def of_link(self, name: str, kind: str) -> float:
        """Return `link_efficiency`, `link_us` or `exchange_us` for a kind of link; only NVLink's values were fitted."""
        return OTHER_LINKS[kind][name] if kind in OTHER_LINKS else self.values[name]

    def held_out_of(self, kind: str) -> dict[str, HeldOut]:
        """Return the held-out errors for models of `kind`, by metric."""
        return {each.metric: each for each in self.held_out if each.kind == kind}


def load_constants(path: Path) -> Constants:
    """Read constants from a TOML file, which must hold all of them. Raise MissingFileError or InputError."""
    return _constants(read_toml(path, hint="Check the path of the prior."), path)


@cache
def shipped_constants() -> Constants:
    """Return the constants that ship with the package."""
    import tomllib
    from importlib.resources import files

    source = files("kvarts.executor").joinpath("constants.toml")
    return _constants(tomllib.loads(source.read_text("utf-8")), Path("constants.toml"))


def _constants(values: dict[str, Any], path: Path) -> Constants:
    try:
        constants = msgspec.convert(values, Constants)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=field) from error
    for table in ("values", "deviations"):
        given = getattr(constants, table)
        for name in (*given, *COEFFICIENTS):
            if name not in COEFFICIENTS:
                raise InputError(f"{name!r} is not a constant", path=path, field=f"{table}.{name}")
            if name not in given:
                raise InputError("is missing", path=path, field=f"{table}.{name}")
    return constants


class MeasuredOn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model, device and parallelism of a measured run."""

    llm: str
    device: str
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: int = 1
    pipeline_parallel: int = 1


class Uncertainty(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The covariance of the logarithms of `coefficients`, in their order, after a fit to the runs in `measured`.

    Coefficients that are not listed were not fitted, and are treated as certain. `elsewhere`: the coefficients for what
    was not measured, between those of the fit and those of its prior; `deviations`: how far those of another model may
    be from them, in addition to `covariance`. Raises ConfigError if the matrix is not a covariance.
    """

    coefficients: tuple[str, ...]
    covariance: tuple[tuple[Finite, ...], ...]
    measured: tuple[MeasuredOn, ...] = ()
    elsewhere: dict[str, Positive] = {}
    deviations: dict[str, Positive] = {}

    def __post_init__(self) -> None:
        import numpy as np

        count = len(self.coefficients)
        check_whole(count, "uncertainty.coefficients", most=len(COEFFICIENTS))
        for name in self.coefficients:
            if name not in COEFFICIENTS or self.coefficients.count(name) > 1:
                raise ConfigError(f"{name!r} is not one coefficient", field="uncertainty.coefficients")
        for field in ("elsewhere", "deviations"):
            if strange := sorted(set(getattr(self, field)) - set(self.coefficients)):
                raise ConfigError(f"{strange[0]!r} was not fitted", field=f"uncertainty.{field}")
        matrix = np.array([*self.covariance], np.float64) if self.covariance else np.zeros((0, 0))
        if any(len(row) != count for row in self.covariance) or len(self.covariance) != count:
            raise ConfigError(f"must have {count} rows of {count} numbers", field="uncertainty.covariance")
        if not np.allclose(matrix, matrix.T, rtol=1e-6, atol=1e-12) or np.linalg.eigvalsh(matrix).min() < -1e-9:
            raise ConfigError("is no covariance: not symmetric, or negative", field="uncertainty.covariance")

    def has_measured(self, case: MeasuredOn) -> bool:
        """Return whether `case` was measured; True if nothing is known."""
        return not self.measured or case in self.measured

    def share_of(self, case: MeasuredOn) -> float:
        """Return the relative model error of steps of `case`, beyond its coefficients: OWN, NEAR or FAR."""
        if self.has_measured(case):
            return OWN
        return NEAR if any(each.device == case.device for each in self.measured) else FAR

    def moves(self, case: MeasuredOn, names: Sequence[str]) -> list[dict[str, float]]:
        """Return moves of the logarithms of coefficients, one standard deviation along each axis of the uncertainty.

        `names`: the coefficients that the steps of `case` depend on. The standard deviation of any result is the square
        root of the sum of squares of half the differences between the results of each move and of its opposite.
        """
        import numpy as np

        names = [name for name in names if name in self.coefficients or name in SLOWER]
        places = [self.coefficients.index(name) if name in self.coefficients else None for name in names]
        known = np.array(self.covariance, np.float64)
        matrix = np.array([[0.0 if a is None or b is None else known[a, b] for b in places] for a in places])
        slower = np.array([SLOWER.get(name, 0.0) for name in names])
        matrix += self.share_of(case) ** 2 * np.outer(slower, slower)
        if not self.has_measured(case):
            matrix += np.diag([self.deviations.get(name, 0.0) ** 2 for name in names])
        variances, directions = np.linalg.eigh(matrix)
        return [
            dict(zip(names, (direction * np.sqrt(variance)).tolist(), strict=True))
            for variance, direction in zip(variances[::-1], directions.T[::-1], strict=True)
            if variance >= LEAST_AXIS**2
        ]
