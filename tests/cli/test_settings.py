"""Every setting, of every part: its help, its default, its flag, its key; and where an error says it came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from kvarts.base.errors import ConfigError
from kvarts.base.settings import (
    SET,
    Flags,
    Given,
    Section,
    Setting,
    given_in,
    is_inline,
    settings_by_param,
    settings_of,
)
from kvarts.cli.effects import NEEDS
from kvarts.cli.options import options_of
from kvarts.cli.parts import concern_parts, load_parts
from kvarts.cli.replay import replay_command
from kvarts.cli.replaying import OWN_SECTIONS, OneRun, all_sections, read_settings
from kvarts.sim.config import ReplayConfig, make_config

from builders.command_line import parsed

SECTIONS = all_sections()
PLAIN = [section for section in SECTIONS if not section.is_named]
HOMES = {setting: section for section in reversed(PLAIN) for setting in section.settings}
EVERY = [pytest.param(section, setting, id=setting.key) for setting, section in HOMES.items()]

FILE_ONLY = {
    "trace",  # the argument TRACE, or --trace NAME=FILE
    "workload",
    "agentic_replay",
    "offload.full_prompt_hits",
    "offload.workers",
    "offload.num_layers",
    "offload.deadline_s",
    "offload.fail_every",
    "transfer.hold_s",
    "sessions.chunk_tokens",
}
"""Settings that only a file, or Python, can give."""

TABLES_OF_TRAFFIC = ("workload", "agentic_replay")

VALUES: dict[str, tuple[str, Any]] = {
    "price.gpu_hour": ("prefill=2.5,decode=4", "prefill=2.5,decode=4"),
    "model": ("qwen3-8b", "qwen3-8b"),
    "kv_memory": ("3GiB", "3GiB"),
    "prefix_cache_retention_interval": ("48", "48"),
    "cost": ("linear:step_ms=3", "linear:step_ms=3"),
    **{f"{pool}.kv_memory": ("3GiB", "3GiB") for pool in ("prefill", "decode")},
    **{f"{pool}.cost": ("linear:step_ms=3", "linear:step_ms=3") for pool in ("prefill", "decode")},
    "eviction": ("auto", "auto"),
    "health": ("chat=dead@3", ("chat=dead@3",)),
    "offload.host_memory": ("9GiB", "9GiB"),
    "store.memory": ("9GiB", "9GiB"),
    **{f"{pool}.host_memory": ("9GiB", "9GiB") for pool in ("prefill", "decode")},
    "offload.disk_memory": ("9GiB", "9GiB"),
    "offload.h2d": ("7GB/s", "7GB/s"),
    "offload.d2h": ("7GB/s", "7GB/s"),
    "offload.disk_read": ("7GB/s", "7GB/s"),
    "offload.disk_write": ("7GB/s", "7GB/s"),
    "routing.staleness": ("50ms", "50ms"),
    "routing.event_lag": ("50ms", "50ms"),
}
"""What is written, and read, for settings whose type does not say it."""


CHOICES = (
    *("mocker", "prefix", "tails", "lazy", "pin", "evict", "time", "deltas", "implied", "recompute", "vllm", "missing"),
    "worker",
    "lcfs",
    "branches",
    "align",
    "layers",
    "sync",
    "priority",
    "lpm",
    "write_back",
    "best_effort",
    "mooncake",
    "float32",
    "no_buffer",
)
"""Values that are not the default, of settings with a few."""


def written(setting: Setting, number: int) -> tuple[str, Any]:
    """One of two values of a setting, as text and as value."""
    if setting.key in VALUES:
        return VALUES[setting.key]
    if "Literal" in str(setting.kind):
        choice = next(value for value in CHOICES if f"'{value}'" in str(setting.kind))
        return choice, choice
    if setting.default is False:
        return "", True
    try:
        value = msgspec.convert(number, setting.kind)
    except msgspec.ValidationError:
        return f"7{number}", f"7{number}"
    return str(number), value


def read(tmp_path: Path, setting: Setting, value: Any) -> Given:
    """What a file gives that sets one key."""
    table, _, name = setting.key.rpartition(".")
    path = tmp_path / "c.toml"
    if setting.key in TABLES_OF_TRAFFIC:
        path.write_text(f"[{setting.key}]\nnum = 5\n")
    else:
        path.write_text((f"[{table}]\n" if table else "") + f"{name} = {msgspec.json.encode(value).decode()}\n")
    return read_settings(path, SECTIONS)


@pytest.mark.parametrize(("section", "setting"), EVERY)
def test_a_setting_has_help_and_one_default(section: Section, setting: Setting) -> None:
    assert setting.help.endswith(".") and len(setting.help.split()) > 2
    (field,) = (field for field in msgspec.structs.fields(section.struct) if field.name == setting.field)
    assert not field.required
    if setting.flag is None:
        assert setting.key in FILE_ONLY
        return
    if is_inline(setting):
        table, _, name = setting.flag.partition(" ")
        (option,) = (param for param in replay_command.params if table in param.opts)
        assert isinstance(option, click.Option) and name in (option.help or "").rstrip(".").split(": ")[1].split(", ")
        return
    (option,) = (param for param in replay_command.every if setting.flag in param.opts)
    assert isinstance(option, click.Option)
    assert option.default is None, "a default belongs to the struct"
    assert option.help is not None and option.help.startswith(setting.help)
    if isinstance(setting.default, int | float | str) and not isinstance(setting.default, bool):
        text = f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)
        text = setting.default_text or text
        assert option.help.partition(" [")[2].startswith(text)


@pytest.mark.parametrize(("section", "setting"), EVERY)
def test_a_flag_wins_over_a_file_and_a_file_over_the_default(
    section: Section, setting: Setting, tmp_path: Path
) -> None:
    text, _ = written(setting, 3)
    _, of_file = written(setting, 5)
    if setting.key in TABLES_OF_TRAFFIC:
        of_file = {"num": 5}
    from_file = read(tmp_path, setting, of_file)
    assert from_file[setting.key] == of_file != setting.default
    assert from_file.source_of(setting.key).path == tmp_path / "c.toml"
    assert setting.key not in read_settings(None, SECTIONS)
    if setting.flag is None:
        return
    if is_inline(setting):
        table, _, name = setting.flag.partition(" ")
        from_flag = parsed(table, f"{name}={text}")
    elif setting.flag.startswith(SET):
        from_flag = parsed("--set", f"{setting.key}={text or 'true'}")
    else:
        from_flag = parsed(setting.flag, text) if text else parsed(setting.flag)
        assert parsed("--set", f"{setting.key}={text or 'true'}")[setting.key] == from_flag[setting.key]
    assert from_flag[setting.key] == written(setting, 3)[1] != setting.default
    merged = from_flag.over(from_file)
    assert merged[setting.key] == from_flag[setting.key]
    assert merged.source_of(setting.key) == Flags()
    assert parsed().over(from_file)[setting.key] == of_file


def test_an_option_of_a_table_takes_several_keys_and_values_with_commas() -> None:
    given = parsed(
        *("--prefill", "replicas=2,cost=linear:step_ms=5,chunk_token_ms=0.02,max_seqs=9"),
        *("--transfer", "rate=5GB/s", "--transfer", "latency_ms=2"),
    )
    assert given["prefill.replicas"] == 2 and given["prefill.max_seqs"] == 9
    assert given["prefill.cost"] == "linear:step_ms=5,chunk_token_ms=0.02"
    assert (given["transfer.rate"], given["transfer.latency_ms"]) == ("5GB/s", 2.0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--prefill replicas", "--prefill: 'replicas' is not known. Known: replicas, device"),
        ("--prefill seats=3", "--prefill: 'seats=3' is not known"),
        ("--prefill replicas=two", "--prefill replicas: 'two' is not a whole number"),
        ("--transfer latency_ms=x", "--transfer latency_ms: 'x' is not a number"),
        ("--store pages=2 --store pages=3", "--store pages: is given twice. Keep one of them."),
    ],
)
def test_what_an_option_of_a_table_cannot_read_is_named(words: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(*words.split())
    assert str(caught.value).startswith(says)


def test_settings_of_models_are_keys_of_their_tables() -> None:
    for section in SECTIONS:
        if section.table == "models":
            for setting in settings_of(section.struct, f"{section.table}.chat"):
                _, value = written(setting, 1)
                name = setting.key.removeprefix("models.chat.")
                given = given_in({"models": {"chat": {name: value}}}, SECTIONS)
                assert (given.names("models"), given[setting.key]) == (["chat"], value)


def test_every_option_that_is_a_setting_has_its_own_flag() -> None:
    flags = [param.opts[0] for param in replay_command.every if isinstance(param, click.Option)]
    assert len(flags) == len(set(flags))
    assert {setting.flag for setting in settings_by_param(SECTIONS).values()} <= set(flags)


@pytest.mark.parametrize(
    ("file", "arguments", "expected"),
    [
        ({"speedup": 2.0}, "--concurrency 3", {"concurrency": 3}),
        ({"speedup": 2.0}, "--concurrency 3 --speedup 1", {"concurrency": 3, "speedup": 1.0}),
        ({"concurrency": 3}, "--speedup 2", {"concurrency": 3, "speedup": 2.0}),
        ({"pages": 9}, "--kv-memory 1GiB", {"kv_memory": "1GiB"}),
        ({"kv_memory": "1GiB"}, "--pages 9", {"pages": 9}),
        ({"slo": {"ttft_ms": 1.0, "e2e_ms": 2.0}}, "--slo-ttft-ms 5", {"slo.ttft_ms": 5.0, "slo.e2e_ms": 2.0}),
    ],
)
def test_what_is_laid_over_a_file_drops_what_it_stands_for(
    file: dict[str, Any], arguments: str, expected: dict[str, Any]
) -> None:
    merged = parsed(*arguments.split()).over(given_in(file, SECTIONS))
    settings = {setting.key for section in PLAIN for setting in section.settings}
    assert {key: merged[key] for key in settings if key in merged} == expected


@pytest.mark.parametrize(
    ("file", "arguments", "says"),
    [
        ("", "--max-seqs 0", "--max-seqs: must be at least 1, got 0"),
        ("max_seqs = 0", "", "c.toml: max_seqs: must be at least 1, got 0"),
        (
            "",
            "--max-batched-tokens 8",
            "--max-batched-tokens: 256 sequences cannot each get a token from a budget of 8 tokens a step. Raise --max",
        ),
        ("max_batched_tokens = 8", "", "c.toml: max_batched_tokens: 256 sequences cannot each"),
        ("max_batched_tokens = 8", "--max-seqs 9", "--max-seqs: 9 sequences cannot each"),
        (
            "concurrency = 2",
            "--speedup 3",
            "--speedup: a closed loop has no arrival times to speed up. Give concurrency of c.toml or --speedup, not",
        ),
        ("", "--kv-memory 1GiB --pages 4", "--kv-memory: cannot be combined with --pages. Keep one of them."),
        ("", "--model qwen3-8b", "--model: says nothing without a device. Model and device go together: --device"),
        ("device = 'l40s'", "", "c.toml: device: says nothing without a model. Model and device go together: model"),
        ("", "--set memory_fraction=2 --model qwen3-8b --device l40s",
         "--set memory_fraction: must be above 0 and at most 1"),
        ("tensor_parallel = 2", "--model qwen3-8b --device cpu:", "c.toml: tensor_parallel: cpu: has no link"),
        ("", "--model qwen3-8b --device l40s --kv-dtype bf8", "--kv-dtype: 'bf8' is not known"),
        ("[cost]\nmodel = 'linear'\nstep_ms = -1", "", "c.toml: cost.step_ms: must be at least 0"),
        ("", "--cost linear:step_ms=-1", "--cost: step_ms: must be at least 0"),
        ("[slo]\ne2e_ms = 'soon'", "", "c.toml: slo.e2e_ms: Expected `float | null`, got `str`"),
        ("trace = 3", "", "c.toml: trace: Expected `str | null`, got `int`"),
        ("workload = {num_sessions=1, output_tokens={kind='fixed', tokens=0}, new_tokens={kind='fixed', tokens=1}}",
         "", "c.toml: workload.tokens: must be at least 1, got 0"),
        ("agentic_replay = {concurrency=2, benchmark_duration=600}", "",
         "c.toml: agentic_replay.benchmark_duration: must be at least 900, got 600"),
        ("agentic_replay = {concurrency=2, lanes=3}", "",
         "c.toml: agentic_replay: Object contains unknown field `lanes`"),
        ("agentic_replay = {concurrency=2}", "--concurrency 4",
         "--concurrency: cannot be combined with agentic_replay. Give agentic_replay.concurrency"),
    ],
)  # fmt: skip
def test_an_error_says_where_the_value_came_from(
    file: str, arguments: str, says: str, refusal: Callable[[str, str], str]
) -> None:
    assert refusal(file, arguments).startswith(f"kvarts: {says}")


def test_from_python_an_error_names_the_field_that_was_given() -> None:
    for values, field in (
        ({"num_pages": 0}, "num_pages"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens"),
        ({"max_num_seqs": 9_000}, "max_num_seqs"),
        ({"concurrency": 3, "speedup": 2.0}, "speedup"),
    ):
        with pytest.raises(ConfigError) as caught:
            ReplayConfig(**values)
        assert caught.value.field == field
        assert "{" not in str(caught.value)
    with pytest.raises(ConfigError, match="pages: must be at least 1"):
        make_config({"pages": 0})


def test_a_calibrated_cost_is_named_for_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "cost.toml").write_text("[cost]\nmodel = 'roofline'\nllm = 'llama-3.1-70b'\ndevice = 'l40s'\n")
    given = parsed("--cost", str(tmp_path / "cost.toml"), "--kv-dtype", "fp8")
    with pytest.raises(ConfigError, match=r"--cost: device: llama-3\.1-70b does not fit l40s"):
        OneRun(given, None, SECTIONS)


def options_without_parts() -> set[str]:
    return {name for param in options_of(OWN_SECTIONS) for name in param.opts}


def test_what_parts_replace_makes_them_see_a_command_line() -> None:
    replaced = {flag for part in load_parts() for option in part.options() for flag in option.opts}
    assert replaced & options_without_parts() <= {"--model"}, "see concern_parts"


@pytest.mark.parametrize(
    ("line", "is_seen"),
    [
        ("one.jsonl", False),
        ("one.jsonl --pages 9 --page-size=4", False),
        ("--model qwen3-8b one.jsonl", False),
        ("--model a=qwen3-8b", True),
        ("--model=a=qwen3-8b", True),
        ("--model qwen3-8b --model qwen3-4b", True),
        ("one.jsonl --host-pages 9", True),
        ("one.jsonl --config=c.toml", True),
        ("one.jsonl --run-dir r", True),
        ("--help", True),
        ("--no-such-option", True),
        ("-x", True),
    ],
)
def test_parts_see_a_command_line_that_may_be_theirs(line: str, is_seen: bool) -> None:
    assert concern_parts(line.split(), options_without_parts()) is is_seen


def test_without_parts_no_rule_on_effects_is_lost() -> None:
    """A rule is skipped by a command that knows none of what an option needs."""
    own = options_without_parts() | {"--json", "--html", "--open", "--run-dir"}
    everything = {name for param in replay_command.params for name in param.opts}
    for need in NEEDS:
        needed = {what.partition("=")[0] for what in need.needs}
        if (not need.commands or "replay" in need.commands) and own.intersection(need.options) and needed & everything:
            assert needed & own, need


def test_an_error_about_a_choice_lists_the_others() -> None:
    with pytest.raises(ConfigError, match=r"foo.* Use one of none, vllm, .*sglang, tensorrt-llm") as caught:
        make_config({"engine": "foo"})
    assert caught.value.field == "engine"
