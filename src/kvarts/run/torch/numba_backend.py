"""Attention backend with a Numba kernel for decodes that reads pages in place; chunks as in SdpaBackend. For CPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch

from kvarts.run.torch.attention import AttentionMetadata, AttentionParams, Ints
from kvarts.run.torch.openmp import num_threads, team
from kvarts.run.torch.pools import KVPools
from kvarts.run.torch.sdpa import SdpaBackend

__all__ = ["DecodeWork", "NumbaBackend", "emitting", "numba_fits"]

logger = logging.getLogger("kvarts.attention")
SOME_TOKENS = 64
"""Assumed length of a sequence, to estimate the amount of work."""


def numba_fits(pools: KVPools) -> str | None:
    """Return why the kernel cannot read these pages; None if it can."""
    if find_spec("numba") is None:
        return "numba is not installed"
    if pools.device.type != "cpu":
        return f"they are on {pools.device}"
    if pools.dtype not in (torch.float32, torch.bfloat16):
        return f"{pools.dtype} is neither float32 nor bfloat16"
    return None


@contextmanager
def emitting(what: str) -> Iterator[None]:
    """Log `what` if Numba compiles anything in the body, which it does not if the code is found on disk."""
    from numba.core.event import Event, Listener, install_listener

    class _Compiling(Listener):  # type: ignore[misc]  # Numba has no types
        def on_start(self, event: Event) -> None:
            nonlocal what
            if what:
                logger.info("%s", what)
                what = ""

        def on_end(self, event: Event) -> None:
            """Do nothing."""

    with install_listener("numba:compile", _Compiling()):
        yield


class DecodeWork:
    """The work of a step that all layers of one window share; numba_kernel defines its layout.

    Keeps alive the arrays that it holds addresses of.
    """

    def __init__(self, arrays: dict[int, Ints], counts: dict[int, int]) -> None:
        self._arrays = arrays
        self.block = np.array([0] * len(arrays | counts), np.int64)
        for place, array in arrays.items():
            self.block[place] = array.ctypes.data
        for place, count in counts.items():
            self.block[place] = count
        self.address: int = self.block.ctypes.data


class NumbaBackend(SdpaBackend):
    """An AttentionBackend for CPUs.

    Kernels are compiled, or loaded from disk, at construction, so that no step waits for a compiler.
    """

    def __init__(self, pools: KVPools) -> None:
        from kvarts.run.torch import numba_kernel

        super().__init__(pools)
        self._places = numba_kernel
        self._team = team()
        self.counter = np.zeros(8, np.int64)
        """Number of work items taken by threads in a call; reset to 0 before each call."""
        self._works: dict[tuple[int | None, int], DecodeWork] = {}
        # The first engine on a machine waits for the compiler; later ones find the compiled code on disk.
        with emitting("compiling attention for this CPU, which is kept on disk"):
            self.kernels = {
                number: numba_kernel.decode_kernel(
                    pools.dtype == torch.bfloat16, one.head_dim, one.num_heads // one.num_kv_heads, pools.page_size
                )
                for number, one in enumerate(pools.layers)
                if number in pools.numbers
            }
        """Address of each layer's compiled function."""

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepare for a step."""
        super().begin(metadata)
        self._works.clear()

    def _read_decodes(self, layer: int, queries: torch.Tensor, params: AttentionParams, out: torch.Tensor) -> None:
        count = len(self._metadata.decodes.positions)
        own = queries[:count].float().contiguous()
        read = torch.empty_like(own)
        floats = self.floats(layer, params)
        work = self.work(layer, floats, own, read)
        work[self._places.STEP] = self.step_work(layer, params.window).address
        self.counter[0] = 0
        self._team.run(self.kernels[layer], work.ctypes.data, num_threads(read.numel() * SOME_TOKENS))
        out[:count] = read

    def work(self, layer: int, floats: npt.NDArray[np.float32], queries: torch.Tensor, out: torch.Tensor) -> Ints:
        """Return the work of one layer without the step's part; the caller keeps alive the tensors it points to.

        `queries` and `out` [tokens, heads, head_dim], float32.
        """
        places, pools = self._places, self._pools
        work = np.zeros(places.SIZE, np.int64)
        work[places.KEYS] = pools.keys[layer].data_ptr()
        work[places.VALUES] = pools.values[layer].data_ptr()
        work[places.KV_HEADS] = pools.layers[layer].num_kv_heads
        work[places.FLOATS] = floats.ctypes.data
        work[places.QUERIES] = queries.data_ptr()
        work[places.OUT] = out.data_ptr()
        return work

    def floats(self, layer: int, params: AttentionParams) -> npt.NDArray[np.float32]:
        """Return the scaling, softcap and sink scores of a layer, as the kernel reads them."""
        floats = np.full(2 + self._pools.layers[layer].num_heads, self._places.NO_SINK, np.float32)
        floats[:2] = params.scaling, params.softcap or 0.0
        if params.sinks is not None:
            floats[2:] = params.sinks.float().numpy()
        return floats

    def step_work(self, layer: int, window: int | None) -> DecodeWork:
        """Return the work of this step for layers with the same window and number of KV heads."""
        kind = window, self._pools.layers[layer].num_kv_heads
        if kind not in self._works:
            self._works[kind] = self._order_decodes(*kind)
        return self._works[kind]

    def _order_decodes(self, window: int | None, num_kv_heads: int) -> DecodeWork:
        places, decodes = self._places, self._metadata.decodes
        begins, ends = decodes.spans(window)
        sink_begins, sink_ends = decodes.sink_spans(window)
        tables = np.ascontiguousarray(decodes.tables)
        return DecodeWork(
            {
                places.COUNTER: self.counter,
                # Longest first, so that short sequences are taken last and threads finish together.
                places.ORDER: np.argsort(begins - ends, kind="stable"),
                places.TABLES: tables,
                places.BEGINS: begins,
                places.ENDS: ends,
                places.SINK_BEGINS: sink_begins,
                places.SINK_ENDS: sink_ends,
            },
            {
                places.COUNT: len(begins),
                places.PARTS: self._num_parts(len(begins), num_kv_heads),
                places.WIDTH: tables.shape[1],
            },
        )

    def _num_parts(self, count: int, num_kv_heads: int) -> int:
        """Return the number of parts to split a sequence's heads into, so that no thread is idle."""
        wanted = min(num_kv_heads, -(-2 * torch.get_num_threads() // max(1, count)))
        return next(parts for parts in range(wanted, num_kv_heads + 1) if num_kv_heads % parts == 0)
