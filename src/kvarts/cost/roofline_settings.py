"""The settings of a roofline: model, device, parallelism and constants, and what follows from them alone.

The constants have an uncertainty, and are the default ones, or those that a calibration has fitted.

`constants.toml` ships with the package and is the output of a command (docs/accuracy.md names it). A file of the same
form, written by `kvarts calibrate --points TABLE --out FILE`, can replace it as the prior of a calibration.

`Uncertainty` is that of a fitted roofline's coefficients, and of its predictions for another model or device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from kvarts.base.errors import ConfigError, InputError, parts_of
from kvarts.base.files import read_toml
from kvarts.base.limits import MOST_COUNT, MOST_DRAFTED, MOST_MS, MOST_REPLICAS, check_number, check_whole
from kvarts.core.parts.combines import check_combination

if TYPE_CHECKING:
    from pathlib import Path

    from kvarts.cost.hardware.device import Device
    from kvarts.cost.hardware.geometry import Geometry

__all__ = [
    "CELL",
    "COEFFICIENTS",
    "FAR",
    "LINKS",
    "NEAR",
    "OWN",
    "SCALES",
    "SHARES",
    "Constants",
    "Evidence",
    "HeldOut",
    "MeasuredOn",
    "RooflineSettings",
    "Scale",
    "ScaleOf",
    "Uncertainty",
    "canonical",
    "format_of",
    "load_constants",
    "shipped_constants",
]

LEAST_EFFICIENCY = 1e-12
SHARES = ("_efficiency", "_compute", "_bandwidth")
"""Suffixes of the coefficients that are shares and must not be 0."""
WAYS = ("tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel")
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
    "expert_compute",
)
"""The names of all constants. `RooflineCost.active_coefficients` lists those that a step's time depends on."""

# Over PCIe without peer access, data pass through host memory: NCCL then reaches about a fifth of the rate. With peer
# access, a collective takes 5 to 15 us, at 0.4 to 0.6 of the rate.
OTHER_LINKS = {
    "pcie": {"link_efficiency": 0.2, "link_us": 30.0, "exchange_us": 30.0},
    "pcie-peer": {"link_efficiency": 0.5, "link_us": 10.0, "exchange_us": 10.0},
}
"""Unfitted values for the kinds of link other than NVLink."""

CELL = ("kind", "load", "weight")
"""What narrows a cell of held-out errors. Errors of models with experts never stand for dense ones, or the reverse."""

ALIASES = {"trtllm": "tensorrt-llm"}
"""Engines with a second name."""

LINKS = ("link_efficiency", "link_us", "exchange_us")
"""The constants that depend on the kind of link."""

Share = Annotated[float, msgspec.Meta(gt=0, le=100)]
Factor = Annotated[float, msgspec.Meta(gt=0, le=1e3)]
OWN, NEAR, FAR = 0.01, 0.05, 0.10
"""Relative error of step times beyond the coefficients' uncertainty: if model, device and parallelism were measured; if
the device was measured, with another model or parallelism; and if the device was not measured. Guesses, which
docs/accuracy.md compares with measurements."""
Evidence = Literal["measured", "near", "extrapolated"]
"""What was measured: `measured`: the model on the device; `near`: other models on it; `extrapolated`: neither."""
EVIDENCE_OF: dict[float, Evidence] = {OWN: "measured", NEAR: "near", FAR: "extrapolated"}
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
    """Relative errors of predictions for measurements that the constants were not fitted to, of one cell of them.

    `metric`: tpot, ttft or e2e. `vendor`: of the device. `kind`: dense or experts. `load`: open, closed or offline;
    `weight`: 16bit, fp8 or fp4, the format of most weights; None for all. `median`: half of the errors are smaller;
    `one_sigma`: 68 %; `two_sigma`: 95 %, if known.
    """

    metric: str
    vendor: str
    kind: str
    load: str | None = None
    weight: str | None = None
    median: Share
    one_sigma: Share
    two_sigma: Share | None = None
    num_points: int


