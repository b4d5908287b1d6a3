"""The default constants of rooflines: values and their uncertainty, used where no calibration has fitted them.

`constants.toml` ships with the package and is the output of a command (docs/accuracy.md names it). A file of the same
form, written by `kvarts calibrate --points TABLE --out FILE`, can replace it as the prior of a calibration.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvarts.errors import InputError, parts_of
from kvarts.files import read_toml

__all__ = ["COEFFICIENTS", "LINKS", "Constants", "HeldOut", "load_constants", "shipped_constants"]

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
