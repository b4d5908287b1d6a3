"""KV events as SGLang 0.5.23 publishes them: maps with signed hashes, and runs that follow each other in one event.

Before the first batch, all blocks are cleared, and again when the cache is flushed; blocks that are evicted are removed
one by one, also the last ones. The hash of a block is SHA-256 of the one before it and of its tokens; its name is the
first eight bytes. A salt is hashed before the first block. SGLang names an adapter by a random id in each start; here,
an adapter is hashed by its name and path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from kvarts.core.content import Content
from kvarts.core.events import CacheCleared, CopiesRemoved, Event, PagesRemoved
from kvarts.core.keys import BlockKey, salt_parts
from kvarts.doors.kv_events.batches import BlocksCleared, BlocksRemoved, BlocksStored, Told, Wire, lora_name, token_ids
from kvarts.doors.kv_events.reader import KvEventReader, Part, Sink

__all__ = ["SglangReader", "SglangWire"]

WIDE = b"\xff"
"""Precedes tokens that do not fit 32 bits."""
MEDIA = {"CPU": "CPU_PINNED"}
"""SGLang's names of media, where they differ."""
OF_SALT = b"sglang-cache-salt-v1\0"
OF_ADAPTER = b"kvarts-adapter\0"


class SglangKeys:
    """Sequential computation of SGLang's hashes."""

    def extend(self, keys: list[BlockKey], content: Content, num_pages: int) -> None:
        """Extend `keys`, the first keys of `content`, to `num_pages` keys. All tokens that they hash must be known."""
        size, start = content.page_size, len(keys)
        if start >= num_pages:
            return
        tokens = np.asarray(content.tokens(start * size, num_pages * size), dtype="<i8")
        parent = keys[-1] if keys else _before_all(content.salt)
        for page in range(num_pages - start):
            own = tokens[page * size : (page + 1) * size]
            is_wide = int(own.max()) >> 32
            hashed = WIDE + own.tobytes() if is_wide else own.astype("<u4").tobytes()
            parent = BlockKey(sha256(parent + hashed).digest())
            keys.append(parent)


def _before_all(salt: str | None) -> BlockKey:
    adapter, of_request = salt_parts(salt)
    found = b"" if adapter is None else sha256(OF_ADAPTER + f"{adapter.name}\0{adapter.path}".encode()).digest()
    if of_request:
        found = sha256(found + OF_SALT + of_request.encode(errors="surrogatepass")).digest()
    return BlockKey(found)


class SglangReader(KvEventReader):
    """As KvEventReader, with the events of SGLang. The batch of number 0 clears all blocks."""

    def __init__(self, sink: Sink, *, now_s: Callable[[], float] | None = None) -> None:
        super().__init__(sink, hashes=SglangKeys(), now_s=now_s, clears=False)
        self._is_cleared = False
        """Whether the cache was flushed, and removes its blocks."""
        self._batch([BlocksCleared()])

    def observe(self, events: Sequence[Event]) -> None:
        """Emit the block changes in `events`, if any, as one batch."""
        super().observe(events)
        self._is_cleared = False

    def _note(self, event: Event) -> None:
        if isinstance(event, CacheCleared):
            self._emit_removed()
            self._is_cleared = True
            if not self._resident.num_blocks:
                self._told.append(BlocksCleared())
        else:
            super()._note(event)

    def _emit(self, run: BlocksStored) -> None:
        """Emit a run, as a part of the one before it if that ends where this one begins."""
        self._emit_removed()
        last = self._told[-1] if self._told else None
        if isinstance(last, BlocksStored) and (last.keys[-1], last.medium) == (run.parent, run.medium):
            self._told[-1] = BlocksStored(
                run.content, last.start_page, [*last.keys, *run.keys], last.parent, run.medium
            )
        else:
            self._told.append(run)

    def _keys_of_removed(self, event: PagesRemoved | CopiesRemoved, part: Part) -> list[BlockKey]:
        return super()._keys_of_removed(event, part)[::-1]

    def _emit_removed(self) -> None:
        if self._removed and self._is_cleared and not self._resident.num_blocks:
            self._told.append(BlocksCleared())
            self._removed = []
        else:
            super()._emit_removed()


class SglangWire(Wire):
    """Encodes batches as SGLang does. `rank`: the data-parallel rank."""

    def __init__(self, *, rank: int = 0) -> None:
        super().__init__("map", rank=rank)

    def _as_map(self, told: Told) -> dict[str, Any]:
        if isinstance(told, BlocksStored):
            _, salt = salt_parts(told.content.salt)
            name = lora_name(told)
            return {
                "type": "BlockStored",
                "block_hashes": self._hashes(told.keys),
                "parent_block_hash": self._parent(told),
                "token_ids": token_ids(told),
                "block_size": told.content.page_size,
                "lora_id": None,
                "medium": MEDIA.get(told.medium, told.medium),
                **({"cache_salt": salt} if salt else {}),
                **({} if name is None else {"lora_name": name}),
            }
        if isinstance(told, BlocksRemoved):
            medium = MEDIA.get(told.medium, told.medium)
            return {"type": "BlockRemoved", "block_hashes": self._hashes(told.keys), "medium": medium}
        return {"type": "AllBlocksCleared"}

    def _hashes(self, keys: Sequence[BlockKey]) -> list[int]:
        return [int.from_bytes(key[:8], "big", signed=True) for key in keys]
