"""Options that cannot have an effect are refused: in every command, by the rows of one table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import pytest

from kvarts.cli.effects import MODES, NEEDS, NO_REPLAY

from builders.calls import commands

Call = Callable[..., tuple[int, str]]
EVERY = commands()
MODEL = "--model llama-3.1-8b --device h100-80gb"


@pytest.fixture
def call(run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]) -> Call:
    def answer(*words: object) -> tuple[int, str]:
        code = run_command(*words)
        return code, capsysbinary.readouterr().err.decode()

    return answer


def flags_of(name: str) -> set[str]:
    return {flag for param in EVERY[name].every for flag in param.opts}


def test_rows_name_options_that_exist() -> None:
    for mode in MODES:
        if mode.command in EVERY:
            named = {*mode.keeps, *mode.drops, mode.when} - {NO_REPLAY}
            assert named <= flags_of(mode.command), mode
    for need in NEEDS:
        known = [flags_of(name) for name in (need.commands or EVERY) if name in EVERY]
        options = {option.partition(" ")[0] for option in need.options}
        assert any(options & flags for flags in known), need


OF_PLAN = [
    flag
    for param in EVERY["plan slo"].every
    for flag in param.opts
    if flag.startswith("--") and flag not in {"--set", "--vllm-args", "--sglang-args"}
]
VALUES = {
    "--at": "9", "--prices": "p.toml", "--html": "x.html", "--set plot": "x.svg", "--config": "c.toml",
    "--policy": "auto",
    "--trace": "a=b", "--model": "qwen3-8b", "--device": "l4", "--cost": "linear:step_ms=1",
    "--tier": "a:pages=1",
}  # fmt: skip


@pytest.mark.parametrize("flag", OF_PLAN)
def test_a_plan_that_replays_nothing_takes_only_what_curves_need(flag: str, call: Call, tmp_path: Path) -> None:
    (mode,) = (mode for mode in MODES if mode.when == NO_REPLAY and mode.command == "plan slo")
    param = next(param for param in EVERY["plan slo"].every if flag in param.opts)
    others = {"--prices", "--model", "--device", "--cost", "--trace", "--set loans", "--eviction"}
    if flag in mode.keeps or flag in others:
        return
    option, *key = flag.split(" ")
    value = "true" if getattr(param, "type", None) is click.BOOL else _value(flag, param)
    words = [option] if getattr(param, "is_flag", False) else [option, f"{key[0]}={value}" if key else value]
    code, err = call("plan", "sample:mooncake", *words)
    assert code == 2, (flag, err)
    assert flag in err and ("has no effect" in err or "says nothing" in err or "needs" in err), err


def _value(flag: str, param: object) -> str:
    choices = getattr(getattr(param, "type", None), "choices", None)
    if choices:
        return str(list(choices)[-1])
    return VALUES.get(flag, "0.5" if "FloatRange" in repr(getattr(param, "type", "")) else "3")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("plan sample:mooncake --slo-ttft-ms 300", "--slo-ttft-ms: has no effect: nothing is replayed. Give --model"),
        ("plan --slo-share 0.9", "--slo-share: has no effect without --slo-ttft-ms, --slo-tpot-ms or --set slo.e2e_ms"),
        (
            "replay --router prefix",
            "--router: has no effect without --replicas, --set data_parallel, --prefill, --decode or",
        ),
        ("replay --set timeline_every=3", "--set timeline_every: has no effect without --timeline or --run-dir"),
        (
            "replay --pages 40000 --prefill replicas=1,memory_fraction=0.5",
            "--prefill memory_fraction: has no effect with --pages",
        ),
        (
            "replay --decode replicas=1,kv_memory=4GiB,memory_fraction=0.5",
            "--decode memory_fraction: has no effect with --decode kv_memory",
        ),
        ("replay --open", "--open: has no effect without --html"),
        ("replay --set kv_events_topic=x", "--set kv_events_topic: has no effect without --kv-events"),
        ("soak --virtual --set server_pid=1", "--set server_pid: has no effect with --virtual"),
        ("serve sessions --mock --dtype float32", "--dtype: has no effect with --mock"),
        ("calibrate --design --set time_unit=ms", "--set time_unit: has no effect with --design"),
        ("calibrate --points x --set seed=3", "--set seed: has no effect with --points"),
        ("calibrate --points x --model a", "--model: has no effect with --points"),
        ("calibrate --design --set prior=x", "--set prior: has no effect with --design"),
        ("calibrate --set hold_out=gpu", "--set hold_out: has no effect without --points"),
        ("watch tcp://127.0.0.1:1 --set quiet=true --set every=3", "--set every: has no effect with --set quiet"),
    ],
)
def test_what_has_no_effect_is_refused(arguments: str, says: str, call: Call) -> None:
    words = arguments.split()
    code, err = call(*words)
    assert (code, says in err) == (2, True), err


def test_a_plan_has_no_options_of_several_models(call: Call, tmp_path: Path) -> None:
    assert not {"--set reclaim_after_s", "--set health", "--set baselines"} & flags_of("plan slo")
    config = tmp_path / "c.toml"
    config.write_text('[models.chat]\nmodel = "qwen3-8b"\n')
    code, err = call("plan", "sample:mooncake", "--config", config)
    assert code == 2 and "a plan is for one model" in err


def test_what_a_file_gives_counts(call: Call, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("replicas = 2\npages = 40000\n[offload]\nhost_pages = 9\npolicy = 'lazy'\n")
    code, err = call(
        "replay", "sample:azure-chat", "--config", config, "--router", "prefix", "--set", "offload.target_free=3"
    )
    assert code == 0, err
    config.write_text("slo = {ttft_ms = 300}\n")
    code, err = call("plan", "sample:azure-chat", "--config", config)
    assert code == 0, err  # a file of settings is read by several commands


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("arguments", ["plan --slo-ttft-ms 3 --cost-error", "replay --speedup", "plan --slo-ttft-ms"])
def test_no_number_is_nan_or_infinite(arguments: str, text: str, call: Call) -> None:
    code, err = call(*arguments.split(), text)
    assert code == 2 and arguments.rsplit(" ", maxsplit=1)[-1] in err
