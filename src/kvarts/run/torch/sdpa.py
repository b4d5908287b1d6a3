"""Attention backend on PyTorch's scaled dot product attention: gathers pages, a cacheful at a time. For any device.

The heads that share a KV head are the rows of one small matrix. Pages with consecutive ids are read in place.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvarts.core.kv.groups import SinkWindow
from kvarts.run.torch.attention import AttentionMetadata, AttentionParams, ChunkMetadata, Ints
from kvarts.run.torch.pools import KVPools

__all__ = ["SdpaBackend"]

GROUP_TOKENS = 2048
"""Tokens of context that a group of decodes reads together: a few MiB per layer, which stay in a CPU's cache."""
GPU_GROUP_TOKENS = 65536
"""The same on a GPU, where each group is some launches more."""


class _Pages(msgspec.Struct):
    """Places [first, last) of the concatenated pages `ids`; `run`: the first id, if ids are consecutive."""

    ids: torch.Tensor
    count: int
    run: int | None
    first: int
    last: int


class _Group(msgspec.Struct):
    """Decodes `rows` of the batch, of similar length; the same number of pages is read for each.

    `bias` [sequences, 1, 1, places]: 0 for places that are attended to, -inf for others; None if all are.
    """

    rows: torch.Tensor | slice
    pages: _Pages
    bias: torch.Tensor | None


class _LateRotation(msgspec.Struct):
    """Positions of queries and keys that are rotated when they are read: `keys` [places] and `queries` [tokens].

    Keys of the sink, where `is_sink` [places], are read by queries at `queries_to_sink` [tokens].
    """

    keys: torch.Tensor
    queries: torch.Tensor
    queries_to_sink: torch.Tensor
    is_sink: torch.Tensor


class _Chunk(msgspec.Struct):
    """Tokens [first, last) of the batch. `bias` [tokens, places]; None for a plain causal mask."""

    first: int
    last: int
    pages: _Pages
    bias: torch.Tensor | None
    late: _LateRotation | None = None


