"""A cost model derived from model and device: the roofline of one forward pass over a whole step.

Matrices are read once for all tokens of the step and multiplied with each token; attention reads the KV of every
sequence. Each of the two takes as long as its memory traffic or its arithmetic, whichever is longer (Williams, Waterman
and Patterson, Roofline, CACM 52:4, 2009), at a share of the device's peaks that calibration finds. Overheads that are
neither traffic nor arithmetic are added as constants: per step, per layer, per collective and per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import exp
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.base.errors import ConfigError, InputError, parts_of, problem_of
from kvarts.base.files import read_toml
from kvarts.base.limits import brief
from kvarts.core.sched.plan import Batch
from kvarts.cost.polynomial import LinearCost, PolynomialCost
from kvarts.cost.roofline_settings import (
    COEFFICIENTS,
    LINKS,
    SHARES,
    HeldOut,
    RooflineSettings,
    Uncertainty,
    canonical,
    format_of,
    shipped_constants,
)
from kvarts.cost.step_parts import StepParts

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["COEFFICIENTS", "CostSpec", "RooflineCost", "parse_cost"]


class RooflineCost(RooflineSettings, frozen=True, kw_only=True, tag_field="model", tag="roofline"):
    """Steps of the model `llm` on `device`. Raises ConfigError for unknown names and values out of range.

    `llm` and `device`: names as load_geometry and load_device take them. `weight_dtype` and `kv_dtype`: by default
    those of the model. `compute_efficiency`, `bandwidth_efficiency` and `attention_efficiency`: the shares of the
    device's peaks that arithmetic, reading weights and reading KV reach in 16 bits. `fp8_compute`, `fp8_bandwidth`,
    `fp4_compute` and `fp4_bandwidth`: factors on the first two for narrower weights. `attention_compute`: the factor on
    the first for the attention of prompts. `expert_efficiency`: the factor on the first two for large experts;
    `expert_compute`: a further factor on their arithmetic; `expert_half_mb`: the megabytes of one expert on a device at
    which it reaches half of that bandwidth. `link_efficiency`: the share of the link's rate that collectives reach;
    `link_us`: the constant time of an all-reduce; `exchange_us`: the constant time of a gather or a scatter of all
    ranks' tokens. The defaults of these three depend on the kind of link. `step_us`: constant time per step, in
    microseconds; `layer_us`: per layer; `expert_layer_us`: extra per layer with experts; `sparse_layer_us`: extra per
    layer with an indexer of sparse attention; `quantize_us`: extra per matrix whose input is quantized in blocks;
    `sequence_us`: per sequence. The defaults are the constants that ship (`roofline_settings.py`); `kvarts calibrate`
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

    `scale`: factors on constants, of the engine and of the generation of devices that were measured; None: those of the
    device alone, if it has any. `separate_passes`: a step computes prompts and decodes in two passes, one after the
    other, as SGLang schedules them. `speculative_tokens`: tokens drafted after each decode and verified in its step, by
    layers such as MTP; each costs one layer like those of the model and the output head. `acceptance`: for each of
    them, the probability that it and all before it are accepted. A decode then generates 1 + their sum tokens per step
    on average: that many steps of a replay, of one token each, take as long as one step of the engine. `uncertainty`:
    of the coefficients, if a calibration gives it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.parts

    @cached_property
    def parts(self) -> StepParts:
        """The parts that make up the time of a step."""
        return StepParts(self)

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
    def is_shipped(self) -> bool:
        """Whether all constants are those that ship."""
        values = shipped_constants().values
        return all(getattr(self, name) in (None, values[name]) for name in COEFFICIENTS)

    def held_out(self, load: str) -> dict[str, HeldOut]:
        """Return held-out errors for replays of this kind under `load` (open, closed, offline), by metric.

        Empty unless all constants are those that ship, and if no device of this vendor was measured.
        """
        if not self.is_shipped:
            return {}
        return shipped_constants().held_out_of(self.hardware.vendor, self.kind, load, self.weight_format)

    def placed(self, **changes: Any) -> RooflineCost:
        """Return the cost with `changes`: another model, device or division, with the constants that hold for it.

        After a calibration these are its own only for what was measured. Constants of links hold for one kind of link.
        """
        cost = msgspec.structs.replace(self, **changes)
        known = self.uncertainty
        if known is None or known.has_measured(cost.measured_on):
            return cost
        values: dict[str, float | None] = dict(known.elsewhere)
        if cost.hardware.link_kind != self.hardware.link_kind:
            values |= dict.fromkeys(LINKS)
        return msgspec.structs.replace(cost, **values)

    def served_by(self, engine: str, *, separate_passes: bool) -> RooflineCost:
        """Return the cost of steps of `engine`, a name or NAME==VERSION, with the factors that were fitted to it.

        The constants of a calibration are those of the engine that was measured, and have no factors.
        """
        cost = msgspec.structs.replace(self, separate_passes=separate_passes)
        if self.scale is not None or not self.is_shipped:
            return cost
        scale = shipped_constants().scale_of(canonical(engine), self)
        return msgspec.structs.replace(cost, scale=scale)

    def alternatives(self) -> list[tuple[RooflineCost, RooflineCost]]:
        """Return pairs of costs that span this one's uncertainty (Uncertainty.moves); empty if it is not known."""
        if self.uncertainty is None:
            return []
        moves = self.uncertainty.moves(self.measured_on, self.active_coefficients)
        return [(self._moved(move, 1), self._moved(move, -1)) for move in moves]

    def _moved(self, move: dict[str, float], sign: int) -> RooflineCost:
        changes = {name: self.coefficient(name) * exp(sign * by) for name, by in move.items()}
        return msgspec.structs.replace(self, uncertainty=None, **changes)

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


