"""`kvarts mock --fleet`: workers in pools, each with a door of its own, behind a router's door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import ConfigError
from kvarts.cli import (
    http_sessions,
)
from kvarts.cli.http_options import DoorsBehind, say
from kvarts.cli.options import INPUT, GroupedOption
from kvarts.cli.process import tell_whole_pages
from kvarts.core.parts.combines import check_combination

if TYPE_CHECKING:
    from kvarts.base.settings import Given
    from kvarts.cli.parts import ReadersOf
    from kvarts.core.event_log import EventReader
    from kvarts.doors.openai.opening import Door
    from kvarts.doors.openai.server import HttpDoors
    from kvarts.sim.fleet.config import FleetWorker

__all__ = ["open_if_given", "over_file", "server_options"]


def server_options() -> list[click.Option]:
    """Return `--fleet`."""
    return [
        GroupedOption(
            ["--fleet"], group="Listening", metavar="FILE", type=INPUT,
            help="Mock the workers of a fleet, in [[pool]] tables of a .toml as for `kvarts replay --config`: a router "
            "at --port, and each worker at one of the next ports.",
        )
    ]  # fmt: skip


def over_file(params: Mapping[str, Any], given: Given, sections: Any) -> Given:
    """Return the settings of the command line over those of the file that `--fleet` names, if it does."""
    if params["fleet"] is None:
        return given
    from kvarts.cli.replaying import read_settings

    return given.over(read_settings(params["fleet"], sections))


def open_if_given(
    given: Given,
    sections: Any,
    params: Mapping[str, Any],
    door: Door,
    *,
    model: str,
    speedup: float,
    readers_of: ReadersOf,
    kv_groups: dict[str, list[dict[str, Any]]],
) -> DoorsBehind | None:
    """Return the doors of the fleet that `--fleet` names; None without it. Raise ConfigError.

    `readers_of` opens the publisher of KV events of a worker; it reads the KV groups of the worker in `kv_groups`.
    """
    if params["fleet"] is None:
        return None
    from kvarts.sim.fleet.config import is_of_fleet, resolve_fleet

    if not is_of_fleet(given):
        raise ConfigError(
            f"{params['fleet']} has no pools",
            field="fleet",
            hint='Give at least one table [[pool]] with role = "prefill", "decode" or "mixed".',
        )
    asked = {
        "live_fleet": "fleet",
        **({"several": "--model"} if given.names("models") else {}),
    }
    check_combination(asked)
    http_sessions.check_options_beside({"fleet": "fleet"}, params)
    from kvarts.cli.fleet import with_eviction

    config = with_eviction(resolve_fleet(given, sections), given, None)
    for pool in config.pools:
        tell_whole_pages(pool.each, f"the workers in pool {pool.name or pool.role}")
    are_several = len(config.of_models) > 1
    if are_several and door.names:
        hint = "Give each pool its served_model_name."
        raise ConfigError("is for one model", field="--served-model-name", hint=hint)

    def readers_of_worker(worker: FleetWorker) -> list[EventReader]:
        each = worker.pool.each
        of_pool = worker.pool.model_name if are_several else config.of_models[0].model
        name = (*door.names, of_pool or model)[0]
        kv_groups.pop(name, None)
        if each.kv_groups != "off":
            kv_groups[name] = each.memory.to_builtins()["kv_groups"]
        is_added = worker.index >= config.replicas
        try:
            return readers_of.of_worker(name, worker.index, is_added=is_added)
        except ConfigError as error:
            if not is_added:
                raise
            say(f"worker {worker.index} publishes no KV events: {error.what}")  # the others go on
            return []

    from kvarts.doors.openai.fleet.opening import open_fleet
    from kvarts.doors.openai.fleet.servers import FleetServer

    fleet = open_fleet(
        config,
        door,
        model=model,
        speedup=speedup,
        readers_of=readers_of_worker,
        sources_of=readers_of.sources_of,
        close_events=readers_of.close,
    )

    def open_doors(address: Any) -> tuple[HttpDoors, list[tuple[str, str]]]:
        server = FleetServer(fleet, address, say=say)
        return server, server.urls

    return DoorsBehind(fleet.front, open_doors)
