"""`kvarts model show`: what a sequence takes in the KV groups of a model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from kvarts.cli.commands import cli


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["model", "show", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def values(*arguments: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(shown(*arguments, "--json"))
    return parsed


def test_groups_and_sequences_in_json() -> None:
    gpt = values("gpt-oss-120b", "--device", "h100-80gb", "--engine", "none")
    layer = 16 * 2 * 8 * 64 * 2
    window, full = gpt["kv_groups"]
    assert (window["kind"], window["num_layers"], window["window"], window["page_bytes"]) == (
        "window",
        18,
        128,
        18 * layer,
    )
    assert (full["kind"], full["num_layers"], full["window"], full["page_bytes"]) == ("full", 18, None, 18 * layer)
    assert gpt["sequence"] == {
        "num_tokens": 32_768,
        "num_pages": [8, 2048],
        "num_bytes": 18 * layer * (8 + 2048),
        "full_bytes": 36 * layer * 2048,
        "num_sequences": 8,
        "num_full_sequences": 4,
    }
    assert values("gpt-oss-120b", "--set", "sequence_tokens=100")["sequence"]["num_pages"] == [7, 7]


def test_devices_divide_heads_and_states() -> None:
    one, two = (values("qwen3-next-80b-a3b", "--tensor-parallel", ways) for ways in ("1", "2"))
    for ours, theirs in zip(one["kv_groups"], two["kv_groups"], strict=True):
        assert ours["state_bytes"] == 2 * theirs["state_bytes"]
        assert ours["page_bytes"] == 2 * theirs["page_bytes"]
    stages = values("gpt-oss-120b", "--set", "pipeline_parallel=2")["kv_groups"]
    assert [group["page_bytes"] for group in stages] == [9 * 16 * 2 * 8 * 64 * 2] * 2
    latent = values("deepseek-v3", "--tensor-parallel", "8")["kv_groups"]
    assert latent == values("deepseek-v3")["kv_groups"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama-4-scout", "36 that attend to chunks of 8,192 tokens, 12 that attend to all tokens"),
        ("nemotron-h-56b", "54 that keep a state, 54 that see one token at a time, 10 that attend to all tokens"),
        ("gemma-3n-e4b", "12 that attend to the last 512 tokens in the KV of other layers"),
        ("nemotron-h-56b", "states        912,"),
    ],
)
def test_layers_in_words(name: str, says: str) -> None:
    assert says in shown(name)


def test_a_model_that_keeps_everything_is_shown_as_before() -> None:
    assert "KV groups" not in shown("llama-3.1-8b")
    assert "32,768 tokens take 4,294,967,296 bytes" in shown("llama-3.1-8b", "--set", "sequence_tokens=32768")
    assert "13 fit\n" in shown("llama-3.1-8b", "--set", "sequence_tokens=32768", "--device", "h100-80gb")


def test_a_length_that_cannot_be_is_named() -> None:
    result = CliRunner().invoke(cli, ["model", "show", "llama-3.1-8b", "--set", "sequence_tokens=0"])
    assert result.exit_code != 0
    assert "--set sequence_tokens: must be at least 1" in result.output + str(result.exception)
