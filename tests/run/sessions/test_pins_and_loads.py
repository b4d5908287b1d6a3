"""Pinned pages of sessions, and a load that waits for memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from kvarts.core.content import pack_units
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.sessions import SessionReplay
from kvarts.sim.traffic.trace import Trace, TraceRequest

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
    command += ["--trace-block-size", 32, "--set", "session_turns=whole", "--page-size", 8, "--max-seqs", 8]
    command += [
        "--max-batched-tokens",
        33,
        "--host-pages",
        1774,
        "--set",
        "offload.load_kv=sync",
        "--set",
        "sessions.retention=pin",
    ]
    command += ["--set", "mamba_cache_mode=align", "--cost", "linear:step_ms=5", "--pages", 588, "--json"]
    code, out, _ = kvarts(*command, *["--audit"])
    assert code == 0 and json.loads(out)["num_completed"] == 5


def test_a_load_that_lacks_memory_gets_that_of_a_pin() -> None:
    """A prompt of 30 tokens is half computed, 20 others are pinned, and the next prompt has 20 tokens below.

    The load and the rest of the first prompt need 15 of 34 pages, and 14 are free.
    """
    from kvarts import OffloadConfig

    sent = [(0, 0, 20, None), (1, 100, 66, None), (2, 200, 20, "a"), (3, 300, 30, None), (3.06, 0, 22, None)]
    rows = [
        TraceRequest(place, round(at_s * 1e9), pack_units(range(first, first + length)), length, 1, session_id=session)
        for place, (at_s, first, length, session) in enumerate(sent)
    ]
    later = TraceRequest(5, 0, pack_units(range(200, 220)), 20, 1, session_id="a", delay_ns=60 * 10**9)
    below = OffloadConfig(
        host_pages=200, kv_bytes_per_token=1, h2d=10**9, d2h=10**9, latency_us=0.0, load_kv="async"
    )  # fmt: skip
    config = ReplayConfig(
        num_pages=34, page_size=2, max_num_batched_tokens=8, max_num_seqs=4, long_prefill_token_threshold=4,
        audit=True, offload=below,
        cost=LinearCost(step_ms=10.0, chunk_token_ms=5.0), sessions=SessionReplay(retention="pin"),
    )  # fmt: skip
    report = replay(Trace([*rows, later], unit_tokens=1), config)
    assert report.summary["sessions"]["num_pins_given_up"] == 1
    assert report.request_columns["first_admitted_ns"].tolist()[4] < 3.15e9
