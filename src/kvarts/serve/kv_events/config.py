"""Settings of the publisher of KV events: contents and endpoints."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvarts.errors import ConfigError
from kvarts.keys import VLLM_DEFAULT_SEED, KeyAlgorithm
from kvarts.reach import check_endpoint, check_reach

__all__ = ["EventGroup", "Form", "KvEventsConfig", "at_rank"]

Form = Literal["map", "array"]


class EventGroup(msgspec.Struct, frozen=True):
    """A KV group as described in events: the retention of its layers, and the tokens of a window or a chunk."""

    kind: Literal["full", "latent", "window", "chunk", "state"]
    tokens: int | None = None


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Endpoints and format of the KV events of one engine. Raises ConfigError for a value out of range.

    `endpoint`: the PUB socket's, bound unless `connects`. `replay_endpoint`: that of a ROUTER socket that sends past
    batches, the last `buffer_steps` of them. `form`: events as maps, as vLLM writes them since PR 42892, or as arrays,
    as before. `topic`: routers that subscribe to everything may expect the empty one. `rank`: the data-parallel rank; a
    TCP port is that of rank 0 plus `rank`. `hash_bytes`: send whole hashes of 32 bytes instead of their last eight as a
    number. `seed` is vLLM's PYTHONHASHSEED, if that is set there. `state_on_subscribe`: a new subscriber makes the
    publisher send the full state again, to all. `state_on_replay`: the answer to a replay from before the first batch
    in the buffer begins with the full state. `groups`: the KV groups, for an engine that counts them.

    Events hold the token ids of all prompts, and ZMQ neither encrypts nor authenticates: an endpoint that other
    machines reach requires `insecure`, the number of times --insecure was given, see kvarts.reach.
    """

    endpoint: str
    replay_endpoint: str | None = None
    form: Form = "map"
    topic: str = ""
    connects: bool = False
    rank: int = 0
    buffer_steps: int = 10_000
    high_water_mark: int = 100_000
    algorithm: KeyAlgorithm = "sha256_cbor"
    seed: str = VLLM_DEFAULT_SEED
    hash_bytes: bool = False
    state_on_subscribe: bool = False
    state_on_replay: bool = False
    groups: tuple[EventGroup, ...] = ()
    insecure: int = 0

    def __post_init__(self) -> None:
        if self.form not in ("map", "array"):
            raise ConfigError(f"must be 'map' or 'array', got {self.form!r}", field="form")
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