class SdpaBackend:
    """An AttentionBackend for every device and number format."""

    reads_sinks = True

    def __init__(self, pools: KVPools) -> None:
        self._pools = pools
        self._group_tokens = GROUP_TOKENS if pools.device.type == "cpu" else GPU_GROUP_TOKENS
        self._room = [torch.empty(0, dtype=pools.dtype, device=pools.device) for _ in range(2)]
        self._groups: dict[int | None, list[_Group]] = {}
        self._chunks: dict[int | None, list[_Chunk]] = {}

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepare for a step."""
        self._metadata = metadata
        self._groups.clear()
        self._chunks.clear()

    def forward(self, layer: int, queries: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Return the output of one layer's attention."""
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if len(self._metadata.decodes.positions):
            self._read_decodes(layer, queries, params, out)
        self.read_chunks(layer, queries, params, out)
        return out

    def read_chunks(self, layer: int, queries: torch.Tensor, params: AttentionParams, out: torch.Tensor) -> None:
        """Write the output of the chunks' tokens to `out`."""
        window = params.window
        if window not in self._chunks:
            self._chunks[window] = [self._make_chunk(chunk, window) for chunk in self._metadata.chunks]
        for chunk in self._chunks[window]:
            out[chunk.first : chunk.last] = self._prefill(queries[chunk.first : chunk.last], chunk, layer, params)

    def _read_decodes(self, layer: int, queries: torch.Tensor, params: AttentionParams, out: torch.Tensor) -> None:
        """Write the output of the decodes, the first of `queries`, to `out`."""
        if params.window not in self._groups:
            self._groups[params.window] = self._make_groups(params.window)
        for group in self._groups[params.window]:
            out[group.rows] = self._decode(queries[group.rows], group, layer, params)

    def _decode(self, queries: torch.Tensor, group: _Group, layer: int, params: AttentionParams) -> torch.Tensor:
        """Return the output of a group of decodes. `queries` [sequences, heads, head_dim]."""
        num, num_heads, head_dim = queries.shape
        # [sequences, kv_heads, places, head_dim]
        keys, values = (
            states.view(num, -1, *states.shape[1:]).transpose(1, 2) for states in self._fetch(layer, group.pages)
        )
        num_kv_heads = keys.shape[1]
        packed = queries.view(num, num_kv_heads, num_heads // num_kv_heads, head_dim)
        sinks = None if params.sinks is None else params.sinks.view(1, num_kv_heads, -1, 1)
        return _attend(packed, keys, values, group.bias, params, sinks).reshape(num, num_heads, head_dim)

    def _prefill(self, queries: torch.Tensor, chunk: _Chunk, layer: int, params: AttentionParams) -> torch.Tensor:
        """Return the output of a chunk. `queries` [tokens, heads, head_dim] of one sequence."""
        num, num_heads, head_dim = queries.shape
        key_states, value_states = self._fetch(layer, chunk.pages)
        num_kv_heads = key_states.shape[1]
        late = chunk.late
        to_sink = None
        if late is not None:
            rotate = self._metadata.rotate
            assert rotate is not None
            key_states = rotate(layer, key_states, late.keys)
            to_sink = _grouped(rotate(layer, queries, late.queries_to_sink), num_kv_heads)
            queries = rotate(layer, queries, late.queries)
        # [kv_heads, 1, places, head_dim]
        keys, values = (states.transpose(0, 1)[:, None] for states in (key_states, value_states))
        grouped = _grouped(queries, num_kv_heads)
        sinks = None if params.sinks is None else params.sinks.view(num_kv_heads, -1, 1, 1)
        if late is not None and to_sink is not None:
            scores = (grouped @ keys.transpose(-1, -2)) * params.scaling
            scores_of_sink = (to_sink @ keys.transpose(-1, -2)) * params.scaling
            scores = torch.where(late.is_sink, scores_of_sink, scores)
            attended = _weigh(scores, values, chunk.bias, params, sinks)
        else:
            attended = _attend(grouped, keys, values, chunk.bias, params, sinks, is_causal=chunk.bias is None)
        return attended.reshape(num_heads, num, head_dim).transpose(0, 1)

    # Pages ------------------------------------------------------------------------------------------------

    def _fetch(self, layer: int, pages: _Pages) -> list[torch.Tensor]:
        """Return keys and values of a layer, each [places, kv_heads, head_dim]."""
        found = []
        for number, pool in enumerate((self._pools.keys[layer], self._pools.values[layer])):
            if pages.run is not None:
                read = pool[pages.run : pages.run + pages.count]
            else:
                size = pages.count * pool[0].numel()
                if size > self._room[number].numel():
                    self._room[number] = torch.empty(size, dtype=pool.dtype, device=pool.device)
                read = self._room[number][:size].view(pages.count, *pool.shape[1:])
                torch.index_select(pool, 0, pages.ids, out=read)
            found.append(self._pools.decoded(layer, read.flatten(0, 1)[pages.first : pages.last]))
        return found

    def _pages(self, page_ids: Ints, first: int, last: int) -> _Pages:
        flat = page_ids.reshape(-1)
        run = int(flat[0]) if _are_consecutive(flat) else None
        return _Pages(self._metadata.tensor(flat), len(flat), run, first, last)

    # Masks ------------------------------------------------------------------------------------------------

    def _make_groups(self, window: int | None) -> list[_Group]:
        """Return the decodes in groups, for layers that attend to the last `window` tokens, or to all."""
        metadata, page_size = self._metadata, self._pools.page_size
        tables = metadata.decodes.tables
        begins, ends = metadata.decodes.spans(window)
        sink_begins, sink_ends = metadata.decodes.sink_spans(window)
        has_sink = sink_begins < sink_ends
        first_pages = np.where(has_sink, sink_begins, begins) // page_size
        num_pages = -(-ends // page_size) - first_pages
        order = np.argsort(num_pages, kind="stable")
        groups: list[_Group] = []
        while len(order):
            # The longest sequences first: as many as fit with the longest of them.
            longest = int(num_pages[order[-1]])
            count = max(1, self._group_tokens // (longest * page_size))
            chosen, order = order[-count:], order[:-count]
            count = len(chosen)
            columns = np.arange(longest)
            places = np.minimum(first_pages[chosen, None] + columns, tables.shape[1] - 1)
            page_ids = np.where(columns < num_pages[chosen, None], tables[chosen[:, None], places], 0)
            offset = first_pages[chosen, None] * page_size
            if count == 1 and not has_sink[chosen[0]]:
                pages = self._pages(
                    page_ids, int(begins[chosen[0]] - offset[0, 0]), int(ends[chosen[0]] - offset[0, 0])
                )
                bias = None
            else:
                pages = self._pages(page_ids, 0, page_ids.size * page_size)
                where = offset + np.arange(longest * page_size)
                seen = (where >= begins[chosen, None]) & (where < ends[chosen, None])
                if has_sink[chosen].any():
                    seen |= (where >= sink_begins[chosen, None]) & (where < sink_ends[chosen, None])
                bias = self._bias(metadata.tensor(seen)[:, None, None, :])
            rows = slice(int(chosen[0]), int(chosen[-1]) + 1) if _are_consecutive(chosen) else metadata.tensor(chosen)
            groups.append(_Group(rows, pages, bias))
        return groups

    def _make_chunk(self, chunk: ChunkMetadata, window: int | None) -> _Chunk:
        if chunk.keeps is not None:
            return self._make_bounded_chunk(chunk, chunk.keeps, window)
        page_size = self._pools.page_size
        end = chunk.end
        begin = 0 if window is None else max(0, chunk.start + 1 - window)
        first_page = begin // page_size
        offset = first_page * page_size
        pages = self._pages(chunk.page_ids[first_page : -(-end // page_size)], begin - offset, end - offset)
        if chunk.start == 0 and (window is None or window >= end):
            return _Chunk(chunk.first, chunk.last, pages, None)
        device = self._metadata.device
        positions = torch.arange(chunk.start, end, device=device)[:, None]
        places = torch.arange(begin, end, device=device)[None, :]
        visible = places <= positions
        if window is not None:
            visible &= places > positions - window
        return _Chunk(chunk.first, chunk.last, pages, self._bias(visible))

    def _make_bounded_chunk(self, chunk: ChunkMetadata, keeps: SinkWindow, window: int | None) -> _Chunk:
        """Return a chunk of a sequence that retains its sink and a window: all its pages are read."""
        page_size, device = self._pools.page_size, self._metadata.device
        num_places = chunk.end - chunk.gap
        pages = self._pages(chunk.page_ids[: -(-num_places // page_size)], 0, num_places)
        positions = torch.arange(chunk.start, chunk.end, device=device)[:, None]
        places = torch.arange(num_places, device=device)[None, :]
        # Dropped pages followed those of the sink.
        seen = torch.where(places < chunk.num_before_gap, places, places + chunk.gap)
        visible = (seen <= positions) & ((seen < keeps.sink) | (seen >= positions - keeps.window))
        late = None
        if keeps.rotates_late:
            # Positions among the retained tokens: those of the window continue from the end of the sink.
            own = torch.clamp(positions, max=keeps.sink + keeps.window)
            late = _LateRotation(places[0], positions[:, 0] - chunk.gap, own[:, 0], seen[0] < keeps.sink)
            distance = torch.where(seen < keeps.sink, own - seen, positions - seen)
        else:
            distance = positions - seen
        if window is not None:
            visible &= distance < window
        return _Chunk(chunk.first, chunk.last, pages, self._bias(visible), late)

    def _bias(self, visible: torch.Tensor) -> torch.Tensor:
        """Return a mask as additive numbers. Made once for all layers; given booleans, the kernel would convert in
        each.
        """
        bias = torch.zeros(visible.shape, dtype=self._pools.dtype, device=visible.device)
        return bias.masked_fill_(~visible, float("-inf"))


def _are_consecutive(numbers: Ints) -> bool:
    """Return whether each number is the one before plus 1."""
    return bool((np.diff(numbers) == 1).all())


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    params: AttentionParams,
    sinks: torch.Tensor | None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return attention of `queries` [..., rows, head_dim] to `keys` and `values` [..., places, head_dim].

    `bias` [..., rows, places]. `sinks`, of a shape that broadcasts with the scores: the score of each head's sink.
    """
    if params.softcap is None and sinks is None:
        shape = (*queries.shape[:2], *keys.shape[2:])
        return scaled_dot_product_attention(
            queries, keys.expand(shape), values.expand(shape), attn_mask=bias, is_causal=is_causal, scale=params.scaling
        )
    scores = (queries @ keys.transpose(-1, -2)) * params.scaling
    return _weigh(scores, values, bias, params, sinks, is_causal=is_causal)


def _grouped(queries: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return `queries` [tokens, heads, head_dim] as [kv_heads, heads per KV head, tokens, head_dim].

    One batch per KV head, each with its own keys.
    """
    num, num_heads, head_dim = queries.shape
    return queries.transpose(0, 1).view(num_kv_heads, num_heads // num_kv_heads, num, head_dim)


def _weigh(
    scores: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    params: AttentionParams,
    sinks: torch.Tensor | None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return `values` weighted by `scores` [..., rows, places]; the other arguments are those of `_attend`."""
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    elif bias is not None:
        scores = scores + bias
    if sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        # A sink is one more place to attend to, without a value.
        sink = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    return weights.to(values.dtype) @ values
