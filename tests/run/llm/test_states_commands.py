"""Commands with a model of which layers keep a state: text, checks, profiles, and what is refused."""

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
    """A model of four layers, the first three with a state."""
    return tiny("qwen3-next")


def test_a_prompt_is_answered_as_by_itself(kvarts: Kvarts, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvarts.run.torch.check import generated

    code, text, said = kvarts("generate", "--model", directory, "--prompt", "the sea " * 8, "--max-tokens", 12,
                              "--set", "ignore_eos=true", "--kv-memory", "256KiB",
                              "--set", "kv_groups=all")  # fmt: skip
    assert code == 0, said
    assert "64 pages of 16 tokens in 0.2 MiB as 64 blocks of 4,096 bytes" in said
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    expected = generated(model, tokenizer("the sea " * 8)["input_ids"], 12)
    # The last character may be there in part.
    assert text.rstrip("\ufffd\n") == tokenizer.decode(expected).rstrip("\ufffd\n")


def test_guesses_change_no_text(kvarts: Kvarts, directory: Path) -> None:
    asked = ("generate", "--model", directory, "--prompt", "the sea " * 8, "--max-tokens", 40,
             "--set", "ignore_eos=true",
             "--kv-memory", "256KiB", "--set", "kv_groups=all")  # fmt: skip
    code, text, _ = kvarts(*asked)
    assert code == 0
    code, guessed, _ = kvarts(*asked, "--speculative-config", "ngram")
    assert (code, guessed) == (0, text)


@pytest.mark.long
def test_a_check_says_what_it_ran(kvarts: Kvarts, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = ("model", "check", directory, "--prompts", 8, "--max-tokens", 8, "--set", "kv_groups=all")
    code, printed, said = kvarts(*check)
    assert code == 0, said
    assert "states      3 layers; 16,896 bytes a sequence" in printed and "64 of 64 tokens" in printed
    values = json.loads(kvarts(*check, "--json")[1])
    assert (values["num_state_layers"], values["state_bytes"]) == (3, 16_896)
    assert values["num_cached_tokens"] > 0, "some prompt went on from a snapshot"

    from kvarts.core.sched.group_batch import GroupBatch

    take = GroupBatch.take_snapshots
    monkeypatch.setattr(
        GroupBatch,
        "take_snapshots",
        lambda batch: tuple(replace(one, num_tokens=one.num_tokens - 1) for one in take(batch)),
    )
    code, printed, _ = kvarts(*check)
    assert code == 5 and "DIFFERENT" in printed


def test_a_profile_counts_states(kvarts: Kvarts, directory: Path, tmp_path: Path) -> None:
    prompts, timeline = tmp_path / "prompts.jsonl", tmp_path / "blocks.jsonl"
    texts = ["once upon a time there was a sea " * 2 + str(number) for number in range(6)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    code, printed, said = kvarts(
        "profile", "--model", directory, "--prompts", prompts, "--max-tokens", 20, "--set", "ignore_eos=true",
        "--kv-memory", "160KiB", "--set", "kv_groups=all", "--kv-timeline", timeline)  # fmt: skip
    assert code == 0, said
    full, state = json.loads(printed)["kv_groups"]
    assert (full["kind"], full["layers"], full["part_blocks"]) == ("full", 1, 1)
    assert (state["kind"], state["layers"], state["part_blocks"]) == ("state", 3, 5)
    assert 2 <= state["peak_used_parts"] <= 6
    assert kvarts("verify", timeline)[0] == 0
    rows = list(map(json.loads, timeline.read_text().splitlines()))[1:-1]
    for row in rows:
        pages, states = row["group_used_parts"]
        assert row["used_blocks"] == pages + 5 * states


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--set", "kv_groups=off"], "--set kv_groups: qwen3_next has 3 layers that keep a state instead of tokens"),
        (["--set", "kv_groups=all", "--set", "layers=compiled"], "3 layers keep a state"),
    ],
)
def test_what_does_not_go_with_it_is_refused(kvarts: Kvarts, directory: Path, options: list[Any], told: str) -> None:
    code, printed, said = kvarts("generate", "--model", directory, "--prompt", "the sea", *options)
    assert code != 0 and not printed
    assert told in said and "Traceback" not in said
