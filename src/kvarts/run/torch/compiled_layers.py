"""Layers of a standard decoder, in a few compiled calls each instead of hundreds of operations.

Results are those of the model's code, rounded wherever that rounds; only the order of summation differs. The compiled
code makes no assumptions about a model: layer_check runs both and compares the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvarts.run.torch.attention import AttentionMetadata, AttentionParams, Ints
from kvarts.run.torch.decoder import DecoderParts, LayerParts, Norm
from kvarts.run.torch.numba_backend import NumbaBackend, emitting
from kvarts.run.torch.openmp import num_threads, team
from kvarts.run.torch.packing import products
from kvarts.run.torch.pools import KVPools

__all__ = ["CompiledLayers"]

KEPT_TOKENS = 256
"""Buffers of a step with up to this many tokens are reused by the next."""

ROOM_OF_MATRICES = (
    ("normed", "query"),
    ("normed", "key"),
    ("normed", "value"),
    ("attended", "delta"),
    ("normed", "gate"),
    ("normed", "up"),
    ("up", "delta"),
)
"""Input and output buffer of each matrix of a layer."""


class CompiledLayers:
    """The layers in `parts`, over `pools`. Owner of the buffers of a step.

    `backends`: the attention backend of each page table; `tables`: the page table of each layer. `params`: the
    attention parameters of each layer. Plain matrices are multiplied in the same compiled calls; others, which are laid
    out for another library, in separate calls.
    """

    def __init__(
        self,
        parts: DecoderParts,
        pools: KVPools,
        backends: Sequence[NumbaBackend],
        tables: Sequence[int],
        params: Sequence[AttentionParams],
    ) -> None:
        from kvarts.run.torch import layer_kernel, numba_kernel

        self._parts = parts
        self._pools = pools
        self._tables = tuple(tables)
        self._num_tables = len(backends)
        self._backends = [backends[table] for table in tables]
        """One per layer."""
        self._every: Sequence[AttentionMetadata] = ()
        self._params = tuple(params)
        self._places = places = layer_kernel
        self._attention_places = numba_kernel
        self._team = team()
        self.has_own_matrices = all(is_plain(matrix) for matrix in parts.matrices)
        """Whether the compiled code multiplies the matrices."""
        self._room_dtype = torch.float32 if self.has_own_matrices else pools.dtype
        with emitting("compiling layers for this CPU, which is kept on disk"):
            self._kernel = layer_kernel.layer_kernel(pools.dtype == torch.bfloat16, self._room_dtype == torch.float32)
        matrices = parts.layers[0].sizes
        self._num_products = sum(inputs * outputs for inputs, outputs in matrices)
        if not self.has_own_matrices:  # only the work between matrices
            self._num_products = sum(outputs for _, outputs in matrices)
        self._kept: list[Any] = []
        """Objects to keep alive, since their addresses are in use."""
        self._counters = np.zeros(places.NUM_COUNTERS * places.COUNTER_BYTES // 8, np.int64)
        self._step = np.zeros(places.STEP_SIZE, np.int64)
        self._step[places.BARRIER] = self._team.barrier
        self._step[places.THREAD_NUMBER] = self._team.thread_number
        self._step[places.TEAM_SIZE] = self._team.team_size
        self._step[places.COUNTERS] = self._counters.ctypes.data
        self._floats = [
            backend.floats(number, one)
            for number, (backend, one) in enumerate(zip(self._backends, self._params, strict=True))
        ]
        self._works = [self._layer_work(number, layer) for number, layer in enumerate(parts.layers)]
        self._last = self._last_work()
        self._attention_works: list[Ints] = []
        self._slots: list[int] = []
        """Address of the slots of each page table."""
        self._num_room = 0
        self._num_threads = 1
        self.room: dict[str, torch.Tensor] = {}
        """The buffers of a step by name, [tokens, ...]."""

    # A step ----------------------------------------------------------------------------------------------------

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        every: Sequence[AttentionMetadata],
        wheres: Sequence[torch.Tensor],
    ) -> Iterator[torch.Tensor]:
        """Run all layers, and yield the logits of the tokens at each of `wheres`, computed one by one.

        The backends must have begun the step; `every` has an entry per page table. Consume all logits before the next
        step.
        """
        self.begin(tokens, positions, every)
        for number in range(len(self._works)):
            self.run_layer(number)
        self.add_and_norm()
        return self._at_each(len(tokens), wheres)

    def _at_each(self, count: int, wheres: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for where in wheres:
            yield self.head(count, where)
        if self._num_room > KEPT_TOKENS:
            self._make_room(0)

    def begin(self, tokens: torch.Tensor, positions: torch.Tensor, every: Sequence[AttentionMetadata]) -> None:
        """Prepare for a step: embeddings, rotations, and slots of keys and values from `every`, one entry per page
        table.
        """
        places, count = self._places, len(tokens)
        if count > self._num_room:
            self._make_room(count if count > KEPT_TOKENS else min(KEPT_TOKENS, max(8, 2 * count)))
        embedded = self._parts.embedding(tokens)
        cos, sin = self._parts.rotary(embedded[None], positions[None])
        room = self.room
        room["cos"][:count] = cos[0]
        room["sin"][:count] = sin[0]
        for table, metadata in enumerate(every):
            room["slots"][table, :count] = metadata.slots
        self._every = every
        self._step[places.TOKENS] = count
        self._num_threads = num_threads(count * self._num_products)
        num_decodes = len(every[0].decodes.positions)
        self._step[places.DECODES] = num_decodes
        self.set_hidden(embedded)
        if num_decodes:
            for number, (backend, params) in enumerate(zip(self._backends, self._params, strict=True)):
                step_work = backend.step_work(number, params.window)
                self._attention_works[number][self._attention_places.STEP] = step_work.address

    def set_hidden(self, hidden: torch.Tensor) -> None:
        """Set the input of the next layer to `hidden` [tokens, hidden_size]."""
        self.room["hidden"][: len(hidden)] = hidden
        self._step[self._places.IS_ADDED] = 0

    def run_layer(self, number: int) -> None:
        """Run a layer; the output of its MLP stays in the buffers, and the next layer adds it."""
        places, table = self._places, self._tables[number]
        metadata = self._every[table]
        self._step[places.SLOTS] = self._slots[table]
        if not self.has_own_matrices:
            self._run_around_matrices(number, metadata)
        elif metadata.chunks:
            self._run(number, places.ADD_AND_NORM, places.ROTATE_AND_WRITE)
            self._read_chunks(number, metadata)
            self._run(number, places.ATTEND, places.CONTRACT)
        else:
            self._run(number, places.ADD_AND_NORM, places.CONTRACT)
        self._step[places.IS_ADDED] = 1

    def _run_around_matrices(self, number: int, metadata: AttentionMetadata) -> None:
        places, room, step = self._places, self.room, self._step
        count = int(step[places.TOKENS])
        matrices = self._parts.layers[number].matrices
        output, down = matrices[3], matrices[6]
        self._run(number, places.ADD_AND_NORM, places.ADD_AND_NORM)
        normed = room["normed"][:count]
        made = products(matrices[:3], normed)
        step[[places.QUERY, places.KEY, places.VALUE]] = [one.data_ptr() for one in made]
        step[[places.QUERY_STRIDE, places.KEY_STRIDE, places.VALUE_STRIDE]] = [one.stride(0) for one in made]
        self._run(number, places.ROTATE_AND_WRITE, places.ATTEND)
        self._read_chunks(number, metadata)
        made = [output(room["attended"][:count].to(self._pools.dtype)).contiguous()]
        step[places.DELTA] = made[0].data_ptr()
        self._run(number, places.ADD_AND_NORM_AGAIN, places.ADD_AND_NORM_AGAIN)
        made = products(matrices[4:6], normed)
        step[[places.GATE, places.UP]] = [one.data_ptr() for one in made]
        step[[places.GATE_STRIDE, places.UP_STRIDE]] = [one.stride(0) for one in made]
        self._run(number, places.ACTIVATE, places.ACTIVATE)
        self._delta = down(made[1]).contiguous()
        step[places.DELTA] = self._delta.data_ptr()

    def _read_chunks(self, number: int, metadata: AttentionMetadata) -> None:
        """Have the backend attend for the tokens of chunks; those of decodes are left alone."""
        if metadata.chunks:
            room, count = self.room, int(self._step[self._places.TOKENS])
            queries = room["queries"][:count].to(self._pools.dtype)
            read = torch.empty_like(queries)
            self._backends[number].read_chunks(number, queries, self._params[number], read)
            first = metadata.chunks[0].first
            room["attended"][first:count] = read[first:].flatten(1)

    def delta(self, count: int) -> torch.Tensor:
        """Return the output of the last layer's MLP."""
        return self.room["delta"][:count] if self.has_own_matrices else self._delta

    def add_and_norm(self) -> None:
        """Add the output of the last MLP, and apply the norm after all layers."""
        self._counters.fill(0)
        self._last[[self._places.FIRST, self._places.LAST]] = self._places.ADD_AND_NORM
        self._team.run(self._kernel, self._last.ctypes.data, self._num_threads)

    def head(self, count: int, where: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens at `where`, out of the step's `count` tokens."""
        places, room, step = self._places, self.room, self._step
        chosen = room["normed"][:count].index_select(0, where)
        if not self.has_own_matrices:
            logits: torch.Tensor = self._parts.head(chosen)
            return logits
        logits = torch.empty(len(chosen), self._parts.head.out_features)
        changed = [places.TOKENS, places.SOURCES, places.TARGETS]
        before = step[changed]
        step[changed] = len(chosen), chosen.data_ptr(), logits.data_ptr()
        self._counters.fill(0)
        self._last[[places.FIRST, places.LAST]] = places.MULTIPLY
        num_numbers = len(chosen) * self._parts.head.in_features * self._parts.head.out_features
        self._team.run(self._kernel, self._last.ctypes.data, num_threads(num_numbers))
        step[changed] = before
        return logits.to(self._pools.dtype)

    def _run(self, number: int, first: int, last: int) -> None:
        """Run the stages `first` to `last` of a layer."""
        places, work = self._places, self._works[number]
        work[places.FIRST], work[places.LAST] = first, last
        self._counters.fill(0)
        self._backends[number].counter[0] = 0
        self._team.run(self._kernel, work.ctypes.data, self._num_threads)

    # Work ------------------------------------------------------------------------------------------------------

    def _layer_work(self, number: int, layer: LayerParts) -> Ints:
        """Return the work of a layer, without the buffers of a step."""
        places, pools = self._places, self._pools
        work = np.zeros(places.LAYER_SIZE, np.int64)
        work[places.STEP] = self._step.ctypes.data
        for weight, epsilon, norm in (
            (places.NORM, places.NORM_EPSILON, layer.norm),
            (places.NORM_AGAIN, places.EPSILON_AGAIN, layer.norm_again),
            (places.NORM_QUERY, places.EPSILON_QUERY, layer.norm_query),
            (places.NORM_KEY, places.EPSILON_KEY, layer.norm_key),
        ):
            self._set_norm(work, weight, epsilon, norm)
        if self.has_own_matrices:
            self._set_matrices(work, layer.matrices)
        work[places.KEYS] = pools.keys[number].data_ptr()
        work[places.VALUES] = pools.values[number].data_ptr()
        work[places.ATTENTION] = self._backends[number].kernels[number]
        work[places.HEADS], work[places.KV_HEADS] = layer.shape.num_heads, layer.shape.num_kv_heads
        work[places.HEAD_DIM] = layer.shape.head_dim
        work[places.HIDDEN_SIZE] = layer.matrices[0].in_features
        work[places.INNER_SIZE] = layer.matrices[4].out_features
        return work

    def _last_work(self) -> Ints:
        """Return the work of the norm after all layers and of the output head."""
        places, head = self._places, self._parts.head
        work = np.zeros(places.LAYER_SIZE, np.int64)
        work[places.STEP] = self._step.ctypes.data
        self._set_norm(work, places.NORM, places.NORM_EPSILON, self._parts.norm)
        if self.has_own_matrices:
            self._set_matrices(work, (head,))
        work[places.HIDDEN_SIZE], work[places.INNER_SIZE] = head.in_features, head.out_features
        return work

    def _set_norm(self, work: Ints, weight: int, epsilon: int, norm: Norm | None) -> None:
        if norm is not None:
            work[weight] = self._address(norm.weight)
            work[epsilon] = np.float32(norm.epsilon).view(np.int32)

    def _set_matrices(self, work: Ints, matrices: Sequence[Any]) -> None:
        places = self._places
        for place, numbers in (
            (places.WEIGHTS, [self._address(matrix.weight) for matrix in matrices]),
            (places.BIASES, [0 if matrix.bias is None else self._address(matrix.bias) for matrix in matrices]),
            (places.WIDTHS, [matrix.in_features for matrix in matrices]),
            (places.HEIGHTS, [matrix.out_features for matrix in matrices]),
        ):
            array = np.array(numbers, np.int64)
            self._kept.append(array)
            work[place] = array.ctypes.data

    def _address(self, tensor: torch.Tensor) -> int:
        """Return the address of a weight, and keep it alive."""
        assert tensor.is_contiguous() and tensor.dtype == self._pools.dtype
        self._kept.append(tensor)
        return int(tensor.data_ptr())

    def _make_room(self, num_tokens: int) -> None:
        """Allocate the buffers for `num_tokens` tokens."""
        places, layer, self._num_room = self._places, self._parts.layers[0], num_tokens
        heads, kv_heads, _, size, inner = (outputs for _, outputs in layer.sizes[:5])
        shape = layer.shape
        dim = shape.head_dim
        kept = {"hidden": size, "normed": size, "cos": dim, "sin": dim}
        made = {"delta": size, "query": heads, "key": kv_heads, "value": kv_heads, "gate": inner, "up": inner}
        if self.has_own_matrices:
            kept |= made
        self.room = {name: torch.empty(num_tokens, width, dtype=self._room_dtype) for name, width in kept.items()}
        self.room["slots"] = torch.empty(self._num_tables, num_tokens, dtype=torch.long)
        self._slots = [one.data_ptr() for one in self.room["slots"]]
        self.room["queries"] = torch.empty(num_tokens, shape.num_heads, dim)
        self.room["attended"] = torch.empty(num_tokens, heads)
        for name, tensor in self.room.items():
            self._step[getattr(places, name.upper())] = tensor.data_ptr()
        if self.has_own_matrices:
            for name in ("query", "key", "value", "gate", "up"):
                self._step[getattr(places, f"{name.upper()}_STRIDE")] = self.room[name].stride(0)
            for number, (source, target) in enumerate(ROOM_OF_MATRICES):
                self._step[places.SOURCES + number] = self.room[source].data_ptr()
                self._step[places.TARGETS + number] = self.room[target].data_ptr()
        self._attention_works = [
            self._backends[number].work(number, self._floats[number], self.room["queries"], self.room["attended"])
            for number in range(len(self._works))
        ]
        for work, attention in zip(self._works, self._attention_works, strict=True):
            work[places.ATTENTION_WORK] = attention.ctypes.data


def is_plain(matrix: Any) -> bool:
    """Return whether a matrix has only a weight and perhaps a bias."""
    return type(matrix) is torch.nn.Linear and matrix.weight.is_contiguous()
