"""The worker that copies vLLM's blocks, on a CPU and, where there is one, on a GPU: against a copy block by block."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="copies of blocks need PyTorch")

NUM_BLOCKS, NUM_PLACES = 40, 30
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
_names = count()


@pytest.fixture(scope="module")
def worker_module() -> Iterator[Any]:
    """The module with vLLM's base classes stood in for: it takes two names from them, and nothing else."""
    base = ModuleType("vllm.v1.kv_offload.base")
    base.OffloadingWorker = object  # type: ignore[attr-defined]
    base.TransferResult = SimpleNamespace  # type: ignore[attr-defined]
    patch = pytest.MonkeyPatch()
    for name in ("vllm", "vllm.v1", "vllm.v1.kv_offload"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, base.__name__, base)
    patch.delitem(sys.modules, "kvarts.doors.vllm.worker", raising=False)
    yield importlib.import_module("kvarts.doors.vllm.worker")
    sys.modules.pop("kvarts.doors.vllm.worker", None)
    patch.undo()


class Blocks:
    """Layers of a device in KV groups, and the host memory beside them."""

    def __init__(self, module: Any, device: str, sizes: list[list[int]], blocks_per_chunk: int) -> None:
        from kvarts.doors.vllm.page_io import HostRegion

        self.layers = [
            torch.randint(0, 256, (NUM_BLOCKS, size + 8 * (number % 2)), dtype=torch.uint8).to(device)
            for number, size in enumerate(size for group in sizes for size in group)
        ]
        self.refs: list[list[Any]] = []
        for group in sizes:
            first = sum(map(len, self.refs))
            self.refs.append(
                [SimpleNamespace(tensor_idx=first + place, page_size_bytes=size) for place, size in enumerate(group)]
            )
        place_bytes = blocks_per_chunk * max(map(sum, sizes))
        self.region = HostRegion(f"test-{next(_names)}", NUM_PLACES, place_bytes)
        self.region.unlink()
        caches = SimpleNamespace(
            tensors=[SimpleNamespace(tensor=layer) for layer in self.layers], group_data_refs=self.refs
        )
        self.worker = module.KvartsWorker(
            caches, self.region, rank=0, rank_bytes=place_bytes, blocks_per_chunk=blocks_per_chunk
        )

    def read(self, group: int, block: int) -> list[bytes]:
        """The bytes of a block in the layers of its group."""
        return [
            bytes(self.layers[ref.tensor_idx][block, : ref.page_size_bytes].cpu().numpy()) for ref in self.refs[group]
        ]


GROUPS = st.lists(st.lists(st.sampled_from([6, 16, 24, 64]), min_size=1, max_size=3), min_size=1, max_size=3)


@pytest.mark.parametrize("device", DEVICES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sizes=GROUPS, blocks_per_chunk=st.integers(1, 4), data=st.data())
def test_what_is_stored_is_loaded_into_other_blocks(
    worker_module: Any, device: str, sizes: list[list[int]], blocks_per_chunk: int, data: st.DataObject
) -> None:
    blocks = Blocks(worker_module, device, sizes, blocks_per_chunk)
    counts = [data.draw(st.integers(0, 8), "blocks") for _ in sizes]
    firsts = [data.draw(st.integers(0, 7), "first") for _ in sizes]
    num_places = sum(
        (first % blocks_per_chunk + number - 1) // blocks_per_chunk + 1
        for first, number in zip(firsts, counts, strict=True)
        if number
    )
    chosen = data.draw(st.permutations(range(NUM_PLACES)), "places")[:num_places]
    order = data.draw(st.permutations(range(NUM_BLOCKS)), "ids")
    num_blocks = sum(counts)
    if 2 * num_blocks > NUM_BLOCKS or num_places > NUM_PLACES:
        return
    sources, targets = order[:num_blocks], order[num_blocks : 2 * num_blocks]
    places = SimpleNamespace(places=chosen)

    def named(ids: list[int]) -> Any:
        return SimpleNamespace(block_ids=ids, group_sizes=counts, block_indices=firsts)

    groups = [group for group, number in enumerate(counts) for _ in range(number)]
    before = [blocks.read(group, block) for group, block in zip(groups, sources, strict=True)]
    for number, submit, what in (
        (1, blocks.worker.submit_store, (named(sources), places)),
        (2, blocks.worker.submit_load, (places, named(targets))),
    ):
        assert submit(number, *what)
        blocks.worker.wait({number})
        (ended,) = blocks.worker.get_finished()
        assert (ended.job_id, ended.success) == (number, True)
        assert ended.transfer_size == sum(len(part) for parts in before for part in parts)
    assert [blocks.read(group, block) for group, block in zip(groups, targets, strict=True)] == before
    blocks.worker.shutdown()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_memory_that_cuda_cannot_pin_is_refused(worker_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvarts.base.errors import ConfigError

    blocks = Blocks(worker_module, "cuda", [[16]], 1)
    with pytest.raises(ConfigError, match="CUDA cannot pin"):
        worker_module._seen_by(blocks.layers[0].device, blocks.worker._memory)  # a second time
