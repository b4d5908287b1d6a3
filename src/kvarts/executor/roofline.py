"""A cost model derived from model and device: the roofline of one forward pass over a whole step.

Matrices are read once for all tokens of the step and multiplied with each token; attention reads the KV of every
sequence. Each of the two takes as long as its memory traffic or its arithmetic, whichever is longer (Williams,
Waterman and Patterson, Roofline, CACM 52:4, 2009), at a share of the device's peaks that calibration finds. A constant
time is added for the step, and one for each sequence in it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvarts.errors import ConfigError
from kvarts.executor.manysteps import FEW_STEPS, whole_ns
from kvarts.limits import MOST_MS, MOST_REPLICAS, check_number, check_whole
from kvarts.sched.plan import Batch, Chunk

if TYPE_CHECKING:
    from kvarts.hardware import Device, Geometry

__all__ = ["COEFFICIENTS", "RooflineCost"]

LEAST_EFFICIENCY = 1e-12
COEFFICIENTS = ("compute_efficiency", "bandwidth_efficiency", "attention_efficiency", "step_us", "sequence_us")


class RooflineCost(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="model", tag="roofline", dict=True
):
    """Steps of the model `llm` on `device`. Raises ConfigError for unknown names and values out of range.

    `llm` and `device`: names as load_geometry and load_device take them. `weight_dtype` and `kv_dtype`: by default
    those of the model. `compute_efficiency`, `bandwidth_efficiency` and `attention_efficiency`: the shares of the
    device's peaks that arithmetic, reading weights and reading KV reach. `step_us`: constant time of a step, in
    microseconds; `sequence_us`: time for each sequence in it. The defaults are guesses; `kvarts calibrate` fits them.

    Arithmetic: 2 operations a token for each number of the matrices it is multiplied with; for attention, 4 for each
    token, head, number of the head and token attended to; the output head only for sequences that sample. Of E experts
    with k a token, T tokens read E (1 - (1 - k/E)^T), as if each token chose at random. Decodes with a sliding window
    count as if all had the mean length. With tensor parallelism, all of it is divided, KV as far as there are heads,
    and two all-reduces a layer move 2 (n - 1) / n of the activations over the link.
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

    def __post_init__(self) -> None:
        check_whole(self.tensor_parallel, "cost.tensor_parallel", most=MOST_REPLICAS)
        for field in COEFFICIENTS:
            value = getattr(self, field)
            if field.endswith("efficiency"):
                check_number(value, f"cost.{field}", least=LEAST_EFFICIENCY, most=MOST_MS)
            else:
                check_number(value, f"cost.{field}", most=MOST_MS)
        if self.tensor_parallel > 1 and not self.hardware.link_bytes_per_s:
            raise ConfigError(f"{self.device} has no link to a second one", field="cost.tensor_parallel")
        _ = self._parts

    @cached_property
    def geometry(self) -> Geometry:
        """The geometry of the model."""
        from kvarts.hardware.geometry import load_geometry  # imported only if a roofline is used

        return load_geometry(self.llm).stored_as(self.weight_dtype)

    @cached_property
    def hardware(self) -> Device:
        """The device."""
        from kvarts.hardware.device import load_device

        return load_device(self.device)

    @cached_property
    def _parts(self) -> _Parts:
        return _Parts(self)

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step."""
        parts = self._parts
        chunks = batch.chunks
        num_decodes = batch.num_decodes
        if not chunks:
            return round(parts.decode_ms(num_decodes, batch.decode_known_tokens, parts.fixed_ms(num_decodes)) * 1e6)
        num_tokens, num_samples, num_sequences = num_decodes, num_decodes, num_decodes
        attention_ms = 0.0
        for chunk in chunks:
            num_tokens += chunk.num_tokens
            num_samples += chunk.is_last
            num_sequences += 1
            attention_ms += parts.chunk_ms(chunk)
        ms = parts.linear_ms(num_tokens, num_samples) + num_sequences * parts.sequence_ms
        if num_decodes:
            attention_ms += parts.context_ms(num_decodes, batch.decode_known_tokens)
        return round((ms + attention_ms) * 1e6)

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of steps of decodes."""
        parts = self._parts
        fixed_ms = parts.fixed_ms(num_decodes)
        if num_steps < FEW_STEPS or parts.has_windows:
            return [
                round(parts.decode_ms(num_decodes, known, fixed_ms) * 1e6)
                for known in range(known_tokens, known_tokens + num_steps * num_decodes, num_decodes)
            ]
        # The operations of `decode_ms`, in the same order, so that both round alike.
        ms = np.arange(known_tokens, known_tokens + num_steps * num_decodes, num_decodes) * parts.context_token_ms
        ms += fixed_ms
        ms *= 1e6
        return whole_ns(ms)


