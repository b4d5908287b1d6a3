"""Reading pages where they are, with a kernel compiled by Numba; chunks of prompts as in SdpaReader. For a CPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvarts.executor.torch.pools import KVPools
from kvarts.executor.torch.sdpa import SdpaReader
from kvarts.executor.torch.step import Ints, StepView, Way

__all__ = ["InPlaceReader", "in_place_fits"]


def in_place_fits(pools: KVPools) -> str | None:
    """Why such pages cannot be read in place; None if they can."""
    if find_spec("numba") is None:
        return "numba is not installed"
    if pools.device.type != "cpu":
        return f"they are on {pools.device}"
    if pools.dtype not in (torch.float32, torch.bfloat16):
        return f"{pools.dtype} is neither float32 nor bfloat16"
    return None


class _Seen(msgspec.Struct):
    """The decodes of a step in the order in which they are worked on: places [begin, end) of the pages in `tables`."""

    order: torch.Tensor
    back: torch.Tensor
    tables: Ints
    begins: Ints
    ends: Ints


class InPlaceReader(SdpaReader):
    """See Reader."""

    def __init__(self, pools: KVPools) -> None:
        import numba

        super().__init__(pools)
        self._numba = numba
        self._flat = {id(pool): _flat(pool) for pool in pools.tensors}
        self._seen: dict[int | None, _Seen] = {}
        self._num_threads = 1

    def begin(self, step: StepView) -> None:
        """See Reader."""
        super().begin(step)
        self._seen.clear()
        self._num_threads = min(torch.get_num_threads(), self._numba.config.NUMBA_NUM_THREADS)
        self._numba.set_num_threads(self._num_threads)

    def _read_decodes(self, layer: int, queries: torch.Tensor, way: Way, out: torch.Tensor) -> None:
        from kvarts.executor.torch.kernel import NOWHERE, decode_kernel

        pools = self._pools
        keys, values = pools.keys[layer], pools.values[layer]
        num_kv_heads, head_dim = keys.shape[2:]
        num_heads = queries.shape[1]
        seen = self._seen.get(way.window)
        if seen is None:
            seen = self._seen[way.window] = self._look(way.window)
        count = len(seen.begins)
        own = queries[:count][seen.order].float().contiguous().flatten().numpy()
        read = np.empty_like(own)
        sinks = np.full(num_heads, NOWHERE, np.float32)
        if way.sinks is not None:
            sinks[:] = way.sinks.float().numpy()
        kernel = decode_kernel(
            head_dim, num_heads // num_kv_heads, pools.page_size, is_bfloat16=pools.dtype == torch.bfloat16
        )
        kernel(
            own,
            self._flat[id(keys)],
            self._flat[id(values)],
            num_kv_heads,
            self._num_parts(count, num_kv_heads),
            seen.tables,
            seen.begins,
            seen.ends,
            np.float32(way.scaling),
            np.float32(way.softcap or 0.0),
            sinks,
            read,
        )
        out[:count] = torch.from_numpy(read).view(count, num_heads, head_dim)[seen.back]

    def _look(self, window: int | None) -> _Seen:
        step = self._step
        ends = step.decode_positions + 1
        begins = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
        # Each thread works on sequences in a row: the longest are dealt out to all of them, one after the other.
        by_length = np.argsort(begins - ends, kind="stable")
        order = np.concatenate([by_length[first :: self._num_threads] for first in range(self._num_threads)])
        back = np.argsort(order)
        tables = np.ascontiguousarray(step.decode_tables[order])
        return _Seen(step.tensor(order), step.tensor(back), tables, begins[order], ends[order])

    def _num_parts(self, count: int, num_kv_heads: int) -> int:
        """In how many parts the heads of a sequence are worked on, so that no thread is idle."""
        wanted = min(num_kv_heads, -(-2 * self._num_threads // count))
        return next(parts for parts in range(wanted, num_kv_heads + 1) if num_kv_heads % parts == 0)


def _flat(pool: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory in one dimension; a bfloat16, which NumPy does not know, as its bits."""
    flat = pool.view(-1)
    if flat.dtype == torch.bfloat16:
        bits: npt.NDArray[Any] = flat.view(torch.int16).numpy().view(np.uint16)
        return bits
    numbers: npt.NDArray[Any] = flat.numpy()
    return numbers
