"""Names as others spell them: options of vLLM, models, devices, sizes; each is taken or answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvarts.base.errors import did_you_mean
from kvarts.cli.argument_lines import options_in, options_of, server_of, settings_of_line
from kvarts.cli.options import ALIASES, ANSWERS, in_our_words
from kvarts.cli.sglang_args import NOT_MODELLED

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


def test_options_of_sglang_are_ours(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    theirs = "--chunked-prefill-size 4096 --max-running-requests 7 --disable-overlap-schedule --max-prefill-tokens 9000"
    theirs += " --schedule-conservativeness 0.5 --radix-eviction-policy slru --enable-priority-scheduling"
    theirs += " --priority-scheduling-preemption-threshold 3"
    ours = "--max-batched-tokens 4096 --max-seqs 7 --set disable_overlap_schedule=true --set max_prefill_tokens=9000"
    ours += " --set schedule_conservativeness=0.5 --set radix_eviction_policy=slru"
    ours += " --set enable_priority_scheduling=true --set priority_scheduling_preemption_threshold=3"
    printed = []
    for words in (theirs, ours):
        assert run_command("replay", "sample:azure-chat", "--engine", "sglang", *words.split(), "--json") == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1]
    config = printed[0]["config"]
    assert (config["max_seqs"], config["max_prefill_tokens"], config["disable_overlap_schedule"]) == (7, 9000, True)
    assert run_command("replay", "sample:azure-chat", "--disable-overlap-schedule") == 2
    assert "has no effect without --engine sglang" in capsys.readouterr().err


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
        ("--model meta-llama/Llama-3.1-8B-Instruc", 3, "Did you mean llama-3.1-8b?"),
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


VALUES = {
    "speculative-config": """'{"method": "mtp", "num_speculative_tokens": 2}'""",
    "mamba-cache-mode": "align",
    "schedule-policy": "lpm",
}


@pytest.mark.parametrize("name", ["--vllm-args", "--sglang-args"])
def test_every_option_of_a_server_is_taken_or_named(name: str) -> None:
    """An argument line that the server takes is no error here: what has no effect is said."""
    theirs, server = options_of(name), server_of(name)
    refused = {"enable-expert-parallel", *NOT_MODELLED}
    quiet = {*server.flags, *server.defaults, "port"}
    for option in {*theirs["flags"], *theirs["values"], *theirs["several"]} - refused:
        value = VALUES.get(option, server.defaults.get(option, ("3",))[0])
        word = "" if option in theirs["flags"] else f" {value}"
        said: list[str] = []
        found = settings_of_line(f"--{option}{word} --port 80", name, lambda _: True, say=said.append)
        found = [pair for pair in found if pair[0] != "engine"]
        is_named = f"--{option}," in said[0]
        assert bool(found) + is_named == 1 or option in quiet, option


def test_values_of_vllm_with_several_words_and_short_names() -> None:
    line = """--lora-modules sql=/a b=/b --max-num-seqs 7 -sc '{"num_speculative_tokens": 2}'"""
    found = settings_of_line(line, "--vllm-args", lambda _: True, say=str)
    assert found == [("max_seqs", "7"), ("speculative_tokens", "2")]


SGLANG = (
    "--model-path qwen3-8b --tp 1 --chunked-prefill-size 2048 --max-running-requests=7 --page-size 16 "
    "--max-total-tokens 64Ki --schedule-policy lpm --disable-overlap-schedule --radix-eviction-policy slru"
)
SGLANG_AS_OURS = (
    "--engine sglang --model qwen3-8b --set tensor_parallel=1 --max-batched-tokens 2048 --max-seqs 7 --page-size 16 "
    "--pages 4096 --set schedule_policy=lpm --set disable_overlap_schedule=true --set radix_eviction_policy=slru"
)


def test_an_argument_line_of_sglang_is_taken_as_it_is(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.sh"
    file.write_text(f"python -m sglang.launch_server {SGLANG} \\\n  --port 80 --context-length 32k\n")
    printed = []
    for words in (SGLANG_AS_OURS.split(), ["--sglang-args", SGLANG], ["--sglang-args", f"@{file}"]):
        assert run_command("replay", "sample:azure-chat", "--device", "h100-80gb", *words, "--json") == 0
        printed.append(capsys.readouterr())
    assert printed[0].out == printed[1].out == printed[2].out
    config = json.loads(printed[0].out)["config"]
    assert (config["engine"], config["max_seqs"], config["pages"], config["schedule_policy"]) == (
        "sglang",
        7,
        4096,
        "lpm",
    )
    assert (
        "--sglang-args: without effect here: --port, --context-length" in printed[2].err
        and "without" not in printed[1].err
    )


def test_a_word_may_be_cut_if_it_can_be_only_one_option() -> None:
    """argparse, by which SGLang reads its line, completes names."""
    server = server_of("--sglang-args")
    words = ["--tp", "2", "--mem-fraction", "0.8", "--context", "1k", "--page-s", "4"]
    read = [(each.option, each.value) for each in options_in(words, server)]
    assert read == [("tp-size", "2"), ("mem-fraction-static", "0.8"), ("context", ""), ("", "1k"), ("page-size", "4")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max-runing-requests 4", "sglang serve's --max-runing-requests is not known here. Did you mean max-running"),
        ("--xyzzy", "--xyzzy is not known here. Leave it out."),
        ("--schedule-policy lof", "'lof' is not one of 'fcfs', 'lpm', 'dfs-weight'"),
        ("--page-size", "--page-size needs a value."),
        ("--chunked-prefill-size -1", "sets no size of chunks; give the tokens of the longest prompt"),
        ("--enable-hicache --hicache-storage-backend tape", "'tape' is not one of 'none', 'file', 'sim'"),
        ("--dp-size 2", "--dp-size: leave it out, and give --replicas N --router round-robin"),
        ("--max-total-tokens many", "--max-total-tokens must be a whole number of at least 1, got many"),
        ("--max-total-tokens 10 --page-size 16", "--max-total-tokens 10 is less than a page of 16 tokens"),
    ],
)
def test_what_is_wrong_in_a_line_of_sglang_is_named(
    line: str, says: str, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", "sample:azure-chat", "--sglang-args", line) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("--enable-hierarchical-cache", {"hicache_ratio": "2.0"}),
        (
            "--enable-hierarchical-cache --hicache-ratio 1.5 --hicache-size 0",
            {"hicache_ratio": "1.5", "hicache_size": "0"},
        ),
        ("--enable-hicache --hicache-ratio 1.5 --hicache-size 30", {"hicache_size": "30"}),
        ("--hicache-ratio 1.5 --hicache-write-policy write_back", {}),
        (
            "--enable-hicache --hicache-write-policy write_back",
            {"hicache_write_policy": "write_back", "hicache_ratio": "2.0"},
        ),
        ("--swa-full-tokens-ratio 0.5", {"swa_full_tokens_ratio": "0.5"}),
        ("--disable-hybrid-swa-memory", {"disable_hybrid_swa_memory": "true"}),
        (
            "--mamba-full-memory-ratio 0.5 --mamba-radix-cache-strategy no_buffer --max-mamba-cache-size 300",
            {
                "mamba_full_memory_ratio": "0.5",
                "mamba_radix_cache_strategy": "no_buffer",
                "max_mamba_cache_size": "300",
            },
        ),
        ("--hicache-storage-backend file", {}),
        (
            "--enable-hicache --hicache-size 30 --hicache-storage-prefetch-policy best_effort",
            {"hicache_size": "30"},
        ),
        (
            "--enable-hicache --hicache-size 3 --hicache-storage-backend sim --hicache-storage-prefetch-retry-max 2",
            {
                "hicache_size": "3",
                "hicache_storage_backend": "sim",
                "hicache_storage_prefetch_retry_max_attempts": "2",
            },
        ),
    ],
)
def test_memory_of_a_line_of_sglang_is_as_its_server_takes_it(line: str, given: dict[str, str]) -> None:
    pairs = settings_of_line(line, "--sglang-args", lambda key: True)
    assert {
        name: value
        for name, value in pairs
        if name.startswith(("hicache", "swa", "disable_hybrid", "mamba", "max_mamba"))
    } == given


def test_a_mock_takes_the_lengths_of_a_line_of_sglang() -> None:
    words = ["--sglang-args", "--model-path m --context-length 32k --max-queued-requests 5"]
    with EVERY["mock"].make_context("mock", words) as context:
        assert (context.params["max_model_len"], context.params["max_queued"]) == (32_000, 5)


def test_lines_of_two_servers_and_another_page_size_are_refused(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("--sglang-args", "--max-total-tokens 4096")
    assert run_command("replay", "sample:azure-chat", *line, "--vllm-args", "") == 2
    assert "--vllm-args and --sglang-args are of two servers" in capsys.readouterr().err
    assert run_command("replay", "sample:azure-chat", *line, "--page-size", "16") == 2
    assert "--max-total-tokens needs --page-size in the same line" in capsys.readouterr().err


def test_options_win_over_an_argument_line(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3.1-8b", "--max-seqs", "3", "--vllm-args", VLLM, "--device", "h100-80gb", "--json")
    assert run_command("replay", "sample:azure-chat", *words) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["max_seqs"], config["page_size"]) == (3, 32)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max-num-sqs 4", "vllm serve's --max-num-sqs is not known here. Did you mean max-num-seqs?"),
        ("--scheduling-policy lottery", "'lottery' is not one of 'fcfs', 'priority'"),
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
