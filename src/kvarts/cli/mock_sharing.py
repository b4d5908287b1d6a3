"""The part of `kvarts mock` that serves several models on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import ConfigError
from kvarts.cli.options import options_of
from kvarts.cli.process import tell_whole_pages
from kvarts.cli.sharing import MODELS, with_policies
from kvarts.cli.sharing import PART as SHARING

if TYPE_CHECKING:
    from kvarts.base.settings import Given
    from kvarts.sim.sharing.config import SharingConfig

__all__ = ["config_if_several", "given", "options"]

KEYS = ("static_split", "reclaim_after_s")


def options() -> dict[str, click.Option]:
    """Return by flag: `--model`, which may be repeated for several models, and the options of sharing."""
    shared = [option for option in SHARING.options() if option.opts[0] == "--model"]
    return {option.opts[0]: option for option in (*shared, *options_of(SHARING.sections, KEYS, shown=()))}


def given(params: dict[str, Any]) -> Given:
    """Return the settings from `--model`, and remove it from `params`."""
    of_models = {"models": params.pop("models"), "traces": ()}
    return SHARING.given(of_models)


def config_if_several(given: Given, sections: Any, params: dict[str, Any]) -> SharingConfig | None:
    """Return the configuration of several models, if models have names; else None. Raise ConfigError."""
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
    from kvarts.sim.sharing.config import resolve_shares

    config = with_policies(resolve_shares(given, sections), given, {})
    for name, of_model in config.configs.items():
        tell_whole_pages(of_model, name)
    return config
