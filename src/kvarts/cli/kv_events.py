"""KV events that `kvarts replay` publishes while it runs, for testing routers and indexers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import ConfigError
from kvarts.cli.options import GroupedOption, KeyOption
from kvarts.cli.parts import CommandPart
from kvarts.core.parts.combines import check_combination

if TYPE_CHECKING:
    from kvarts.core.event_log import EventReader
    from kvarts.doors.kv_events.batches import KvEventsConfig
    from kvarts.doors.kv_events.publisher import KvEvents
    from kvarts.sim.config import ReplayConfig
    from kvarts.sim.report.report import Report

__all__ = ["PART", "Publishing", "publishing_of"]

TITLE = "KV events"


def server_options() -> list[click.Option]:
    """Return `--kv-events` and the options that go with it, for any command that runs an engine."""
    return [
        GroupedOption(
            ["--kv-events"], group=TITLE, metavar="ENDPOINT",
            help="Publish KV events in vLLM's form at ENDPOINT while it runs: tcp://127.0.0.1:5557. With replicas, "
            "or several models, each at the next port.",
        ),
        GroupedOption(
            ["--kv-events-replay"], group=TITLE, metavar="ENDPOINT",
            help="Answer requests for past events, and for full state, at ENDPOINT.",
        ),
        KeyOption(
            ["--kv-events-format"], group=TITLE, default="map",
            type=click.Choice(["map", "array", "copies", "reports"]),
            help="Events as maps, as vLLM writes them, or as arrays, as it did before; maps with all copies of blocks, "
            "as vLLM stores and removes them, or also with the reports of its kv_cache_report_mode full. [map]",
        ),
        KeyOption(
            ["--kv-events-topic"], group=TITLE, metavar="TEXT", default="",
            help="Topic of the events; in a mock, and of several models, {model} stands for the name of the model. "
            "[empty]",
        ),
    ]  # fmt: skip


class ServerReaders:
    """Opens a publisher for each engine of a server, which closes with `stack`; none if KV events are off.

    Each model has its own endpoints and sequence numbers, like separate engines: a consumer of one model sees no gaps.
    Events do not name the model; indexers are configured with the model of each endpoint. Raises ConfigError.
    """

    def __init__(self, stack: ExitStack, values: Mapping[str, Any]) -> None:
        self._config = _config_of(values)
        self._open: dict[int, tuple[KvEvents, dict[str, Any], int]] = {}
        """The publisher of each engine, where it publishes, and its place in the row of ports."""
        stack.callback(self._close_all)

    def of_model(self, name: str, engine: ReplayConfig) -> list[EventReader]:
        """Return the readers of the events of the next model, which has this name; empty if KV events are off."""
        return [] if self._config is None else self._at(name, engine, len(self._open), len(self._open))

    def of_worker(self, name: str, engine: ReplayConfig, worker: int, *, is_added: bool) -> list[EventReader]:
        """Return the readers of a worker of a fleet, at the first ports of the row that no worker has.

        `is_added`: a scaler added the worker; if one of these ports is not available, it has any free ones, and if that
        fails, none: the others go on.
        """
        if self._config is None:
            return []
        taken = {place for _, _, place in self._open.values()}
        place = next(place for place in count() if place not in taken)
        try:
            readers = self._at(name, engine, place, worker)
        except ConfigError:
            if not is_added:
                raise
            try:
                readers = self._at(name, engine, place, worker, at_free_ports=True)
            except ConfigError as error:
                click.echo(f"kvarts: worker {worker} publishes no KV events: {error.what}", err=True)
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

    def _close_all(self) -> None:
        for worker in reversed(list(self._open)):
            self.close(worker)

    def _at(
        self, name: str, engine: ReplayConfig, place: int, worker: int, *, at_free_ports: bool = False
    ) -> list[EventReader]:
        from kvarts.doors.kv_events.batches import MAX_WAITING
        from kvarts.doors.kv_events.publisher import open_kv_events

        assert self._config is not None
        config = self._config.at_free_ports() if at_free_ports else self._config
        of_model = _of_model(config, name, place)
        if engine.kv_groups != "off":
            of_model = _with_groups(of_model, engine.memory.to_builtins()["kv_groups"])
        taken = {source[key] for _, source, _ in self._open.values() for key in ("endpoint", "replay_endpoint")}
        _take(of_model, taken)
        events = open_kv_events(of_model, now_s=time.time)
        publisher = events.publisher
        source = {
            "data_parallel_rank": of_model.rank,
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "buffer_steps": of_model.buffer_steps,
            "hwm": of_model.high_water_mark,
            "max_queue_size": MAX_WAITING,
            "topic": of_model.topic,
            "model_name": name,
        }
        self._open[worker] = events, source, place
        return [events.reader]


def _config_of(values: Mapping[str, Any]) -> KvEventsConfig | None:
    """Return the configuration from the options of `server_options`; None if they are off. Raise ConfigError."""
    if values["kv_events"] is None:
        for name in ("kv_events_replay", "kv_events_topic"):
            if values[name]:
                raise ConfigError("needs --kv-events", field=name)
        return None
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"KV events need ZeroMQ ({error})", hint="pip install 'kvarts[serve]'.") from None
    from kvarts.doors.kv_events.batches import Extent, KvEventsConfig

    extents: dict[str, Extent] = {"copies": "copies", "reports": "reports"}
    with _as_options():
        return KvEventsConfig(
            endpoint=values["kv_events"],
            replay_endpoint=values["kv_events_replay"],
            form="array" if values["kv_events_format"] == "array" else "map",
            extent=extents.get(values["kv_events_format"], "blocks"),
            topic=values["kv_events_topic"],
            insecure=values["insecure"],
        )


@contextmanager
def _as_options() -> Iterator[None]:
    """Name options in errors of a KvEventsConfig."""
    try:
        yield
    except ConfigError as error:
        option = {"endpoint": "kv_events", "replay_endpoint": "kv_events_replay"}.get(error.field or "")
        raise error if option is None else ConfigError(error.what, field=option, hint=error.hint) from None


def _of_model(config: KvEventsConfig, name: str, place: int, rank: int | None = None) -> KvEventsConfig:
    """Return the settings of an engine of model `name`, at `place` among several. Raise ConfigError without a port."""
    with _as_options():
        of_model = config.for_model(name, place)
        return of_model if rank is None else of_model.for_rank(rank)


def _take(config: KvEventsConfig, taken: set[str]) -> None:
    """Add the endpoints of an engine to those that are `taken`. Raise ConfigError if one is, and not a free port."""
    from kvarts.doors.kv_events.batches import at_rank

    for field, endpoint in (("kv_events", config.endpoint), ("kv_events_replay", config.replay_endpoint)):
        if endpoint is None:
            continue
        own = at_rank(endpoint, config.rank)
        if own in taken and not (own.startswith("tcp://") and own.endswith(":0")):
            raise ConfigError(
                f"{own} would be of two engines: each has the next port",
                field=field,
                hint="Let --kv-events and --kv-events-replay be further apart: tcp://127.0.0.1:5557 and :5657.",
            )
        taken.add(own)


def _with_groups(config: KvEventsConfig, groups: Sequence[Mapping[str, Any]]) -> KvEventsConfig:
    """Return `config` for an engine with these KV groups."""
    import msgspec

    from kvarts.doors.kv_events.batches import EventGroup

    told = tuple(EventGroup(group["kind"], group.get("tokens")) for group in groups)
    return msgspec.structs.replace(config, groups=told)


class KvEventsPart(CommandPart):
    """KV events over ZMQ."""

    def options(self) -> Sequence[click.Option]:
        """Return `--kv-events` and the options that go with it."""
        return (
            *server_options(),
            KeyOption(
                ["--kv-events-wait"], group=TITLE, metavar="SECONDS", type=click.FloatRange(min=0.0), default=0.0,
                help="Begin after the first subscription, or after this time. [0]",
            ),
            KeyOption(
                ["--kv-events-stay"], group=TITLE, metavar="SECONDS", type=click.FloatRange(min=0.0), default=0.0,
                help="Answer requests for past events for this long after the replay. [0]",
            ),
            GroupedOption(
                ["--insecure"], group=TITLE, count=True,
                help="Given twice: publish at an address that other machines reach. They read all tokens.",
            ),
        )  # fmt: skip

    def results(
        self, config: ReplayConfig, places: Mapping[str, Any], run_dir: Path | None, model: str | None
    ) -> Publishing | None:
        """Return the publisher, if `--kv-events` is given; of several models, one publishes for all of them."""
        return None if model is not None else publishing_of([config] * config.replicas, places, {})


def publishing_of(
    engines: Sequence[ReplayConfig],
    places: Mapping[str, Any],
    given: Mapping[str, str],
    models: Sequence[str] = (),
) -> Publishing | None:
    """Return the publisher of `engines`, if `--kv-events` is given. `given`: more features, see check_combination.

    `models`: the name of each engine's model, one model after the other, if there are several.
    """
    published = _config_of(places)
    if published is None:
        for name in ("kv_events_wait", "kv_events_stay"):
            if places[name]:
                raise ConfigError("needs --kv-events", field=name)
        return None
    check_combination({"kv_events": "--kv-events", **engines[0].features, **given})
    return Publishing(published, engines, places, models)


class Publishing:
    """Publisher of the events of one replay's engines. Raises ConfigError for endpoints that are not valid.

    `engines`: the configurations of those that are there from the beginning, each of which has a port of its own.
    `models`: as of `publishing_of`; engines of one model have ranks from 0.
    """

    def __init__(
        self,
        config: KvEventsConfig,
        engines: Sequence[ReplayConfig],
        places: Mapping[str, Any],
        models: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._engines = engines
        self._models = models
        taken: set[str] = set()
        for number in range(len(engines)):
            of_engine = self._config_of(number)
            if models:
                _take(of_engine, taken)
        self.paths: Sequence[Path] = ()
        for name in ("kv_events_wait", "kv_events_stay"):
            if not isfinite(places[name]):
                raise ConfigError(f"must be a finite number, got {places[name]}", field=name)
        self._wait_s = places["kv_events_wait"]
        self._stay_s = places["kv_events_stay"]

    @contextmanager
    def observers(self) -> Iterator[Callable[[int], list[EventReader]]]:
        """Yield a function that returns the publisher of a replica's events."""
        with self.open() as publisher_of:
            yield lambda replica: [publisher_of(replica, self._engines[replica])]

    @contextmanager
    def open(self) -> Iterator[Callable[[int, ReplayConfig], EventReader]]:
        """Yield a function that returns the publisher of an engine's events, by its number and configuration."""
        from kvarts.doors.kv_events.publisher import open_kv_events

        with ExitStack() as stack:
            opened: dict[int, KvEvents] = {}

            def publisher_of(rank: int, engine: ReplayConfig) -> EventReader:
                if rank not in opened:
                    config = self._config_of(rank)
                    if engine.kv_groups != "off":
                        config = _with_groups(config, engine.memory.to_builtins()["kv_groups"])
                    opened[rank] = open_kv_events(config)
                    stack.callback(opened[rank].close)
                return opened[rank].reader

            for rank, engine in enumerate(self._engines):
                publisher_of(rank, engine)
            deadline = time.monotonic() + self._wait_s
            for events in opened.values():
                events.publisher.wait_for_subscriber(max(0.0, deadline - time.monotonic()))
            yield publisher_of
            if self._stay_s:
                click.echo(f"kvarts: the replay has ended; KV events stay for {self._stay_s:g} s", err=True)
                time.sleep(self._stay_s)

    def _config_of(self, number: int) -> KvEventsConfig:
        """Return the settings of an engine, by its number."""
        if not self._models:
            with _as_options():
                return self._config.for_rank(number)
        name = self._models[number]
        first = self._models.index(name)
        return _of_model(self._config, name, first, number - first)

    def write(self, report: Report) -> None:
        """Do nothing: all events have been published."""


PART = KvEventsPart()
