"""`kvarts engine`."""

from __future__ import annotations

from typing import Any

import click

from kvarts.base.errors import ConfigError
from kvarts.base.settings import given_by_flags
from kvarts.cli import front_end, kv_events
from kvarts.cli.http_options import failure_options
from kvarts.cli.mock import engine_and_text_options, engine_of_mock
from kvarts.cli.options import Command, GroupedOption, KeyOption, line_options
from kvarts.cli.parts import check_engine_options, with_engine_options
from kvarts.cli.replaying import all_sections

__all__ = ["engine_command"]

TITLE = front_end.TITLE
NEWEST = "0.33"
SHOWN = ("model", "device", "pages", "cost")
"""The settings of the engine with an option of their own."""


def _options() -> list[click.Parameter]:
    options = engine_and_text_options(SHOWN)
    options += [
        GroupedOption(["--handshake"], group=TITLE, metavar="ADDRESS", required=True,
                      help="Where the front end waits for engines: tcp://HOST:PORT, of its --data-parallel-address and "
                      "--data-parallel-rpc-port."),
        GroupedOption(["--rank"], group=TITLE, metavar="N", type=click.IntRange(0, 1023), default=0,
                      help="Number of this engine, of several. [0]"),
        KeyOption(["--ranks", "num_ranks"], group=TITLE, metavar="N", type=click.IntRange(1, 1024), default=1,
                      help="Its --data-parallel-size. [1]"),
        KeyOption(["--vllm-version"], group=TITLE, metavar="VERSION", default=NEWEST,
                  help="Version of the front end. [0.33]"),
        KeyOption(["--task"], group=TITLE, type=click.Choice(["generate", "embed"]), default="generate",
                  help="What its model does: embed with --runner pooling. [generate]"),
        KeyOption(["--reasoning"], group=TITLE, is_flag=True,
                  help="Begin answers of chats with reasoning, for a front end with --reasoning-parser."),
        KeyOption(["--max-model-len"], key="max_model_len", group=TITLE, metavar="TOKENS", type=click.IntRange(min=2),
                  help="Most tokens of a prompt and its answer. [the tokens of all pages]"),
        KeyOption(["--insecure"], group=TITLE, count=True, help="Given twice: publish KV events to other machines."),
        *failure_options(), *front_end.own_options(), *kv_events.server_options(), *line_options("vllm serve"),
    ]  # fmt: skip
    return options


@click.command("engine", cls=Command, params=_options())
def engine_command(**params: Any) -> None:
    """Be the engine behind a front end of vLLM that runs already: scheduler, cache and queues of a mock.

    `vllm serve DIR --data-parallel-size-local 0` is such a front end; `kvarts mock --front-end vllm` starts both.
    """
    sections = all_sections()
    given = with_engine_options(params, given_by_flags(params, sections))
    check_engine_options(given)
    if "model" not in given:
        raise ConfigError("needs the directory of the front end's model", field="--model", hint="Give --model DIR.")
    if params["rank"] >= params["num_ranks"]:
        raise ConfigError(
            f"must be below --ranks, {params['num_ranks']}, got {params['rank']}", field="rank", hint="Count from 0."
        )
    params["model"] = str(given["model"])
    given = front_end.engine_given(given, sections, params["vllm_version"], params)
    config = engine_of_mock(given, sections, max_model_len=params["max_model_len"])
    front_end.serve_alone(config, params)
