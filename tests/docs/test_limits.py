"""The table of docs/limits.md: cells of refused features match the code's table, and commands do what cells claim."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kvarts.cli.main import main
from kvarts.core.parts.combines import FEATURES, PLACES, REFUSED

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
GEMMA = ("--model", "gemma-3-27b", "--device", "h100-80gb", "--kv-groups", "all")
LLAMA = ("--model", "llama-3.1-8b", "--device", "h100-80gb")
HYBRID = ("--model", "granite-4.0-h-tiny", "--device", "h100-80gb", "--set", "mamba_cache_mode=align")
EXPERTS = ("--model", "qwen3-30b-a3b", "--device", "h100-80gb")
ASKED: dict[str, dict[str, tuple[str, ...]]] = {
    "replay": {
        "kv_groups": GEMMA,
        "states_by_page": HYBRID,
        "tiers": ("--host-pages", "64"),
        "files": ("--host-pages", "64", "--set", "offload.disk_pages=64"),
        "orders": ("--eviction", "auto"),
        "layers": ("--host-pages", "64", "--set", "offload.load_overlap=layers"),
        "sync_loads": ("--host-pages", "64", "--set", "offload.load_kv=sync"),
        "drafts": (*LLAMA, "--set", "speculative_tokens=1", "--set", "acceptance=0.5"),
        "bound": ("--set", "max_itl_ms=9"),
        "mocker": ("--profile", "mocker"),
        "late_events": ("--replicas", "2", "--router", "prefix", "--set", "routing.event_lag=10ms"),
        "ahead": (
            "--set",
            "async_scheduling=true",
        ),
        "ranks": (*EXPERTS, "--set", "data_parallel=2"),
        "pipeline": (*LLAMA, "--set", "pipeline_parallel=2"),
    },
    "several": {
        "kv_groups": ("--model", "a=gemma-3-12b:kv_groups=all"),
        "states_by_page": ("--model", "a=granite-4.0-h-tiny:mamba_cache_mode=align"),
        "tiers": ("--host-pages", "64"),
        "files": ("--host-pages", "64", "--set", "offload.disk_pages=64"),
        "ahead": (
            "--set",
            "async_scheduling=true",
        ),
        "orders": ("--eviction", "auto"),
        "layers": ("--host-pages", "64", "--set", "offload.load_overlap=layers"),
        "sync_loads": ("--host-pages", "64", "--set", "offload.load_kv=sync"),
        "drafts": ("--model", "a=llama-3.1-8b:speculative_tokens=1,acceptance=0.5"),
        "bound": ("--set", "max_itl_ms=9"),
        "late_events": ("--replicas", "2", "--router", "prefix", "--set", "routing.event_lag=10ms"),
        "ranks": ("--set", "data_parallel=2"),
        "pipeline": ("--set", "pipeline_parallel=2"),
    },
}
"""Options that ask for a feature, by place."""
ASKED["fleet"] = {**ASKED["replay"], "late_events": ("--router", "prefix", "--set", "routing.event_lag=10ms")}
TRIES = [(place, feature) for place, features in ASKED.items() for feature in features]
FLEET = ("--prefill", "replicas=1", "--decode", "replicas=1")
SEVERAL = ("--device", "h100-80gb", "--trace", "a=tiny.jsonl", "--trace", "b=tiny.jsonl", "--model", "b=llama-3.1-8b")


def cells() -> dict[tuple[str, str], str]:
    """The cells of the page, by feature and place."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:1] == "|"]
    titles = [words.removeprefix("a ") for words in PLACES.values()]
    head = next(number for number, line in enumerate(lines) if line[1:] == titles)
    names = {feature.words: name for name, feature in FEATURES.items()}
    rows = lines[head + 2 : head + 2 + len(FEATURES)]
    return {(names[row[0]], place): text for row in rows for place, text in zip(PLACES, row[1:], strict=True)}


def test_every_cell_is_a_word_that_the_page_explains() -> None:
    assert set(cells()) == {(feature, place) for feature in FEATURES for place in PLACES}
    for text in cells().values():
        assert re.fullmatch(r"works(, but \d+(, \d+)*)?|refused \(\d+\)|-", text)


def test_refused_cells_are_those_of_the_code() -> None:
    for (feature, place), text in cells().items():
        refusals = [{name, place} for name in (feature, FEATURES[feature].part_of) if name]
        numbers = [number for number, refusal in enumerate(REFUSED, 1) if set(refusal.together) in refusals]
        assert re.findall(r"refused \((\d+)\)", text) == [str(number) for number in numbers[:1]], (feature, place)
        for number in re.findall(r"\d+", text):
            assert {feature, FEATURES[feature].part_of} & set(REFUSED[int(number) - 1].together)


@pytest.mark.parametrize(("place", "feature"), TRIES)
def test_a_command_does_what_its_cell_claims(
    place: str, feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        f'{{"timestamp": {number}, "input_length": 600, "output_length": 3, "hash_ids": [1, {number + 2}]}}\n'
        for number in range(4)
    ]
    Path("tiny.jsonl").write_text("".join(rows))
    words = ["--json", *ASKED[place][feature]]
    if place == "several":
        has_model = any(word.startswith("a=") and "json" not in word for word in words)
        words = [*SEVERAL, *words, *([] if has_model else ["--model", "a=llama-3.1-8b"])]
    else:
        words = ["tiny.jsonl", *words, *(FLEET if place == "fleet" else ())]
    monkeypatch.setattr(sys, "argv", ["kvarts", "replay", *words])
    code = main()
    assert code == (2 if cells()[feature, place].startswith("refused") else 0), capfd.readouterr().err
