"""A cost model derived from model and device: the roofline of one forward pass over a whole step.

Matrices are read once for all tokens of the step and multiplied with each token; attention reads the KV of every
sequence. Each of the two takes as long as its memory traffic or its arithmetic, whichever is longer (Williams, Waterman
and Patterson, Roofline, CACM 52:4, 2009), at a share of the device's peaks that calibration finds. Overheads that are
neither traffic nor arithmetic are added as constants: per step, per layer, per collective and per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.combines import check_combination
from kvarts.errors import ConfigError
from kvarts.executor.constants import COEFFICIENTS, LINKS, HeldOut, shipped_constants
from kvarts.executor.step_parts import StepParts, format_of
from kvarts.executor.uncertainty import Uncertainty
from kvarts.limits import MOST_COUNT, MOST_DRAFTED, MOST_MS, MOST_REPLICAS, check_number, check_whole
from kvarts.sched.plan import Batch

if TYPE_CHECKING:
    from kvarts.hardware import Device, Geometry

__all__ = ["COEFFICIENTS", "RooflineCost"]

LEAST_EFFICIENCY = 1e-12
SHARES = ("_efficiency", "_compute", "_bandwidth")
"""Suffixes of the coefficients that are shares and must not be 0."""
WAYS = ("tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel")


def _shipped(name: str) -> Any:
    """Return a struct field with the constant `name` of constants.toml as its default."""
    factory: Callable[[], float] = lambda: shipped_constants().values[name]  # noqa: E731
    return msgspec.field(default_factory=factory)


class RooflineCost(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="model",
    tag="roofline",
    dict=True,
):
    """Steps of the model `llm` on `device`. Raises ConfigError for unknown names and values out of range.

    `llm` and `device`: names as load_geometry and load_device take them. `weight_dtype` and `kv_dtype`: by default
    those of the model. `compute_efficiency`, `bandwidth_efficiency` and `attention_efficiency`: the shares of the
    device's peaks that arithmetic, reading weights and reading KV reach in 16 bits. `fp8_compute`, `fp8_bandwidth`,
    `fp4_compute` and `fp4_bandwidth`: factors on the first two for narrower weights. `attention_compute`: the factor on
    the first for the attention of prompts. `expert_efficiency`: the factor on the first two for large experts;
    `expert_half_mb`: the megabytes of one expert on a device at which it reaches half of that bandwidth.
    `link_efficiency`: the share of the link's rate that collectives reach; `link_us`: the constant time of an
    all-reduce; `exchange_us`: the constant time of a gather or a scatter of all ranks' tokens. The defaults of these
    three depend on the kind of link. `step_us`: constant time per step, in microseconds; `layer_us`: per layer;
    `expert_layer_us`: extra per layer with experts; `sparse_layer_us`: extra per layer with an indexer of sparse
    attention; `quantize_us`: extra per matrix whose input is quantized in blocks;
    `sequence_us`: per sequence. The defaults are the constants that ship (constants.py); `kvarts calibrate`
    fits them.

    Arithmetic: 2 operations per token and matrix element; attention: 4 per token, head, element of the head and token
    attended to; the output head is computed only for sequences that sample. With E experts and k per token, T tokens
    read E (1 - (1 - k/E)^T) experts, as if each token chose at random.

    With tensor parallelism, all work is divided, KV only up to the number of KV heads, and two all-reduces per layer
    move 2 (n - 1) / n of the activations over the link. With data parallelism, each rank serves different requests; the
    experts of a model that has them are divided over all ranks, which then run in lock step: each such layer gathers
    the tokens of all ranks and scatters the results, instead of an all-reduce. `expert_parallel`: 1 if each expert is
    split into parts, or the number of devices of all ranks, over which whole experts are distributed; all then wait for
    the device whose experts are chosen most often. With pipeline parallelism, a step is a round of as many
    micro-batches as there are stages: matrices are read once per micro-batch, and all other work is divided over them.

    `graph_tokens`: steps of up to this many tokens run as CUDA graphs, which vLLM captures for 1, 2, 4, multiples of 8
    up to 256, and of 16 above; tokens are padded to the next size; 0 disables graphs. A step without a graph takes
    `eager_layer_us` longer per layer, plus `eager_expert_layer_us` per layer with experts, and at least `eager_us`.
    Decodes with a sliding window are treated as if all had the mean length.

    `separate_passes`: a step computes prompts and decodes in two passes, one after the other, as SGLang schedules them.
    `speculative_tokens`: tokens drafted after each decode and verified in its step, by layers such as MTP; each costs
    one layer like those of the model and the output head. `acceptance`: for each of them, the probability that it and
    all before it are accepted. A decode then generates 1 + their sum tokens per step on average: that many steps of a
    replay, of one token each, take as long as one step of the engine. `uncertainty`: of the coefficients, if a
    calibration gives it.
    """

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
        _ = self.parts

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

    @cached_property
    def parts(self) -> StepParts:
        """The parts that make up the time of a step."""
        return StepParts(self)

    @property
    def num_ranks(self) -> int:
        """Number of engines in lock step: the data-parallel ranks if experts are divided over them, else 1."""
        return 1 if self.geometry.experts is None else self.data_parallel

    def coefficient(self, name: str) -> float:
        """Return one of COEFFICIENTS; if it was not given, the default for the device's kind of link."""
        value = getattr(self, name)
        return float(shipped_constants().of_link(name, self.hardware.link_kind) if value is None else value)

    @property
    def active_coefficients(self) -> tuple[str, ...]:
        """The coefficients that the time of a step depends on, in the order of COEFFICIENTS."""
        geometry = self.geometry
        formats = {format_of(geometry.weight_dtype)}
        unused: set[str] = set()
        if geometry.experts is None:
            unused |= {name for name in COEFFICIENTS if "expert" in name}
        else:
            formats.add(format_of(geometry.expert_dtype))
        if not self.parts.num_collectives:
            unused |= {"link_efficiency", "link_us"}
        if self.num_ranks == 1:
            unused.add("exchange_us")
        if geometry.sparse is None:
            unused.add("sparse_layer_us")
        if not self.parts.num_quantized:
            unused.add("quantize_us")
        unused |= {f"{narrow}{what}" for narrow in ("fp8", "fp4") if narrow not in formats for what in SHARES[1:]}
        return tuple(name for name in COEFFICIENTS if name not in unused)

    @property
    def held_out(self) -> dict[str, HeldOut]:
        """Held-out errors for models of this kind, by metric; empty unless all constants are those that ship."""
        shipped = shipped_constants()
        for name in COEFFICIENTS:
            if getattr(self, name) not in (None, shipped.values[name]):
                return {}
        return shipped.held_out_of("dense" if self.geometry.experts is None else "experts")

    def placed(self, **changes: Any) -> RooflineCost:
        """Return the cost with `changes`: another model, device or division, with the constants that hold for it.

        After a calibration these are its own only for what was measured. Constants of links hold for one kind of link.
        """
        cost = msgspec.structs.replace(self, **changes)
        known = self.uncertainty
        if known is None or known.has_measured(cost):
            return cost
        values: dict[str, float | None] = dict(known.elsewhere)
        if cost.hardware.link_kind != self.hardware.link_kind:
            values |= dict.fromkeys(LINKS)
        return msgspec.structs.replace(cost, **values)

    def alternatives(self) -> list[tuple[RooflineCost, RooflineCost]]:
        """Return pairs of costs that span this one's uncertainty (Uncertainty.alternatives); empty if it is not
        known.
        """
        return [] if self.uncertainty is None else self.uncertainty.alternatives(self)

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step. With several ranks, the others are idle."""
        return self.parts.step_ns(batch)

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of `num_steps` steps of decodes."""
        return self.parts.decode_ns(num_decodes, known_tokens, num_steps)

    def together_ns(self, batches: Sequence[Batch]) -> int:
        """Return the duration of a step of ranks in lock step, given one batch per rank; idle ranks are left out.

        All wait for the slowest; experts process the tokens of all ranks.
        """
        if len(batches) == 1:
            return self.step_ns(batches[0])
        return round(self.parts.together_ms(batches) * 1e6)

    def decodes_together_ns(self, decodes: Sequence[tuple[int, int]], num_steps: int) -> list[int]:
        """Return the durations of steps of decodes on ranks in lock step: (decodes, known tokens) per rank with
        work.
        """
        if len(decodes) == 1:
            return self.decode_ns(*decodes[0], 0, num_steps)
        return [round(ms * 1e6) for ms in self.parts.decodes_together_ms(decodes, num_steps)]
