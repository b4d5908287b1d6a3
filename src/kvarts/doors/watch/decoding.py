"""Decoder of KV events in vLLM's formats: maps or arrays, with whole hashes or their last eight bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import problem_of

__all__ = [
    "DEFAULT_MEDIUM",
    "MAX_BATCH_BYTES",
    "Batch",
    "BlockHash",
    "Cleared",
    "MalformedError",
    "Removed",
    "Stored",
    "Told",
    "TooLongError",
    "Unknown",
    "decode_batch",
]

T = TypeVar("T")
BlockHash = int | bytes
DEFAULT_MEDIUM = "GPU"


class MalformedError(Exception):
    """The payload is not a batch of KV events."""


class TooLongError(Exception):
    """The payload exceeds the limits of a batch."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks that can be found from now on; the first follows `parent`.

    `medium`: with the name of a secondary tier, and whether it is remote, if the event has these. `kind` and `span`: of
    the group's layers, if the event has them: vLLM's name, and the tokens of a window.

    With fewer blocks than its tokens fill, an event is sparse: the group does not keep all blocks of these tokens, and
    the event does not name those that it skips.
    """

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    medium: str
    group: int
    kind: str | None = None
    span: int | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether blocks between these are skipped."""
        size, num_tokens = self.block_size, len(self.token_ids)
        return size > 0 and num_tokens % size == 0 and num_tokens > size * len(self.hashes)


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks that can no longer be found in `medium`."""

    hashes: Sequence[BlockHash]
    medium: str
    group: int


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """All blocks were removed."""


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """An event of another kind."""

    kind: str


Told = Stored | Removed | Cleared | Unknown


class Batch(msgspec.Struct, frozen=True, gc=False):
    """The events that one data-parallel rank published together at `time_s`."""

    time_s: float
    told: Sequence[Told]
    rank: int | None


MAX_BATCH_BYTES = 8 << 20
"""Size limit of a batch, enough for a prompt of more than a million tokens."""
MAX_EVENTS = 1 << 16
MOST_TIME_S = 1e10
"""Limit of the time of a batch, in seconds since 1970: more than 300 years. NaN is none."""
MAX_BATCH_BLOCKS = 1 << 18
MAX_HASH_BYTES = 64
MAX_MEDIUM_CHARS = 64

_Hash = int | Annotated[bytes, msgspec.Meta(max_length=MAX_HASH_BYTES)]
_Hashes = list[_Hash]
_TokenId = Annotated[int, msgspec.Meta(ge=0)]
_TokenIds = list[_TokenId]
_Medium = Annotated[str, msgspec.Meta(max_length=MAX_MEDIUM_CHARS)] | None
_SKIPPED = msgspec.Raw()

# Unused values are not decoded: a byte of msgpack may become a hundred bytes of objects.


class _Batch(msgspec.Struct, array_like=True, gc=False):
    time_s: Annotated[float, msgspec.Meta(ge=0, lt=MOST_TIME_S)]
    events: list[msgspec.Raw]
    rank: int | None = None


class _KindOfMap(msgspec.Struct, gc=False):
    type: str


class _KindOfArray(msgspec.Struct, array_like=True, gc=False):
    type: str


class _StoredMap(msgspec.Struct, gc=False):
    block_hashes: _Hashes
    token_ids: _TokenIds
    block_size: int
    parent_block_hash: _Hash | None = None
    medium: _Medium = None
    group_idx: int | None = None
    kv_cache_spec_kind: msgspec.Raw = _SKIPPED
    kv_cache_spec_sliding_window: msgspec.Raw = _SKIPPED
    locality: _Medium = None
    ownership: _Medium = None


class _StoredArray(msgspec.Struct, array_like=True, gc=False):
    """Fields in the order of vLLM. Later fields are ignored."""

    type: str
    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: _TokenIds
    block_size: int
    lora_id: msgspec.Raw = _SKIPPED
    medium: _Medium = None
    lora_name: msgspec.Raw = _SKIPPED
    extra_keys: msgspec.Raw = _SKIPPED
    group_idx: int | None = None
    kv_cache_spec_kind: msgspec.Raw = _SKIPPED
    kv_cache_spec_sliding_window: msgspec.Raw = _SKIPPED
    locality: _Medium = None
    ownership: _Medium = None


class _StoredEagle(msgspec.Struct, array_like=True, gc=False):
    """The event of SGLang's radix cache with EAGLE, whose keys are pairs: each token, and the one after it."""

    type: str
    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: list[tuple[_TokenId, _TokenId]]
    block_size: int
    lora_id: msgspec.Raw = _SKIPPED
    medium: _Medium = None


class _RemovedMap(msgspec.Struct, gc=False):
    block_hashes: _Hashes
    medium: _Medium = None
    group_idx: int | None = None
    locality: _Medium = None
    ownership: _Medium = None


class _RemovedArray(msgspec.Struct, array_like=True, gc=False):
    type: str
    block_hashes: _Hashes
    medium: _Medium = None
    group_idx: int | None = None
    locality: _Medium = None
    ownership: _Medium = None


