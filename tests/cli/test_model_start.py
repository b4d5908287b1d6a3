"""`kvarts model show --engine vllm`: vLLM's lines, its plan as JSON, and its refusals with what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvarts.base.errors import KvartsError
from kvarts.cli.commands import cli


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["model", "show", *arguments])
    if isinstance(result.exception, KvartsError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def start(*arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(run(*arguments, "--json"))["vllm"]
    return values


def test_the_figures_of_a_log() -> None:
    """gpt-oss-20b on an H100 with the bytes that a log states, in both versions."""
    for version in ("0.32", "0.33"):
        values = start("gpt-oss-20b", "--device", "h100", "--engine", f"vllm=={version}", *GIVEN)
        assert values["version"] == version
        assert (values["block_size"], values["num_blocks"], values["kv_cache_tokens"]) == (16, 150_186, 2_133_894)
        assert round(values["max_concurrency"], 2) == 16.28 and values["refusal"] is None
        kinds = [(group["kind"], group["layers"], group["block_size"]) for group in values["groups"]]
        assert kinds == [("sliding_window", 12, 16), ("full_attention", 12, 16)]
        assert values["available_kv_memory"] == {"least_bytes": BYTES, "most_bytes": BYTES, "parts": {}}


BYTES = 59_055_804_641
GIVEN = ("--available-kv-memory", str(BYTES))


def test_options_of_vllm_change_the_plan_as_in_vllm() -> None:
    own = start("qwen3.5-27b", "--device", "h100", "--engine", "vllm", "--available-kv-memory", "40GiB")
    assert own["groups"][0] == {
        "kind": "mamba",
        "layers": 16,
        "block_size": 832,
        "window": None,
        "blocks_per_request": 3,
    }
    arguments = ("qwen3.5-27b", "--device", "h100", "--engine", "vllm", "--available-kv-memory", "40GiB")
    eight = start(*arguments, "--kv-cache-dtype", "fp8")
    assert (eight["block_size"], eight["num_blocks"]) == (1600, 819)
    plain = start(*arguments, "--no-enable-prefix-caching", "--max-num-seqs", "256")
    assert [group["blocks_per_request"] for group in plain["groups"]] == [1, 1, 1, 335]
    short = start(*arguments, "--set", "max_model_len=8192", "--max-num-seqs", "16", "--max-num-batched-tokens", "4096")
    assert (short["max_model_len"], short["max_num_seqs"], short["max_num_batched_tokens"]) == (8192, 16, 4096)
    assert short["refusal"] is None
    large = start("qwen3-32b", "--device", "h100", "--engine", "vllm", "--block-size", "64", *GIVEN)
    assert large["block_size"] == 64
    two = start("qwen3-32b", "--device", "h100", "--engine", "vllm", "--tensor-parallel-size", "2", *GIVEN)
    assert two["num_blocks"] == 2 * start("qwen3-32b", "--device", "h100", "--engine", "vllm", *GIVEN)["num_blocks"]


def test_drafts_have_kv_and_states() -> None:
    """The bytes, blocks and tokens of a log: Qwen3.8-27B in NVFP4, with three drafted tokens."""
    arguments = ("qwen3.6-27b", "--device", "rtx-5090", "--engine", "vllm==0.32", "--available-kv-memory", "5000000000")
    own = start(*arguments, "--set", "speculative_tokens=3", "--kv-dtype", "fp8", "--set", "max_model_len=98304")
    assert (own["block_size"], own["kv_cache_tokens"]) == (1600, 113_624)
    assert [(group["layers"], group["blocks_per_request"]) for group in own["groups"]] == [(16, 5)] * 3 + [(17, 62)]


def test_a_window_holds_the_tokens_in_flight() -> None:
    """Asynchronous scheduling has two steps in flight, and windows keep the tokens of both."""
    arguments = ("gpt-oss-120b", "--device", "h200", "--engine", "vllm", "--available-kv-memory", "40GiB")
    blocks = [start(*arguments, *more)["groups"][0]["blocks_per_request"] for more in ((), ("--no-async-scheduling",))]
    assert blocks == [-(-(127 + 2 * 8192) // 16) + 1, -(-(127 + 8192) // 16) + 1]


def test_refusals_are_vllms_words_with_what_to_change() -> None:
    short = run("qwen3-32b", "--device", "h100", "--engine", "vllm", "--available-kv-memory", "2.1GiB")
    assert "To serve at least one request with the model's max seq len (40960), (10.00 GiB KV cache is needed" in short
    assert "Give --max-model-len 8576, or -1" in short
    fitted = start(
        "qwen3-32b",
        "--device",
        "h100",
        "--engine",
        "vllm",
        "--available-kv-memory",
        "2.1GiB",
        "--set",
        "max_model_len=-1",
    )
    assert fitted["max_model_len"] == 8576
    states = run("qwen3.5-27b", "--device", "h100", "--engine", "vllm", "--available-kv-memory", "22.1GiB")
    assert (
        "max_num_seqs (1024) exceeds available Mamba cache blocks (435)" in states and "Give --max-seqs 435." in states
    )
    eight = run("gpt-oss-20b", "--device", "a100", "--engine", "vllm", "--kv-dtype", "fp8")
    assert "Re-run with --kv-cache-dtype bfloat16." in eight and "Give a device of a later generation" in eight
    none = run("qwen3-32b", "--device", "l4", "--engine", "vllm")
    assert "No available memory for the cache blocks" in none and "Give more devices" in none


def test_the_memory_is_an_interval_with_its_parts() -> None:
    values = start("gpt-oss-120b", "--device", "h200", "--engine", "vllm")
    memory = values["available_kv_memory"]
    total, *used = memory["parts"].values()
    assert list(memory["parts"]) == ["to use", "weights", "activations", "CUDA graphs", "NCCL", "context"]
    assert memory["least_bytes"] == total["least_bytes"] - sum(part["most_bytes"] for part in used)
    assert memory["most_bytes"] == total["most_bytes"] - sum(part["least_bytes"] for part in used)
    assert values["num_blocks"] < values["at_most"]["num_blocks"]
    less = start("gpt-oss-120b", "--device", "h200", "--engine", "vllm", "--gpu-memory-utilization", "0.8")
    assert less["num_blocks"] < values["num_blocks"]
    text = run("gpt-oss-120b", "--device", "h200", "--engine", "vllm")
    assert "at least" in text and "at most" in text and text.count("GPU KV cache size:") == 2


def line(model: str, arguments: str, *more: str) -> dict[str, Any]:
    return start(model, "--device", "h100", "--engine", "vllm==0.33", "--vllm-args", arguments, *more)


def test_an_argument_line_of_vllm_is_planned() -> None:
    """Options of `vllm serve` that decide memory, with its units: 32k is 32,000, 1K is 1,024."""
    own = line("gpt-oss-20b", "--kv-cache-memory-bytes 40G --max-model-len 32k --max-num-batched-tokens 4K")
    assert own["available_kv_memory"]["least_bytes"] == 40 << 30
    assert (own["max_model_len"], own["max_num_batched_tokens"]) == (32_000, 4096)
    assert line("gpt-oss-20b", "--num-gpu-blocks-override 10000")["num_blocks"] == 10_000
    one = line("gpt-oss-20b", "--disable-hybrid-kv-cache-manager", *GIVEN)
    assert [(group["kind"], group["layers"]) for group in one["groups"]] == [("full_attention", 24)]
    twice = line("gpt-oss-20b", "--performance-mode throughput", *GIVEN)
    assert (twice["max_num_batched_tokens"], twice["max_num_seqs"]) == (16_384, 2048)
    whole = line("gpt-oss-20b", "--no-enable-chunked-prefill", *GIVEN)
    assert whole["max_num_batched_tokens"] == 131_072
    fitted = line("qwen3-32b", "--max-model-len auto", "--available-kv-memory", "2.1GiB")
    assert fitted["max_model_len"] == 8576
    assert line("qwen3.5-27b", "--enforce-eager", "--available-kv-memory", "22.1GiB")["refusal"] is None
    half = line("qwen3.5-27b", "--mamba-ssm-cache-dtype bfloat16 --max-num-seqs 9", "--available-kv-memory", "22.1GiB")
    assert half["block_size"] == 448
    shared = line("deepseek-v3", "-tp 8 -dcp 4 --max-model-len 16k", "--available-kv-memory", "10GiB")
    alone = line("deepseek-v3", "-tp 8 --max-model-len 16k", "--available-kv-memory", "10GiB")
    assert shared["num_blocks"] == alone["num_blocks"] and shared["kv_cache_tokens"] == 4 * alone["kv_cache_tokens"]
    heads = line("qwen3-32b", "-tp 4 --decode-context-parallel-size 2", *GIVEN)
    assert heads["refusal"].startswith("Decode context parallelism for GQA/MQA requires")


def test_the_memory_is_read_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    lines = (
        f"(Worker_TP{rank} pid=1) INFO Available KV cache memory: {size} GiB\n" for rank, size in ((0, 55.0), (1, 54.5))
    )
    log.write_text("INFO starting\n" + "".join(lines))
    own = start("gpt-oss-20b", "--device", "h100", "--engine", "vllm", "--available-kv-memory", f"@{log}")
    assert own["available_kv_memory"]["least_bytes"] == int(54.5 * (1 << 30))
    text = "INFO 09-01 [gpu_worker.py:564] Available KV cache memory: 55.0 GiB"
    copied = start("gpt-oss-20b", "--device", "h100", "--engine", "vllm", "--available-kv-memory", text)
    assert (copied["num_blocks"], copied["kv_cache_tokens"]) == (150_186, 2_133_894)
    log.write_text("nothing\n")
    with pytest.raises(KvartsError, match="has no line 'Available KV cache memory"):
        run("gpt-oss-20b", "--device", "h100", "--engine", "vllm", "--available-kv-memory", f"@{log}")


def test_a_layout_file_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(
        'weights = "54GB"\nlayers = [\n  {count = 10, kind = "full", heads = 16, head_dim = 128},\n'
        '  {count = 52, kind = "window", window = 1024, heads = 16, head_dim = 128},\n]\n'
    )
    arguments = (
        "any",
        "--set",
        f"kv_layout={path!s}",
        "--device",
        "h100",
        "--engine",
        "vllm",
        "--set",
        "max_model_len=8192",
    )
    own = start(*arguments, *GIVEN)
    assert [group["layers"] for group in own["groups"]] == [10, 9, 9, 9, 9, 8, 8]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--engine", "vllm==0.30"), "'vllm==0.30' is not understood"),
        (("--set", "max_model_len=100"), "needs --engine vllm"),
        (("--engine", "vllm", "--set", "max_model_len=0"), "must be at least 1"),
        (("--engine", "vllm", "--block-size", "24"), "take multiples of 16 tokens"),
        (("--engine", "vllm", "--available-kv-memory", "44.1GX"), "is not a size in bytes"),
    ],
)
def test_options_that_are_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(KvartsError, match=says):
        run("qwen3-8b", "--device", "h100", *arguments)


def test_a_start_needs_a_device() -> None:
    with pytest.raises(KvartsError, match="needs a device"):
        run("qwen3-8b", "--engine", "vllm")


def test_without_an_engine_models_whose_layers_keep_less_are_shown_as_vllm_starts() -> None:
    """The states of 256 sequences of Qwen3.6-27B are not set aside: vLLM keeps them in blocks."""
    arguments = ("qwen3.6-27b", "--device", "h100")
    assert start(*arguments, *GIVEN) == start(*arguments, "--engine", "vllm", *GIVEN)
    assert "vllm" not in json.loads(run("qwen3-8b", "--device", "h100", "--json"))
    with pytest.raises(KvartsError, match=r"36\.70 states"):
        run(*arguments, "--engine", "none")
