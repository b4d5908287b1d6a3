"""Names as others spell them: options of vLLM, models, devices, sizes; each is taken or answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvarts.base.errors import did_you_mean
from kvarts.cli.options import ALIASES, ANSWERS, in_our_words
from kvarts.cli.vllm_args import DEFAULTS, FLAGS, options_of_vllm, settings_of_line

from builders.calls import commands

EVERY = commands()


def test_aliases_stand_for_options_that_exist() -> None:
    flags = {getattr(param, "flag", param.opts[0]) for command in EVERY.values() for param in command.every}
    assert set(ALIASES.values()) <= flags
    # One that is its own alias is answered in commands without such a key.
    assert not set(ANSWERS) & {theirs for theirs, ours in ALIASES.items() if theirs != ours}


def test_options_of_vllm_are_ours(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    theirs = "--num-gpu-blocks-override 40000 --block-size=32 --max-num-seqs 7 --max-num-batched-tokens 4096"
    ours = "--pages 40000 --page-size 32 --max-seqs 7 --max-batched-tokens 4096"
    assert run_command("replay", "sample:azure-chat", *theirs.split(), "--json") == 0
    first = capsys.readouterr().out
    assert run_command("replay", "sample:azure-chat", *ours.split(), "--json") == 0
    assert json.loads(first) == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("name", "answer"), ANSWERS.items())
def test_options_without_the_same_are_answered(
    name: str, answer: str, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", name, "4") == 2
    assert answer in capsys.readouterr().err


def test_options_of_vllm_are_keys_where_they_have_no_option(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    server = EVERY["serve model"]
    theirs = ["--model", "m", "--enforce-eager", "--max-num-seqs", "7", "--kv-cache-dtype=fp8"]
    theirs += ["--tool-call-parser", "hermes"]
    with server.make_context("model", theirs) as context:
        given = {name: context.params[name] for name in ("enforce_eager", "max_seqs", "kv_dtype", "tool_call_parser")}
    assert given == {"enforce_eager": True, "max_seqs": 7, "kv_dtype": "fp8", "tool_call_parser": "hermes"}
    assert run_command("mock", "--max-queued", "5") == 2
    assert "No such option: --max-queued: give --set max_queued=VALUE." in capsys.readouterr().err


def test_a_command_with_such_an_option_keeps_it() -> None:
    assert in_our_words(["--max-model-len", "3"], {"--max-model-len"}) == ["--max-model-len", "3"]
    assert in_our_words(["--", "--tp", "3"], {"--tensor-parallel"}) == ["--", "--tp", "3"]


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("llama3.1-8b", ["llama-3.1-8b", "qwen3-8b"], "Did you mean llama-3.1-8b?"),
        ("meta-llama/Llama-3.1-8B-Instruct", ["llama-3.1-8b", "llama-3.1-70b"], "Did you mean llama-3.1-8b?"),
        ("Qwen/Qwen3-8B", ["llama-3.1-8b", "qwen3-8b", "qwen3-0.6b"], "Did you mean qwen3-8b?"),
        ("h100", ["a100-40gb", "h100-80gb", "h100-pcie"], "Did you mean h100-80gb or h100-pcie?"),
        ("NVIDIA-H100", ["h100-80gb", "l4"], "Did you mean h100-80gb?"),
        ("rplay", ["replay", "report"], "Did you mean replay?"),
        ("zzz", ["replay"], ""),
        ("", ["replay"], ""),
    ],
)
def test_close_matches(name: str, known: list[str], said: str) -> None:
    assert did_you_mean(name, known) == said


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("--model llama3.1-8b", 3, "Did you mean llama-3.1-8b?"),
        ("--model meta-llama/Llama-3.1-8B-Instruct", 3, "Did you mean llama-3.1-8b?"),
        ("--device h100-80", 2, "h100-80gb"),
        ("--device h200-141", 2, "Did you mean h200"),
        ("grid.toml", 2, "is a configuration, not a trace. Use --config FILE."),
        ("sample:azure-chat --pages 100 --host-memory 64", 2, "Did you mean 64GiB?"),
        ("sample:azure-chat --pages 100 --host-memory 64Gb", 2, "may stand for bits. Write 64GB for bytes."),
        ("--kv-memory 40", 2, "Did you mean 40GiB?"),
    ],
)
def test_replay_answers_what_it_does_not_know(
    arguments: str, code: int, says: str, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", *arguments.split()) == code
    assert says in capsys.readouterr().err


VLLM = "qwen3-8b --max-num-seqs 7 --block-size=32 --num-gpu-blocks-override 4000 -tp 1 --no-enable-prefix-caching"
AS_OURS = "--model qwen3-8b --max-seqs 7 --page-size 32 --pages 4000 --set no_prefix_caching=true"


def test_an_argument_line_of_vllm_is_taken_as_it_is(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.sh"
    file.write_text(f"vllm serve {VLLM} \\\n  --port 80\n")
    printed = []
    for words in (AS_OURS.split(), ["--vllm-args", VLLM], ["--vllm-args", f"@{file}"]):
        assert run_command("replay", "sample:azure-chat", "--device", "h100-80gb", *words, "--json") == 0
        printed.append(capsys.readouterr())
    assert printed[0].out == printed[1].out == printed[2].out
    assert json.loads(printed[0].out)["config"]["max_seqs"] == 7
    assert "--vllm-args: without effect here: --port" in printed[2].err and "without" not in printed[1].err


def test_every_option_of_vllm_is_taken_or_named() -> None:
    """An argument line that vLLM takes is no error here: what has no effect is said."""
    theirs = options_of_vllm()
    for option in {*theirs["flags"], *theirs["values"], *theirs["several"]} - {"enable-expert-parallel"}:
        value = {"speculative-config": """ '{"method": "mtp", "num_speculative_tokens": 2}'"""}.get(option)
        if value is None:
            value = "" if option in theirs["flags"] else f" {DEFAULTS.get(option, ('3',))[0]}"
        said: list[str] = []
        found = settings_of_line(f"--{option}{value} --port 80", lambda _: True, say=said.append)
        is_named = f"--{option}," in said[0]
        assert bool(found) + is_named == 1 or option in {*FLAGS, *DEFAULTS, "port"}, option
    line = """--lora-modules sql=/a b=/b --max-num-seqs 7 -sc '{"num_speculative_tokens": 2}'"""
    assert settings_of_line(line, lambda _: True, say=str) == [("max_seqs", "7"), ("speculative_tokens", "2")]


def test_options_win_over_an_argument_line(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3.1-8b", "--max-seqs", "3", "--vllm-args", VLLM, "--device", "h100-80gb", "--json")
    assert run_command("replay", "sample:azure-chat", *words) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["max_seqs"], config["page_size"]) == (3, 32)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max-num-sqs 4", "vllm serve's --max-num-sqs is not known here. Did you mean max-num-seqs?"),
        ("--scheduling-policy lottery", "--scheduling-policy lottery is not known. Use one of fcfs, priority."),
        ("--max-num-seqs", "--max-num-seqs needs a value."),
        ("--max-num-seqs x", "Invalid value for '--max-seqs': 'x' is not a valid integer"),
        ("--enable-expert-parallel", "give --set expert_parallel=N"),
        ("--speculative-config 3", "is no JSON object with num_speculative_tokens"),
        ("'", "No closing quotation"),
    ],
)
@pytest.mark.parametrize("command", ["replay", "plan"])
def test_what_is_wrong_in_an_argument_line_is_named(
    command: str, line: str, says: str, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command, "sample:azure-chat", "--vllm-args", line) == 2
    assert says in capsys.readouterr().err


def test_a_missing_file_of_an_argument_line_is_named(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", "--vllm-args", "@nowhere.sh") == 3
    assert "nowhere.sh" in capsys.readouterr().err
    (tmp_path / "latin.sh").write_bytes(b"caf\xe9")
    for name in ("latin.sh", "."):
        assert run_command("replay", "--vllm-args", f"@{tmp_path / name}") == 4
        assert f"{tmp_path / name}: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--gpus 4", "No such option: --gpus: it is of kvarts plan fleet."),
        ("--users=1..4 --json", "it is of kvarts plan users."),
        ("--policy auto", "it is of kvarts plan policies."),
        ("--routers prefix", "it is of kvarts plan routers."),
    ],
)
def test_an_option_of_another_plan_names_it(
    words: str, says: str, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("plan", "sample:azure-chat", *words.split()) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--disk-pages 3", "No such option: --disk-pages: give --set offload.disk_pages=VALUE."),
        ("--set offload.disk_page=3", "there is no key 'offload.disk_page'. Did you mean offload.disk_pages"),
        ("--set pages", "'pages' is not KEY=VALUE"),
        ("--set audit=yes", "audit is true or false, not 'yes'"),
        ("--set", "requires an argument"),
    ],
)
def test_keys_that_are_not_known_are_answered(
    words: str, says: str, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", "sample:azure-chat", *words.split()) == 2
    assert says in capsys.readouterr().err
