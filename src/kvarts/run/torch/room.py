"""The size of a model's KV memory on its device: the number of pages, or of blocks for a model with KV groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvarts.base.errors import ConfigError
from kvarts.base.units import meant_size, parse_bytes
from kvarts.core.kv.groups import Retention
from kvarts.run.torch.attention import find_latent
from kvarts.run.torch.block_cut import BlockCut, cut_blocks
from kvarts.run.torch.pools import page_bytes_of, stored_as
from kvarts.run.torch.probe import examine

__all__ = ["KV_GROUPS", "KVRoom", "latent_token_bytes", "open_room", "token_bytes"]

MOST_AUTO_BYTES = 4 << 30
KV_GROUPS = ("off", "all", "tails")


def token_bytes(model: Any, kv_dtype: str = "auto") -> int:
    """Return the bytes of KV per token, stored in `kv_dtype`."""
    return page_bytes_of(examine(model).layers, page_size=1, dtype=model.dtype, kv_dtype=kv_dtype)


def latent_token_bytes(model: Any) -> int | None:
    """Return the bytes per token of a model's latents; None without a latent.

    They are stored where kvarts.run.torch.attention can, else the keys and values to which they are expanded.
    """
    latents = [shape for module in model.modules() if (shape := find_latent(module)) is not None]
    numbers = sum(shape.head_dim for shape in latents)
    if not latents:
        text = model.config.get_text_config(decoder=True)
        rank = getattr(text, "kv_lora_rank", None)
        if not rank:
            return None
        numbers = len(examine(model).layers) * (rank + (getattr(text, "qk_rope_head_dim", None) or 0))
    return numbers * int(model.dtype.itemsize)


class KVRoom:
    """The division of a model's KV memory: into pages of all layers, or into blocks of a page in some layers.

    `kv_groups`: with `off`, every layer keeps every token. With `all` or `tails`, layers with a window keep only tokens
    that later ones attend to. Among released pages, `all` keeps all until memory is short, as vLLM does, and `tails`
    only those needed for a hit at the end of a prompt or an answer. Raises ConfigError for any other value, and for
    layers that cannot be divided into blocks of one size. `kv_dtype`: the format of KV in pages.
    """

    def __init__(self, model: Any, page_size: int, kv_groups: str = "off", kv_dtype: str = "auto") -> None:
        if kv_groups not in KV_GROUPS:
            raise ConfigError(
                f"must be {', '.join(KV_GROUPS[:-1])} or {KV_GROUPS[-1]}, got {kv_groups!r}", field="kv_groups"
            )
        self._model = model
        self._page_bytes = token_bytes(model, kv_dtype) * page_size
        self.kv_groups = kv_groups
        """What layers keep: `off` for everything, else by which rule."""
        self.whole_pages = ""
        """The refusal of KV groups, which are the default for the model; empty if they were not refused."""
        self.cut: BlockCut | None = None
        """The groups, and the blocks of each layer; None if every layer keeps every token."""
        states = examine(model).states
        if states and kv_groups == "off":
            raise ConfigError(
                f"{model.config.model_type} has {len(states)} layers that keep a state instead of tokens",
                field="kv_groups",
                hint="Set kv_groups to all or tails (--set kv_groups=all).",
            )
        if states and kv_dtype != "auto":
            raise ConfigError(
                f"{model.config.model_type} has layers that keep a state", field="kv_dtype", hint="Leave it to auto."
            )
        if kv_groups != "off":
            keeps: Retention = "all" if kv_groups == "all" else "tails"
            layers, dtype = stored_as(examine(model).layers, model.dtype, kv_dtype)
            self.cut = cut_blocks(layers, page_size=page_size, dtype=dtype, keeps=keeps, states=states)

    @property
    def has_states(self) -> bool:
        """Whether the model has layers with a state."""
        return self.cut is not None and self.cut.memory.has_states

    def num_pages(self, kv_memory: str | int) -> int:
        """Return how many pages of all layers fit in `kv_memory`. Raise ConfigError if none does."""
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
        """Return the number of blocks in the memory of `num_pages` pages; 0 if it is not divided into blocks."""
        return 0 if self.cut is None else self.cut.memory.num_blocks(num_pages)

    def check(self, num_pages: int) -> None:
        """Raise ConfigError if the pages exceed the device's memory."""
        num_bytes, most = num_pages * self._page_bytes, _most_bytes(self._model.device)
        if num_bytes > most:
            raise ConfigError(
                f"{num_bytes / 2**30:,.1f} GiB of KV are more than the {most / 2**30:,.1f} GiB that "
                f"{self._model.device} has left",
                field="kv_memory",
                hint="Give less, or leave it to auto.",
            )


def open_room(
    model: Any,
    page_size: int,
    kv_groups: str | None = None,
    check: Callable[[KVRoom], object] = lambda room: None,
    *,
    kv_dtype: str = "auto",
) -> KVRoom:
    """Return the KVRoom of `model` with `kv_groups`; None: `all` where layers keep less and nothing refuses it.

    `check` raises ConfigError for a room that the other settings do not go with. Such a model then keeps every token,
    unless layers keep a state instead.
    """
    facts = examine(model)
    states, layers = facts.states, facts.layers
    if kv_groups is not None or not (states or any(layer.window is not None for layer in layers)):
        room = KVRoom(model, page_size, "off" if kv_groups is None else kv_groups, kv_dtype)
        check(room)
        return room
    try:
        room = KVRoom(model, page_size, "all", kv_dtype)
        check(room)
    except ConfigError as refused:
        if states:
            raise
        room = KVRoom(model, page_size, kv_dtype=kv_dtype)
        check(room)
        room.whole_pages = refused.what if refused.field is None else f"{refused.field} {refused.what}"
    return room


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _most_bytes(device: torch.device) -> int:
    """Return the bytes available on a device, including host memory that only caches files."""
    if device.type != "cpu":
        return _free_bytes(device) if device.type == "cuda" else 1 << 60
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