SCALES = {
    "layer": ("layer_us", "expert_layer_us", "sparse_layer_us", "quantize_us"),
    "prefill": ("eager_layer_us", "eager_expert_layer_us"),
    "bandwidth": ("bandwidth_efficiency",),
    "compute": ("compute_efficiency",),
}
"""The constants that each factor of a Scale multiplies."""


def canonical(engine: str) -> str:
    """Return the first name of an engine, with its version if it has one."""
    name, equals, version = engine.partition("==")
    return ALIASES.get(name, name) + equals + version


def format_of(dtype: str) -> str:
    """Return the prefix of a number format's coefficients: fp8 for 8 to 15 bits, fp4 for fewer, "" from 16 bits."""
    from kvarts.core.kv.number_formats import dtype_bits

    bits = dtype_bits(dtype, field="dtype")
    return "" if bits >= 16 else "fp8" if bits >= 8 else "fp4"


class Scale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors on the constants in SCALES: of an engine, of a generation of devices, or the product of both."""

    layer: Factor = 1.0
    prefill: Factor = 1.0
    bandwidth: Factor = 1.0
    compute: Factor = 1.0

    def times(self, other: Scale) -> Scale:
        """Return the product of two scales."""
        return Scale(**{name: getattr(self, name) * getattr(other, name) for name in SCALES})


class ScaleOf(Scale, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The factors that were fitted to the measurements of one engine or device.

    `of`: an engine, one version of it in addition (sglang==0.5.12), or a device. `kind`: dense or experts; `weight`:
    16bit, fp8 or fp4, the format of most weights; None for all. `fitted`: the factors that a fit may change.
    """

    of: str
    kind: str | None = None
    weight: str | None = None
    fitted: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the row applies to, in words."""
        return " ".join(filter(None, (self.of, self.kind, self.weight)))

    def holds_for(self, engine: str, cost: RooflineSettings) -> bool:
        """Return whether the row applies to the model and the device of `cost` on this engine."""
        names = engine, engine.partition("==")[0], cost.hardware.name
        return self.of in names and self.kind in (None, cost.kind) and self.weight in (None, cost.weight_format)


class Constants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values by name, the standard deviations of their logarithms, scales, and the errors of held-out predictions.

    `measured`: the models of the points that the values were fitted to, by device.
    """

    values: dict[str, Annotated[float, msgspec.Meta(gt=0, le=1e9)]]
    deviations: dict[str, Annotated[float, msgspec.Meta(gt=0, le=10)]]
    scale: list[ScaleOf] = []
    held_out: list[HeldOut] = []
    measured: dict[str, list[str]] = {}

    def scale_of(self, engine: str, cost: RooflineSettings) -> Scale:
        """Return the scale of an engine, times those of its version and of the device, for the model of `cost`."""
        found = Scale()
        for row in self.scale:
            if row.holds_for(engine, cost):
                found = found.times(row)
        return found

    def has_measured(self, engine: str) -> bool:
        """Return whether factors were fitted to measurements of an engine, or of the version of it that is named."""
        return any(row.of == canonical(engine) for row in self.scale)

    def of_link(self, name: str, kind: str) -> float:
        """Return `link_efficiency`, `link_us` or `exchange_us` for a kind of link; only NVLink's values were fitted."""
        return OTHER_LINKS[kind][name] if kind in OTHER_LINKS else self.values[name]

    def held_out_of(self, vendor: str, *of: str) -> dict[str, HeldOut]:
        """Return the held-out errors by metric, each of the narrowest cell that was measured; empty if none was.

        `of`: kind, load and format, which narrow a cell in the order of CELL.
        """
        found: dict[str, HeldOut] = {}
        for depth in range(1, len(CELL) + 1):
            cell = (*of[:depth], *[None] * (len(CELL) - depth))
            for row in self.held_out:
                if row.vendor == vendor and tuple(getattr(row, name) for name in CELL) == cell:
                    found[row.metric] = row
        return found


