"""`kvarts mock`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.base.errors import ConfigError, MissingFileError
from kvarts.base.settings import Flags, Given, SettingError, given_by_flags, settings_of
from kvarts.cli import (
    front_end,
    http_sessions,
    kv_events,
    mock_fleet,
    mock_sharing,
)
from kvarts.cli.http_options import (
    address_of,
    door_settings,
    failure_options,
    http_options,
    keys_of,
    need_http,
    serve_http,
)
from kvarts.cli.options import INPUT, GroupedOption, KeyOption, line_options, options_of
from kvarts.cli.parts import check_engine_options, engine_options, with_engine_options
from kvarts.cli.process import say, tell_whole_pages
from kvarts.cli.replaying import all_sections
from kvarts.plan.policy import with_policy
from kvarts.sim.sglang import SGLANG_NAMES

if TYPE_CHECKING:
    from kvarts.doors.openai.opening import Opened
    from kvarts.doors.openai.running import MockConfig
    from kvarts.sim.config import ReplayConfig

__all__ = ["engine_and_text_options", "engine_of_mock", "mock_command", "without_drafts"]

DRAFTS = ("speculative_tokens", "speculative_method", "acceptance")
KEYS = (
    "model",
    "weight_dtype",
    "kv_dtype",
    "device",
    "tensor_parallel",
    "pipeline_parallel",
    "kv_memory",
    "memory_fraction",
    "pages",
    "page_size",
    "max_batched_tokens",
    "max_seqs",
    "max_itl_ms",
    "cost",
    "kv_groups",
    "snapshots",
    "mamba_cache_mode",
    "audit",
    "eviction",
    "engine",
    "no_prefix_caching",
    "long_prefill_token_threshold",
    "prefill_schedule_interval",
    "async_scheduling",
    *DRAFTS,
    *sorted(SGLANG_NAMES),
)
TABLES = ("offload.",)
SHOWN = ("model", "device", "engine", "tensor_parallel", "kv_memory", "pages", "page_size", "max_batched_tokens",
         "max_seqs", "cost", "audit", "kv_groups", "offload.host_memory")  # fmt: skip
"""The settings with an option of their own, among those of KEYS and TABLES."""


def engine_and_text_options(shown: Collection[str] = SHOWN) -> list[click.Parameter]:
    """Return the options of the mock's engine, which are settings of a replay, and of what it writes.

    `shown`: the keys of settings that are options; the others are keys of `--set`.
    """
    sections = all_sections()
    keys = [*KEYS, *(setting.key for section in sections if not section.is_named for setting in section.settings
                     if setting.key.startswith(TABLES))]  # fmt: skip
    of_engine: dict[str, click.Option] = {option.opts[0]: option for option in options_of(sections, keys, shown)}
    of_engine.update({option.opts[0]: option for option in engine_options()})
    of_mock: list[click.Parameter] = [
        GroupedOption(["--seed"], group="Mock", metavar="N", type=int, default=0, help="Seed of its text. [0]"),
        GroupedOption(["--speedup"], group="Mock", metavar="X", type=float, default=1.0,
                      help="Steps take 1/X of their time. [1]"),
        GroupedOption(["--output-tokens"], group="Mock", metavar="N", type=click.IntRange(min=1),
                      help="Mean length of answers, which end at max_tokens at the latest. [128]"),
    ]  # fmt: skip
    return [*of_engine.values(), *of_mock]


def _options() -> list[click.Parameter]:
    """Return the options of the mock's engine, of the mock, and of a server."""
    several = mock_sharing.options()
    of_mock = [
        GroupedOption(["--any-model"], group="Mock", is_flag=True,
                      help="Answer requests for any model name, such as gpt-4o, and not only for its own."),
        GroupedOption(["--answers"], group="Mock", metavar="FILE", type=INPUT,
                      help="Its answers, as rules in a .toml or .json."),
        KeyOption(["--media"], group="Mock", type=click.Choice(["openai", "qwen", "gemma", "claude"]),
                  help="Count images and audio as models of this family do. [by --model, else openai]"),
    ]  # fmt: skip
    options: list[click.Parameter] = [
        *(several.pop(option.opts[0], option) for option in engine_and_text_options()),
        *several.values(), *of_mock, *http_options(), *failure_options(),
    ]  # fmt: skip
    options += kv_events.server_options()
    options += http_sessions.server_options()
    options += mock_fleet.server_options()
    options += front_end.front_end_options()
    return [*options, *line_options()]


