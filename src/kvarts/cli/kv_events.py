"""KV events that `kvarts replay` publishes while it runs, for testing routers and indexers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import ConfigError
from kvarts.cli.options import GroupedOption, KeyOption
from kvarts.cli.parts import CommandPart
from kvarts.cli.process import say
from kvarts.core.parts.combines import check_combination

if TYPE_CHECKING:
    from kvarts.core.event_log import EventReader
    from kvarts.doors.kv_events.batches import KvEventsConfig
    from kvarts.doors.kv_events.publisher import KvEvents
    from kvarts.doors.openai.opening import Readers
    from kvarts.sim.config import ReplayConfig
    from kvarts.sim.report.report import Report

__all__ = ["PART", "Publishing", "config_of", "open_readers", "publishing_of", "server_options"]

TITLE = "KV events"


def server_options() -> list[click.Option]:
    """Return `--kv-events` and the options that go with it, for any command that runs an engine."""
    return [
        GroupedOption(
            ["--kv-events"], group=TITLE, metavar="ENDPOINT",
            help="Publish KV events at ENDPOINT while it runs, in vLLM's form, or SGLang's with --engine sglang: "
            "tcp://127.0.0.1:5557. With replicas, or several models, each at the next port.",
        ),
        KeyOption(
            ["--kv-events-replay"], group=TITLE, metavar="ENDPOINT",
            help="Answer requests for past events, and for full state, at ENDPOINT.",
        ),
        KeyOption(
            ["--kv-events-format"], group=TITLE, default=None,
            type=click.Choice(["map", "array", "copies", "reports", "sglang"]),
            help="Events as maps, as vLLM writes them, or as arrays, as it did before; maps with all copies of blocks, "
            "as vLLM stores and removes them, or also with the reports of its kv_cache_report_mode full; or as those "
            "of SGLang. [sglang with --engine sglang, else map]",
        ),
        KeyOption(
            ["--kv-events-topic"], group=TITLE, metavar="TEXT", default="",
            help="Topic of the events; in a mock, and of several models, {model} stands for the name of the model. "
            "[empty]",
        ),
    ]  # fmt: skip


def open_readers(stack: ExitStack, values: Mapping[str, Any]) -> Readers:
    """Return the publishers of KV events, which close with `stack`; none if they are off."""
    from kvarts.doors.openai.opening import OwnReaders

    config = config_of(values)
    if config is None:
        return OwnReaders()
    from kvarts.doors.kv_events.servers import ServerReaders

    readers = ServerReaders(config, say)
    stack.callback(readers.close_all)
    return readers


def config_of(values: Mapping[str, Any]) -> KvEventsConfig | None:
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
    from kvarts.doors.kv_events.batches import Extent, Form, KvEventsConfig
    from kvarts.doors.kv_events.servers import as_options

    formats: dict[str | None, tuple[Form | None, Extent]] = {
        None: (None, "blocks"),
        "map": ("map", "blocks"),
        "array": ("array", "blocks"),
        "copies": ("map", "copies"),
        "reports": ("map", "reports"),
        "sglang": ("sglang", "blocks"),
    }
    form, extent = formats[values["kv_events_format"]]
    with as_options():
        return KvEventsConfig(
            endpoint=values["kv_events"],
            replay_endpoint=values["kv_events_replay"],
            form=form,
            extent=extent,
            topic=values["kv_events_topic"],
            insecure=values["insecure"],
        )


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
                ["--insecure"], group=TITLE, is_flag=True,
                help="Publish at an address that other machines reach. They read all tokens.",
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
    published = config_of(places)
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
        from kvarts.doors.kv_events.servers import take

        taken: set[str] = set()
        for number in range(len(engines)):
            of_engine = self._config_of(number)
            if models:
                take(of_engine, taken)
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
        from kvarts.doors.kv_events.servers import for_engine

        with ExitStack() as stack:
            opened: dict[int, KvEvents] = {}

            def publisher_of(rank: int, engine: ReplayConfig) -> EventReader:
                if rank not in opened:
                    opened[rank] = open_kv_events(for_engine(self._config_of(rank), engine))
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
        from kvarts.doors.kv_events.servers import as_options, of_model

        if not self._models:
            with as_options():
                return self._config.for_rank(number)
        name = self._models[number]
        first = self._models.index(name)
        return of_model(self._config, name, first, number - first)

    def write(self, report: Report) -> None:
        """Do nothing: all events have been published."""


PART = KvEventsPart()
