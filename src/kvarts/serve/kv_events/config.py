"""What is published, and where."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from kvarts.errors import ConfigError
from kvarts.keys import VLLM_DEFAULT_SEED, KeyAlgorithm
from kvarts.reach import check_reach

__all__ = ["EventGroup", "Form", "KvEventsConfig", "at_rank"]

Form = Literal["map", "array"]

MAX_PORT = 65_535
_ENDPOINT = re.compile(r"tcp://[^\s/]+:\d{1,5}|ipc://\S+|inproc://\S+")


class EventGroup(msgspec.Struct, frozen=True):
    """A KV group as events tell of it: what its layers keep, and the tokens of a window or a chunk."""

    kind: Literal["full", "latent", "window", "chunk", "state"]
    tokens: int | None = None


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where KV events of one engine go, and in which form. Raises ConfigError for a value out of range.

    `endpoint`: of the PUB socket, bound unless `connects`. `replay_endpoint`: of a ROUTER socket that answers with
    past batches, the last `buffer_steps` of them. `form`: events as maps, as vLLM writes them since PR 42892, or as
    arrays, as before. `topic`: routers that subscribe to everything may expect the empty one. `rank`: the data-parallel
    rank; a TCP port is that of rank 0 plus `rank`. `hash_bytes`: hashes are 32 bytes, not their last eight as a number.
    `seed` is vLLM's PYTHONHASHSEED, if that is set there. `state_on_subscribe`: a new subscriber makes the publisher
    tell everything again, to all. `state_on_replay`: a replay that asks for more than is left begins with everything.
    `groups`: the KV groups of an engine that counts them.

    Events hold the token ids of all prompts, and ZMQ neither encrypts nor asks for credentials: an endpoint that
    other machines reach needs `insecure`, how often --insecure was given, see kvarts.reach.
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
        for field in ("endpoint", "replay_endpoint"):
            value = getattr(self, field)
            if value is not None and not _ENDPOINT.fullmatch(value):
                raise ConfigError(
                    f"is no endpoint: {value!r}", field=field, hint="An endpoint is tcp://HOST:PORT or ipc://PATH."
                )
            if value is not None and _port(value) + self.rank > MAX_PORT:
                raise ConfigError(f"has no port for rank {self.rank}: {value}", field=field)
            if value is not None and value.startswith("tcp://") and not (self.connects and field == "endpoint"):
                check_reach(
                    value.removeprefix("tcp://").rpartition(":")[0],
                    field=field,
                    insecure=self.insecure,
                    encrypts=False,
                    asks_for_token=False,
                    missing="KV events hold the tokens of all prompts: publish at tcp://127.0.0.1:PORT or ipc://PATH",
                )
        if self.form not in ("map", "array"):
            raise ConfigError(f"must be 'map' or 'array', got {self.form!r}", field="form")
        for field, least in (("rank", 0), ("buffer_steps", 1), ("high_water_mark", 0)):
            if getattr(self, field) < least:
                raise ConfigError(f"must be at least {least}, got {getattr(self, field)}", field=field)

    def for_model(self, name: str, place: int) -> KvEventsConfig:
        """Return the same for model `name`, of several the one at `place` from 0: each at the next port, as engines of
        one model each would be. `{model}` in the topic stands for the name.
        """
        replay = self.replay_endpoint
        return msgspec.structs.replace(
            self,
            endpoint=_at_place(self.endpoint, place, name),
            replay_endpoint=None if replay is None else _at_place(replay, place, name),
            topic=self.topic.replace("{model}", name),
        )

    def for_rank(self, rank: int) -> KvEventsConfig:
        """Return the same for another data-parallel rank."""
        return msgspec.structs.replace(self, rank=rank)


def at_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of `rank`: another port, or another name. Port 0 stays, which is any free one."""
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    port = _port(endpoint)
    return f"{endpoint.rpartition(':')[0]}:{port + rank if port else 0}"


def _at_place(endpoint: str, place: int, name: str) -> str:
    """Return the endpoint of one model of several: another port, or another name."""
    if endpoint.startswith("tcp://"):
        return at_rank(endpoint, place)
    return f"{endpoint}_{name}" if place else endpoint


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2]) if endpoint.startswith("tcp://") else 0
