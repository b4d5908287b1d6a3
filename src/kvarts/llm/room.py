"""The room of a model's KV on its device: how many pages there are, and where layers keep less, how many blocks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvarts.errors import ConfigError
from kvarts.executor.torch.block_cut import BlockCut, cut_blocks
from kvarts.executor.torch.pools import page_bytes_of
from kvarts.executor.torch.probe import examine, layer_shapes
from kvarts.kv.group_memory import Retention
from kvarts.units import meant_size, parse_bytes

__all__ = ["KV_GROUPS", "KVRoom", "latent_token_bytes", "token_bytes"]

MOST_AUTO_BYTES = 4 << 30
KV_GROUPS = ("off", "all", "tails")


def token_bytes(model: Any) -> int:
    """Return the bytes of KV of a token."""
    return page_bytes_of(layer_shapes(model), page_size=1, dtype=model.dtype)


def latent_token_bytes(model: Any) -> int | None:
    """Return the bytes of a token if its latent were kept, and not what that is expanded to; None without a latent.

    Attention of transformers is handed expanded keys and values only.
    """
    text = model.config.get_text_config(decoder=True)
    rank = getattr(text, "kv_lora_rank", None)
    if not rank:
        return None
    numbers: int = rank + (getattr(text, "qk_rope_head_dim", None) or 0)
    return len(layer_shapes(model)) * numbers * int(model.dtype.itemsize)


class KVRoom:
    """How the memory of a model's KV is cut: into pages of all layers, or into blocks of a page in some layers.

    `kv_groups`: `off`, every layer keeps every token. `all` or `tails`: layers with a window keep what later tokens
    see; of what requests leave behind, `all` keeps everything until memory is short, as vLLM does, and `tails` what a
    hit at the end of a prompt or an answer needs. Raises ConfigError for another word, and for layers that cannot be
    cut into blocks of one size.
    """

    def __init__(self, model: Any, page_size: int, kv_groups: str = "off") -> None:
        if kv_groups not in KV_GROUPS:
            raise ConfigError(
                f"must be {', '.join(KV_GROUPS[:-1])} or {KV_GROUPS[-1]}, got {kv_groups!r}", field="kv_groups"
            )
        self._model = model
        self._page_bytes = token_bytes(model) * page_size
        self.cut: BlockCut | None = None
        """The groups, and where each layer has its blocks; None where every layer keeps every token."""
        states = examine(model).states
        if states and kv_groups == "off":
            raise ConfigError(
                f"{model.config.model_type} has {len(states)} layers that keep a state instead of tokens",
                field="kv_groups",
                hint="Set kv_groups to all or tails (--kv-groups all).",
            )
        if kv_groups != "off":
            keeps: Retention = "all" if kv_groups == "all" else "tails"
            self.cut = cut_blocks(
                layer_shapes(model), page_size=page_size, dtype=model.dtype, keeps=keeps, states=states
            )

    @property
    def has_states(self) -> bool:
        """Whether layers keep a state."""
        return self.cut is not None and self.cut.memory.has_states

    def num_pages(self, kv_memory: str | int) -> int:
        """Return the pages of all layers that `kv_memory` holds. Raise ConfigError for bytes that hold none."""
        if kv_memory == "auto":
            num_bytes = min(_free_bytes(self._model.device) // 4, MOST_AUTO_BYTES)
        else:
            num_bytes = parse_bytes(kv_memory) if isinstance(kv_memory, str) else kv_memory
        if num_bytes < self._page_bytes:
            raise ConfigError(
                f"{num_bytes:,} bytes hold no page of {self._page_bytes:,} bytes",
                field="kv_memory",
                hint=meant_size(kv_memory, self._page_bytes),
            )
        return num_bytes // self._page_bytes

    def num_blocks(self, num_pages: int) -> int:
        """Return the blocks in the memory of as many pages; 0 where it is not cut into blocks."""
        return 0 if self.cut is None else self.cut.memory.num_blocks(num_pages)

    def check(self, num_pages: int) -> None:
        """Raise ConfigError for pages that the memory of the device cannot hold."""
        num_bytes, most = num_pages * self._page_bytes, _most_bytes(self._model.device)
        if num_bytes > most:
            raise ConfigError(
                f"{num_bytes / 2**30:,.1f} GiB of KV are more than the {most / 2**30:,.1f} GiB that "
                f"{self._model.device} has left",
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
