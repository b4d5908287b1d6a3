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
    """See Reader. Its kernels are compiled, or found on disk, when it is made: no step has to wait for them."""

    def __init__(self, pools: KVPools) -> None:
        import numba

        from kvarts.executor.torch import kernel

        super().__init__(pools)
        self._numba = numba
        self._kernel = kernel
        self._flat = {id(pool): _flat(pool) for pool in pools.tensors}
        self._seen: dict[int | None, _Seen] = {}
        self._num_threads = 1
        for layer in range(len(pools.layers)):
            self._compile(layer)

    def begin(self, step: StepView) -> None:
        """See Reader."""
        super().begin(step)
        self._seen.clear()
        self._num_threads = min(torch.get_num_threads(), self._numba.config.NUMBA_NUM_THREADS)
        self._numba.set_num_threads(self._num_threads)

    def _read_decodes(self, layer: int, queries: torch.Tensor, way: Way, out: torch.Tensor) -> None:
        seen = self._seen.get(way.window)
        if seen is None:
            seen = self._seen[way.window] = self._look(way.window)
        count = len(seen.begins)
        out[:count] = self._call(layer, queries[:count][seen.order], way, seen)[seen.back]

    def _call(self, layer: int, queries: torch.Tensor, way: Way, seen: _Seen) -> torch.Tensor:
        """`queries` [sequences, heads, head_dim], in the order of `seen`; as many, in 32 bits."""
        pools, shape = self._pools, self._pools.layers[layer]
        own = queries.float().contiguous().flatten().numpy()
        read = np.empty_like(own)
        sinks = np.full(shape.num_heads, self._kernel.NOWHERE, np.float32)
        if way.sinks is not None:
            sinks[:] = way.sinks.float().numpy()
        self._kernel.decode_kernel(shape.head_dim, shape.num_heads // shape.num_kv_heads, pools.page_size)(
            own,
            self._flat[id(pools.keys[layer])],
            self._flat[id(pools.values[layer])],
            shape.num_kv_heads,
            self._num_parts(len(seen.begins), shape.num_kv_heads),
            seen.tables,
            seen.begins,
            seen.ends,
            np.float32(way.scaling),
            np.float32(way.softcap or 0.0),
            sinks,
            read,
        )
        return torch.from_numpy(read).view(queries.shape)

    def _compile(self, layer: int) -> None:
        """By a call for no sequence at all, which is nothing where another layer of this shape was before."""
        shape = self._pools.layers[layer]
        nothing = torch.empty(0, shape.num_heads, shape.head_dim)
        none = np.empty(0, np.int64)
        seen = _Seen(torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long), none[:, None], none, none)
        self._call(layer, nothing, Way(1.0), seen)

    def _look(self, window: int | None) -> _Seen:
        step = self._step
        begins, ends = step.decode_spans(window)
        # Each thread works on sequences in a row: the longest are dealt out to all of them, one after the other.
        by_length = np.argsort(begins - ends, kind="stable")
        order = np.concatenate([by_length[first :: self._num_threads] for first in range(self._num_threads)])
        back = np.argsort(order)
        tables = np.ascontiguousarray(step.decode_tables[order])
        return _Seen(step.tensor(order), step.tensor(back), tables, begins[order], ends[order])

    def _num_parts(self, count: int, num_kv_heads: int) -> int:
        """In how many parts the heads of a sequence are worked on, so that no thread is idle."""
        wanted = min(num_kv_heads, -(-2 * self._num_threads // max(1, count)))
        return next(parts for parts in range(wanted, num_kv_heads + 1) if num_kv_heads % parts == 0)


def _flat(pool: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory in one dimension; a bfloat16, which NumPy does not know, as its bits."""
    flat = pool.view(-1)
    if flat.dtype == torch.bfloat16:
        bits: npt.NDArray[Any] = flat.view(torch.int16).numpy().view(np.uint16)
        return bits
    numbers: npt.NDArray[Any] = flat.numpy()
    return numbers
