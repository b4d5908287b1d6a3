"""KV events: runs of blocks with their names, in numbered batches; the queue of these; their encoding."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Condition
from types import MappingProxyType
from typing import Any

import msgspec

from kvarts.content import Content
from kvarts.keys import BlockKey
from kvarts.serve.kv_events.config import EventGroup, Form

__all__ = ["MAX_WAITING", "Batch", "BatchQueue", "BlocksCleared", "BlocksRemoved", "BlocksStored", "Told", "Wire"]

ONE_GROUP = EventGroup("full")
"""The group of a cache of whole pages, whose layers all retain every token."""
KINDS = MappingProxyType(
    {
        "full": "full_attention",
        "latent": "mla_attention",
        "window": "sliding_window",
        "chunk": "chunked_local_attention",
        "state": "mamba",
    }
)
"""vLLM's names of the kinds of groups."""


class BlocksStored(msgspec.Struct, frozen=True, gc=False):
    """Pages of `content` from `start_page` on, one for each of `keys`, can be found.

    `parent`: the block before them. `group`: with KV groups, the group of these parts.
    """

    content: Content
    start_page: int
    keys: Sequence[BlockKey]
    parent: BlockKey | None
    medium: str
    group: int | None = None


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks, or their parts in `group`, can no longer be found in `medium`."""

    keys: Sequence[BlockKey]
    medium: str
    group: int | None = None


class BlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """All blocks were removed from all media."""


Told = BlocksStored | BlocksRemoved | BlocksCleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """The events emitted together at `time_s`, with number `seq`."""

    seq: int
    time_s: float
    told: Sequence[Told]


MAX_WAITING = 100_000
AT_ONCE = 1000
"""Batches sent before the sender checks for requests."""


class BatchQueue:
    """Batches that are emitted and not yet sent, in order. Batches put after `close` are dropped."""

    def __init__(self) -> None:
        self._waiting: deque[Batch] = deque()
        self._has_room = Condition()
        self._is_closed = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def put(self, batch: Batch) -> None:
        """Add a batch, and wake the sender. Never waits."""
        if not self._is_closed:
            self._waiting.append(batch)
            self.wake()

    def pace(self) -> None:
        """Wait while too many batches are queued. The caller must not hold locks that the sender needs."""
        if len(self._waiting) > MAX_WAITING:
            with self._has_room:
                self._has_room.wait_for(lambda: len(self._waiting) <= MAX_WAITING or self._is_closed)

    def wake(self) -> None:
        """Make the descriptor readable."""
        with suppress(BlockingIOError):  # it is readable already
            self._write.send(b"\0")

    def fileno(self) -> int:
        """Return a descriptor that is readable when batches may be queued."""
        return self._read.fileno()

    def take(self) -> Iterator[Batch]:
        """Take at most AT_ONCE batches: with a fast engine, the queue might never be empty."""
        with suppress(BlockingIOError):
            while self._read.recv(4096):
                pass
        for _ in range(min(len(self._waiting), AT_ONCE)):
            yield self._waiting.popleft()
        if self._waiting:
            self.wake()
        with self._has_room:
            self._has_room.notify_all()

    @property
    def is_empty(self) -> bool:
        """Whether the queue is empty."""
        return not self._waiting

    def close(self) -> None:
        """Close the descriptors, and release threads that wait for room."""
        with self._has_room:
            self._is_closed = True
            self._has_room.notify_all()
        self._read.close()
        self._write.close()


class Wire:
    """Encodes batches of one engine in one format. `rank`: its data-parallel rank; `hash_bytes`: send whole hashes.

    `groups`: its KV groups, if there are several; arrays then include the fields for them.
    """

    def __init__(
        self, form: Form, *, rank: int = 0, hash_bytes: bool = False, groups: Sequence[EventGroup] = ()
    ) -> None:
        self._groups = tuple(groups)
        self._rank = rank
        self._hash_bytes = hash_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._event = self._as_map if form == "map" else self._as_array

    def encode(self, told: Sequence[Told], time_s: float) -> bytes:
        """Return one batch as bytes."""
        return self._encode((time_s, [self._event(one) for one in told], self._rank))

    def _as_map(self, told: Told) -> dict[str, Any]:
        if isinstance(told, BlocksStored):
            return {
                "type": "BlockStored",
                "block_hashes": self._hashes(told.keys),
                "parent_block_hash": self._parent(told),
                "token_ids": _token_ids(told),
                "block_size": told.content.page_size,
                "lora_id": None,
                "medium": told.medium,
                "lora_name": None,
                "extra_keys": _extra_keys(told),
                "group_idx": told.group or 0,
                **self._kept_by(told),
            }
        if isinstance(told, BlocksRemoved):
            return {
                "type": "BlockRemoved",
                "block_hashes": self._hashes(told.keys),
                "medium": told.medium,
                "group_idx": told.group or 0,
            }
        return {"type": "AllBlocksCleared"}

    def _as_array(self, told: Told) -> list[Any]:
        if isinstance(told, BlocksStored):
            hashes, parent = self._hashes(told.keys), self._parent(told)
            stored = ["BlockStored", hashes, parent, _token_ids(told), told.content.page_size, None, told.medium, None]
            return (
                stored
                if told.group is None
                else [*stored, _extra_keys(told), told.group, *self._kept_by(told).values()]
            )
        if isinstance(told, BlocksRemoved):
            removed = ["BlockRemoved", self._hashes(told.keys), told.medium]
            return removed if told.group is None else [*removed, told.group]
        return ["AllBlocksCleared"]

    def _kept_by(self, told: BlocksStored) -> dict[str, Any]:
        """Return the fields that describe the group of the blocks."""
        group = ONE_GROUP if told.group is None else self._groups[told.group]
        kept: dict[str, Any] = {"kv_cache_spec_kind": KINDS[group.kind]}
        if group.kind == "window":
            kept["kv_cache_spec_sliding_window"] = group.tokens
        return kept

    def _hashes(self, keys: Sequence[BlockKey]) -> Sequence[int | bytes]:
        return keys if self._hash_bytes else [int.from_bytes(key[-8:], "big") for key in keys]

    def _parent(self, told: BlocksStored) -> int | bytes | None:
        return None if told.parent is None else self._hashes([told.parent])[0]


def _token_ids(told: BlocksStored) -> list[int]:
    size = told.content.page_size
    start = told.start_page * size
    return told.content.tokens(start, start + len(told.keys) * size).tolist()


def _extra_keys(told: BlocksStored) -> list[tuple[str, ...] | None]:
    content = told.content
    first = (content.salt,) if content.salt is not None and not told.start_page else None
    return [first, *[None] * (len(told.keys) - 1)]
