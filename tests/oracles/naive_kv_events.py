"""A consumer of KV events that holds a dict of blocks, and names of blocks worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec

__all__ = ["NaiveConsumer", "chain"]

FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")


class NaiveConsumer:
    """What is stored in each medium: each block by its hash, with its parent and its tokens."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[Any, tuple[Any, tuple[int, ...]]]] = {}
        self.next_seq = 0

    def take(self, seq: int, payload: bytes) -> None:
        assert seq == self.next_seq, f"batch {seq} after {self.next_seq - 1}"
        self.next_seq = seq + 1
        self.apply(payload)

    def apply(self, payload: bytes) -> None:
        _, events, _ = msgspec.msgpack.decode(payload)
        assert events
        for event in map(_named, events):
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            there = self.blocks.setdefault(event["medium"], {})
            if event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del there[name]
                continue
            names, parent, size = event["block_hashes"], event["parent_block_hash"], event["block_size"]
            assert len(event["token_ids"]) == len(names) * size and names
            assert parent is None or any(parent in blocks for blocks in self.blocks.values()), "an unknown parent"
            for index, name in enumerate(names):
                assert name not in there, "stored twice"
                there[name] = parent, tuple(event["token_ids"][index * size : (index + 1) * size])
                parent = name

    def content(self) -> dict[str, dict[Any, tuple[Any, tuple[int, ...]]]]:
        return {medium: blocks for medium, blocks in self.blocks.items() if blocks}


def _named(event: Any) -> dict[str, Any]:
    """An event by the names of its fields, in whichever form it came."""
    if isinstance(event, dict):
        return event
    kind, *values = event
    names = ("block_hashes", "medium") if kind == "BlockRemoved" else FIELDS
    return {"type": kind, **dict(zip(names, values, strict=False))}


def _head(major: int, value: int) -> bytes:
    for width, code in ((1, 24), (2, 25), (4, 26), (8, 27)):
        if value < 24:
            return bytes([major << 5 | value])
        if value < 1 << (8 * width):
            return bytes([major << 5 | code]) + value.to_bytes(width, "big")
    raise ValueError(value)


def cbor(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949) of what a block's name is made of."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        return _head(3, len(value.encode())) + value.encode()
    return _head(4, len(value)) + b"".join(map(cbor, value))


def chain(
    token_ids: Sequence[int], block_size: int, salt: str | None = None, seed: str = "vllm-none-hash"
) -> list[bytes]:
    """The names of the full blocks of a sequence, as vLLM's sha256_cbor gives them."""
    names = []
    parent = sha256(cbor(seed)).digest()
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        extra = (("cache_salt", salt),) if start == 0 and salt else None
        parent = sha256(cbor((parent, tuple(token_ids[start : start + block_size]), extra))).digest()
        names.append(parent)
    return names
