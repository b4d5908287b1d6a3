"""KV events: runs of blocks with their names, in numbered batches; the queue of these; their encoding."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Condition
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.core.content import Content
from kvarts.core.keys import VLLM_DEFAULT_SEED, BlockKey, KeyAlgorithm, salt_parts
from kvarts.doors.exposure import check_endpoint, check_reach

__all__ = [
    "ALGORITHM",
    "MAX_WAITING",
    "Batch",
    "BatchQueue",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "EventGroup",
    "Extent",
    "Form",
    "KvEventsConfig",
    "Told",
    "Wire",
    "at_rank",
    "lora_name",
    "token_ids",
]

Form = Literal["map", "array", "sglang"]
Extent = Literal["blocks", "copies", "reports"]
ALGORITHM: Final[KeyAlgorithm] = "sha256_cbor"


class EventGroup(msgspec.Struct, frozen=True):
    """A KV group as described in events: the retention of its layers, and the tokens of a window or a chunk.

    `block_pages`: the pages of a block, more than 1 if the blocks of groups hold different numbers of tokens.
    """

    kind: Literal["full", "latent", "window", "latent_window", "chunk", "state"]
    tokens: int | None = None
    block_pages: int = 1


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Endpoints and format of the KV events of one engine. Raises ConfigError for a value out of range.

    `endpoint`: the PUB socket's, bound unless `connects`. `replay_endpoint`: that of a ROUTER socket that sends past
    batches, the last `buffer_steps` of them. `form`: events as maps, as vLLM writes them since PR 42892, or as arrays,
    as before. `topic`: routers that subscribe to everything may expect the empty one. `rank`: the data-parallel rank; a
    TCP port is that of rank 0 plus `rank`. `hash_bytes`: send whole hashes of 32 bytes instead of their last eight as a
    number. `seed` is vLLM's PYTHONHASHSEED, if that is set there. `state_on_subscribe`: a new subscriber makes the
    publisher send the full state again, to all. `state_on_replay`: the answer to a replay from before the first batch
    in the buffer begins with the full state. `groups`: the KV groups, for an engine that counts them. `extent`: events
    for `blocks`, when the first copy comes and the last one goes; for all `copies`, as of vLLM; or also the `reports`
    of vLLM's `kv_cache_report_mode` `full`, for all requests.

    Events hold the token ids of all prompts, and ZMQ neither encrypts nor authenticates: an endpoint that other
    machines reach requires `insecure`.
    """

    endpoint: str
    replay_endpoint: str | None = None
    form: Form | None = None
    topic: str = ""
    connects: bool = False
    rank: int = 0
    buffer_steps: int = 10_000
    high_water_mark: int = 100_000
    algorithm: KeyAlgorithm = ALGORITHM
    seed: str = VLLM_DEFAULT_SEED
    hash_bytes: bool = False
    state_on_subscribe: bool = False
    state_on_replay: bool = False
    groups: tuple[EventGroup, ...] = ()
    extent: Extent = "blocks"
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.form not in (None, "map", "array", "sglang"):
            raise ConfigError(f"must be 'map', 'array' or 'sglang', got {self.form!r}", field="form")
        if self.form == "sglang" and (self.extent != "blocks" or self.hash_bytes or self.groups):
            raise ConfigError("has no copies, whole hashes or KV groups in SGLang's form", field="form")
        if self.extent not in ("blocks", "copies", "reports"):
            raise ConfigError(f"must be 'blocks', 'copies' or 'reports', got {self.extent!r}", field="extent")
        for field, least in (("rank", 0), ("buffer_steps", 1), ("high_water_mark", 0)):
            if getattr(self, field) < least:
                raise ConfigError(f"must be at least {least}, got {getattr(self, field)}", field=field)
        for field in ("endpoint", "replay_endpoint"):
            value = getattr(self, field)
            if value is not None:
                check_endpoint(value, field=field, binds=not self.connects, offset=self.rank)
            if value is not None and value.startswith("tcp://") and not (self.connects and field == "endpoint"):
                check_reach(
                    value.removeprefix("tcp://").rpartition(":")[0],
                    field=field,
                    insecure=self.insecure,
                    encrypts=False,
                    asks_for_token=False,
                    missing="KV events hold the tokens of all prompts: publish at tcp://127.0.0.1:PORT or ipc://PATH",
                )

    def for_model(self, name: str, place: int) -> KvEventsConfig:
        """Return the settings for model `name`, at `place` among several, from 0.

        Each model has the next port, as engines of one model each would have. `{model}` in the topic is replaced by the
        name.
        """
        replay = self.replay_endpoint
        return msgspec.structs.replace(
            self,
            endpoint=_at_place(self.endpoint, place, name),
            replay_endpoint=None if replay is None else _at_place(replay, place, name),
            topic=self.topic.replace("{model}", name),
        )

    def at_free_ports(self) -> KvEventsConfig:
        """Return the settings with any free ports in place of those of TCP endpoints."""
        replay = self.replay_endpoint
        return msgspec.structs.replace(
            self,
            endpoint=_at_free_port(self.endpoint),
            replay_endpoint=None if replay is None else _at_free_port(replay),
        )

    def for_form(self, form: Form) -> KvEventsConfig:
        """Return the settings with this format of the engine, unless there is one."""
        is_open = self.form is None and self.extent == "blocks"
        return msgspec.structs.replace(self, form=form) if is_open else self

    def for_rank(self, rank: int) -> KvEventsConfig:
        """Return the settings for another data-parallel rank."""
        return msgspec.structs.replace(self, rank=rank)


