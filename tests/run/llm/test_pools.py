"""KV memory: zeros, aligned, of the size that the formula says, and taken from the system when it is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvarts.run.torch.pools import KVPools, LayerShape, page_bytes_of  # noqa: E402

LAYERS = (LayerShape(4, 2, 16, 0), LayerShape(4, 2, 16, 0), LayerShape(8, 1, 33, 2, window=8))
STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pools_are_zero_and_of_the_bytes_of_their_pages(dtype: Any) -> None:
    pools = KVPools(LAYERS, num_pages=3, page_size=5, dtype=dtype)
    assert [tuple(keys.shape) for keys in pools.keys] == [(3, 5, 2, 16), (3, 5, 2, 16), (3, 5, 1, 33)]
    assert sum(tensor.nbytes for tensor in pools.tensors) == 3 * page_bytes_of(LAYERS, page_size=5, dtype=dtype)
    assert pools.keys[0] is pools.keys[1], "a layer that reads the keys of another has none"
    for tensor in pools.tensors:
        assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(1)
    assert all(bool(tensor.all()) for tensor in pools.tensors)


@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")
def test_memory_is_taken_when_it_is_written() -> None:
    before = resident_bytes()
    pools = KVPools(LAYERS, num_pages=1 << 16, page_size=16, dtype=torch.float32)
    num_bytes = sum(tensor.nbytes for tensor in pools.tensors)
    assert num_bytes > 300 << 20
    assert resident_bytes() - before < num_bytes // 10
    pools.keys[0].fill_(1)
    assert resident_bytes() - before >= pools.keys[0].nbytes * 9 // 10
