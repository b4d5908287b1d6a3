"""KV events as they are published: both sides' events, decoded with vLLM's classes, in the form of a Step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from equal.workload import Step
from kvarts.doors.kv_events.batches import Batch, EventGroup, Wire


class Published:
    """Encodes kvarts' KV events as they are published, and decodes them with vLLM's classes into the present step."""

    def __init__(
        self, recorder: Any, groups: list[tuple[str, int | None]], block_pages: Sequence[int], page_size: int
    ) -> None:
        self._recorder = recorder
        self._sizes = [pages * page_size for pages in block_pages]
        sizes = block_pages or [1] * len(groups)
        kinds = [EventGroup(kind, span, pages) for (kind, span), pages in zip(groups, sizes, strict=True)]  # type: ignore[arg-type]
        self._wire = Wire("map", hash_bytes=True, groups=kinds)
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._copies: Counter[tuple[int, str]] = Counter()

    def put(self, batch: Batch) -> None:
        """Receive a batch."""
        events = self._decode(self._wire.encode(batch.told, batch.time_s)).events
        note_blocks(self._recorder.step, events, self._copies, publishes=True, sizes=self._sizes)

    def pace(self) -> None:
        """Do not wait."""


def note_blocks(
    done: Step,
    events: Sequence[Any],
    copies: Counter[tuple[int, str]],
    *,
    publishes: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """Note which hashes became findable and which were evicted; with `publishes`, all that their events report.

    vLLM has an event for each copy of a block. `copies`: how many there are. With `publishes`, the names of all but the
    first and the last one have a number; without it, these are left out. `sizes`: tokens of a block by group; further
    names of a block, of the tokens up to a place inside it, are left out: no lookup uses them. Next to the names of
    those blocks of a window that are retained, vLLM lists the tokens of all: these are not compared either.
    """
    for event in events:
        group = event.group_idx or 0
        if sizes and isinstance(event, BlockStored) and event.block_size != sizes[group]:
            continue
        fields: dict[tuple[int, str], str] = {}
        if publishes and isinstance(event, BlockStored):
            is_dense = not sizes or not event.kv_cache_spec_kind.startswith("sliding_window")
            fields = dict(fields_of(event, has_tokens=is_dense))
        for each in event.block_hashes:
            name = group, each.hex()
            if isinstance(event, BlockStored):
                copies[name] += 1
                if copies[name] == 1 or publishes:
                    done.stored.append(numbered(name, copies[name]))
                if publishes:
                    done.published[done.stored[-1]] = fields[name]
            elif copies[name] or not sizes:
                if copies[name] == 1 or publishes:
                    done.removed.append(numbered(name, copies[name]))
                copies[name] -= 1


def numbered(name: tuple[int, str], number: int) -> tuple[int, str]:
    """Return the name of copy `number` of a block."""
    return (name[0], f"{name[1]} {number}") if number > 1 else name


def fields_of(event: Any, *, has_tokens: bool = True) -> Iterator[tuple[tuple[int, str], str]]:
    """Yield the fields that a KV event has of each of its blocks."""
    size = event.block_size
    parent = event.parent_block_hash
    assert not has_tokens or len(event.token_ids) == len(event.block_hashes) * size
    for place, key in enumerate(event.block_hashes):
        follows = {
            "parent": None if parent is None else parent.hex(),
            "tokens": event.token_ids[place * size : (place + 1) * size],
        }
        published = {
            **(follows if has_tokens else {}),
            "extra keys": event.extra_keys and event.extra_keys[place],
            "size": size,
            "medium": event.medium,
            "kind": (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window),
            "lora": (event.lora_id, event.lora_name),
        }
        yield (event.group_idx or 0, key.hex()), str(published)
        parent = key
