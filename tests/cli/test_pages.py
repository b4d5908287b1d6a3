"""Pages that commands write, and `--open`."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., int]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    urls: list[str] = []

    def note(url: str) -> bool:
        urls.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", note)
    return urls


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}\n' * 5)
    return path


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_a_page_is_written_and_opened(
    command: str, trace: Path, tmp_path: Path, run_command: Run, opened: list[str]
) -> None:
    page = tmp_path / "page.html"
    assert run_command(command, trace, "--html", page) == 0
    assert page.read_bytes().startswith(b"<!") and opened == []
    assert run_command(command, trace, "--html", page, "--open") == 0
    assert opened == [page.as_uri()]


def test_the_page_of_a_replay_is_that_of_its_run_directory(trace: Path, tmp_path: Path, run_command: Run) -> None:
    run = tmp_path / "run"
    assert run_command("replay", trace, "--run-dir", run, "--html", tmp_path / "a.html") == 0
    assert run_command("replay", trace, "--html", tmp_path / "b.html") == 0
    assert run_command("report", run, "--html", tmp_path / "c.html") == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "c.html").read_bytes()
    assert run_command("replay", trace, "--html", tmp_path / "d.html") == 0
    assert (tmp_path / "b.html").read_bytes() == (tmp_path / "d.html").read_bytes()


def test_standard_output_cannot_be_opened(
    trace: Path, run_command: Run, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run_command("replay", trace, "--html", "-", "--open") == 2
    assert b"--open: opens a file" in capsysbinary.readouterr().err
    assert run_command("replay", trace, "--html", "-") == 0
    assert capsysbinary.readouterr().out.startswith(b"<!")


def test_where_there_is_no_browser_it_is_said(
    trace: Path, tmp_path: Path, run_command: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    page = tmp_path / "page.html"
    assert run_command("replay", trace, "--html", page, "--open") == 0
    assert f"found no browser; open {page} yourself" in capsys.readouterr().err
