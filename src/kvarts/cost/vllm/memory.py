"""The memory that vLLM leaves for KV on a device: an interval with its parts, or the figure that a log states.

vLLM measures: available = share x total - weights - peak of activations - CUDA graphs - everything that is not
PyTorch's (v1/worker/gpu_worker.py, determine_available_memory). Only weights can be counted; the bounds of the other
parts enclose what public logs of vLLM 0.19 to 0.33 state (tests/cost/vllm/starts.toml).
"""

from __future__ import annotations

from math import ceil

import msgspec

from kvarts.core.kv.number_formats import dtype_bits
from kvarts.cost.hardware.device import Device
from kvarts.cost.hardware.fit import local_weight_bytes
from kvarts.cost.hardware.geometry import Geometry
from kvarts.cost.vllm.start import Start, StartSettings

__all__ = ["Available", "Part", "available_bytes"]

MIB, GIB = 1 << 20, 1 << 30


class Part(msgspec.Struct, frozen=True):
    """A part of the memory of one device, in bytes."""

    name: str
    least: int
    most: int


class Available(msgspec.Struct, frozen=True):
    """Bytes for KV on one device, at least and at most. `parts`: the memory and what it is used for; none if given."""

    least: int
    most: int
    parts: tuple[Part, ...] = ()

    @classmethod
    def exactly(cls, size_bytes: int) -> Available:
        """Return the figure of a log."""
        return cls(size_bytes, size_bytes)

    def lines(self) -> list[str]:
        """Return the interval and its parts as text, in GiB."""
        if not self.parts:
            return [f"{self.least / GIB:.2f} GiB, as given"]
        total, *used = self.parts
        text = f"{self.least / GIB:.2f} to {self.most / GIB:.2f} GiB: {_range(total)} to use"
        return [text, *(f"- {_range(part)} {part.name}" for part in used)]

    def values(self) -> dict[str, object]:
        """Return the JSON fields."""
        parts = {part.name: {"least_bytes": part.least, "most_bytes": part.most} for part in self.parts}
        return {"least_bytes": self.least, "most_bytes": self.most, "parts": parts}


def _range(part: Part) -> str:
    low, high = f"{part.least / GIB:.2f}", f"{part.most / GIB:.2f}"
    return low if low == high else f"{low} to {high}"


def available_bytes(geometry: Geometry, device: Device, settings: StartSettings, start: Start) -> Available:
    """Return the bytes that vLLM leaves for KV on each device of a model.

    Activations: those of a step of the most tokens, and the logits and sampling buffers of the most sequences.
    """
    usable = device.usable_bytes
    parts = (
        Part("to use", *(ceil(size * settings.memory_fraction) for size in usable)),
        _weights(geometry, settings),
        _activations(geometry, settings, start),
        _graphs(geometry, settings),
        Part("NCCL", *((0, 0) if settings.tensor_parallel * settings.pipeline_parallel == 1 else (150 * MIB, 2 * GIB))),
        Part("context", 0, 900 * MIB),
    )
    least = parts[0].least - sum(part.most for part in parts[1:])
    most = parts[0].most - sum(part.least for part in parts[1:])
    return Available(least, most, parts)


def _weights(geometry: Geometry, settings: StartSettings) -> Part:
    """Return the weights: at least those counted; at most with a vision tower and what loaders add."""
    size = local_weight_bytes(geometry, settings.tensor_parallel, 1, settings.pipeline_parallel)
    return Part("weights", int(size * 0.98), int(size * 1.04) + 3 * GIB // 2)


def _activations(geometry: Geometry, settings: StartSettings, start: Start) -> Part:
    """Return the peak of the profile batch."""
    number = float(dtype_bits(geometry.dtype, field="dtype")) / 8
    width = geometry.intermediate_size
    if geometry.experts is not None:
        experts = geometry.experts
        width = max(width if geometry.num_dense_layers else 0, experts.per_token * experts.intermediate_size)
    token = (2 * geometry.hidden_size + (geometry.num_heads * geometry.head_dim + width) / settings.tensor_parallel) * number
    step = start.max_num_batched_tokens * token
    logits = 4 * start.max_num_seqs * geometry.vocab_size
    return Part("activations", int(step / 2), int(4 * step + 3 * logits) + GIB // 2)


def _graphs(geometry: Geometry, settings: StartSettings) -> Part:
    """Return the CUDA graphs of the sizes that vLLM captures."""
    return Part("CUDA graphs", 0, GIB // 2 + geometry.num_layers * 24 * MIB)
