"""A command line that is read without click means what it means for click."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvarts.cli.replay
import kvarts.cli.replaying
from kvarts.cli.commands import cli
from kvarts.cli.plain import plain_call
from kvarts.cli.replaying import OWN_SECTIONS
from kvarts.errors import ConfigError
from kvarts.settings import Given, settings_by_param, value_kind

SETTINGS = {setting.flag: setting for setting in settings_by_param(OWN_SECTIONS).values() if setting.flag is not None}
NUMBERS = ("0", "1", "2", "16", "007", "0.5", "1e3", "1e999", "nan", "-1", "+3", " 4", "1_000", "9" * 5000, "x", "")
NAMES = ("a", "llama-3.1-8b", "h100-80gb", "chat=llama-3.1-8b", "3GiB", "fp8", "linear:step_ms=3", "-", "--", "ü", "\t")


def words_of(flag: str) -> st.SearchStrategy[list[str]]:
    """An option with a value, which may be wrong, in either spelling."""
    kind = value_kind(SETTINGS[flag].kind) if flag in SETTINGS else str
    if kind is bool:
        return st.sampled_from([[flag], [flag, "1"], [f"{flag}=1"], [f"no-{flag}"]])
    choices = kind if isinstance(kind, tuple) else ()
    value = st.sampled_from([*NUMBERS, *NAMES, *choices, *choices])
    return value.flatmap(lambda text: st.sampled_from([[flag, text], [f"{flag}={text}"], [flag]]))


OTHERS = ["one.jsonl", "two.jsonl", "sample:agents", "--json", "--open", "-h", "--help-all", "--block-size", "--", "-"]
OPTIONS = [*SETTINGS, "--report", "--requests", "--report", "--requests", "--host-memory", "--config", "--html"]
WORDS = st.lists(
    st.one_of(
        st.sampled_from([["one.jsonl"], ["--json"], *([other] for other in OTHERS)]),
        st.sampled_from(OPTIONS).flatmap(words_of),
    ),
    max_size=4,
).map(lambda lists: [word for words in lists for word in words])


def meaning(run: Callable[[], object]) -> Any:
    """What would be replayed: settings with the spelling of each, trace, results; and the error about effects."""
    found: list[Any] = []

    def record(
        given: Given, trace: Path | None, sections: Any, parts: Any, places: Any, *, check_effects: Any, **more: Any
    ) -> int:
        values = {
            each: (given.value_of(each), given.source_of(each).spell(given.setting_of(each)))
            for section in sections
            for each in (setting.key for setting in section.settings)
            if each in given
        }
        error = None
        try:
            check_effects(lambda what: False)
        except ConfigError as refused:
            error = str(refused)
        assert set(more.values()) <= {None, False}
        found.append((values, list(values), trace, sections, tuple(parts), places, error))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvarts.cli.replaying, "run_replay", record)
        patch.setattr(kvarts.cli.replay, "run_replay", record)
        run()
    return found


@given(WORDS)
def test_what_is_read_without_click_is_what_click_reads(words: list[str]) -> None:
    call = plain_call(["replay", *words])
    if call is None:
        return
    assert meaning(call) == meaning(lambda: cli(["replay", *words], standalone_mode=False))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["one.jsonl"],
        ["one.jsonl", "--json", "--report", "r.json", "--requests=q.jsonl"],
        ["--model", "llama-3.1-8b", "--device=h100-80gb", "one.jsonl", "--slo-ttft-ms", "100", "--max-seqs", "8"],
        ["one.jsonl", "--audit", "--engine", "vllm", "--speedup", "1.5"],
    ],
)
def test_ordinary_command_lines_are_read_without_click(words: list[str]) -> None:
    assert plain_call(["replay", *words]) is not None


@pytest.mark.parametrize(
    "words",
    [["replay", "--help"], ["replay", "--host-pages", "9"], ["replay", "--model", "a=b"], ["replay", "--pages", "x"],
     ["replay", "a", "b"], ["replay", "\udcff"], ["replay", "--report", "-"], ["plan"], ["--help"], []],
)  # fmt: skip
def test_other_command_lines_are_left_to_click(words: list[str]) -> None:
    assert plain_call(words) is None


def test_completion_is_left_to_click(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_KVARTS_COMPLETE", "bash_source")
    assert plain_call(["replay"]) is None


def test_an_error_names_the_option_that_was_typed(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", "--speedup", "2", "--concurrency", "2") == 2
    assert "--speedup: a closed loop has no arrival times to speed up" in capsys.readouterr().err
    assert run_command("replay", "--memory-fraction", "0.5", "--pages", "9") == 2
    assert "--memory-fraction: has no effect with --pages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("long_s", "is_compiled", "says"), [(0.0, False, True), (0.0, True, False), (60.0, False, False)]
)
def test_a_long_replay_says_once_that_there_is_a_faster_build(
    long_s: float,
    is_compiled: bool,
    says: bool,
    run_command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(kvarts.cli.replaying, "LONG_S", long_s)
    monkeypatch.setattr(kvarts.cli.replaying, "is_compiled", lambda: is_compiled)
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}\n')
    assert run_command("replay", str(trace)) == 0
    assert capsys.readouterr().err.count("this is the interpreted build") == says
