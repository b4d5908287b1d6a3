"""KV events of vLLM's form, from bytes: maps or arrays, whole hashes or their last eight bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

__all__ = ["Batch", "BlockHash", "Cleared", "MalformedError", "Removed", "Stored", "Told", "Unknown", "decode_batch"]

BlockHash = int | bytes
DEFAULT_MEDIUM = "GPU"


class MalformedError(Exception):
    """What came is no batch of KV events."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that follow one another can be found; the first follows `parent`."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    medium: str
    group: int


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks can no longer be found in `medium`; in none, where that is None."""

    hashes: Sequence[BlockHash]
    medium: str
    group: int


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """No block can be found any more."""


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """An event of another kind."""

    kind: str


Told = Stored | Removed | Cleared | Unknown


class Batch(msgspec.Struct, frozen=True, gc=False):
    """What was told at once, at `time_s`, by one data-parallel rank."""

    time_s: float
    told: Sequence[Told]
    rank: int | None


_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""The order in which an array has them. What stands after these is not needed; what is missing is None."""

_decode = msgspec.msgpack.Decoder().decode


class _Form(msgspec.Struct, gc=False):
    """What both forms come to. Raises ValidationError for values that cannot be."""

    block_hashes: list[int | bytes] = []
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    group_idx: int | None = None


def decode_batch(payload: bytes) -> Batch:
    """Return what a payload says. Raise MalformedError for anything else than a batch of events."""
    try:
        body = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"is no msgpack: {error}") from None
    if not isinstance(body, list) or not 2 <= len(body) <= 3 or not isinstance(body[1], list):
        raise MalformedError("is no array of a time, events and a rank")
    time_s, events = body[0], body[1]
    rank = body[2] if len(body) == 3 else None
    if isinstance(time_s, bool) or not isinstance(time_s, int | float) or not isinstance(rank, int | None):
        raise MalformedError("has no time, or a rank that is no number")
    return Batch(float(time_s), [_told(event) for event in events], rank)


def _told(event: Any) -> Told:
    kind, fields = _kind_and_fields(event)
    if kind not in _FIELDS:
        return Unknown(kind)
    if kind == "AllBlocksCleared":
        return Cleared()
    try:
        form = msgspec.convert(fields, _Form)
    except msgspec.ValidationError as error:
        raise MalformedError(f"{kind}: {error}") from None
    medium, group = form.medium or DEFAULT_MEDIUM, form.group_idx or 0
    if kind == "BlockRemoved":
        return Removed(form.block_hashes, medium, group)
    return Stored(form.block_hashes, form.parent_block_hash, form.token_ids, form.block_size, medium, group)


def _kind_and_fields(event: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(event, dict):
        kind, fields = event.get("type"), event
    elif isinstance(event, list) and event:
        kind = event[0]
        names = _FIELDS.get(kind, ()) if isinstance(kind, str) else ()
        fields = dict(zip(names, event[1:], strict=False))
    else:
        kind = None
    if not isinstance(kind, str):
        raise MalformedError("an event has no type")
    needed = {"BlockStored": ("block_hashes", "token_ids", "block_size"), "BlockRemoved": ("block_hashes",)}
    missing = [name for name in needed.get(kind, ()) if fields.get(name) is None]
    if missing:
        raise MalformedError(f"{kind} has no {missing[0]}")
    return kind, {name: value for name, value in fields.items() if name in _Form.__struct_fields__}
