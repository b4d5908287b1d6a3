"""Steps of decodes as graphs, recorded and repeated on a CPU: the same tokens, and nothing read from before."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch

from kvarts.core.sampling import SamplingParams
from kvarts.run.torch import executor
from kvarts.run.torch.attention import AttentionMetadata, AttentionParams
from kvarts.run.torch.graphs import graph_sizes
from kvarts.run.torch.pools import KVPools
from kvarts.run.torch.sdpa import SdpaBackend

from builders.real_models import VOCABULARY, engine_of, undisturbed
from builders.recorded_graphs import RecordedGraph, record_graphs

PARAMS = SamplingParams(max_tokens=14, ignore_eos=True)


class NaiveBackend:
    """Attention of decodes to all that tables name, from tensors of the device alone; others are read by sdpa."""

    reads_sinks = False

    def __init__(self, pools: KVPools) -> None:
        self._pools = pools
        self._other = SdpaBackend(pools)

    def begin(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        if metadata.chunks:
            self._other.begin(metadata)

    def forward(self, layer: int, queries: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        if self._metadata.chunks:
            return self._other.forward(layer, queries, params)
        tables, positions = self._metadata.decode_tables, self._metadata.decode_positions
        size = self._pools.page_size
        slots = (tables.long()[:, :, None] * size + torch.arange(size)).flatten(1)
        keys, values = self._pools.keys_flat[layer][slots], self._pools.values_flat[layer][slots]
        each = queries.shape[1] // keys.shape[2]
        keys, values = (one.repeat_interleave(each, dim=2) for one in (keys, values))
        scores = torch.einsum("nhd,nphd->nhp", queries, keys) * params.scaling
        places = torch.arange(slots.shape[1])
        unseen = places > positions[:, None]
        if params.window:
            unseen |= places <= positions[:, None] - params.window
        weights = torch.softmax(scores.masked_fill(unseen[:, None], -torch.inf), dim=-1)
        return torch.einsum("nhp,nphd->nhd", weights, values)


@pytest.fixture
def naive(monkeypatch: pytest.MonkeyPatch) -> str:
    record_graphs(monkeypatch)
    monkeypatch.setitem(executor.BACKENDS, "naive", (NaiveBackend, lambda _: None))
    monkeypatch.setattr(executor, "CAPTURED", ("naive",))
    return "naive"


def test_sizes_of_graphs_end_with_the_most_sequences() -> None:
    for most in (1, 3, 4, 5, 256, 300):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most


@pytest.mark.parametrize(("family", "keeps"), [("qwen3", "off"), ("gemma3", "all")])
def test_tokens_are_those_of_the_model(
    models: Callable[[str], tuple[Any, Any]], naive: str, family: str, keeps: str
) -> None:
    """Sequences come and go, so that graphs have rows to spare, pages that others had, and tables of other widths."""
    model, reference = models(family)
    random = Random(3)
    prompts = [[random.randrange(VOCABULARY - 1) for _ in range(random.randrange(1, 30))] for _ in range(9)]
    engine = engine_of(model, num_pages=50, budget=64, seqs=5, attention=naive, layers="model", kv_groups=keeps)
    for _ in range(2):
        for prompt, completion in zip(prompts, engine.generate(prompts, PARAMS), strict=True):
            assert list(completion.tokens) == undisturbed(reference, prompt, PARAMS.max_tokens)
    engine.check()
    assert RecordedGraph.num_replays > 20


def test_a_step_that_reads_memory_while_it_is_captured_runs_without_graphs(
    models: Callable[[str], tuple[Any, Any]], naive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = models("qwen3")
    forward = NaiveBackend.forward

    def reading(self: NaiveBackend, layer: int, queries: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        assert float(queries.sum()) == float(queries.sum())
        return forward(self, layer, queries, params)

    monkeypatch.setattr(NaiveBackend, "forward", reading)
    engine = engine_of(model, seqs=2, attention=naive, layers="model")
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    for prompt, completion in zip(prompts, engine.generate(prompts, PARAMS), strict=True):
        assert list(completion.tokens) == undisturbed(reference, prompt, PARAMS.max_tokens)
    assert RecordedGraph.num_replays == 0
