"""What `kvarts replay --kv-groups` records, and what is told of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvarts.proof.evidence import verify_file
from kvarts.proof.journal import Head

Kvarts = Callable[..., tuple[int, str, str]]

OPTIONS = ("--model", "gemma-3-27b", "--device", "h100-80gb", "--kv-memory", "2GB", "--page-size", "64")
"""Layers with a window of 1,024 tokens, five of six; memory for 4,000 tokens in all layers."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Prompts of 2,048 tokens and more with a prefix of 512 in common; two of three go on from the one before."""
    rows = []
    for index in range(12):
        chain = [0, *range(10 * (index // 3) + 1, 10 * (index // 3) + 4 + index % 3)]
        tokens = {"input_length": 512 * len(chain), "output_length": 80}
        rows.append({"timestamp": 900 * index, **tokens, "hash_ids": chain})
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("keeps", ["all", "tails"])
def test_a_run_directory_has_a_journal_and_says_what_the_report_says(
    kvarts: Kvarts, trace: Path, tmp_path: Path, keeps: str
) -> None:
    asked = ("replay", trace, *OPTIONS, "--kv-groups", keeps)
    code, plain, said = kvarts(*asked, "--json")
    assert code == 0, said
    run = tmp_path / "run"
    code, told, said = kvarts(*asked, "--run-dir", run, "--audit", "--json")
    assert (code, told) == (0, plain), said
    summary = json.loads(plain)
    assert summary["num_evicted_pages"] and summary["num_cached_tokens"]
    assert verify_file(run / "timeline.json.gz").verdict == "ok"
    journal = tmp_path / "events.jsonl"
    assert kvarts(*asked, "--events", journal, "--json")[1] == plain
    head = json.loads(journal.read_text().splitlines()[0])
    assert head["total_blocks"] == summary["total_blocks"] and head["block_bytes"] == summary["block_bytes"]
    assert [group["kind"] for group in head["kv_groups"]] == [group["kind"] for group in summary["kv_groups"]]
    assert set(head) <= set(Head.__struct_fields__)


def test_a_journal_tells_what_a_window_gave_back_and_which_group_ended_a_hit(
    kvarts: Kvarts, trace: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert kvarts("replay", trace, *OPTIONS, "--kv-groups", "tails", "--run-dir", run)[0] == 0
    code, hits, _ = kvarts("story", run, "--hits")
    assert code == 0 and "not kept" in hits
    story = kvarts("story", run, "--request", "2")[1]
    assert "of window 1,024 given back" in story
    ended = kvarts("story", run, "--request", "3")[1]
    assert "as window 1,024 had no more; others could go on from" in ended
    assert "stored in window 1,024: 0 filled it" in kvarts("story", run, "--block", "0:20")[1]
    page = tmp_path / "page.html"
    assert kvarts("report", run, "--html", page)[0] == 0
    assert "seen, but not kept" in page.read_text()


def test_a_journal_tells_which_parts_of_a_block_were_stored_below(kvarts: Kvarts, trace: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, _, said = kvarts("replay", trace, *OPTIONS, "--kv-groups", "all", "--host-memory", "4GB", "--run-dir", run)
    assert code == 0, said
    assert verify_file(run / "timeline.json.gz").verdict == "ok"
    block = kvarts("story", run, "--block", "0:20")[1]
    assert "on its way to host in full" in block and "stored in host as well in full" in block
    assert "stored in host, of window 1,024" in kvarts("story", run, "--request", "0")[1]


@pytest.mark.parametrize("form", ["json", "jsonl", "parquet"])
def test_a_preemption_beside_a_load_says_what_is_promised_to_it(kvarts: Kvarts, tmp_path: Path, form: str) -> None:
    """Blocks that a request will need after its load are not in use, and not free for the request that preempts."""
    config = {
        "model_type": "gemma3_text", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000,
        "num_hidden_layers": 4, "intermediate_size": 128, "num_key_value_heads": 1, "head_dim": 24,
        "sliding_window": 33, "layer_types": ["sliding_attention"] * 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = [
        (10, 20, [3], "a"), (20, 17, [1, 2, 0, 0, 0], "a"), (70, 1, [0], "a"), (130, 20, [1, 2, 0], "b"),
        (190, 8, [1, 3, 3, 0], "a"), (200, 10, [2, 1], "a"),
    ]  # fmt: skip
    rows = [
        {"timestamp": ms, "input_length": len(ids), "output_length": count, "hash_ids": ids, "tenant": tenant}
        for ms, count, ids, tenant in asked
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    timeline = tmp_path / f"timeline.{form}"
    code, _, said = kvarts(
        "replay", trace, "--model", tmp_path / "config.json", "--device", "h100-80gb", "--trace-block-size", "1",
        "--page-size", "1", "--pages", "51", "--host-pages", "1", "--offload", "lazy", "--cost", "polynomial",
        "--timeline", timeline,
    )  # fmt: skip
    assert code == 0, said
    verdict = verify_file(timeline)
    assert verdict.verdict == "ok", verdict.to_text()
    if form == "jsonl":
        lines = [json.loads(line) for line in timeline.read_text().splitlines()]
        promised = [ask.get("promised_blocks", 0) for line in lines for ask in line.get("asked", ())]
        assert promised == [0, 0, 0, 2]


def test_models_that_share_a_device_have_journals_of_their_own_groups(
    kvarts: Kvarts, trace: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    models = ("--model", "a=gemma-3-27b:kv_groups=all", "--model", "b=gemma-3-4b:kv_groups=tails")
    traces = ("--trace", f"a={trace}", "--trace", f"b={trace}")
    place = ("--device", "h100-80gb", "--kv-memory", "3GB", "--page-size", "64", "--run-dir", run)
    code, _, said = kvarts("replay", *models, *traces, *place)
    assert code == 0, said
    for name in ("a", "b"):
        assert verify_file(run / name / "timeline.json.gz").verdict == "ok"
        assert "of window 1,024 given back" in kvarts("story", run / name, "--request", "3")[1]
    assert "not kept" in kvarts("story", run / "b", "--hits")[1]
