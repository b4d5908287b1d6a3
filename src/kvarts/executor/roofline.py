"""A cost model derived from model and device: the roofline of one forward pass over a whole step.

Matrices are read once for all tokens of the step and multiplied with each token; attention reads the KV of every
sequence. Each of the two takes as long as its memory traffic or its arithmetic, whichever is longer (Williams,
Waterman and Patterson, Roofline, CACM 52:4, 2009), at a share of the device's peaks that calibration finds. What
devices tell each other is added, a constant time for the step, and one for each sequence in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from kvarts.errors import ConfigError
from kvarts.executor.step_parts import StepParts
from kvarts.executor.uncertainty import Uncertainty
from kvarts.limits import MOST_COUNT, MOST_MS, MOST_REPLICAS, check_number, check_whole
from kvarts.sched.plan import Batch

if TYPE_CHECKING:
    from kvarts.hardware import Device, Geometry

__all__ = ["COEFFICIENTS", "RooflineCost"]

LEAST_EFFICIENCY = 1e-12
COEFFICIENTS = (
    "compute_efficiency",
    "bandwidth_efficiency",
    "attention_efficiency",
    "step_us",
    "sequence_us",
    "expert_efficiency",
    "link_efficiency",
    "link_us",
)
"""What a calibration fits. The last three count only for models with experts and for several devices."""
WAYS = ("tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel")


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
    device's peaks that arithmetic, reading weights and reading KV reach; `expert_efficiency`: what experts reach of the
    first two. `link_efficiency`: the share of the link's rate that collectives reach; `link_us`: the constant time of
    each, both by default as the device says. `step_us`: constant time of a step, in microseconds; `sequence_us`: time
    for each sequence in it. The defaults are guesses; `kvarts calibrate` fits them.

    Arithmetic: 2 operations a token for each number of the matrices it is multiplied with; for attention, 4 for each
    token, head, number of the head and token attended to; the output head only for sequences that sample. Of E experts
    with k a token, T tokens read E (1 - (1 - k/E)^T), as if each token chose at random. Decodes with a sliding window
    count as if all had the mean length.

    With tensor parallelism, all of it is divided, KV as far as there are heads, and two all-reduces a layer move
    2 (n - 1) / n of the activations over the link. With data parallelism, each rank has requests of its own; a model
    with experts has them divided over all ranks, which are in lock step: each layer gathers the tokens of all ranks and
    scatters the results, instead of an all-reduce. `expert_parallel`: 1, or all devices of the ranks; experts are
    divided either way, as whole experts or each into parts, which takes alike long. With pipeline parallelism, a step
    is a round of as many parts of the batch as there are stages: matrices are read once for each part, and all else is
    divided over the parts. `graph_tokens`: steps of so many tokens at most run as CUDA graphs, which vLLM captures for
    1, 2, 4, multiples of 8 up to 256, and of 16 above: tokens are padded to the next; 0: there are none. `eager_us`: at
    least so long takes a step without a graph, to launch its kernels. `uncertainty`: of the coefficients, where a
    calibration says it.
    """

    llm: str
    device: str
    tensor_parallel: int = 1
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    compute_efficiency: float = 0.7
    bandwidth_efficiency: float = 0.8
    attention_efficiency: float = 0.7
    step_us: float = 1000.0
    sequence_us: float = 10.0
    data_parallel: int = 1
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    expert_efficiency: float = 0.7
    link_efficiency: float | None = None
    link_us: float | None = None
    graph_tokens: int = 0
    eager_us: float = 0.0
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
            if field.endswith("efficiency"):
                check_number(value, f"cost.{field}", least=LEAST_EFFICIENCY, most=MOST_MS)
            else:
                check_number(value, f"cost.{field}", most=MOST_MS)
        self._check_ways()
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
            raise ConfigError("is not modelled for ranks in lock step", field="cost.pipeline_parallel")

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
        """Return one of COEFFICIENTS; where it is left out, what the device says."""
        value = getattr(self, name)
        return float(getattr(self.hardware, name) if value is None else value)

    @property
    def active_coefficients(self) -> tuple[str, ...]:
        """The names of the coefficients that the time of a step depends on."""
        active: tuple[str, ...] = COEFFICIENTS[:5]
        if self.geometry.experts is not None:
            active += ("expert_efficiency",)
        if self.parts.num_collectives:
            active += ("link_efficiency", "link_us")
        return active

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
