"""Pinned pages of sessions, and a load that waits for memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from builders.rooms import HAS_OFFLOAD

Kvarts = Callable[..., tuple[int, str, str]]

MODEL = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "-M-*",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "mamba_num_heads": 2,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "ssm_state_size": 8,
}


@pytest.mark.skipif(not HAS_OFFLOAD, reason="the room is not there")
def test_a_load_below_pinned_pages_begins(kvarts: Kvarts, tmp_path: Path) -> None:
    """L8: with aligned states, it takes no more memory than was found to be there when its request was accepted."""
    first, second = (
        "01212121111202200201200101012202220112112012001222022111111010102022022212010021210112210110222110110112202212011101211",
        ("012121211102210210022221022122121110101100120201200120111022020100022"),
    )
    third = second[:67] + first * 2
    sizes = [(first[:12], 384, 2, "a"), ("0", 32, 2, "b"), (first, 3792, 1, "a"), (second, 2187, 90, "b")]
    rows = [
        {"input_length": length, "output_length": num_output, "hash_ids": [*map(int, units)], "session_id": session}
        for units, length, num_output, session in (*sizes, (third[:196], 6244, 5, "b"))
    ]
    rows = [{**row, **({"timestamp": 1} if place < 2 else {"delay": 0})} for place, row in enumerate(rows)]
    rows[0]["tenant"] = rows[4]["tenant"] = "a"
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["replay", tmp_path / "trace.jsonl", "--model", tmp_path / "config.json", "--device", "h100-80gb"]
    command += ["--trace-block-size", 32, "--session-turns", "whole", "--page-size", 8, "--max-seqs", 8]
    command += ["--max-batched-tokens", 33, "--host-pages", 1774, "--load-kv", "sync", "--session-retention", "pin"]
    command += ["--mamba-cache-mode", "align", "--cost", "linear:step_ms=5", "--pages", 588, "--json"]
    code, out, _ = kvarts(*command, *["--audit"])
    assert code == 0 and json.loads(out)["num_completed"] == 5
