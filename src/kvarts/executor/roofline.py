"""A cost model derived from model and device: the roofline of one forward pass over a whole step.

Matrices are read once for all tokens of the step and multiplied with each token; attention reads the KV of every
sequence. Each of the two takes as long as its memory traffic or its arithmetic, whichever is longer (Williams,
Waterman and Patterson, Roofline, CACM 52:4, 2009), at a share of the device's peaks that calibration finds. What
neither moves bytes nor multiplies is added: constant times of a step, of each layer, of each collective and of each
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.combines import check_combination
from kvarts.errors import ConfigError
from kvarts.executor.constants import COEFFICIENTS, HeldOut, shipped_constants
from kvarts.executor.step_parts import StepParts, format_of
from kvarts.executor.uncertainty import Uncertainty
from kvarts.limits import MOST_COUNT, MOST_DRAFTED, MOST_MS, MOST_REPLICAS, check_number, check_whole
from kvarts.sched.plan import Batch

if TYPE_CHECKING:
    from kvarts.hardware import Device, Geometry

__all__ = ["COEFFICIENTS", "RooflineCost"]

LEAST_EFFICIENCY = 1e-12
SHARES = ("_efficiency", "_compute", "_bandwidth")
"""How the names of coefficients end that are shares, and may not be 0."""
WAYS = ("tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel")


def _shipped(name: str) -> Any:
    """Return a field of a struct; its default is the constant `name` in constants.toml."""
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
    device's peaks that arithmetic, reading weights and reading KV reach in 16 bits; `fp8_compute`, `fp8_bandwidth`,
    `fp4_compute` and `fp4_bandwidth`: what narrower weights reach of the first two. `expert_efficiency`: what large
    experts reach of the first two; `expert_half_mb`: the megabytes of one expert on a device at which it reaches half
    of that bandwidth. `link_efficiency`: the share of the link's rate that collectives reach; `link_us`: the constant
    time of an all-reduce, and `exchange_us`: of a gather or a scatter of the tokens of all ranks; all by default as the
    kind of link says. `step_us`: constant time of a step, in microseconds; `layer_us`: of each layer, and
    `expert_layer_us`: more of each layer with experts; `sequence_us`: of each sequence. The defaults are the constants
    that ship, see constants.py; `kvarts calibrate` fits them.

    Arithmetic: 2 operations a token for each number of the matrices it is multiplied with; for attention, 4 for each
    token, head, number of the head and token attended to; the output head only for sequences that sample. Of E experts
    with k a token, T tokens read E (1 - (1 - k/E)^T), as if each token chose at random.

    With tensor parallelism, all of it is divided, KV as far as there are heads, and two all-reduces a layer move
    2 (n - 1) / n of the activations over the link. With data parallelism, each rank has requests of its own; a model
    with experts has them divided over all ranks, which are in lock step: each layer gathers the tokens of all ranks and
    scatters the results, instead of an all-reduce. `expert_parallel`: 1, where each expert is divided into parts, or
    all devices of the ranks, over which whole experts are divided. With pipeline parallelism, a step is a round of as
    many parts of the batch as there are stages: matrices are read once for each part, and all else is divided over the
    parts. `graph_tokens`: steps of so many tokens at most run as CUDA graphs, which vLLM captures for 1, 2, 4,
    multiples of 8 up to 256, and of 16 above: tokens are padded to the next; 0: there are none. A step without a graph
    takes at least as long as launching its kernels: `eager_us`, `eager_layer_us` for each layer and
    `eager_expert_layer_us` more for each layer with experts. Decodes with a sliding window count as if all had the mean
    length. `separate_passes`: prompts and decodes of a step are not computed together, but one after the other, as
    SGLang schedules them. `speculative_tokens`: drafted after each decode and verified in its step, by layers such as
    MTP: for each, a layer like those of the model and the output head. `acceptance`: for each of them, the share of
    drafts in which it and all before it are accepted. A decode then makes 1 + their sum tokens per step, in the mean:
    that many steps of a replay, each of one token, take as long as one of the engine. `uncertainty`: of the
    coefficients, where a calibration says it.
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
            linked = None  # each rank is an engine by itself
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
        """The tokens that a decode makes in a step, in the mean."""
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
        """The parts of which the time of a step is made."""
        return StepParts(self)

    @property
    def num_ranks(self) -> int:
        """How many engines are in lock step: the ranks of data parallelism, where experts are divided over them."""
        return 1 if self.geometry.experts is None else self.data_parallel

    def coefficient(self, name: str) -> float:
        """Return one of COEFFICIENTS; where it is left out, the guess for the kind of link that the device has."""
        value = getattr(self, name)
        return float(shipped_constants().of_link(name, self.hardware.link_kind) if value is None else value)

    @property
    def active_coefficients(self) -> tuple[str, ...]:
        """The names of the coefficients that the time of a step depends on, in the order of COEFFICIENTS."""
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
        unused |= {f"{narrow}{what}" for narrow in ("fp8", "fp4") if narrow not in formats for what in SHARES[1:]}
        return tuple(name for name in COEFFICIENTS if name not in unused)

    @property
    def held_out(self) -> dict[str, HeldOut]:
        """Held-out errors of models of this kind, by metric; nothing unless all constants are those that ship."""
        shipped = shipped_constants()
        for name in COEFFICIENTS:
            if getattr(self, name) not in (None, shipped.values[name]):
                return {}
        return shipped.held_out_of("dense" if self.geometry.experts is None else "experts")

    def alternatives(self) -> list[tuple[RooflineCost, RooflineCost]]:
        """Return pairs of costs that say how uncertain this one is, see Uncertainty; none where that is not known."""
        return [] if self.uncertainty is None else self.uncertainty.alternatives(self)

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step; of several ranks, while the others have nothing to do."""
        return self.parts.step_ns(batch)

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of steps of decodes."""
        return self.parts.decode_ns(num_decodes, known_tokens, num_steps)

    def together_ns(self, batches: Sequence[Batch]) -> int:
        """Return the duration of a step of ranks in lock step, each with a batch; a rank left out has none.

        All wait for the slowest; experts see the tokens of all.
        """
        if len(batches) == 1:
            return self.step_ns(batches[0])
        return round(self.parts.together_ms(batches) * 1e6)

    def decodes_together_ns(self, decodes: Sequence[tuple[int, int]], num_steps: int) -> list[int]:
        """Return the durations of steps of decodes on ranks in lock step: (decodes, known tokens) of each with work."""
        if len(decodes) == 1:
            return self.decode_ns(*decodes[0], 0, num_steps)
        return [round(ms * 1e6) for ms in self.parts.decodes_together_ms(decodes, num_steps)]
