"""Attention backend with a kernel compiled by Numba that reads pages in place; chunks as in SdpaBackend. For a CPU."""

from __future__ import annotations

import logging
import threading
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvarts.executor.torch.metadata import AttentionMetadata, AttentionParams, Ints
from kvarts.executor.torch.pools import KVPools
from kvarts.executor.torch.sdpa import SdpaBackend

__all__ = ["NumbaBackend", "numba_fits"]

logger = logging.getLogger("kvarts.attention")
TELL_AFTER_S = 1.0
"""A compiler that takes longer than this is told of."""


def numba_fits(pools: KVPools) -> str | None:
    """Return why the kernel cannot read such pages; None if it can."""
    if find_spec("numba") is None:
        return "numba is not installed"
    if pools.device.type != "cpu":
        return f"they are on {pools.device}"
    if pools.dtype not in (torch.float32, torch.bfloat16):
        return f"{pools.dtype} is neither float32 nor bfloat16"
    return None


class _Decodes(msgspec.Struct):
    """The decodes of a step in the order of computation: places [begin, end) of the pages in `tables`, after the sink.

    `sink_begins` and `sink_ends`: the places of the sink that are read before.
    """

    order: torch.Tensor
    back: torch.Tensor
    tables: Ints
    begins: Ints
    ends: Ints
    sink_begins: Ints
    sink_ends: Ints


class NumbaBackend(SdpaBackend):
    """An AttentionBackend for CPUs.

    Its kernels are compiled, or found on disk, when it is made, so that no step waits for a compiler.
    """

    def __init__(self, pools: KVPools) -> None:
        import numba

        from kvarts.executor.torch import numba_kernel

        super().__init__(pools)
        self._numba = numba
        self._kernel = numba_kernel
        self._flat = {id(pool): _flat(pool) for pool in pools.tensors}
        self._decodes: dict[int | None, _Decodes] = {}
        self._num_threads = 1
        # The first engine on a machine waits for the compiler; later ones find its work on disk.
        word = threading.Timer(TELL_AFTER_S, logger.info, ("compiling attention for this CPU, which is kept on disk",))
        word.daemon = True
        word.start()
        try:
            for layer in range(len(pools.layers)):
                self._compile(layer)
        finally:
            word.cancel()

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepare for a step."""
        super().begin(metadata)
        self._decodes.clear()
        self._num_threads = min(torch.get_num_threads(), self._numba.config.NUMBA_NUM_THREADS)
        self._numba.set_num_threads(self._num_threads)

    def _read_decodes(self, layer: int, queries: torch.Tensor, params: AttentionParams, out: torch.Tensor) -> None:
        decodes = self._decodes.get(params.window)
        if decodes is None:
            decodes = self._decodes[params.window] = self._order_decodes(params.window)
        count = len(decodes.begins)
        out[:count] = self._call(layer, queries[:count][decodes.order], params, decodes)[decodes.back]

    def _call(self, layer: int, queries: torch.Tensor, params: AttentionParams, decodes: _Decodes) -> torch.Tensor:
        """Return what `queries` [sequences, heads, head_dim], in the order of `decodes`, read, in 32 bits."""
        pools, shape = self._pools, self._pools.layers[layer]
        own = queries.float().contiguous().flatten().numpy()
        read = np.empty_like(own)
        sinks = np.full(shape.num_heads, self._kernel.NO_SINK, np.float32)
        if params.sinks is not None:
            sinks[:] = params.sinks.float().numpy()
        self._kernel.decode_kernel(shape.head_dim, shape.num_heads // shape.num_kv_heads, pools.page_size)(
            own,
            self._flat[id(pools.keys[layer])],
            self._flat[id(pools.values[layer])],
            shape.num_kv_heads,
            self._num_parts(len(decodes.begins), shape.num_kv_heads),
            decodes.tables,
            decodes.begins,
            decodes.ends,
            decodes.sink_begins,
            decodes.sink_ends,
            np.float32(params.scaling),
            np.float32(params.softcap or 0.0),
            sinks,
            read,
        )
        return torch.from_numpy(read).view(queries.shape)

    def _compile(self, layer: int) -> None:
        """Compile the kernel of a layer by a call without sequences, unless one of this shape is compiled already."""
        shape = self._pools.layers[layer]
        nothing = torch.empty(0, shape.num_heads, shape.head_dim)
        none = np.empty(0, np.int64)
        decodes = _Decodes(
            torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long), none[:, None], none, none, none, none
        )
        self._call(layer, nothing, AttentionParams(1.0), decodes)

    def _order_decodes(self, window: int | None) -> _Decodes:
        metadata = self._metadata
        begins, ends = metadata.decodes.spans(window)
        sink_begins, sink_ends = metadata.decodes.sink_spans(window)
        # Each thread works on sequences in a row: the longest are dealt out to all of them, one after the other.
        by_length = np.argsort(begins - ends, kind="stable")
        order = np.concatenate([by_length[first :: self._num_threads] for first in range(self._num_threads)])
        back = np.argsort(order)
        return _Decodes(
            metadata.tensor(order),
            metadata.tensor(back),
            np.ascontiguousarray(metadata.decodes.tables[order]),
            begins[order],
            ends[order],
            sink_begins[order],
            sink_ends[order],
        )

    def _num_parts(self, count: int, num_kv_heads: int) -> int:
        """Return into how many parts the heads of a sequence are split, so that no thread is idle."""
        wanted = min(num_kv_heads, -(-2 * self._num_threads // max(1, count)))
        return next(parts for parts in range(wanted, num_kv_heads + 1) if num_kv_heads % parts == 0)


def _flat(pool: torch.Tensor) -> npt.NDArray[Any]:
    """Return the same memory in one dimension; bfloat16, which NumPy does not know, as its bits."""
    flat = pool.view(-1)
    if flat.dtype == torch.bfloat16:
        bits: npt.NDArray[Any] = flat.view(torch.int16).numpy().view(np.uint16)
        return bits
    numbers: npt.NDArray[Any] = flat.numpy()
    return numbers