def load_constants(path: Path) -> Constants:
    """Read constants from a TOML file, which must hold all of them. Raise MissingFileError or InputError."""
    return _constants(read_toml(path, hint="Check the path of the prior."), path)


@cache
def shipped_constants() -> Constants:
    """Return the constants that ship with the package."""
    import tomllib
    from pkgutil import get_data

    text = get_data("kvarts.cost", "constants.toml")
    assert text is not None
    return _constants(tomllib.loads(text.decode()), "constants.toml")


def _constants(values: dict[str, Any], path: Path | str) -> Constants:
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
    """The model, device and parallelism of a measured run. A short name of a device becomes that of its preset."""

    llm: str
    device: str
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: int = 1
    pipeline_parallel: int = 1

    def __post_init__(self) -> None:
        from kvarts.cost.hardware.device import preset_name

        msgspec.structs.force_setattr(self, "device", preset_name(self.device))


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


def _shipped(name: str) -> Any:
    """Return a struct field with the constant `name` of constants.toml as its default."""
    factory: Callable[[], float] = lambda: shipped_constants().values[name]  # noqa: E731
    return msgspec.field(default_factory=factory)


class RooflineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The fields of a RooflineCost, which explains them."""

    llm: str
    device: str
    tensor_parallel: int = 1
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    compute_efficiency: float = _shipped("compute_efficiency")
    bandwidth_efficiency: float = _shipped("bandwidth_efficiency")
    attention_efficiency: float = _shipped("attention_efficiency")
    step_us: float = _shipped("step_us")
    sequence_us: float = _shipped("sequence_us")
    data_parallel: int = 1
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    expert_efficiency: float = _shipped("expert_efficiency")
    link_efficiency: float | None = None
    link_us: float | None = None
    exchange_us: float | None = None
    layer_us: float = _shipped("layer_us")
    expert_layer_us: float = _shipped("expert_layer_us")
    expert_half_mb: float = _shipped("expert_half_mb")
    fp8_compute: float = _shipped("fp8_compute")
    fp8_bandwidth: float = _shipped("fp8_bandwidth")
    fp4_compute: float = _shipped("fp4_compute")
    fp4_bandwidth: float = _shipped("fp4_bandwidth")
    graph_tokens: int = 512
    eager_us: float = 0.0
    eager_layer_us: float = _shipped("eager_layer_us")
    eager_expert_layer_us: float = _shipped("eager_expert_layer_us")
    attention_compute: float = _shipped("attention_compute")
    sparse_layer_us: float = _shipped("sparse_layer_us")
    quantize_us: float = _shipped("quantize_us")
    expert_compute: float = _shipped("expert_compute")
    scale: Scale | None = None
    separate_passes: bool = False
    speculative_tokens: int = 0
    acceptance: tuple[float, ...] = ()
    uncertainty: Uncertainty | None = None

    def __post_init__(self) -> None:
        for ways in WAYS:
            check_whole(getattr(self, ways), f"cost.{ways}", most=MOST_REPLICAS)
        check_whole(self.graph_tokens, "cost.graph_tokens", least=0, most=MOST_COUNT)
        check_number(self.eager_us, "cost.eager_us", most=MOST_MS)
        for field in COEFFICIENTS:
            value = getattr(self, field)
            if value is None:
                continue
            if field.endswith(SHARES):
                check_number(value, f"cost.{field}", least=LEAST_EFFICIENCY, most=MOST_MS)
            else:
                check_number(value, f"cost.{field}", most=MOST_MS)
        self._check_ways()
        self._check_drafts()

    def _check_ways(self) -> None:
        from kvarts.cost.hardware.fit import check_split

        linked = next((ways for ways in WAYS if getattr(self, ways) > 1), None)
        has_experts = self.geometry.experts is not None
        if linked == "data_parallel" and not has_experts and self.pipeline_parallel == 1:
            linked = None  # each rank is a separate engine
        if linked is not None and not self.hardware.link_bytes_per_s:
            raise ConfigError(f"{self.device} has no link to a second one", field=f"cost.{linked}")
        try:
            check_split(self.geometry, **{ways: getattr(self, ways) for ways in WAYS})
        except ConfigError as error:
            raise ConfigError(error.what, field=f"cost.{error.field}", hint=error.hint) from None
        if self.pipeline_parallel > 1 and self.num_ranks > 1:
            check_combination({"pipeline": "cost.pipeline_parallel", "ranks": "cost.data_parallel"})

    def _check_drafts(self) -> None:
        check_whole(self.speculative_tokens, "cost.speculative_tokens", least=0, most=MOST_DRAFTED)
        if len(self.acceptance) != self.speculative_tokens:
            raise ConfigError(
                f"has {len(self.acceptance)} rates for {self.speculative_tokens} speculative tokens",
                field="cost.acceptance",
                hint="Give one rate for each: the share of drafts in which it and all before it are accepted.",
            )
        before = 1.0
        for rate in self.acceptance:
            if not 0.0 <= rate <= before:
                raise ConfigError(
                    f"must be from 0 to 1, and never rise: got {rate:g} after {before:g}",
                    field="cost.acceptance",
                    hint="A token is accepted only if all before it are.",
                )
            before = rate

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a decode generates per step."""
        return 1.0 + sum(self.acceptance)

    @cached_property
    def geometry(self) -> Geometry:
        """The geometry of the model."""
        from kvarts.cost.hardware.model_config import load_geometry  # imported only if a roofline is used

        return load_geometry(self.llm, self.weight_dtype).on(self.hardware)

    @cached_property
    def hardware(self) -> Device:
        """The device."""
        from kvarts.cost.hardware.device import load_device

        return load_device(self.device)

    @property
    def num_ranks(self) -> int:
        """Number of engines in lock step: the data-parallel ranks if experts are divided over them, else 1."""
        return 1 if self.geometry.experts is None else self.data_parallel

    def coefficient(self, name: str) -> float:
        """Return one of COEFFICIENTS; if it was not given, the default for the device's kind of link."""
        value = getattr(self, name)
        return float(shipped_constants().of_link(name, self.hardware.link_kind) if value is None else value)

    @property
    def kind(self) -> str:
        """The kind of the model: dense, or experts."""
        return "dense" if self.geometry.experts is None else "experts"

    @property
    def weight_format(self) -> str:
        """The format of most weights: 16bit, fp8 or fp4."""
        return format_of(self.geometry.expert_dtype) or "16bit"

    @cached_property
    def scaled(self) -> RooflineSettings:
        """The same settings with `scale` in the values of the constants; None: that of the device."""
        scale = shipped_constants().scale_of("", self) if self.scale is None else self.scale
        changes = {
            name: getattr(self, name) * getattr(scale, factor)
            for factor, names in SCALES.items()
            for name in names
            if getattr(scale, factor) != 1.0
        }
        if not changes:
            return self
        scaled = msgspec.structs.replace(self, scale=Scale(), **changes)
        vars(scaled).update(geometry=self.geometry, hardware=self.hardware)
        return scaled

    @property
    def measured_on(self) -> MeasuredOn:
        """The model, device and parallelism."""
        return MeasuredOn(*(getattr(self, field) for field in MeasuredOn.__struct_fields__))

    @property
    def evidence(self) -> Evidence:
        """Whether measurements of this model and device, or of the device, determined the constants."""
        if self.uncertainty is not None and self.uncertainty.measured:
            return EVIDENCE_OF[self.uncertainty.share_of(self.measured_on)]
        measured = shipped_constants().measured
        device = self.hardware.name
        if device not in measured:
            return "extrapolated"
        name = self.geometry.name.rpartition("/")[2].lower().removesuffix("-instruct")
        return "measured" if name in measured[device] else "near"
