"""The parts of a step's time, of the settings of a roofline: matrices, experts, attention, and communication.

The formulas depend on a step only by arithmetic and by the methods `larger`, `smaller`, `fewer`, `root` and `padded`;
step_arrays.py overrides these, so that the same formulas take arrays, with one element per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from kvarts.core.executor import are_many, whole_ns
from kvarts.core.sched.plan import Batch
from kvarts.cost.roofline_settings import format_of

if TYPE_CHECKING:
    from kvarts.core.kv.layers import KvLayer
    from kvarts.cost.hardware.geometry import Sparse
    from kvarts.cost.roofline_settings import RooflineSettings

__all__ = ["StepParts", "graph_size"]


class LayerCost(NamedTuple):
    """Layers that attend to the same span. `span`: the largest number of tokens attended to; None for all.

    `work`, `read`: arithmetic and bytes per attended token in one of these layers, relative to the model's first layer;
    `decode`: the relative cost per attended token of all these layers in a decode.
    """

    span: int | None
    num_layers: int
    work: float
    read: float
    decode: float


class StepParts:
    """The constants of a RooflineCost, in milliseconds, and the durations of the parts of a step."""

    def __init__(self, cost: RooflineSettings) -> None:
        from kvarts.core.kv.number_formats import dtype_bits, flops_dtype, has_block_scales
        from kvarts.cost.hardware.fit import local_layer_bytes_per_token

        cost = cost.scaled
        geometry, device, ways = cost.geometry, cost.hardware, cost.tensor_parallel
        of_weights, of_experts = _reached(cost, geometry.weight_dtype), _reached(cost, geometry.expert_dtype)
        flops = device.flops_per_s(geometry.weight_dtype) * of_weights.compute / 1e3
        expert_flops = device.flops_per_s(geometry.expert_dtype) * of_experts.compute / 1e3
        peak = device.bandwidth_bytes_per_s / 1e3
        bandwidth = peak * cost.bandwidth_efficiency
        number_bytes = float(dtype_bits(geometry.dtype, field="dtype")) / 8
        matrix_bytes = float(dtype_bits(geometry.weight_dtype, field="weight_dtype")) / 8
        expert_bytes = float(dtype_bits(geometry.expert_dtype, field="expert_dtype")) / 8
        self._stages = cost.pipeline_parallel
        self.graph_tokens = 0 if device.is_cpu else cost.graph_tokens
        self.separates = cost.separate_passes
        self._num_drafted = cost.speculative_tokens
        self.num_verified = 1 + cost.speculative_tokens
        """Tokens that a decode computes per step: its own and the drafted ones."""
        self._tokens_per_step = cost.tokens_per_step
        self.composes = self.separates or self._num_drafted > 0
        """Whether a step of prompts and decodes is composed of two passes, or of one and its difference to another."""
        expert_layers = 0 if geometry.experts is None else geometry.experts.num_layers
        launch_us = geometry.num_layers * cost.eager_layer_us + expert_layers * cost.eager_expert_layer_us
        self._eager_ms = cost.eager_us / 1e3
        layers_us = geometry.num_layers * cost.layer_us + expert_layers * cost.expert_layer_us
        if geometry.sparse is not None:
            layers_us += geometry.sparse.num_indexers * cost.sparse_layer_us
        scaled = {
            dtype: has_block_scales(dtype) and flops_dtype(dtype) in device.tflops
            for dtype in (geometry.weight_dtype, geometry.expert_dtype)
        }
        num_dense = 4 * geometry.num_layers - 2 * expert_layers
        self.num_quantized = (
            num_dense * scaled[geometry.weight_dtype] + 2 * expert_layers * scaled[geometry.expert_dtype]
        )
        """Matrices whose inputs are quantized at run time: those of attention, and two of feed-forward, per layer."""
        layers_us += self.num_quantized * cost.quantize_us
        self.step_ms = (cost.step_us + layers_us) / 1e3
        self._launch_ms = 0.0 if device.is_cpu else launch_us / 1e3
        """The time that a step without a CUDA graph takes longer."""
        self.sequence_ms = cost.sequence_us / 1e3
        # A state is read and written once per step, however many tokens of the sequence the step has.
        self.sequence_ms += 2 * geometry.state_bytes / ways / bandwidth
        self._common_read_ms = geometry.common_matrix * matrix_bytes / ways / (peak * of_weights.bandwidth)
        self._common_token_ms = 2 * geometry.common_matrix / ways / flops
        self._head_read_ms = geometry.head_matrix * number_bytes / ways / bandwidth
        self._head_sample_ms = 2 * geometry.head_matrix / ways / (device.flops_per_s(geometry.dtype) / 1e3)
        self._head_sample_ms /= cost.compute_efficiency
        self._experts = geometry.experts
        self.num_ranks = cost.num_ranks
        if self._experts is not None:
            every = ways * self.num_ranks
            numbers = expert_layers * geometry.expert_matrix / every
            local_mb = geometry.expert_matrix * expert_bytes / (1 if cost.expert_parallel > 1 else every) / 1e6
            reached = of_experts.bandwidth * cost.expert_efficiency / (1 + cost.expert_half_mb / local_mb)
            self._expert_read_ms = numbers * expert_bytes / (peak * min(reached, 1.0))
            expert_flops *= cost.expert_efficiency * cost.expert_compute
            self._expert_token_ms = 2 * numbers * self._experts.per_token / expert_flops
        self._expert_devices = cost.expert_parallel
        self._above = busiest_of(cost.expert_parallel)
        self._set_communication(cost, expert_layers)
        # Attention, for one layer: the first that attends.
        first = geometry.attending[0].layer
        kv_bytes = local_layer_bytes_per_token(geometry, first, ways, cost.kv_dtype)
        self._kv_read_ms = kv_bytes / (device.bandwidth_bytes_per_s * cost.attention_efficiency / 1e3)
        attention_flops = device.flops_per_s(geometry.dtype) * cost.compute_efficiency / 1e3
        latent = geometry.latent
        if latent is None:
            prompt_operations = decode_operations = 2 * geometry.num_heads * first.head_numbers
        else:
            # A prompt expands keys and values; a decode computes on the latents.
            prompt_operations = 2 * geometry.num_heads * (latent.nope_dim + latent.rope_dim + latent.v_dim)
            decode_operations = 2 * geometry.num_heads * (2 * latent.kv_rank + latent.rope_dim)
        self._pair_ms = prompt_operations / ways / (attention_flops * cost.attention_compute)
        decode_operations *= self.num_verified
        self._decode_pair_ms = max(decode_operations / ways / attention_flops, self._kv_read_ms)
        self._layers: list[LayerCost] = []
        for group in geometry.attending:
            layer = group.layer
            work = layer.head_numbers / first.head_numbers
            read = local_layer_bytes_per_token(geometry, layer, ways, cost.kv_dtype) / kv_bytes
            decode = 1.0
            if (work, read) != (1.0, 1.0):
                slowest_ms = max(work * decode_operations / ways / attention_flops, read * self._kv_read_ms)
                decode = slowest_ms / self._decode_pair_ms
            self._layers.append(LayerCost(layer.span, group.num_layers, work, read, decode * group.num_layers))
        if geometry.sparse is not None:
            self._layers = self._sparse_layers(cost, geometry.sparse, first, decode_operations / ways)
        # A drafted token takes a layer like those of the model, and the output head.
        self._draft_share = cost.speculative_tokens / geometry.num_layers
        self._draft_ms = cost.speculative_tokens * self._head_read_ms
        self._draft_ms += self._draft_share * (layers_us / 1e3 + self._collectives_ms)
        self.has_windows = geometry.has_spans or geometry.sparse is not None
        self.context_token_ms = self._decode_pair_ms * sum(layer.decode for layer in self._layers)
        self._is_linear = not (self.has_windows or self._stages > 1)
        """Whether the time of decodes in a CUDA graph is linear in their known tokens."""

    def _set_communication(self, cost: RooflineSettings, expert_layers: int) -> None:
        """Set the constants of communication between devices.

        One all-reduce follows attention, and another the rest of the layer, unless experts are divided over ranks: then
        all tokens are gathered before the experts, and the results scattered after them.
        """
        from kvarts.core.kv.number_formats import dtype_bits

        geometry, device, ways = cost.geometry, cost.hardware, cost.tensor_parallel
        self._reduce_token_ms = self._exchange_token_ms = self._pass_token_ms = 0.0
        num_reduces = num_exchanges = num_passes = 0
        link = device.link_bytes_per_s * cost.coefficient("link_efficiency") / 1e3
        token_bytes = geometry.hidden_size * float(dtype_bits(geometry.dtype, field="dtype")) / 8
        if ways > 1:
            num_reduces = 2 * geometry.num_layers - (expert_layers if self.num_ranks > 1 else 0)
            self._reduce_token_ms = num_reduces * token_bytes * 2 * (ways - 1) / ways / link
        if self.num_ranks > 1:
            every = ways * self.num_ranks
            num_exchanges = 2 * expert_layers
            self._exchange_token_ms = num_exchanges * token_bytes * (every - 1) / every / link
        if self._stages > 1:
            num_passes = self._stages - 1
            self._pass_token_ms = num_passes * token_bytes / link
        self.num_collectives = num_reduces + num_exchanges + num_passes
        self._collectives_ms = (num_reduces + num_passes) * cost.coefficient("link_us") / 1e3
        self._collectives_ms += num_exchanges * cost.coefficient("exchange_us") / 1e3

    def _sparse_layers(
        self, cost: RooflineSettings, sparse: Sparse, first: KvLayer, decode_operations: float
    ) -> list[LayerCost]:
        """Return the attention to chosen tokens, the indexers, which score all tokens in fp8, and the other layers.

        The key of an indexer is read on every device. Its queries are on every device, or divided as heads are.
        """
        from kvarts.cost.hardware.fit import local_layer_bytes_per_token

        geometry, ways = cost.geometry, cost.tensor_parallel
        keyed = next((group.layer for group in geometry.attending if group.layer.fixed_bytes), first)
        all_bytes, chosen_bytes, first_bytes = (
            local_layer_bytes_per_token(geometry, layer, ways, cost.kv_dtype)
            for layer in (keyed, msgspec.structs.replace(keyed, fixed_bytes=0), first)
        )
        chosen, index = chosen_bytes / first_bytes, (all_bytes - chosen_bytes) / first_bytes
        flops = cost.hardware.flops_per_s(geometry.dtype) * cost.compute_efficiency / 1e3
        decode = max(decode_operations / flops, chosen * self._kv_read_ms) / self._decode_pair_ms
        num_sparse = geometry.num_attending_layers - sparse.num_dense
        layers = [LayerCost(sparse.top_tokens, num_sparse, 1.0, chosen, decode * num_sparse)]
        if sparse.num_dense:
            layers.append(LayerCost(None, sparse.num_dense, 1.0, chosen, decode * sparse.num_dense))
        if sparse.num_indexers:
            num_heads = sparse.num_heads / ways if sparse.is_divided else sparse.num_heads
            score_ms = 2 * num_heads * sparse.key_dim / (flops * cost.fp8_compute)
            score_ms *= cost.hardware.flops_per_s(geometry.dtype) / cost.hardware.flops_per_s("fp8")
            decode = max(score_ms * self.num_verified, index * self._kv_read_ms) / self._decode_pair_ms
            num = sparse.num_indexers
            layers.append(LayerCost(None, num, score_ms / self._pair_ms, index, decode * num))
        return layers

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step. With several ranks, the others are idle."""
        if batch.num_decodes:
            if not batch.chunks:
                num_decodes = batch.num_decodes
                return round(self.decode_ms(num_decodes, batch.decode_known_tokens, self.fixed_ms(num_decodes)) * 1e6)
            if self.composes:
                return round(self._composed_ms([batch], lambda batches: self._pass_ms(batches[0])) * 1e6)
        return round(self._pass_ms(batch) * 1e6)

    def _pass_ms(self, batch: Batch) -> float:
        """Return the time of one pass over prompts and decodes together."""
        num_decodes = batch.num_decodes
        num_tokens = num_samples = num_decodes * self.num_verified
        num_sequences = num_decodes
        chunks_ms = 0.0
        for chunk in batch.chunks:
            num_tokens += chunk.num_tokens
            num_samples += chunk.is_last
            num_sequences += 1
            chunks_ms += self.chunk_ms(chunk.start, chunk.end)
        known = batch.decode_known_tokens
        return self.pass_ms(num_decodes, known, num_tokens, num_samples, num_sequences, chunks_ms)

    def pass_ms(
        self,
        num_decodes: int,
        known_tokens: int,
        num_tokens: int,
        num_samples: int,
        num_sequences: int,
        chunks_ms: float,
    ) -> float:
        """Return the time of one pass, given the counts of its work and the time of its chunks' attention."""
        ms = self.linear_ms(num_tokens, num_samples, num_sequences) + num_sequences * self.sequence_ms
        if self._num_drafted:
            ms = ms + self._drafting_ms(num_decodes, num_decodes) * (num_decodes > 0)
        attention_ms = chunks_ms + self.context_ms(num_decodes, known_tokens)
        return self.at_least(ms + attention_ms / self.divided_by(num_sequences), num_tokens)

    def _composed_ms(self, batches: Sequence[Batch], pass_ms: Callable[[Sequence[Batch]], float]) -> float:
        """Return the time that a step of prompts and decodes counts for, per token of the decodes.

        Prompts count with the time that they add to the step, or with a separate pass. With drafts, the remaining time
        is divided by the tokens that a decode generates per step. `batches`: one per rank. `pass_ms`: returns the time
        of one pass over batches.
        """
        decodes, prompts = self.apart(batches)
        decodes_ms = pass_ms(decodes) if decodes else 0.0
        rest_ms = 0.0
        if prompts:
            rest_ms = pass_ms(prompts if self.separates or not decodes else batches)
        return self.composed_ms(decodes_ms, rest_ms)

    def apart(self, batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
        """Return the decodes of a step, and its prompts, each with one batch per rank that has any."""
        decodes = [
            Batch((), batch.num_decodes, batch.decode_known_tokens, batch.pool_tokens)
            for batch in batches
            if batch.num_decodes
        ]
        prompts = [Batch(batch.chunks, 0, 0, batch.pool_tokens) for batch in batches if batch.chunks]
        return decodes, prompts

    def composed_ms(self, decodes_ms: float, rest_ms: float) -> float:
        """Return the time that a step counts for: `decodes_ms`, that of a pass over its decodes, and `rest_ms`.

        `rest_ms`: the time of a separate pass over prompts, or of one pass over all of the step; 0 without prompts.
        """
        prompts_ms = rest_ms if self.separates else self.larger(0.0, rest_ms - decodes_ms)
        return decodes_ms / self._tokens_per_step + prompts_ms

    def decode_ns(self, num_decodes: int, known_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of `num_steps` steps of decodes, where every sequence grows by one token per step."""
        fixed_ms = self.fixed_ms(num_decodes)
        are_few = not are_many(num_steps)
        each_known = range(known_tokens, known_tokens + num_steps * num_decodes, num_decodes)
        if not self._is_simple(num_decodes):
            return [round(self.decode_ms(num_decodes, known, fixed_ms) * 1e6) for known in each_known]
        # The operations of `decode_ms`, in the same order, so that all round identically.
        if are_few:
            context_token_ms = self.context_token_ms
            if not self._num_drafted:
                return [round((known * context_token_ms + fixed_ms) * 1e6) for known in each_known]
            per_step = self._tokens_per_step
            return [round((known * context_token_ms + fixed_ms) / per_step * 1e6) for known in each_known]
        ms = np.arange(known_tokens, known_tokens + num_steps * num_decodes, num_decodes) * self.context_token_ms
        ms += fixed_ms
        if self._num_drafted:
            ms /= self._tokens_per_step
        ms *= 1e6
        return whole_ns(ms)

    def divided_by(self, num_sequences: int) -> float:
        """Return the number of micro-batches of a step: one per stage, each with at least one sequence."""
        return 1 if self._stages == 1 else self.larger(1, self.smaller(self._stages, num_sequences))

    def _linear_ms(self, num_tokens: int, num_samples: int, num_routed: int, num_parts: float) -> float:
        """Return the time of matrices. `num_routed`: tokens of all ranks, which the experts process."""
        read_ms = self._common_read_ms + self._head_read_ms * (num_samples > 0)
        work_ms = self._common_token_ms * self.padded(num_tokens) + self._head_sample_ms * num_samples
        experts = self._experts
        if experts is not None:
            share = 1.0 - (1.0 - experts.per_token / experts.count) ** (num_routed / num_parts)
            active = experts.count * share
            busiest = num_routed * 1.0
            if self._expert_devices > 1:
                # All wait for the device whose experts are chosen most often.
                active = active + self._above * self.root(active * (1.0 - share) * self._expert_devices)
                active = self.smaller(active, experts.count)
                busiest = busiest + self._above * self.root(num_routed * self._expert_devices / experts.per_token)
            read_ms = read_ms + self._expert_read_ms * active
            work_ms = work_ms + self._expert_token_ms * busiest
        return self.larger(read_ms, work_ms / num_parts)

    def _exchanged_ms(self, num_tokens: int, num_routed: int, num_parts: float) -> float:
        """Return the time of collectives. `num_tokens`: tokens of the largest rank; `num_routed`: tokens of all
        ranks.
        """
        ms = self._reduce_token_ms * num_tokens + self._exchange_token_ms * num_routed + self._collectives_ms
        if self._stages == 1:
            return ms
        # Micro-batches follow each other through the stages; each token is passed once from stage to stage.
        return self._reduce_token_ms * num_tokens / num_parts + self._pass_token_ms * num_tokens + self._collectives_ms

    def linear_ms(self, num_tokens: int, num_samples: int, num_sequences: int) -> float:
        """Return the time of a step of `num_tokens` tokens without attention and the constants per sequence."""
        parts = self.divided_by(num_sequences)
        ms = self._linear_ms(num_tokens, num_samples, num_tokens, parts)
        if self.num_collectives:
            ms = ms + self._exchanged_ms(num_tokens, num_tokens, parts)
        return ms + self._constant_ms(num_tokens)

    def _constant_ms(self, num_tokens: int) -> float:
        """Return the constant time of a step of so many tokens: longer without a CUDA graph."""
        return self.step_ms + self._launch_ms * (num_tokens > self.graph_tokens)

    def fixed_ms(self, num_decodes: int) -> float:
        """Return the time of a step of decodes without attention."""
        num_tokens = num_decodes * self.num_verified
        ms = self.linear_ms(num_tokens, num_tokens, num_decodes) + num_decodes * self.sequence_ms
        return ms + self._drafting_ms(num_decodes, num_decodes) if self._num_drafted else ms

    def _drafting_ms(self, num_decodes: int, num_routed: int) -> float:
        """Return the time of drafting for `num_decodes` sequences; `num_routed`: sequences of all ranks."""
        return self._draft_ms + self._draft_share * self._linear_ms(num_decodes, 0, num_routed, 1)

    def decode_ms(self, num_decodes: int, known_tokens: int, fixed_ms: float) -> float:
        """Return the time of a step of decodes that know `known_tokens` tokens in total."""
        if self._is_simple(num_decodes):
            ms = known_tokens * self.context_token_ms + fixed_ms
        else:
            attention_ms = self.context_ms(num_decodes, known_tokens) / self.divided_by(num_decodes)
            ms = self.at_least(fixed_ms + attention_ms, num_decodes * self.num_verified)
        return ms / self._tokens_per_step if self._num_drafted else ms

    def _is_simple(self, num_decodes: int) -> bool:
        """Return whether the time of `num_decodes` decodes is linear in their known tokens."""
        return self._is_linear and (num_decodes * self.num_verified <= self.graph_tokens or not self._eager_ms)

    def at_least(self, ms: float, num_tokens: int) -> float:
        """Return `ms`, or for a step without a CUDA graph the least time that such a step takes, if that is longer."""
        return self.larger(ms, self._eager_ms * (num_tokens > self.graph_tokens)) if self._eager_ms else ms

    def together_ms(self, batches: Sequence[Batch]) -> float:
        """Return the time of a step of ranks in lock step."""
        return self._composed_ms(batches, self._together_ms) if self.composes else self._together_ms(batches)

    def _together_ms(self, batches: Sequence[Batch]) -> float:
        """Return the time of one pass of ranks in lock step."""
        verified = self.num_verified
        counts = [batch.num_decodes * verified + sum(chunk.num_tokens for chunk in batch.chunks) for batch in batches]
        num_routed = sum(counts)
        slowest_ms = 0.0
        for batch, num_tokens in zip(batches, counts, strict=True):
            chunks, num_decodes = batch.chunks, batch.num_decodes
            num_samples = num_decodes * verified + sum(chunk.is_last for chunk in chunks)
            chunks_ms = sum(self.chunk_ms(chunk.start, chunk.end) for chunk in chunks)
            ms = self.rank_ms(
                num_decodes,
                batch.decode_known_tokens,
                num_tokens,
                num_samples,
                num_decodes + len(chunks),
                chunks_ms,
                num_routed,
            )
            slowest_ms = max(slowest_ms, ms)
        all_decodes = [batch.num_decodes for batch in batches]
        most, num_drafting = max(all_decodes, default=0), sum(all_decodes)
        return self.lockstep_ms(slowest_ms, max(counts, default=0), num_routed, most, num_drafting)

    def rank_ms(
        self,
        num_decodes: int,
        known_tokens: int,
        num_tokens: int,
        num_samples: int,
        num_sequences: int,
        chunks_ms: float,
        num_routed: int,
    ) -> float:
        """Return the time that a rank computes, given the counts of its work; `num_routed`: tokens of all ranks."""
        ms = self._linear_ms(num_tokens, num_samples, num_routed, 1)
        ms = ms + num_sequences * self.sequence_ms
        return ms + chunks_ms + self.context_ms(num_decodes, known_tokens)

    def lockstep_ms(
        self, slowest_ms: float, num_tokens: int, num_routed: int, num_decodes: int, num_drafting: int
    ) -> float:
        """Return the time of a step of ranks, given that of the slowest.

        `num_tokens`, `num_decodes`: the largest of a rank. `num_routed`, `num_drafting`: tokens and decodes of all.
        """
        ms = slowest_ms + self._exchanged_ms(num_tokens, num_routed, 1) + self._constant_ms(num_tokens)
        if self._num_drafted:
            ms = ms + self._drafting_ms(num_decodes, num_drafting) * (num_drafting > 0)
        return self.at_least(ms, num_tokens)

    def decodes_together_ms(self, decodes: Sequence[tuple[int, int]], num_steps: int) -> list[float]:
        """Return the times of steps of decodes of ranks in lock step, equal to calling `together_ms` once per step."""
        verified = self.num_verified
        num_drafting = sum(num_decodes for num_decodes, _ in decodes)
        num_routed = num_drafting * verified
        largest = max(num_decodes for num_decodes, _ in decodes) * verified
        after_ms = self._exchanged_ms(largest, num_routed, 1) + self._constant_ms(largest)
        if self._num_drafted:
            after_ms += self._drafting_ms(largest // verified, num_drafting)
        fixed = []
        for num, known in decodes:
            ms = self._linear_ms(num * verified, num * verified, num_routed, 1) + num * self.sequence_ms
            fixed.append((num, known, ms))
        times_ms = []
        for step in range(num_steps):
            slowest_ms = 0.0
            for num, known, fixed_ms in fixed:
                slowest_ms = max(slowest_ms, fixed_ms + self.context_ms(num, known + step * num))
            ms = self.at_least(slowest_ms + after_ms, largest)
            times_ms.append(ms / self._tokens_per_step if self._num_drafted else ms)
        return times_ms

    def context_ms(self, num_decodes: int, known_tokens: int) -> float:
        """Return the time of the decodes' attention."""
        if not self.has_windows:
            return known_tokens * self.context_token_ms
        pairs = 0.0
        for layer in self._layers:
            seen = known_tokens if layer.span is None else self.fewer(known_tokens, layer.span * num_decodes)
            pairs = pairs + seen * layer.decode
        return pairs * self._decode_pair_ms

    def chunk_ms(self, start: int, end: int) -> float:
        """Return the time of the attention of a chunk of tokens [start, end).

        Every token attends to itself and to all tokens before it.
        """
        ms = 0.0
        for layer in self._layers:
            span = layer.span
            pairs = self._pairs(end, span) - self._pairs(start, span)
            read = end if span is None else self.fewer(end, span + end - start)
            work_ms, read_ms = pairs * self._pair_ms * layer.work, read * self._kv_read_ms * layer.read
            ms = ms + layer.num_layers * self.larger(work_ms, read_ms)
        return ms

    def _pairs(self, num_tokens: int, window: int | None) -> int:
        """Return the number of (token, attended token) pairs of the first `num_tokens`, within the last `window`."""
        if window is None:
            return num_tokens * (num_tokens + 1) // 2
        near = self.fewer(num_tokens, window)
        return near * (near + 1) // 2 + (num_tokens - near) * window

    def larger(self, one: float, other: float) -> float:
        """Return the larger of two times."""
        return one if one > other else other

    def smaller(self, one: float, other: float) -> float:
        """Return the smaller of two numbers."""
        return one if one < other else other

    def fewer(self, one: int, other: int) -> int:
        """Return the smaller of two counts."""
        return one if one < other else other

    def root(self, number: float) -> float:
        """Return the square root."""
        return sqrt(number)

    def padded(self, num_tokens: int) -> int:
        """Return the number of tokens that are computed: in a CUDA graph, the next size."""
        return graph_size(num_tokens, self.graph_tokens) if num_tokens <= self.graph_tokens else num_tokens


class Reached(NamedTuple):
    """Reached shares of a device's peaks in one number format: arithmetic and bandwidth."""

    compute: float
    bandwidth: float


def _reached(cost: RooflineSettings, dtype: str) -> Reached:
    compute, bandwidth = cost.compute_efficiency, cost.bandwidth_efficiency
    narrow = format_of(dtype)
    if narrow == "fp8":
        return Reached(compute * cost.fp8_compute, bandwidth * cost.fp8_bandwidth)
    if narrow == "fp4":
        return Reached(compute * cost.fp4_compute, bandwidth * cost.fp4_bandwidth)
    return Reached(compute, bandwidth)


def busiest_of(num_devices: int) -> float:
    """Return how far the largest of so many normal numbers is above their mean, in standard deviations (Blom, 1958)."""
    if num_devices == 1:
        return 0.0
    from statistics import NormalDist

    return NormalDist().inv_cdf((num_devices - 0.375) / (num_devices + 0.25))


def graph_size(num_tokens: int, largest: int) -> int:
    """Return the padded size of a step: 1, 2, 4, a multiple of 8 up to 256, of 16 above, or `largest`."""
    if num_tokens <= 2:
        return num_tokens
    if num_tokens <= 4:
        return min(4, largest)
    multiple = 8 if num_tokens <= 256 else 16
    return min(-(-num_tokens // multiple) * multiple, largest)
