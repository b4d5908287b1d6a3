"""The part of `kvarts mock` that serves several models on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import ConfigError
from kvarts.cli.options import options_of
from kvarts.cli.process import tell_whole_pages
from kvarts.cli.sharing import MODELS, with_policies
from kvarts.cli.sharing import PART as SHARING

if TYPE_CHECKING:
    from kvarts.base.settings import Given
    from kvarts.core.event_log import EventReader
    from kvarts.doors.openai.opening import Door, Opened

__all__ = ["given", "open_if_several", "options"]

KEYS = ("static_split", "reclaim_after_s")


def options() -> dict[str, click.Option]:
    """Return by flag: `--model`, which may be repeated for several models, and the options of sharing."""
    shared = [option for option in SHARING.options() if option.opts[0] == "--model"]
    return {option.opts[0]: option for option in (*shared, *options_of(SHARING.sections, KEYS, shown=()))}


def given(params: dict[str, Any]) -> Given:
    """Return the settings from `--model`, and remove it from `params`."""
    of_models = {"models": params.pop("models"), "traces": ()}
    return SHARING.given(of_models)


def open_if_several(
    given: Given,
    sections: Any,
    params: dict[str, Any],
    door: Door,
    *,
    speedup: float,
    readers_of: Callable[[str], list[EventReader]],
    kv_groups: dict[str, list[dict[str, Any]]],
) -> Opened | None:
    """Return the mocks of several models, if models have names; else None. Raise ConfigError.

    `readers_of` returns the readers of a model's events. It is called after `kv_groups` has the model's KV groups, if
    these are counted.
    """
    if not given.names(MODELS):
        for key in KEYS:
            if key in given:
                raise given.error(key, "is for several models on one device", hint="Give --model NAME=MODEL for each.")
        return None
    if params["names"]:
        raise ConfigError("is for one model", field="--served-model-name", hint="Give it as --model NAME=MODEL.")
    for key in ("cost", "pages"):
        if key in given:
            raise given.error(key, "is for one model", hint="Give it for each model: --model NAME=MODEL:cost=FILE.")
    from kvarts.doors.openai.sharing.device import open_several
    from kvarts.sim.sharing.config import resolve_shares

    config = with_policies(resolve_shares(given, sections), given, {})
    for name, of_model in config.configs.items():
        tell_whole_pages(of_model, name)
        if of_model.kv_groups != "off":
            kv_groups[name] = of_model.memory.to_builtins()["kv_groups"]
    return open_several(config, door, speedup=speedup, readers_of=readers_of)
