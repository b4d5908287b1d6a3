"""The settings of a roofline: model, device, parallelism and constants, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.combines import check_combination
from kvarts.errors import ConfigError
from kvarts.executor.constants import COEFFICIENTS, MeasuredOn, Uncertainty, shipped_constants
from kvarts.limits import MOST_COUNT, MOST_DRAFTED, MOST_MS, MOST_REPLICAS, check_number, check_whole

if TYPE_CHECKING:
    from kvarts.hardware import Device, Geometry

__all__ = ["SHARES", "RooflineSettings"]

LEAST_EFFICIENCY = 1e-12
SHARES = ("_efficiency", "_compute", "_bandwidth")
"""Suffixes of the coefficients that are shares and must not be 0."""
WAYS = ("tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel")


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
        every = self.tensor_parallel * self.data_parallel
        linked = next((ways for ways in WAYS if getattr(self, ways) > 1), None)
        has_experts = self.geometry.experts is not None
        if linked == "data_parallel" and not has_experts and self.pipeline_parallel == 1:
            linked = None  # each rank is a separate engine
        if linked is not None and not self.hardware.link_bytes_per_s:
            raise ConfigError(f"{self.device} has no link to a second one", field=f"cost.{linked}")
        if self.expert_parallel > 1:
            if not has_experts:
                raise ConfigError(f"{self.llm} has no experts", field="cost.expert_parallel")
            if self.expert_parallel != every:
                raise ConfigError(
                    f"must be 1 or {every}, got {self.expert_parallel}",
                    field="cost.expert_parallel",
                    hint="Experts are divided over all devices of all ranks: tensor_parallel x data_parallel.",
                )
        if self.pipeline_parallel > self.geometry.num_layers:
            raise ConfigError(
                f"must be at most {self.geometry.num_layers}, the layers of {self.llm}, got {self.pipeline_parallel}",
                field="cost.pipeline_parallel",
            )
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
        from kvarts.hardware.model_config import load_geometry  # imported only if a roofline is used

        return load_geometry(self.llm).stored_as(self.weight_dtype)

    @cached_property
    def hardware(self) -> Device:
        """The device."""
        from kvarts.hardware.device import load_device

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
    def measured_on(self) -> MeasuredOn:
        """The model, device and parallelism."""
        return MeasuredOn(*(getattr(self, field) for field in MeasuredOn.__struct_fields__))