@click.command("mock", cls=front_end.MockCommand, params=_options())
def mock_command(**params: Any) -> None:
    """Serve OpenAI's API from a mock: the scheduler, cache and queues of kvarts on the wall clock, without a model.

    A cost model gives the time of each step, by default that of llama-3.1-8b on an h100-80gb. Answers are words.
    """
    sections = all_sections()
    given = given_by_flags(params, sections)
    given = with_engine_options(params, mock_sharing.given(params).over(given))
    speedup = params["speedup"]
    if not 0.0 < speedup < float("inf"):
        raise ConfigError(f"must be a finite number above 0, got {speedup}", field="speedup")
    given = mock_fleet.over_file(params, given, sections)
    check_engine_options(given)
    if "model" in given:
        _check_model(str(given["model"]))
    theirs = click.get_current_context().meta[front_end.THEIRS]
    if params["front_end"] == "vllm":
        front_end.serve_behind(given, sections, params, theirs, partial(engine_of_mock, sections=sections))
        return
    if theirs:
        raise click.UsageError(f"{theirs[0]} is after --, where arguments of vllm serve are: give --front-end vllm.")
    need_http()
    given = _over_default(without_drafts(given), sections)
    from kvarts.doors.openai.answers import load_rules
    from kvarts.doors.openai.opening import Door, MockSettings
    from kvarts.doors.openai.running import open_mock
    from kvarts.doors.openai.served import Limits
    from kvarts.sim.hardware import resolve_hardware

    keys = keys_of(params)
    address = address_of(params, keys)
    limits = Limits(
        max_queued=params["max_queued"],
        retry_after_s=params["retry_after"],
        max_model_len=params["max_model_len"] or 131_072,
        max_body_bytes=params["max_body_bytes"],
        default_tokens=params["output_tokens"],
    )
    door = Door(
        names=params["names"],
        any_model=params["any_model"],
        adapters=params["adapters"],
        **door_settings(params, keys),
        limits=limits,
        fail=params["fail"] or "",
        allows_failures=params["allow_failures"],
        seed=params["seed"],
        is_recording=params["record"] is not None,
        answers=() if params["answers"] is None else load_rules(params["answers"]),
        media=params["media"] or (str(given["model"]) if "model" in given else ""),
    )
    name = str(given["model"]) if "model" in given else "mock"
    token_bytes = 0
    config: MockConfig | None = mock_fleet.config_if_given(given, sections, params)
    is_fleet = config is not None
    if config is None:
        config = mock_sharing.config_if_several(given, sections, params)
    if config is None:
        asked = {"windows": "session_window"} if params["session_window"] else {}
        config = engine_of_mock(given, sections, asked, max_model_len=params["max_model_len"])
        if http_sessions.given_options(params) and "async_scheduling" not in given:
            config = msgspec.structs.replace(config, async_scheduling=False)
        token_bytes = resolve_hardware(given).get("kv_bytes_per_token", 0)
    with ExitStack() as stack:
        readers = kv_events.open_readers(stack, params)
        settings = MockSettings(model=name, speedup=speedup, token_bytes=token_bytes, readers=readers)
        opened = open_mock(config, door, settings)
        if not is_fleet:
            http_sessions.open_sessions_of(opened, params, keys)
        serve_http(opened, address, params, what=_told(opened))


def without_drafts(given: Given) -> Given:
    """Return settings without drafts, unless the mock can have them."""
    if "speculative_tokens" not in given or ("acceptance" in given and str(given.get("engine", "")).startswith("vllm")):
        return given
    say("kvarts: drafts have no effect: with --engine vllm and --set acceptance=0.8,0.6,0.4, decodes have drafts")
    return given.without(DRAFTS)


def engine_of_mock(
    given: Given, sections: Any, asked: Mapping[str, str] = {}, *, max_model_len: int | None = None
) -> ReplayConfig:
    """Return the engine of a mock.

    `max_model_len`: the length for which vLLM plans, if the mock starts as vLLM; by default, the model's.
    """
    from kvarts.sim.config import OF_START, is_of_start, reason_of, resolve_replay

    try:
        of_length = Given() if max_model_len is None else _of_length(max_model_len)
        config = resolve_replay(of_length.over(given), sections, asked=asked)
    except ConfigError as refusal:
        if is_of_start(refusal) and "engine" in given:
            raise
        config = resolve_replay(given, sections, asked=asked)
        if config.start is not None:
            raise
        if is_of_start(refusal):  # else there is no start to plan for
            config = msgspec.structs.replace(config, not_started=reason_of(refusal))
    tell_whole_pages(config)
    if config.not_started and not any(key in given for key in OF_START):
        say(f"kvarts: not as vLLM 0.33 starts: {config.not_started}")
    if "eviction" in given:
        config = with_policy(config, given, None)
    if "speculative_tokens" in given and "started_drafts" not in config.features:
        hint = f"Leave out {', '.join(DRAFTS)}."
        raise SettingError(f"needs a start of vLLM: {config.not_started}", "speculative_tokens", hint=hint)
    return config


def _of_length(max_model_len: int) -> Given:
    from kvarts.sim.hardware import ModelSettings

    given = Given()
    length = next(each for each in settings_of(ModelSettings) if each.field == "max_model_len")
    given.add(length, max_model_len, Flags())
    return given


def _check_model(name: str) -> None:
    """Raise MissingFileError for an unknown model; its hint covers a name that was meant for the mock."""
    from kvarts.cost.hardware.model_config import load_geometry

    try:
        load_geometry(name)
    except MissingFileError as error:
        hint = f"To serve a mock by this name: --served-model-name {name}. {error.hint}"
        raise MissingFileError(error.what, path=name, hint=hint) from None


def _told(opened: Opened) -> str:
    """Return a description of the served models."""
    told = [
        f"{served.names[0]}, mocked with {served.host.config.num_pages:,} pages of "
        f"{served.host.config.page_size} tokens,"
        for served in opened.models
    ]
    return " and ".join(told)


def _over_default(given: Given, sections: Any) -> Given:
    """Return `given`, with the default model and device if nothing in it determines the time of steps."""
    if given.in_table("models") or any(key in given for key in ("model", "device", "cost")):
        return given
    from kvarts.base.settings import given_in
    from kvarts.doors.openai.running import DEFAULT_DEVICE, DEFAULT_MODEL

    values: dict[str, Any] = {"model": DEFAULT_MODEL, "device": DEFAULT_DEVICE}
    return given.over(given_in(values, sections))
