"""`kvarts mock --fleet`: workers in pools, each with a door of its own, behind a router's door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import ConfigError
from kvarts.cli import (
    http_sessions,
)
from kvarts.cli.options import INPUT, GroupedOption
from kvarts.cli.process import tell_whole_pages
from kvarts.core.parts.combines import check_combination

if TYPE_CHECKING:
    from kvarts.base.settings import Given
    from kvarts.sim.fleet.config import FleetConfig

__all__ = ["config_if_given", "over_file", "server_options"]


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


def config_if_given(given: Given, sections: Any, params: Mapping[str, Any]) -> FleetConfig | None:
    """Return the configuration of the fleet that `--fleet` names; None without it. Raise ConfigError."""
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
    if len(config.of_models) > 1 and params["names"]:
        hint = "Give each pool its served_model_name."
        raise ConfigError("is for one model", field="--served-model-name", hint=hint)
    return config
