"""Keeps a model's weights in huge pages of memory on Linux.

Each step reads all weights. In pages of 4 KiB a CPU translates an address every 4 KiB, and the time for this depends on
where the system has put the pages. Pages of 2 MiB make it rare. Results do not change.

PyTorch asks for huge pages itself if the environment says so before its first tensor, but only the whole ones within a
tensor are huge. `allocate` has tensors share memory, so that nearly all of it is. `use_huge_pages` moves weights that
are elsewhere, which takes some seconds of processor time for a GiB.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

__all__ = ["SETTING", "allocate", "ask_for_huge_pages", "use_huge_pages"]

SETTING = "THP_MEM_ALLOC_ENABLE"
"""PyTorch reads it with its first tensor."""
SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
FEW_BYTES = 32 << 20
"""Smaller models fit into caches."""
MOST_GAP_BYTES = 1 << 16
"""Between two weights that are moved together: norms, and what an allocator notes."""
SHARED_BYTES = 64 << 20
"""Tensors share memory of at most this size, which is freed when none of them is left."""
LINE_BYTES = 64
"""Of a CPU's cache."""
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
"""Allows huge pages for memory; moves it to huge pages at once, on Linux 6.1 and later."""


def ask_for_huge_pages() -> None:
    """Have PyTorch ask for huge pages, unless the environment says otherwise."""
    os.environ.setdefault(SETTING, "1")


def allocate(wanted: Mapping[str, tuple[tuple[int, ...], Any]]) -> dict[str, Any]:
    """Return a tensor of each shape and number format by its name, without values; neighbours share memory."""
    import torch

    made: dict[str, Any] = {}
    sharing: list[tuple[str, int]] = []

    def share(num_bytes: int) -> None:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        for name, start in sharing:
            shape, dtype = wanted[name]
            made[name] = memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        sharing.clear()

    end = 0
    for name, (shape, dtype) in wanted.items():
        num_bytes = -(-prod(shape) * dtype.itemsize // LINE_BYTES) * LINE_BYTES
        if sharing and end + num_bytes > SHARED_BYTES:
            share(end)
            end = 0
        sharing.append((name, end))
        end += num_bytes
    share(end)
    return made


def use_huge_pages(model: Any) -> int:
    """Move the matrices of a model on a CPU to huge pages; return the number of bytes that the system was asked for.

    Does nothing if the system has no huge pages, or if it or the environment has them switched off. If free memory is
    too fragmented, weights stay where they are.
    """
    size = _page_bytes() if os.environ.get(SETTING) == "1" else 0
    # Moving smaller weights would take a start longer than it saves.
    spans = [span for span in _spans(model) if span[1] >= size] if size else []
    if sum(num_bytes for _, num_bytes in spans) < FEW_BYTES:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_pages = 0
    for start, end in _joined(spans):
        for page in range(-(-start // size), end // size):  # one by one, since a call ends with the first that fails
            madvise(page * size, size, MADV_HUGEPAGE)
            madvise(page * size, size, MADV_COLLAPSE)
            num_pages += 1
    return num_pages * size


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the first and last address of stretches of memory that are weights, but for small gaps."""
    first = last = 0
    for start, num_bytes in sorted(spans):
        if start > last + MOST_GAP_BYTES:
            if last:
                yield first, last
            first = start
        last = max(last, start + num_bytes)
    if last:
        yield first, last


def _page_bytes() -> int:
    """Return the size of a huge page; 0 if the system has none."""
    try:
        is_off = "[never]" in (SYSTEM / "enabled").read_text()
        return 0 if is_off else int((SYSTEM / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def _spans(model: Any) -> Iterator[tuple[int, int]]:
    """Yield the address and size of each weight on a CPU that steps read as a whole: all but embeddings."""
    import torch

    from kvarts.run.torch.packing import PackedPart

    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            continue
        held = module.whole if isinstance(module, PackedPart) else module
        for value in [*vars(held).values(), *held.parameters(recurse=False)]:
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                continue
            if value.is_mkldnn:
                yield torch.ops.mkldnn.data_ptr(value), torch.ops.mkldnn._nbytes(value)
            elif value.layout == torch.strided:
                yield value.data_ptr(), value.nbytes
