"""Commands with `kv_groups`: the same text, timelines that hold, reports in blocks, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")


Kvarts = Callable[..., tuple[int, str, str]]


@pytest.fixture
def directory(tiny: Callable[[str], Path]) -> Path:
    """A model of four layers, every other of which sees 24 tokens."""
    return tiny("gemma3")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ["once upon a time there was a sea " * 6 + str(number % 3) for number in range(8)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def profile(kvarts: Kvarts, directory: Path, prompts: Path, kv_groups: str) -> dict[str, Any]:
    """The report of prompts in a memory that is too small for all; a timeline and a trace are beside them."""
    options = (
        "--model",
        directory,
        "--prompts",
        prompts,
        "--max-tokens",
        60,
        "--set",
        "ignore_eos=true",
        "--kv-memory",
        "640KiB",
    )
    files = ("--kv-timeline", prompts.with_suffix(f".{kv_groups}.jsonl"),
             "--set", f"write_trace={prompts.with_suffix('.' + kv_groups + '.trace')}")  # fmt: skip
    code, printed, said = kvarts("profile", *options, "--set", f"kv_groups={kv_groups}", *files)
    assert code == 0, said
    report = json.loads(printed)
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("kv_groups", ["all", "tails"])
def test_a_profile_counts_blocks_and_says_the_same(
    kvarts: Kvarts, directory: Path, prompts: Path, kv_groups: str
) -> None:
    plain, report = (profile(kvarts, directory, prompts, name) for name in ("off", kv_groups))
    timeline = prompts.with_suffix(f".{kv_groups}.jsonl")
    assert timeline.with_suffix(".trace").read_bytes() == prompts.with_suffix(".off.trace").read_bytes()
    assert report["config"]["kv_groups"] == kv_groups and "kv_groups" not in plain["config"]
    assert report["num_steps"] < plain["num_steps"]
    assert report["total_blocks"] == 2 * plain["config"]["pages"]
    window, full = report["kv_groups"]
    assert (window["kind"], window["tokens"], full["kind"]) == ("window", 24, "full")
    assert 0 < window["mean_used_parts"] < full["mean_used_parts"]

    assert kvarts("verify", timeline)[0] == 0
    head, *rows = map(json.loads, timeline.read_text().splitlines())
    assert head["total_blocks"] == report["total_blocks"]
    assert head["block_bytes"] == report["block_bytes"]
    for row in rows[:-1]:
        assert row["used_blocks"] == sum(row["group_used_parts"])
        assert row["cached_blocks"] == sum(row["group_cached_parts"])


def test_text_is_the_same_and_memory_is_told(kvarts: Kvarts, directory: Path) -> None:
    say = ("generate", "--model", directory, "--prompt", "the sea " * 20, "--max-tokens", 40,
           "--set", "ignore_eos=true",
           "--kv-memory", "256KiB")  # fmt: skip
    code, text, said = kvarts(*say, "--set", "kv_groups=all")
    assert (code, text) == kvarts(*say)[:2]
    assert "16 pages of 16 tokens in 0.2 MiB as 32 blocks of 8,192 bytes" in said


def test_host_memory_changes_no_token_and_is_in_timeline_and_report(
    kvarts: Kvarts, directory: Path, prompts: Path
) -> None:
    options = ("profile", "--model", directory, "--prompts", prompts, "--max-tokens", 30, "--set", "ignore_eos=true",
               "--kv-memory", "320KiB", "--set", "kv_groups=tails")  # fmt: skip
    timeline = prompts.with_suffix(".host.jsonl")
    traces = [prompts.with_suffix(name) for name in (".alone", ".below")]
    assert kvarts(*options, "--set", f"write_trace={traces[0]}")[0] == 0
    code, printed, said = kvarts(
        *options, "--host-memory", "4MiB", "--set", f"write_trace={traces[1]}", "--kv-timeline", timeline
    )
    assert code == 0, said
    assert traces[0].read_bytes() == traces[1].read_bytes()
    report = json.loads(printed)
    assert report["transfers"]["num_stores"] > 0
    stored = [report["transfers"][f"num_stored_parts_group{group}"] for group in range(2)]
    assert 0 < stored[0] < stored[1], "tails of the window, and all of the full layers"
    assert sum(stored) * report["block_bytes"] == report["transfers"]["bytes"]["d2h"]
    assert kvarts("verify", timeline)[0] == 0
    head, *rows = map(json.loads, timeline.read_text().splitlines())
    assert head["host_total_blocks"] == (4 << 20) // report["block_bytes"]
    assert 0 < max(row["host_cached_blocks"] for row in rows[:-1]) <= sum(stored)


def test_a_check_compares_with_generate(kvarts: Kvarts, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = ("model", "check", directory, "--prompts", 3, "--set")
    code, printed, said = kvarts(*check, "kv_groups=all")
    assert code == 0, said
    assert "KV groups   all: windows keep what they see" in printed and "48 of 48 tokens" in printed
    assert "KV groups" not in kvarts(*check, "kv_groups=off")[1]

    from kvarts.run.torch.block_cut import cut_blocks

    def too_short(*args: Any, **kwargs: Any) -> Any:
        cut = cut_blocks(*args, **kwargs)
        window, full = cut.memory.groups
        groups = (replace(window, layer=replace(window.layer, span=8)), full)
        return replace(cut, memory=replace(cut.memory, groups=groups))

    monkeypatch.setattr("kvarts.run.torch.room.cut_blocks", too_short)
    code, printed, _ = kvarts(*check, "kv_groups=all")
    assert code == 5 and "DIFFERENT" in printed


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--set", "kv_groups=some"], "--set kv_groups: must be off, all or tails, got 'some'"),
        pytest.param(
            ["--set", "kv_groups=all", "--host-memory", "1MiB", "--set", "disk_memory=1", "--set", "disk_path=."],
            "--set disk_memory: 1 bytes hold no block of",
        ),
        (["--set", "kv_groups=all", "--set", "layers=compiled"], "--set layers: "),
    ],
)
def test_what_does_not_go_with_it_is_refused(kvarts: Kvarts, directory: Path, options: list[str], told: str) -> None:
    code, printed, said = kvarts("generate", "--model", directory, "--prompt", "the sea", *options)
    assert code != 0 and not printed
    assert told in said and "Traceback" not in said
