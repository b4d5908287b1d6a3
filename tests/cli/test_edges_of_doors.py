"""Values that sessions, their clients, a watch and long computations refuse, by the rule that every command has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
pytest.importorskip("zmq", reason="needs kvarts[serve]")

from kvarts.base.errors import ConfigError
from kvarts.doors.watch.sockets import EngineStream
from kvarts.plan.calibrate.experiment import MOST_STEPS
from kvarts.plan.grid import MOST_POINTS

SESSIONS = ("serve", "sessions", "--mock", "--port", "0")
WATCH = ("watch", "--duration", "0.1")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        *(((*SESSIONS, "--speedup", value), 2, "speedup: must be a finite number")
          for value in ("0", "nan", "inf", "-5")),
        ((*WATCH, "tcp://127.0.0.1:99999"), 2, "is no port that can be used"),
        ((*WATCH, "tcp://127.0.0.1:0"), 2, "is no port that can be used"),
        ((*WATCH, "tcp://127.0.0.1:5557", "--replay", "tcp://127.0.0.1:0"), 2, "is no port that can be used"),
        ((*WATCH, "tcp://127.0.0.1:5557", "--metrics", "x"), 2, "is not a URL of HTTP"),
        ((*WATCH, "tcp://127.0.0.1:5557", "--metrics", "file:///etc/passwd"), 2, "is not a URL of HTTP"),
        ((*WATCH, "tcp://127.0.0.1:5557", "--set", "topic=\udcff"), 2, "topic: is not text in UTF-8"),
        (("mock", "--port", "0", "--fail", f"first {'9' * 5000}: 429"), 2, "names no requests"),
    ],
)  # fmt: skip
def test_values_that_cannot_be(
    arguments: tuple[str, ...], code: int, says: str, run_command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*arguments) == code
    error = capsys.readouterr().err
    assert says in error and len(error) < 1000


def test_points_of_a_sweep_are_counted_before_they_are_made(
    run_command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = list(range(1, 201))
    grid = "\n".join(f"{key} = {values}" for key in ("pages", "page_size", "max_seqs", "speedup"))
    (tmp_path / "sweep.toml").write_text(f'trace = "trace.jsonl"\n[grid]\n{grid}\n')
    begin = time.perf_counter()
    assert run_command("sweep", str(tmp_path / "sweep.toml"), "-o", str(tmp_path / "out")) == 4
    assert time.perf_counter() - begin < 5.0
    assert f"has 1,600,000,000 points, and {MOST_POINTS:,} are run at most" in capsys.readouterr().err


def test_steps_of_a_design_are_counted_before_they_are_replayed(
    run_command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    on = ("--model", "llama-3.1-8b", "--device", "h100-80gb")
    begin = time.perf_counter()
    assert run_command("calibrate", "--design", *on, "--max-batched-tokens", "1", "--set", "max_seqs=1") == 2
    assert time.perf_counter() - begin < 5.0
    assert f"steps, and {MOST_STEPS:,} are replayed at most" in capsys.readouterr().err


def test_a_stream_refuses_what_the_command_does() -> None:
    wrong: list[dict[str, Any]] = [
        {"endpoint": "tcp://127.0.0.1:99999"},
        {"endpoint": "tcp://127.0.0.1:1", "topic": "\udcff"},
    ]
    for settings in wrong:
        with pytest.raises(ConfigError):
            EngineStream(**settings)