_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_kind_of_map = msgspec.msgpack.Decoder(_KindOfMap).decode
_kind_of_array = msgspec.msgpack.Decoder(_KindOfArray).decode
_stored_eagle = msgspec.msgpack.Decoder(_StoredEagle).decode
_FORMS = {
    "BlockStored": (msgspec.msgpack.Decoder(_StoredMap).decode, msgspec.msgpack.Decoder(_StoredArray).decode),
    "BlockRemoved": (msgspec.msgpack.Decoder(_RemovedMap).decode, msgspec.msgpack.Decoder(_RemovedArray).decode),
}


def decode_batch(payload: bytes) -> Batch:
    """Return the batch in a payload.

    Raise MalformedError if it is not a batch of events, TooLongError if it exceeds the limits.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise TooLongError(f"has {len(payload):,} bytes, and {MAX_BATCH_BYTES:,} are read at most")
    num_fields, num_events = _lengths(payload)
    if num_events > MAX_EVENTS:
        raise TooLongError(f"has {num_events:,} events, and {MAX_EVENTS:,} are read at most")
    if not 2 <= num_fields <= 3:
        raise MalformedError("is no array of a time, events and a rank")
    try:
        batch = _decode_batch(payload)
        told = [_told(event) for event in batch.events]
    except UNDECODED as error:
        raise MalformedError(f"is no batch of events: {problem_of(error)}") from None
    num_blocks = sum(len(one.hashes) for one in told if isinstance(one, Stored | Removed))
    if num_blocks > MAX_BATCH_BLOCKS:
        raise TooLongError(f"has {num_blocks:,} blocks, and {MAX_BATCH_BLOCKS:,} are read at most")
    return Batch(batch.time_s, told, batch.rank)


def _told(event: msgspec.Raw) -> Told:
    is_array = _is_array(event)
    try:
        kind = (_kind_of_array if is_array else _kind_of_map)(event).type
    except msgspec.ValidationError:
        raise MalformedError("an event has no type") from None
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in _FORMS:
        return Unknown(kind[:MAX_MEDIUM_CHARS])
    try:
        form: Any = _FORMS[kind][is_array](event)
    except msgspec.ValidationError as error:
        eagle = _eagle(event) if is_array and kind == "BlockStored" else None
        if eagle is None:
            raise MalformedError(f"{kind}: {problem_of(error)}") from None
        return eagle
    medium, group = form.medium or DEFAULT_MEDIUM, form.group_idx or 0
    if form.ownership:  # one of several tiers of a medium, each of which may have the block
        medium = f"{medium}/{form.ownership}"
    if form.locality == "REMOTE":
        medium = f"{medium} remote"
    if kind == "BlockRemoved":
        return Removed(form.block_hashes, medium, group)
    layers, span = _if_any(form.kv_cache_spec_kind, str), _if_any(form.kv_cache_spec_sliding_window, int)
    if layers is not None:
        layers = layers[:MAX_MEDIUM_CHARS]
    size = form.block_size
    return Stored(form.block_hashes, form.parent_block_hash, form.token_ids, size, medium, group, layers, span)


def _eagle(event: msgspec.Raw) -> Stored | None:
    """Return an event with pairs of tokens, of which the first ones are the tokens of its blocks; None for others."""
    try:
        form = _stored_eagle(event)
    except msgspec.ValidationError:
        return None
    tokens = [first for first, _ in form.token_ids]
    return Stored(form.block_hashes, form.parent_block_hash, tokens, form.block_size, form.medium or DEFAULT_MEDIUM, 0)


def _if_any(raw: msgspec.Raw, kind: type[T]) -> T | None:
    """Return an optional value; None if it is missing or of another type."""
    try:
        return msgspec.msgpack.decode(raw, type=kind) if memoryview(raw).nbytes else None
    except UNDECODED:
        return None


def _is_array(event: msgspec.Raw) -> bool:
    first = memoryview(event)[0]
    return first & 0xF0 == 0x90 or first in (0xDC, 0xDD)


def _lengths(payload: bytes) -> tuple[int, int]:
    """Return the numbers of fields and events of a batch, before any are decoded. Raise MalformedError."""
    num_fields, at = _array_length(payload, 0)
    if num_fields is not None and at < len(payload):
        first = payload[at]
        at += 1 + _NUMBER_BYTES.get(first, 0)  # the time; anything but a number fails in decoding
        num_events, _ = _array_length(payload, at)
        if num_events is not None:
            return num_fields, num_events
    raise MalformedError("is no array of a time, events and a rank")


_NUMBER_BYTES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""Bytes after the first byte of a number in msgpack; small numbers consist of one byte."""


def _array_length(payload: bytes, at: int) -> tuple[int | None, int]:
    """Return the length of the array that begins at `at`, None for anything else, and the start of its items."""
    if at >= len(payload):
        return None, at
    first = payload[at]
    if first & 0xF0 == 0x90:
        return first & 0x0F, at + 1
    size = {0xDC: 2, 0xDD: 4}.get(first, 0)
    if not size:
        return None, at
    return int.from_bytes(payload[at + 1 : at + 1 + size], "big"), at + 1 + size