def at_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of `rank`: another port, or another name. Port 0, any free port, is unchanged."""
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    port = _port(endpoint)
    return f"{endpoint.rpartition(':')[0]}:{port + rank if port else 0}"


def _at_place(endpoint: str, place: int, name: str) -> str:
    """Return the endpoint of one model of several: another port, or another name."""
    if endpoint.startswith("tcp://"):
        return at_rank(endpoint, place)
    return f"{endpoint}_{name}" if place else endpoint


def _at_free_port(endpoint: str) -> str:
    return f"{endpoint.rpartition(':')[0]}:0" if endpoint.startswith("tcp://") else endpoint


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2]) if endpoint.startswith("tcp://") else 0


ONE_GROUP = EventGroup("full")
"""The group of a cache of whole pages, whose layers all retain every token."""
KINDS = MappingProxyType(
    {
        "full": "full_attention",
        "latent": "mla_attention",
        "window": "sliding_window",
        "latent_window": "sliding_window_mla",
        "chunk": "chunked_local_attention",
        "state": "mamba",
    }
)
"""vLLM's names of the kinds of groups."""


class BlocksStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks of `content` from `start_page` on, one for each of `keys`, can be found.

    `parent`: the block before them. `group`: with KV groups, the group of these parts. `block_pages`: as of EventGroup.
    """

    content: Content
    start_page: int
    keys: Sequence[BlockKey]
    parent: BlockKey | None
    medium: str
    group: int | None = None
    block_pages: int = 1

    @property
    def block_size(self) -> int:
        """The tokens of a block."""
        return self.content.page_size * self.block_pages


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
                "token_ids": token_ids(told),
                "block_size": told.block_size,
                "lora_id": None,
                "medium": told.medium,
                "lora_name": lora_name(told),
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
            size, name = told.block_size, lora_name(told)
            stored = ["BlockStored", hashes, parent, token_ids(told), size, None, told.medium, name]
            if told.group is None:
                return stored
            return [*stored, _extra_keys(told), told.group, *self._kept_by(told).values()]
        if isinstance(told, BlocksRemoved):
            removed = ["BlockRemoved", self._hashes(told.keys), told.medium]
            return removed if told.group is None else [*removed, told.group]
        return ["AllBlocksCleared"]

    def _kept_by(self, told: BlocksStored) -> dict[str, Any]:
        """Return the fields that describe the group of the blocks."""
        group = ONE_GROUP if told.group is None else self._groups[told.group]
        kept: dict[str, Any] = {"kv_cache_spec_kind": KINDS[group.kind]}
        if group.kind in ("window", "latent_window"):
            kept["kv_cache_spec_sliding_window"] = group.tokens
        return kept

    def _hashes(self, keys: Sequence[BlockKey]) -> Sequence[int | bytes]:
        return keys if self._hash_bytes else [int.from_bytes(key[-8:], "big") for key in keys]

    def _parent(self, told: BlocksStored) -> int | bytes | None:
        return None if told.parent is None else self._hashes([told.parent])[0]


def token_ids(told: BlocksStored) -> list[int]:
    """Return the tokens of all blocks."""
    start = told.start_page * told.content.page_size
    return told.content.tokens(start, start + len(told.keys) * told.block_size).tolist()


def lora_name(told: BlocksStored) -> str | None:
    """Return the name of the adapter under which the blocks were computed; None without one."""
    adapter, _ = salt_parts(told.content.salt)
    return None if adapter is None else adapter.name


def _extra_keys(told: BlocksStored) -> list[tuple[str, ...] | None]:
    """Return the extra keys of each block. In events, vLLM leaves out what they are, and the paths of adapters."""
    adapter, salt = salt_parts(told.content.salt)
    every = () if adapter is None else (adapter.name,)
    first = (*every, salt) if salt and not told.start_page else every
    return [first or None, *[every or None] * (len(told.keys) - 1)]
