"""`kvarts serve model`, also called by `kvarts serve --model DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvarts.base.errors import ConfigError
from kvarts.cli import (
    http_sessions,
)
from kvarts.cli.http_options import address_of, door_settings, http_options, keys_of, need_http, serve_http
from kvarts.cli.llm import (
    MODEL_HELP,
    engine_options,
    engine_options_of,
    kv_groups_option,
    need_torch,
    snapshots_option,
    speculation_option,
)
from kvarts.cli.options import Command, GroupedOption, KeyOption
from kvarts.sim.eviction import order_maker

__all__ = ["model_command"]


def _options() -> list[click.Parameter]:
    """Return the options of any HTTP server."""
    options: list[click.Parameter] = [*http_options()]
    options += http_sessions.server_options()
    return options


@click.command("model", cls=Command, params=_options())
@click.option("--model", metavar="DIR", required=True, cls=GroupedOption, group="Model", help=MODEL_HELP)
@lambda command: engine_options(command, cls=GroupedOption, group="Engine")
@lambda command: kv_groups_option(command, group="Engine")
@lambda command: snapshots_option(command, group="Engine")
@lambda command: speculation_option(command, cls=GroupedOption, group="Engine")
@click.option("--eviction", metavar="NAME", cls=KeyOption, group="Engine",
              help="Which cached pages go next: a policy of `kvarts plan policies`, such as hinted; or module:Class. "
                   "[lru]")  # fmt: skip
@click.option("--tool-call-parser", metavar="NAME", default="auto", cls=KeyOption, group="Model",
              help="How the model writes calls of tools: hermes (Qwen, too), llama3_json, mistral, gemma, or auto, by "
                   "its chat template. [auto]")  # fmt: skip
def model_command(**params: Any) -> None:
    """Serve OpenAI's API from a model that runs here."""
    need_http()
    from kvarts.doors.openai.opening import Door, open_model
    from kvarts.doors.openai.served import Limits

    keys = keys_of(params)
    address = address_of(params, keys)
    door = Door(
        names=params["names"] or (Path(params["model"]).name or params["model"],),
        adapters=params["adapters"],
        **door_settings(params, keys),
        limits=Limits(
            max_queued=params["max_queued"],
            retry_after_s=params["retry_after"],
            max_body_bytes=params["max_body_bytes"],
        ),
        is_recording=params["record"] is not None,
    )
    need_torch()
    engine: dict[str, Any] = {"speculative_config": params["speculative_config"]}
    if params["eviction"] is not None:
        engine["eviction"] = _policy(params["eviction"])
    opened = open_model(
        params["model"],
        door,
        max_model_len=params["max_model_len"],
        tool_call_parser=params["tool_call_parser"],
        options=engine_options_of(params),
        **engine,
    )
    http_sessions.open_sessions_of(opened, params, keys)
    config = opened.served.host.config
    what = f"{opened.served.names[0]}, with {config.num_pages:,} pages of {config.page_size} tokens,"
    serve_http(opened, address, params, what=what)


def _policy(name: str) -> Any:
    try:
        return order_maker(name)
    except ConfigError as error:
        raise ConfigError(error.what, field="--eviction", hint=error.hint) from error
