from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvarts.cli.main import main

pytest.register_assert_rewrite("builders.models")

settings.register_profile(
    "fast", max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("many", parent=settings.get_profile("fast"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("KVARTS_HYPOTHESIS", "fast"))


@pytest.fixture(scope="session")
def conversation_trace() -> Path:
    """The whole Mooncake conversation trace, where it is at hand: see KVARTS_DATA in CONTRIBUTING."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("KVARTS_DATA", default)) / "mooncake" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path}; set KVARTS_DATA to a folder with mooncake/conversation_trace.jsonl")
    return path


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `kvarts` with these arguments; its exit code."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["kvarts", *map(str, arguments)])
        return main()

    return run
