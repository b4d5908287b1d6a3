"""How much KV the memory of a device can hold."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvarts.config import EngineConfig
from kvarts.errors import ConfigError
from kvarts.executor.torch.pools import page_bytes_of
from kvarts.executor.torch.probe import layer_shapes
from kvarts.units import parse_bytes

__all__ = ["check_room", "num_pages", "token_bytes"]

MOST_AUTO_BYTES = 4 << 30


def token_bytes(model: Any) -> int:
    """Return the bytes of KV of a token."""
    return page_bytes_of(layer_shapes(model), page_size=1, dtype=model.dtype)


def num_pages(model: Any, kv_memory: str | int, page_size: int) -> int:
    """Return the pages that `kv_memory` holds."""
    page_bytes = token_bytes(model) * page_size
    if kv_memory == "auto":
        num_bytes = min(_free_bytes(model.device) // 4, MOST_AUTO_BYTES)
    else:
        num_bytes = parse_bytes(kv_memory) if isinstance(kv_memory, str) else kv_memory
    if num_bytes < page_bytes:
        raise ConfigError(f"{num_bytes:,} bytes hold no page of {page_bytes:,} bytes", field="kv_memory")
    return num_bytes // page_bytes


def check_room(model: Any, config: EngineConfig) -> None:
    """Raise ConfigError for pages that the memory of the device cannot hold."""
    num_bytes = config.num_pages * config.page_size * token_bytes(model)
    most = _most_bytes(model.device)
    if num_bytes > most:
        raise ConfigError(
            f"{num_bytes / 2**30:,.1f} GiB of KV are more than the {most / 2**30:,.1f} GiB that "
            f"{model.device} has left",
            field="kv_memory",
            hint="Give less, or leave it to auto.",
        )


def _free_bytes(device: torch.device) -> int:
    """Return the bytes of a device that nothing has taken."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _most_bytes(device: torch.device) -> int:
    """Return the bytes of a device that can be had at most; of host memory also those that only keep files."""
    if device.type != "cpu":
        return _free_bytes(device) if device.type == "cuda" else 1 << 60
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
