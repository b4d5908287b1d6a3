"""How memory is cut into blocks of one size: every byte belongs to one token of one layer, of whatever shape."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import numpy as np
import torch

from kvarts.base.errors import ConfigError
from kvarts.core.kv.groups import PageTable
from kvarts.core.kv.pool import PageId
from kvarts.core.sched.plan import Batch, Chunk, StepPlan
from kvarts.cost.hardware.fit import local_kv_groups
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.run.flat_batch import PageTables
from kvarts.run.torch.block_cut import cut_blocks
from kvarts.run.torch.pools import KVPools, LayerShape, page_bytes_of

from builders.windowed_models import FAMILIES, config_of

LAYERS = st.lists(
    st.tuples(st.sampled_from([None, 3, 8]), st.sampled_from([(1, 8), (2, 8), (4, 8), (2, 16), (3, 8)]), st.booleans()),
    min_size=1,
    max_size=8,
)
"""Windows, KV heads and their numbers, and whether the layer before is read instead of a layer's own."""


@pytest.mark.laws
@settings(max_examples=60)
@given(kinds=LAYERS, page_size=st.sampled_from([1, 2, 4, 6, 16]), seed=st.integers(0, 99))
def test_every_number_belongs_to_one_token_of_one_layer(kinds: list[Any], page_size: int, seed: int) -> None:
    layers: list[LayerShape] = []
    for window, shape, shares in kinds:
        owner = layers[-1].owner if shares and layers else len(layers)
        own = (layers[owner].num_kv_heads, layers[owner].head_dim) if owner < len(layers) else shape
        layers.append(LayerShape(own[0], own[0], own[1], owner, window))
    sizes = {layer.num_kv_heads * layer.head_dim for layer in layers}
    if any(size % least or page_size % (size // least) for size in sizes for least in [min(sizes)]):
        with suppress(ConfigError):  # whether it can be depends on how many layers there are of each size
            cut_blocks(layers, page_size=page_size, dtype=torch.float32)
        return
    cut = cut_blocks(layers, page_size=page_size, dtype=torch.float32)
    memory = cut.memory
    num_pages = 2
    num_blocks = memory.num_blocks(num_pages + 1)
    pools = KVPools(
        layers,
        num_pages=num_blocks,
        page_size=page_size,
        dtype=torch.float32,
        places=cut.places,
        page_sizes=cut.page_sizes,
    )
    assert pools.num_bytes == (num_pages + 1) * page_bytes_of(layers, page_size=page_size, dtype=torch.float32)
    assert pools.num_bytes == num_blocks * memory.block_bytes == num_blocks * pools.page_bytes
    assert [len(tensor) for tensor in pools.tensors] == [num_blocks] * len(pools.tensors)
    each = memory.page_bytes // memory.block_bytes
    ids = Random(seed).sample(range(num_blocks), num_pages * each)
    tables = tuple(PageTable(tuple(map(PageId, ids[number * num_pages :][:num_pages]))) for number in range(each))
    num_tokens = num_pages * page_size
    chunk = Chunk(0, num_tokens, num_tokens, num_tokens, tokens=np.zeros(num_tokens, np.uint64), tables=tables)
    batch = PageTables(1, page_size, cut.layer_tables).flatten(StepPlan(0, Batch((chunk,), 0, 0, 0)))
    assert batch is not None
    written: dict[int, torch.Tensor] = {}
    first = 1.0
    for number, layer in enumerate(layers):
        if layer.owner == number:
            shape = (num_tokens, layer.num_kv_heads, layer.head_dim)
            count = int(np.prod(shape))
            written[number] = torch.arange(first, first + count).view(shape)
            first += count
            slots = torch.from_numpy(batch.tables[cut.tables[number]].slots)
            for flat in (pools.keys_flat, pools.values_flat):
                flat[number][slots] = written[number]
    for number, layer in enumerate(layers):
        slots = torch.from_numpy(batch.tables[cut.tables[number]].slots)
        assert torch.equal(pools.keys_flat[number][slots], written[layer.owner])
    for tensors in (pools.keys, pools.values):
        seen = {tensor.data_ptr(): tensor for tensor in tensors}
        assert sum(int((tensor != 0).sum()) for tensor in seen.values()) == first - 1
    in_blocks = sum(int((tensor[ids] != 0).sum()) for tensor in pools.tensors)
    assert in_blocks == 2 * (first - 1) == len(ids) * memory.block_bytes // 4


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mimo_v2_flash"])
def test_groups_of_a_model_are_those_of_its_config(family: str, tmp_path: Path, windowed: Any) -> None:
    """What is counted from a config.json and what is allocated are the same, group by group, to the byte."""
    from kvarts.run.torch.probe import examine

    (tmp_path / "config.json").write_text(json.dumps({**config_of(family).to_dict(), "dtype": "bfloat16"}))
    counted = [group for group in local_kv_groups(load_geometry(tmp_path), page_size=16) if group.layer.keeps_tokens]
    groups = cut_blocks(examine(windowed(family)[0]).layers, page_size=16, dtype=torch.bfloat16).memory.groups
    assert [(group.part_bytes, group.num_layers, group.layer) for group in groups] == [
        (group.page_bytes, group.num_layers, group.layer) for group in counted
    ]


def test_a_block_that_cannot_be_is_refused() -> None:
    layers = [LayerShape(4, 2, 8, 0), LayerShape(4, 3, 8, 1, window=4)]
    with pytest.raises(ConfigError, match=r"2 of 8 numbers, 3 of 8 numbers.*pages of 16 tokens"):
        cut_blocks(layers, page_size=16, dtype=torch.float32)
    assert cut_blocks(layers, page_size=6, dtype=torch.float32).page_sizes == (3, 2)
