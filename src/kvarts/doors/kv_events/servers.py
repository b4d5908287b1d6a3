"""Publishers of the engines of one server: one for each, at endpoints of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.doors.kv_events.batches import MAX_WAITING, EventGroup, KvEventsConfig, at_rank

if TYPE_CHECKING:
    from kvarts.core.event_log import EventReader
    from kvarts.doors.kv_events.publisher import KvEvents
    from kvarts.sim.config import ReplayConfig

__all__ = ["ServerReaders", "as_options", "for_engine", "of_model", "take", "with_groups"]


class ServerReaders:
    """Opens a publisher for each engine of a server, until `close_all`.

    Each model has its own endpoints and sequence numbers, like separate engines: a consumer of one model sees no gaps.
    Events do not name the model; indexers are configured with the model of each endpoint. `say`: receives what happens
    to added workers. Raises ConfigError.
    """

    def __init__(self, config: KvEventsConfig, say: Callable[[str], object] = lambda _: None) -> None:
        self._config = config
        self._say = say
        self._open: dict[int, tuple[KvEvents, dict[str, Any], int]] = {}
        """The publisher of each engine, where it publishes, and its place in the row of ports."""

    def of_model(self, name: str, config: ReplayConfig) -> list[EventReader]:
        """Return the readers of the events of the next model, which has this name."""
        return self._at(name, config, len(self._open), len(self._open))

    def of_worker(self, name: str, config: ReplayConfig, worker: int, *, is_added: bool) -> list[EventReader]:
        """Return the readers of a worker of a fleet, at the first ports of the row that no worker has.

        `is_added`: a scaler added the worker; if one of these ports is not available, it has any free ones, and if that
        fails, none: the others go on.
        """
        taken = {place for _, _, place in self._open.values()}
        place = next(place for place in count() if place not in taken)
        try:
            readers = self._at(name, config, place, worker)
        except ConfigError:
            if not is_added:
                raise
            try:
                readers = self._at(name, config, place, worker, at_free_ports=True)
            except ConfigError as error:
                self._say(f"worker {worker} publishes no KV events: {error.what}")
                return []
        self._open[worker][1]["worker"] = worker
        return readers

    def sources_of(self, worker: int) -> list[dict[str, Any]]:
        """Return where the events of a worker are published."""
        return [self._open[worker][1]] if worker in self._open else []

    def close(self, worker: int) -> None:
        """Publish the queued batches of a worker, and close its sockets."""
        opened = self._open.pop(worker, None)
        if opened is not None:
            opened[0].close()

    def close_all(self) -> None:
        """Close all of them."""
        for worker in reversed(list(self._open)):
            self.close(worker)

    def _at(
        self, name: str, engine: ReplayConfig, place: int, worker: int, *, at_free_ports: bool = False
    ) -> list[EventReader]:
        from kvarts.doors.kv_events.publisher import open_kv_events

        config = of_model(self._config.at_free_ports() if at_free_ports else self._config, name, place)
        config = for_engine(config, engine)
        taken = {source[key] for _, source, _ in self._open.values() for key in ("endpoint", "replay_endpoint")}
        take(config, taken)
        events = open_kv_events(config, now_s=time.time)
        publisher = events.publisher
        source = {
            "data_parallel_rank": config.rank,
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "buffer_steps": config.buffer_steps,
            "hwm": config.high_water_mark,
            "max_queue_size": MAX_WAITING,
            "topic": config.topic,
            "model_name": name,
        }
        self._open[worker] = events, source, place
        return [events.reader]


@contextmanager
def as_options() -> Iterator[None]:
    """Name options in errors of a KvEventsConfig."""
    try:
        yield
    except ConfigError as error:
        option = {"endpoint": "kv_events", "replay_endpoint": "kv_events_replay"}.get(error.field or "")
        raise error if option is None else ConfigError(error.what, field=option, hint=error.hint) from None


def of_model(config: KvEventsConfig, name: str, place: int, rank: int | None = None) -> KvEventsConfig:
    """Return the settings of an engine of model `name`, at `place` among several. Raise ConfigError without a port."""
    with as_options():
        found = config.for_model(name, place)
        return found if rank is None else found.for_rank(rank)


def take(config: KvEventsConfig, taken: set[str]) -> None:
    """Add the endpoints of an engine to those that are `taken`. Raise ConfigError if one is, and not a free port."""
    for field, endpoint in (("kv_events", config.endpoint), ("kv_events_replay", config.replay_endpoint)):
        if endpoint is None:
            continue
        own = at_rank(endpoint, config.rank)
        if own in taken and not (own.startswith("tcp://") and own.endswith(":0")):
            raise ConfigError(
                f"{own} would be of two engines: each has the next port",
                field=field,
                hint="Let --kv-events and --set kv_events_replay be further apart: tcp://127.0.0.1:5557 and :5657.",
            )
        taken.add(own)


def for_engine(config: KvEventsConfig, engine: ReplayConfig) -> KvEventsConfig:
    """Return `config` for an engine: its KV groups, and its format unless one was given."""
    if engine.plans_batches:
        return config.for_form("sglang")
    return config if engine.kv_groups == "off" else with_groups(config, engine.memory.to_builtins()["kv_groups"])


def with_groups(config: KvEventsConfig, groups: Sequence[dict[str, Any]]) -> KvEventsConfig:
    """Return `config` for an engine with these KV groups."""
    told = tuple(
        EventGroup(
            "latent_window" if each.get("is_latent") else each["kind"], each.get("tokens"), each.get("block_pages", 1)
        )
        for each in groups
    )
    return msgspec.structs.replace(config, groups=told)
