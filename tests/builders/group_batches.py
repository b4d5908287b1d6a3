"""Steps of sequences with KV groups, whose parts are handed out naively, and attention over them written out by token.

Needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch

from kvarts.core.kv.groups import PageTable
from kvarts.core.kv.pool import PageId
from kvarts.core.sched.plan import Batch, Chunk, DecodeRows, StepPlan
from kvarts.run.flat_batch import PageTables
from kvarts.run.torch.attention import AttentionMetadata, AttentionParams, PagedAttention
from kvarts.run.torch.block_cut import BlockCut
from kvarts.run.torch.pools import KVPools, LayerShape

__all__ = ["GroupSteps"]

POISON = 1e3
"""What is written to blocks that nothing holds, so that whatever reads one is far off."""


class Sequence_(msgspec.Struct):  # noqa: N801
    """`states`: of each layer, the keys and the values of the tokens so far. `blocks`: of each group, by page."""

    row: int
    states: list[tuple[torch.Tensor, torch.Tensor]]
    blocks: list[dict[int, tuple[PageId, ...]]]
    tables: list[list[int]]
    num_tokens: int = 0
    has_row: bool = False


Work = tuple[Sequence_, int, list[tuple[int, tuple[PageId, ...]]]]
"""A sequence, how many of its tokens are computed, and the pages that it got, with their blocks."""


class GroupSteps:
    """Sequences of a model with `layers`, of which each attends by its `params`, in memory that `cut` is the cut of.

    `too_early`: how many tokens before its time a page is given back; 0 for what is right.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        params: Sequence[AttentionParams],
        cut: BlockCut,
        make: Callable[[KVPools], Any],
        *,
        page_size: int,
        num_blocks: int,
        seed: int,
        most_sequences: int,
        too_early: int = 0,
    ) -> None:
        self._layers, self._params, self._page_size = tuple(layers), tuple(params), page_size
        self._random = Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._too_early = too_early
        self._groups = cut.memory.groups
        self._each = [group.part_bytes // cut.memory.block_bytes for group in self._groups]
        self.pools = KVPools(
            layers,
            num_pages=num_blocks,
            page_size=page_size,
            dtype=torch.float32,
            places=cut.places,
            page_sizes=cut.page_sizes,
        )
        of_table = [[number for number, of in enumerate(cut.tables) if of == table] for table in sorted({*cut.tables})]
        backends = [make(self.pools.of_layers(numbers)) for numbers in of_table]
        self._attention = PagedAttention(self.pools, backends, cut.tables)
        self._rows = PageTables(most_sequences, page_size, cut.layer_tables)
        self._sequences: list[Sequence_] = []
        self._most_sequences = most_sequences
        self._refs: dict[PageId, int] = {}
        self._free = [PageId(block) for block in range(num_blocks)]
        self._random.shuffle(self._free)

    def begin(self) -> None:
        """Begin a sequence, perhaps where another is, in the same blocks, if that is at the end of a page."""
        if len(self._sequences) == self._most_sequences:
            return
        nothing = [
            (torch.zeros(0, one.num_kv_heads, one.head_dim), torch.zeros(0, one.num_kv_heads, one.head_dim))
            for one in self._layers
        ]
        num_tables = sum(self._each)
        begun = Sequence_(len(self._sequences), nothing, [{} for _ in self._groups], [[] for _ in range(num_tables)])
        others = [one for one in self._sequences if one.num_tokens and not one.num_tokens % self._page_size]
        if others:
            other = self._random.choice(others)
            begun.states, begun.num_tokens = list(other.states), other.num_tokens
            begun.blocks = [dict(blocks) for blocks in other.blocks]
            begun.tables = [list(table) for table in other.tables]
            for blocks in begun.blocks:
                for ids in blocks.values():
                    self._hold(ids)
        self._sequences.append(begun)

    def step(self, num_tokens: Sequence[int]) -> float:
        """Compute so many tokens of each sequence; return by how much attention was off at most, in any layer."""
        decodes: list[Work] = []
        chunks: list[Work] = []
        for sequence, count in zip(self._sequences, num_tokens, strict=True):
            if count:
                self._give_back(sequence)
                new_blocks = self._take(sequence, sequence.num_tokens + count)
                is_decode = count == 1 and sequence.has_row
                (decodes if is_decode else chunks).append((sequence, count, new_blocks))
        for block in self._free:
            for tensor in self.pools.tensors:
                tensor[block] = POISON
        if not decodes and not chunks:
            return 0.0
        metadata = self._begin_attention(self._plan(decodes, chunks))
        self._attention.begin(metadata)
        spans = [
            (sequence, sequence.num_tokens, sequence.num_tokens + count) for sequence, count, _ in decodes + chunks
        ]
        for sequence, _, end in spans:
            sequence.num_tokens = end
            sequence.has_row = True
        return max(self._off(number, spans) for number in range(len(self._layers)))

    # Memory -----------------------------------------------------------------------------------------------

    def _hold(self, ids: Sequence[PageId]) -> None:
        for block in ids:
            self._refs[block] = self._refs.get(block, 0) + 1

    def _give_back(self, sequence: Sequence_) -> None:
        """Give back every page without a token that the next one attends to, by asking of each."""
        for group, blocks in zip(self._groups, sequence.blocks, strict=True):
            window = group.layer.span
            for page in list(blocks):
                last = (page + 1) * self._page_size - 1
                if window is not None and last < sequence.num_tokens + 1 - window + self._too_early:
                    for block in blocks.pop(page):
                        self._refs[block] -= 1
                        if not self._refs[block]:
                            self._free.insert(self._random.randrange(len(self._free) + 1), block)

    def _take(self, sequence: Sequence_, end: int) -> list[tuple[int, tuple[PageId, ...]]]:
        """Take blocks for the pages up to `end`; return the pages, and their blocks in all groups."""
        taken: list[tuple[int, tuple[PageId, ...]]] = []
        for page in range(len(sequence.tables[0]), -(-end // self._page_size)):
            of_page: tuple[PageId, ...] = ()
            for each, blocks in zip(self._each, sequence.blocks, strict=True):
                blocks[page] = tuple(self._free.pop() for _ in range(each))
                self._hold(blocks[page])
                of_page += blocks[page]
            for table, block in zip(sequence.tables, of_page, strict=True):
                table.append(block)
            taken.append((page, of_page))
        return taken

    # Steps ------------------------------------------------------------------------------------------------

    def _plan(self, decodes: list[Work], chunks: list[Work]) -> StepPlan:
        rows = None
        if decodes:
            rows = DecodeRows(
                np.array([sequence.row for sequence, _, _ in decodes]),
                np.array([sequence.num_tokens for sequence, _, _ in decodes]),
                np.zeros(len(decodes), np.uint64),
                new_blocks=tuple(
                    (sequence.row, page, blocks) for sequence, _, taken in decodes for page, blocks in taken
                ),
            )
        made = tuple(
            Chunk(
                sequence.num_tokens,
                count,
                sequence.num_tokens + count,
                sequence.num_tokens + count,
                row=sequence.row,
                request_index=sequence.row,
                tokens=np.zeros(count, np.uint64),
                tables=self._tables(sequence),
            )
            for sequence, count, _ in chunks
        )
        return StepPlan(0, Batch(made, len(decodes), 0, 0), decodes=rows)

    def _tables(self, sequence: Sequence_) -> tuple[PageTable, ...]:
        """Page tables with 0 for what was given back, as a sequence gets them that begins again."""
        tables: list[PageTable] = []
        first = 0
        for each, blocks in zip(self._each, sequence.blocks, strict=True):
            for number in range(first, first + each):
                table = sequence.tables[number]
                ids = (PageId(table[page] if page in blocks else 0) for page in range(len(table)))
                tables.append(PageTable(tuple(ids)))
            first += each
        return tuple(tables)

    def _begin_attention(self, plan: StepPlan) -> list[AttentionMetadata]:
        batch = self._rows.flatten(plan)
        assert batch is not None
        return [
            AttentionMetadata(torch.device("cpu"), slots=one.slots, chunks=one.chunks, decodes=one.decodes)
            for one in batch.tables
        ]

    def _off(self, number: int, spans: list[tuple[Sequence_, int, int]]) -> float:
        """Attend in a layer, once as it is done and once token by token; return by how much they differ at most."""
        layer, params = self._layers[number], self._params[number]
        counts = [end - start for _, start, end in spans]
        queries = torch.randn(sum(counts), layer.num_heads, layer.head_dim, generator=self._generator)
        keys, values = (
            torch.randn(sum(counts), layer.num_kv_heads, layer.head_dim, generator=self._generator) for _ in range(2)
        )
        computed = self._attention.attend(number, queries, keys, values, params)
        expected = []
        for (sequence, start, end), own, new_keys, new_values in zip(
            spans, queries.split(counts), keys.split(counts), values.split(counts), strict=True
        ):
            if layer.owner == number:
                before = sequence.states[number]
                sequence.states[number] = torch.cat((before[0], new_keys)), torch.cat((before[1], new_values))
            seen_keys, seen_values = sequence.states[layer.owner]
            expected += [
                _attended(own[position - start], seen_keys[: position + 1], seen_values[: position + 1], params)
                for position in range(start, end)
            ]
        return float((computed - torch.stack(expected)).abs().max())


def _attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """What one token reads, head by head: `query` [heads, head_dim], the last of `keys` and `values` its own."""
    first = 0 if params.window is None else max(0, len(keys) - params.window)
    share = len(query) // keys.shape[1]
    read = []
    for head, own in enumerate(query):
        scores = keys[first:, head // share] @ own * params.scaling
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        weights = torch.exp(scores)
        total = weights.sum() + (0.0 if params.sinks is None else torch.exp(params.sinks[head]))
        read.append((weights / total) @ values[first:, head // share])
    return torch.stack(read)
