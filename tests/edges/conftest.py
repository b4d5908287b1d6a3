from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvarts.cli.main import main
from kvarts.core.config import EngineConfig

from builders.calls import commands, make_files

Run = Callable[..., tuple[int, bytes, str]]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the calls of all commands read."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)

        def run(arguments: Sequence[object]) -> int:
            patch.setattr(sys, "argv", ["kvarts", *map(str, arguments)])
            return main()

        make_files(folder, run)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, and the working directory."""
    folder = tmp_path / "here"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def call(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `kvarts` with these arguments: its exit code, what it printed, and what it said beside."""

    def run(*arguments: Any) -> tuple[int, bytes, str]:
        monkeypatch.setattr(sys, "argv", ["kvarts", *map(str, arguments)])
        code = main()
        captured = capfdbinary.readouterr()
        return code, captured.out, captured.err.decode("utf-8", "replace")

    return run


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ends after one request: what it reads and writes is opened."""

    async def serve(settings: dict[str, Any], *_: object) -> None:
        settings["record"](EngineConfig(num_pages=4), {})

    async def ask(app: Any) -> None:
        from kvarts.doors.openai.http import HttpRequest, HttpResponse, Wire

        wire = Wire(asyncio.Transport())
        wire.is_lost = True
        response = HttpResponse(wire, has_body=True, is_last=False, has_chunks=True, ended=lambda: None)
        await app(HttpRequest("GET", "/health", b"", [], wire), response)
        app.close()

    def serve_http(opened: Any, address: object, values: dict[str, Any], **_: object) -> None:
        asyncio.run(ask(opened.app))
        if opened.recorder is not None:
            opened.recorder.write(values["record"])

    if "serve sessions" in commands():
        monkeypatch.setattr("kvarts.cli.serve_sessions._serve", serve)
    if "mock" in commands():
        monkeypatch.setattr("kvarts.cli.mock.serve_http", serve_http)
        for name in ("access.time", "access.monotonic", "app.monotonic"):
            monkeypatch.setattr(f"kvarts.doors.openai.{name}", lambda: 0.0)
        monkeypatch.setattr("kvarts.doors.openai.app.new_id", lambda: "an-id")
