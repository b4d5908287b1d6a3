"""vLLM's offloading worker: copies blocks between the device and host memory. Runs in each worker's process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import gcd
from typing import Any

import torch
from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvarts.base.errors import ConfigError
from kvarts.doors.vllm.page_io import HostRegion

__all__ = ["KvartsWorker"]


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes."""


class _Copy:
    """A running copy. `ready`: an event of the device; None if copies complete at once."""

    def __init__(self, job_id: int, num_bytes: int, ready: Any) -> None:
        self.job_id = job_id
        self.num_bytes = num_bytes
        self.ready = ready
        self.began = time.monotonic()


class _OnDevice:
    """Host memory that a device may read and write at its own address, as a tensor of that device."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def _seen_by(device: torch.device, memory: torch.Tensor) -> torch.Tensor:
    """Return `memory` as the kernels of `device` can read and write it. Raise ConfigError if CUDA cannot pin it."""
    if device.type != "cuda":
        return memory
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(error):
            with suppress(RuntimeError):
                torch.zeros(1, device=device)  # CUDA reports the error once more, at the next kernel
            raise ConfigError(
                f"CUDA cannot pin {memory.numel()} bytes of host memory (error {int(error)})",
                field="kv_connector_extra_config.host_memory",
                hint="Give less, or raise the limit of locked memory (ulimit -l).",
            )
        return torch.as_tensor(_OnDevice(memory), device=device)


def _unpin(device: torch.device, memory: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class KvartsWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between `kv_caches`, vLLM's canonical views of a device, and the part of `rank` in `region`.

    A place has `blocks_per_chunk` blocks of one KV group, each with the group's layers in order. A GPU reads and writes
    host memory itself, on a stream of its own; expedited loads have another stream.
    """

    def __init__(
        self, kv_caches: Any, region: HostRegion, *, rank: int, rank_bytes: int, blocks_per_chunk: int
    ) -> None:
        tensors = [each.tensor.view(torch.uint8) for each in kv_caches.tensors]
        self._refs = kv_caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        for refs in self._refs:
            num_bytes = blocks_per_chunk * sum(ref.page_size_bytes for ref in refs)
            assert num_bytes <= rank_bytes, f"{num_bytes} bytes of a chunk do not fit in {rank_bytes}"
        sizes = [ref.page_size_bytes for refs in self._refs for ref in refs]
        starts = [size for tensor in tensors for size in (tensor.storage_offset(), tensor.stride(0), tensor.shape[1])]
        # A thread of a GPU moves a word: over the bus, words of eight bytes arrive several times as fast as bytes.
        self._word_bytes = gcd(8, region.place_bytes, rank_bytes, *sizes, *starts)
        word = WORDS[self._word_bytes]
        self._tensors = [tensor.view(word) for tensor in tensors]
        self._device = tensors[0].device
        self._memory = torch.frombuffer(region.memory, dtype=torch.uint8)
        places = _seen_by(self._device, self._memory).view(region.num_places, region.place_bytes)
        self._unpin = weakref.finalize(self, _unpin, self._device, self._memory)
        self._host = places[:, rank * rank_bytes : (rank + 1) * rank_bytes].view(word)
        is_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None
        # The step waits for an expedited load (vLLM 0.33), which must not queue behind other copies.
        self._expedited = torch.cuda.Stream(self._device, priority=-1) if is_cuda else None
        self._copies: list[_Copy] = []
        self._ended: list[Any] = []

    @override
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        num_bytes = 0
        with self._copying(self._stream):
            for tensor, blocks, places, start, end in self._moves(src_spec, dst_spec):
                rows = tensor[blocks, : end - start]
                self._host[places, start:end] = rows
                num_bytes += rows.numel() * self._word_bytes
        self._began(job_id, num_bytes, self._stream)
        return True

    @override
    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        num_bytes = 0
        stream = self._expedited if expedited else self._stream
        with self._copying(stream):
            for tensor, blocks, places, start, end in self._moves(dst_spec, src_spec):
                rows = self._host[places, start:end]
                tensor[blocks, : end - start] = rows
                num_bytes += rows.numel() * self._word_bytes
        self._began(job_id, num_bytes, stream)
        return True

    @contextmanager
    def _copying(self, stream: Any) -> Iterator[None]:
        """Run copies after what the device was asked for before, and beside what it is asked for later."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def _began(self, job_id: int, num_bytes: int, stream: Any) -> None:
        ready = None if stream is None else stream.record_event()
        self._copies.append(_Copy(job_id, num_bytes, ready))

    @override
    def get_finished(self) -> list[Any]:
        self._end([copy for copy in self._copies if copy.ready is None or copy.ready.query()])
        ended, self._ended = self._ended, []
        return ended

    @override
    def wait(self, job_ids: set[int]) -> None:
        waited = [copy for copy in self._copies if copy.job_id in job_ids]
        for copy in waited:
            if copy.ready is not None:
                copy.ready.synchronize()
        self._end(waited)

    @override
    def shutdown(self) -> None:
        self.wait({copy.job_id for copy in self._copies})
        self._unpin()

    def _end(self, copies: list[_Copy]) -> None:
        now = time.monotonic()
        for copy in copies:
            self._copies.remove(copy)
            took = now - copy.began
            self._ended.append(
                TransferResult(job_id=copy.job_id, success=True, transfer_size=copy.num_bytes, transfer_time=took)
            )

    def _moves(self, device: Any, host: Any) -> Iterator[tuple[Any, Any, Any, int, int]]:
        """Yield the parts of a copy: a tensor and its blocks, and their places in host memory with first and last word.

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
            block_words = sum(ref.page_size_bytes for ref in refs) // self._word_bytes
            for inside in range(size):
                chosen = steps % size == inside
                if not chosen.any():
                    continue
                device_blocks, device_places = blocks[chosen].to(self._device), places[chosen].to(self._device)
                start = inside * block_words
                for ref in refs:
                    end = start + ref.page_size_bytes // self._word_bytes
                    yield self._tensors[ref.tensor_idx], device_blocks, device_places, start, end
                    start = end
