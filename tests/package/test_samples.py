"""Bundled traces by their names: everywhere a file is read, and what is said of a name that does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarts import load_trace
from kvarts.base.errors import MissingFileError
from kvarts.base.files import SAMPLES, located, read_bytes, where_samples_are
from kvarts.cli.replaying import OneRun, all_sections, read_settings
from kvarts.plan.calibrate.recorded_run import load_measured
from kvarts.sim.traffic.mooncake import load_mooncake


@pytest.mark.parametrize("name", SAMPLES)
def test_each_sample_is_a_trace_in_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(load_trace(f"sample:{name}").requests or ()) > 100


def test_a_sample_knows_what_its_hash_ids_stand_for() -> None:
    assert load_trace("sample:vllm-rtx4090").unit_tokens == 16
    assert load_mooncake("sample:mooncake").unit_tokens == 512


def test_files_beside_a_sample_have_names_too() -> None:
    assert len(load_measured("sample:vllm-rtx4090/requests.jsonl")) == 300
    assert b"[cost]" in read_bytes(Path("sample:vllm-rtx4090/cost.toml"))


def test_a_file_of_settings_may_name_a_sample(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('trace = "sample:azure-chat"\n')
    sections = all_sections()
    run = OneRun(read_settings(tmp_path / "c.toml", sections), None, sections)
    assert run.load()[0].name == "azure-conv-1000.csv"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sample:moncake", "Did you mean sample:mooncake?"),
        ("sample:zzz", "Bundled are sample:agents, sample:mooncake"),
        ("sample:vllm-rtx4090/nothing", "sample:vllm-rtx4090/requests.jsonl"),
        ("sample:vllm-rtx4090/../README.md", "Bundled are"),
        ("sample:mooncake/x", "Bundled are sample:mooncake."),
    ],
)
def test_an_unknown_sample_is_answered(name: str, hint: str) -> None:
    with pytest.raises(MissingFileError, match="is not bundled") as refused:
        located(name)
    assert hint in (refused.value.hint or "")


def test_a_file_that_does_not_exist_may_be_bundled() -> None:
    with pytest.raises(MissingFileError) as refused:
        load_trace("mooncake-conversation-1000.jsonl")
    assert refused.value.hint == "A trace of that name is bundled: sample:mooncake."
    assert "kvarts trace list" in where_samples_are("my.jsonl")
