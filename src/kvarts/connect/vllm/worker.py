"""vLLM's offloading worker: copies blocks between the device and host memory. Runs in each worker's process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvarts.connect.vllm.region import HostRegion

__all__ = ["KvartsWorker"]


class _Copy:
    """A running copy. `ready`: an event of the device; None if copies complete at once."""

    def __init__(self, job_id: int, num_bytes: int, ready: Any, staged: list[Any], kept: list[Any]) -> None:
        self.job_id = job_id
        self.num_bytes = num_bytes
        self.ready = ready
        self.staged = staged
        """For a store: rows of host memory, their first and last byte in a place, and the bytes to put there."""
        self.kept = kept
        """Pinned memory that is read until then."""
        self.began = time.monotonic()


class KvartsWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between `kv_caches`, vLLM's canonical views of a device, and the part of `rank` in `region`.

    A place has `blocks_per_chunk` blocks of one KV group, each with the group's layers in order. On a device with
    streams, copies run on a separate stream, through pinned memory.
    """

    def __init__(
        self, kv_caches: Any, region: HostRegion, *, rank: int, rank_bytes: int, blocks_per_chunk: int
    ) -> None:
        self._tensors = [each.tensor.view(torch.uint8) for each in kv_caches.tensors]
        self._refs = kv_caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        memory = torch.frombuffer(region.memory, dtype=torch.uint8)
        places = memory.view(region.num_places, region.place_bytes)
        self._host = places[:, rank * rank_bytes : (rank + 1) * rank_bytes]
        for refs in self._refs:
            num_bytes = blocks_per_chunk * sum(ref.page_size_bytes for ref in refs)
            assert num_bytes <= rank_bytes, f"{num_bytes} bytes of a chunk do not fit in {rank_bytes}"
        device = self._tensors[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copies: deque[_Copy] = deque()
        self._ended: list[Any] = []

    @override
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        staged: list[Any] = []
        num_bytes = 0
        ready = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._tensors[0].device))
        with torch.cuda.stream(self._stream):
            for tensor, blocks, places, start, end in self._moves(src_spec, dst_spec):
                rows = tensor[blocks.to(tensor.device), : end - start]
                num_bytes += rows.numel()
                if self._stream is None:
                    self._host[places, start:end] = rows
                else:
                    pinned = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
                    pinned.copy_(rows, non_blocking=True)
                    staged.append((places, start, end, pinned))
            if self._stream is not None:
                ready = self._stream.record_event()
        self._copies.append(_Copy(job_id, num_bytes, ready, staged, []))
        return True

    @override
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        num_bytes = 0
        ready = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._tensors[0].device))
        kept = []
        with torch.cuda.stream(self._stream):
            for tensor, blocks, places, start, end in self._moves(dst_spec, src_spec):
                rows = self._host[places, start:end]
                num_bytes += rows.numel()
                if self._stream is None:
                    tensor[blocks, : end - start] = rows
                else:
                    pinned = rows.pin_memory()
                    kept.append(pinned)
                    tensor[blocks.to(tensor.device), : end - start] = pinned.to(tensor.device, non_blocking=True)
            if self._stream is not None:
                ready = self._stream.record_event()
        self._copies.append(_Copy(job_id, num_bytes, ready, [], kept))
        return True

    @override
    def get_finished(self) -> list[Any]:
        while self._copies and (self._copies[0].ready is None or self._copies[0].ready.query()):
            self._end(self._copies.popleft())
        ended, self._ended = self._ended, []
        return ended

    @override
    def wait(self, job_ids: set[int]) -> None:
        while any(copy.job_id in job_ids for copy in self._copies):
            copy = self._copies.popleft()
            if copy.ready is not None:
                copy.ready.synchronize()
            self._end(copy)

    def _end(self, copy: _Copy) -> None:
        for places, start, end, pinned in copy.staged:
            self._host[places, start:end] = pinned
        seconds = time.monotonic() - copy.began
        self._ended.append(
            TransferResult(job_id=copy.job_id, success=True, transfer_size=copy.num_bytes, transfer_time=seconds)
        )

    def _moves(self, device: Any, host: Any) -> Iterator[tuple[Any, Any, Any, int, int]]:
        """Yield the parts of a copy: a tensor and its blocks, and their places in host memory with first and last byte.

        vLLM lists the blocks of the KV groups one group after the other, without gaps; the first block may be inside a
        chunk.
        """
        at = place_at = 0
        size = self._blocks_per_chunk
        block_ids = torch.as_tensor(device.block_ids, dtype=torch.long)
        all_places = torch.tensor(host.places, dtype=torch.long)
        for refs, count, first in zip(self._refs, device.group_sizes, device.block_indices, strict=True):
            if not count:
                continue
            steps = torch.arange(count) + first % size
            places = all_places[place_at + steps // size]
            place_at += int(steps[-1]) // size + 1
            blocks = block_ids[at : at + count]
            at += count
            block_bytes = sum(ref.page_size_bytes for ref in refs)
            for inside in range(size):
                chosen = steps % size == inside
                if not chosen.any():
                    continue
                start = inside * block_bytes
                for ref in refs:
                    end = start + ref.page_size_bytes
                    yield self._tensors[ref.tensor_idx], blocks[chosen], places[chosen], start, end
                    start = end
