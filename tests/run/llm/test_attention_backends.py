"""Attention backends, each against attention written out token by token, on random pools, tables and parameters."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import numpy as np
import numpy.typing as npt
import torch

from kvarts.base.errors import ConfigError
from kvarts.core.kv.groups import SinkWindow
from kvarts.run.torch.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    ChunkMetadata,
    DecodeMetadata,
    PagedAttention,
)
from kvarts.run.torch.executor import BACKENDS, choose_backend
from kvarts.run.torch.flash import FlashBackend
from kvarts.run.torch.numba_backend import NumbaBackend
from kvarts.run.torch.pools import KVPools, LayerShape
from kvarts.run.torch.sdpa import GROUP_TOKENS, SdpaBackend
from kvarts.run.torch.triton_backend import TritonBackend

from builders.flash_standin import flash_module
from builders.triton_interpreted import TRITON, interpret


@pytest.fixture(autouse=True)
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for FlashAttention's package: what it says of itself, computed naively. And Triton's interpreter."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_module())
    interpret(monkeypatch)


MAKERS: dict[str, Any] = {
    "sdpa": SdpaBackend,
    "numba": NumbaBackend,
    "flash": FlashBackend,
    "triton": TritonBackend,
}
NAMES = [*(name for name in MAKERS if name != "triton"), TRITON]


class Batch:
    """Sequences with pages in any order, some of them shared, the first `num_decodes` of which decode."""

    def __init__(
        self,
        seed: int,
        *,
        page_size: int,
        spans: list[tuple[int, int]],
        num_decodes: int,
        keeps: list[SinkWindow | None] | None = None,
    ) -> None:
        """`spans`: for each sequence, the positions [start, end) that the batch computes. `keeps`: what it retains."""
        self.keeps: list[SinkWindow | None] = [None] * len(spans) if keeps is None else keeps
        random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        needed = [-(-end // page_size) for _, end in spans]
        ids = random.permutation(sum(needed) + 3)
        self.pages, taken = [], 0
        for count in needed:
            self.pages.append(ids[taken : taken + count].astype(np.int64))
            taken += count
        if len(spans) > 1:
            # Pages before what either computes may belong to both.
            common = min(spans[0][0], spans[1][0]) // page_size
            self.pages[1][:common] = self.pages[0][:common]
        self.spans, self.num_decodes, self.page_size = spans, num_decodes, page_size
        self.pools = KVPools([LayerShape(4, 2, 8, 0)], num_pages=len(ids), page_size=page_size, dtype=torch.float32)
        self.pools.keys[0].normal_()
        self.pools.values[0].normal_()
        self.num_tokens = sum(end - start for start, end in spans)
        self.queries = torch.randn(self.num_tokens, 4, 8)
        self.keys, self.values = torch.randn(2, self.num_tokens, 2, 8)

    def answer(self, backend: AttentionBackend, params: AttentionParams) -> torch.Tensor:
        """The output of the backend, after writing what is new."""
        size = self.page_size
        slots, chunks, first = [], [], 0
        for number, ((start, end), pages) in enumerate(zip(self.spans, self.pages, strict=True)):
            where = np.arange(start, end)
            slots.append(pages[where // size] * size + where % size)
            if number >= self.num_decodes:
                keeps, gap = self.keeps[number], self.gap(number)
                before = 0 if keeps is None else keeps.num_sink_pages(size) * size
                chunks.append(
                    ChunkMetadata(
                        first, first + end - start, start, self.table(number), keeps, gap, num_before_gap=before
                    )
                )
            first += end - start
        tables = np.zeros((self.num_decodes, max(map(len, self.pages[: self.num_decodes]), default=1)), np.int64)
        for row in range(self.num_decodes):
            pages = self.table(row)
            tables[row, : len(pages)] = pages
        metadata = AttentionMetadata(
            self.pools.device,
            slots=np.concatenate(slots),
            chunks=chunks,
            decodes=self.decodes(tables),
        )
        attention = PagedAttention(self.pools, [backend])
        attention.begin([metadata])
        return attention.attend(0, self.queries, self.keys, self.values, params)

    def gap(self, number: int) -> int:
        """Tokens of pages that the sequence dropped before this batch."""
        keeps = self.keeps[number]
        if keeps is None:
            return 0
        num_passed = keeps.first_seen(self.spans[number][0]) // self.page_size
        return max(0, num_passed - keeps.num_sink_pages(self.page_size)) * self.page_size

    def table(self, number: int) -> npt.NDArray[np.int64]:
        """The pages of a sequence without those that it dropped."""
        keeps, pages = self.keeps[number], self.pages[number]
        if keeps is None:
            return pages
        begin = keeps.num_sink_pages(self.page_size)
        return np.delete(pages, range(begin, begin + self.gap(number) // self.page_size))

    def decodes(self, tables: npt.NDArray[np.int64]) -> DecodeMetadata:
        """The decodes of the batch."""
        keeps = self.keeps[: self.num_decodes]
        positions = np.array([start for start, _ in self.spans[: self.num_decodes]], np.int64)
        if not any(keeps):
            return DecodeMetadata.plain(positions, tables)
        return DecodeMetadata(
            positions,
            tables,
            np.array([0 if kept is None else kept.sink for kept in keeps], np.int64),
            np.array([1 << 62 if kept is None else kept.window for kept in keeps], np.int64),
            np.array([self.gap(number) for number in range(self.num_decodes)], np.int64),
            positions,
        )

    def expected(self, params: AttentionParams) -> torch.Tensor:
        """Token by token, head by head, place by place; after `answer`."""
        out = torch.zeros_like(self.queries)
        token = 0
        for (start, end), pages, keeps in zip(self.spans, self.pages, self.keeps, strict=True):
            for position in range(start, end):
                begin = 0 if params.window is None else max(0, position + 1 - params.window)
                slots = [
                    int(pages[at // self.page_size]) * self.page_size + at % self.page_size
                    for at in range(begin, position + 1)
                    if keeps is None or at < keeps.sink or at >= position - keeps.window
                ]
                for head in range(4):
                    scores = self.pools.keys_flat[0][slots, head // 2] @ self.queries[token, head] * params.scaling
                    if params.softcap is not None:
                        scores = params.softcap * torch.tanh(scores / params.softcap)
                    weights = torch.exp(scores)
                    total = weights.sum() + (0.0 if params.sinks is None else torch.exp(params.sinks[head]))
                    out[token, head] = (weights / total) @ self.pools.values_flat[0][slots, head // 2]
                token += 1
        return out


PARAMS = st.builds(
    lambda window, softcap, sinks: AttentionParams(
        0.4, window, softcap, torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None
    ),
    st.sampled_from([None, 1, 3, 8, 200]),
    st.sampled_from([None, 1.5]),
    st.booleans(),
)
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=0, max_size=3)


@pytest.mark.laws
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    page_size=st.sampled_from([1, 4, 8]),
    decodes=st.lists(st.integers(0, 40), max_size=4),
    chunks=SPANS,
    params=PARAMS,
)
def test_every_backend_computes_attention(
    name: str, seed: int, page_size: int, decodes: list[int], chunks: list[tuple[int, int]], params: AttentionParams
) -> None:
    spans = [(position, position + 1) for position in decodes] + [(start, start + count) for start, count in chunks]
    if not spans:
        return
    batch = Batch(seed, page_size=page_size, spans=spans, num_decodes=len(decodes))
    with torch.inference_mode():
        computed = batch.answer(MAKERS[name](batch.pools), params)
        torch.testing.assert_close(computed, batch.expected(params), rtol=1e-4, atol=1e-5)


KEEPS = st.none() | st.builds(SinkWindow, st.integers(0, 9), st.integers(1, 12))


@pytest.mark.laws
@pytest.mark.parametrize("name", ["sdpa", "numba"])
@settings(max_examples=50)
@given(
    seed=st.integers(0, 99),
    page_size=st.sampled_from([1, 4, 8]),
    decodes=st.lists(st.tuples(st.integers(0, 60), KEEPS), max_size=4),
    chunks=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 12), KEEPS), max_size=3),
    params=PARAMS,
)
def test_sequences_that_dropped_pages_attend_to_their_sink_and_window(
    name: str,
    seed: int,
    page_size: int,
    decodes: list[tuple[int, SinkWindow | None]],
    chunks: list[tuple[int, int, SinkWindow | None]],
    params: AttentionParams,
) -> None:
    """L12: beside sequences that retain all, in layers with windows, caps and attention sinks of their own."""
    spans = [(position, position + 1) for position, _ in decodes]
    spans += [(start, start + count) for start, count, _ in chunks]
    if not spans:
        return
    keeps = [kept for _, kept in decodes] + [kept for _, _, kept in chunks]
    batch = Batch(seed, page_size=page_size, spans=spans, num_decodes=len(decodes), keeps=keeps)
    with torch.inference_mode():
        computed = batch.answer(MAKERS[name](batch.pools), params)
        torch.testing.assert_close(computed, batch.expected(params), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_long_chunks_and_many_decodes_are_cut_into_blocks_and_groups(name: str) -> None:
    """More queries than a block of FlexAttention's mask has, more context than a group."""
    decodes = [(length, length + 1) for length in (GROUP_TOKENS // 2, 700, 3, 701, 5)]
    batch = Batch(1, page_size=16, spans=[*decodes, (100, 400)], num_decodes=5)
    with torch.inference_mode():
        for window in (None, 150):
            params = AttentionParams(0.3, window)
            computed = batch.answer(MAKERS[name](batch.pools), params)
            torch.testing.assert_close(computed, batch.expected(params), rtol=1e-4, atol=1e-5)


def test_a_backend_goes_from_step_to_step() -> None:
    """What it made for one step is not used for the next."""
    first = Batch(0, page_size=4, spans=[(40, 41), (3, 30)], num_decodes=1)
    others = [Batch(seed, page_size=4, spans=[(seed, seed + 1), (3, 9)], num_decodes=1) for seed in (5, 17, 2)]
    for name, make in MAKERS.items():
        if name == "triton":
            continue  # interpreted, it takes as long as all others
        backend = make(first.pools)
        for batch in (first, *others, first):
            batch.pools = first.pools
            for window in (None, 6):
                with torch.inference_mode():
                    computed = batch.answer(backend, AttentionParams(0.3, window))
                    torch.testing.assert_close(computed, batch.expected(AttentionParams(0.3, window)), msg=name)


def pools(page_size: int = 16, head_dim: int = 8, dtype: torch.dtype = torch.bfloat16) -> KVPools:
    return KVPools([LayerShape(1, 1, head_dim, 0)], num_pages=2, page_size=page_size, dtype=dtype)


def on_cuda(page_size: int = 16, head_dim: int = 8, dtype: torch.dtype = torch.bfloat16) -> KVPools:
    """Pools that say that they are on a GPU, which is enough for a choice."""
    there = pools(page_size, head_dim, dtype)
    there.device = torch.device("cuda")
    return there


def test_which_backend_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert type(choose_backend(pools())) is NumbaBackend
    assert type(choose_backend(pools(dtype=torch.float16))) is SdpaBackend
    assert type(choose_backend(pools(), "sdpa")) is SdpaBackend
    assert type(choose_backend(pools(256), "flash")) is FlashBackend
    for bad, name, message in (
        (pools(48), "flash", "48 is no multiple of 256"),
        (pools(256, 512), "flash", "heads of 512"),
        (pools(256, dtype=torch.float32), "flash", "not of 16 bits"),
        (pools(), "triton", "it needs a GPU, and the pages are on cpu"),
        (on_cuda(head_dim=512), "triton", "heads of 512 are larger than 256"),
        (on_cuda(dtype=torch.float64), "triton", "not of 16 or 32 bits"),
        (pools(dtype=torch.float16), "numba", "neither float32 nor bfloat16"),
        (pools(), "fast", "'fast' is not known"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose_backend(bad, name)
    # On CUDA, the first that fits. No such device is needed to choose.
    monkeypatch.setattr(SdpaBackend, "__init__", lambda self, pools: None)
    monkeypatch.setattr(TritonBackend, "__init__", lambda self, pools: None)
    assert type(choose_backend(on_cuda(8))) is TritonBackend
    assert type(choose_backend(on_cuda(head_dim=512))) is SdpaBackend
    monkeypatch.setitem(sys.modules, "triton", None)
    assert type(choose_backend(on_cuda(256))) is FlashBackend
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert type(choose_backend(on_cuda(256))) is SdpaBackend
    assert list(BACKENDS) == ["flash", "numba", "sdpa", "triton"]