LINEAR_HINT = "'linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,context_token_ms=0',"

CostSpec = PolynomialCost | LinearCost | RooflineCost
"""The cost models that a file or a command line can name."""


def parse_cost(text: str) -> CostSpec:
    """Return the cost model that `text` names: `polynomial`, `linear:step_ms=5,decode_ms=0.1`, or a TOML file.

    The file must have a table `[cost]`. For a roofline, a table `[posterior]` gives its uncertainty.

    Raise ConfigError for any other text; MissingFileError or InputError for the file.
    """
    if text.endswith(".toml"):
        from pathlib import Path

        return _load_cost(Path(text))
    name, _, rest = text.partition(":")
    fields: dict[str, object] = {"model": name}
    for part in filter(None, rest.split(",")):
        key, equals, value = (text.strip() for text in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            raise ConfigError(f"{brief(part)} is not NAME=NUMBER", field="cost") from None
        assert equals or not value
        if key in fields:
            raise ConfigError(f"says {key} twice", field="cost", hint="Keep one of them.")
        fields[key] = number
    if fields == {"model": "linear"}:
        raise ConfigError(
            "says nothing: every step would take no time", field="cost", hint=f"Write {LINEAR_HINT} or some of it."
        )
    try:
        cost: CostSpec = msgspec.convert(fields, CostSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{brief(text)}: {problem_of(error)}",
            field="cost",
            hint=f"Use 'polynomial', {LINEAR_HINT} or the file that a calibration wrote.",
        ) from error
    return cost


def _load_cost(path: Path) -> CostSpec:
    values = read_toml(path, hint="Check the path of the cost model.")
    if "cost" not in values:
        raise InputError("is missing", path=path, field="cost", hint="The file must have a table [cost].")
    if values["cost"] == {"model": "linear"}:
        raise InputError("says nothing: every step would take no time", path=path, field="cost")
    try:
        cost: CostSpec = msgspec.convert(values["cost"], CostSpec)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=f"cost.{field}" if field else "cost") from error
    except ConfigError as error:
        raise ConfigError(error.what, path=path, field=error.field, hint=error.hint) from error
    if "posterior" not in values or not isinstance(cost, RooflineCost):
        return cost
    try:
        return msgspec.structs.replace(cost, uncertainty=msgspec.convert(values["posterior"], Uncertainty))
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=f"posterior.{field}" if field else "posterior") from error
    except ConfigError as error:
        field = (error.field or "").replace("uncertainty.", "posterior.")
        raise ConfigError(error.what, path=path, field=field, hint=error.hint) from error