class _Parts:
    """The constants of a RooflineCost, in milliseconds, and the durations of the parts of a step."""

    def __init__(self, cost: RooflineCost) -> None:
        from kvarts.hardware.dtypes import dtype_bits
        from kvarts.hardware.fit import local_kv_bytes_per_token

        geometry, device, ways = cost.geometry, cost.hardware, cost.tensor_parallel
        flops = device.flops_per_s(geometry.weight_dtype) * cost.compute_efficiency / 1e3
        expert_flops = device.flops_per_s(geometry.expert_dtype) * cost.compute_efficiency / 1e3
        bandwidth = device.bandwidth_bytes_per_s * cost.bandwidth_efficiency / 1e3
        number_bytes = float(dtype_bits(geometry.dtype, field="dtype")) / 8
        matrix_bytes = float(dtype_bits(geometry.weight_dtype, field="weight_dtype")) / 8
        expert_bytes = float(dtype_bits(geometry.expert_dtype, field="expert_dtype")) / 8
        self.step_ms = cost.step_us / 1e3
        self.sequence_ms = cost.sequence_us / 1e3
        self._common_read_ms = geometry.common_matrix * matrix_bytes / ways / bandwidth
        self._common_token_ms = 2 * geometry.common_matrix / ways / flops
        self._head_read_ms = geometry.head_matrix * number_bytes / ways / bandwidth
        self._head_sample_ms = 2 * geometry.head_matrix / ways / (device.flops_per_s(geometry.dtype) / 1e3)
        self._head_sample_ms /= cost.compute_efficiency
        self._experts = geometry.experts
        if self._experts is not None:
            numbers = self._experts.num_layers * geometry.expert_matrix / ways
            self._expert_read_ms = numbers * expert_bytes / bandwidth
            self._expert_token_ms = 2 * numbers * self._experts.per_token / expert_flops
        self._reduce_token_ms = 0.0
        if ways > 1:
            moved = 2 * geometry.num_layers * geometry.hidden_size * number_bytes * 2 * (ways - 1) / ways
            self._reduce_token_ms = moved / (device.link_bytes_per_s / 1e3)
        # Attention, for one layer.
        kv_bytes = local_kv_bytes_per_token(geometry, ways, cost.kv_dtype) / geometry.num_layers
        self._kv_read_ms = kv_bytes / (device.bandwidth_bytes_per_s * cost.attention_efficiency / 1e3)
        attention_flops = device.flops_per_s(geometry.dtype) * cost.compute_efficiency / 1e3
        latent = geometry.latent
        if latent is None:
            prompt_operations = decode_operations = 4 * geometry.num_heads * geometry.head_dim
        else:
            # A prompt expands keys and values; a decode computes on the latent ones.
            prompt_operations = 2 * geometry.num_heads * (latent.nope_dim + latent.rope_dim + latent.v_dim)
            decode_operations = 2 * geometry.num_heads * (2 * latent.kv_rank + latent.rope_dim)
        self._pair_ms = prompt_operations / ways / attention_flops
        self._decode_pair_ms = max(decode_operations / ways / attention_flops, self._kv_read_ms)
        self._layers = list(geometry.layers_by_window.items())
        self.has_windows = any(window is not None for window, _ in self._layers)
        self.context_token_ms = self._decode_pair_ms * geometry.num_layers

    def linear_ms(self, num_tokens: int, num_samples: int) -> float:
        """Return the time of all but attention and the constant of each sequence, for a step of `num_tokens` tokens."""
        read_ms = self._common_read_ms
        work_ms = self._common_token_ms * num_tokens
        if num_samples:
            read_ms += self._head_read_ms
            work_ms += self._head_sample_ms * num_samples
        experts = self._experts
        if experts is not None:
            share = 1.0 - (1.0 - experts.per_token / experts.count) ** num_tokens
            read_ms += self._expert_read_ms * experts.count * share
            work_ms += self._expert_token_ms * num_tokens
        longer_ms = read_ms if read_ms > work_ms else work_ms
        return longer_ms + self._reduce_token_ms * num_tokens + self.step_ms

    def fixed_ms(self, num_decodes: int) -> float:
        """Return the time of a step of decodes without attention."""
        return self.linear_ms(num_decodes, num_decodes) + num_decodes * self.sequence_ms

    def decode_ms(self, num_decodes: int, known_tokens: int, fixed_ms: float) -> float:
        """Return the time of a step of decodes that know `known_tokens` tokens together."""
        return self.context_ms(num_decodes, known_tokens) + fixed_ms

    def context_ms(self, num_decodes: int, known_tokens: int) -> float:
        """Return the time of attention of decodes."""
        if not self.has_windows:
            return known_tokens * self.context_token_ms
        pairs = 0.0
        for window, count in self._layers:
            seen = known_tokens if window is None else min(known_tokens, window * num_decodes)
            pairs += seen * count
        return pairs * self._decode_pair_ms

    def chunk_ms(self, chunk: Chunk) -> float:
        """Return the time of attention of a chunk: every token attends to itself and to all tokens before it."""
        ms = 0.0
        start, end = chunk.start, chunk.end
        for window, count in self._layers:
            pairs = _pairs(end, window) - _pairs(start, window)
            read = end if window is None else min(end, window + end - start)
            work_ms, read_ms = pairs * self._pair_ms, read * self._kv_read_ms
            ms += count * (work_ms if work_ms > read_ms else read_ms)
        return ms


def _pairs(num_tokens: int, window: int | None) -> int:
    """Return how many tokens the first `num_tokens` attend to in sum, each to at most the last `window`."""
    if window is None or num_tokens <= window:
        return num_tokens * (num_tokens + 1) // 2
    return window * (window + 1) // 2 + (num_tokens - window) * window
