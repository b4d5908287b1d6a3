"""Engines that publish, without sockets: what they have published, and what they answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from kvarts.doors.watch.sockets import FULL_STATE, Numbered

__all__ = ["CLEARED", "Published", "removed", "stored"]


def stored(
    hashes: Sequence[Any],
    parent: Any = None,
    *,
    size: int = 2,
    medium: str | None = "GPU",
    token_ids: Sequence[int] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """An event as vLLM writes it; tokens follow from the hashes unless they are given."""
    tokens = [int(name) % 1000 for name in hashes for _ in range(size)] if token_ids is None else list(token_ids)
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **more,
    }


def removed(hashes: Sequence[Any], medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, **more}


CLEARED = {"type": "AllBlocksCleared"}


class Published:
    """An engine that stores and removes blocks, an Asker with a buffer; some know the request for full state."""

    def __init__(self, *, buffer: int = 10_000, knows_state: bool = True, name: int = 0) -> None:
        self.past: deque[Numbered] = deque(maxlen=buffer)
        self.knows_state = knows_state
        self.blocks: dict[int, None] = {}
        self.next_seq = 0
        self.name = name
        self.is_reachable = True

    def publish(self, *events: Any) -> Numbered:
        batch = self.next_seq, msgspec.msgpack.encode([float(self.next_seq + 1000 * self.name), list(events), 0])
        self.past.append(batch)
        self.next_seq += 1
        return batch

    def toggle(self, block: int) -> Numbered:
        """Store a block that is not there, remove one that is."""
        if block in self.blocks:
            del self.blocks[block]
            return self.publish(removed([block]))
        self.blocks[block] = None
        return self.publish(stored([block]))

    def ask(self, start: int) -> list[Numbered] | None:
        if not self.is_reachable:
            return None
        if start == FULL_STATE:
            if not self.knows_state or not self.next_seq:
                return []
            told = [CLEARED, *(stored([block]) for block in self.blocks)]
            return [(self.next_seq - 1, msgspec.msgpack.encode([0.0, told, 0]))]
        return [batch for batch in self.past if batch[0] >= start]
