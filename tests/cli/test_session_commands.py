"""`kvarts serve sessions`, on a runtime without an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
from kvarts.core.config import EngineOptions
from kvarts.doors.client import Sessions
from kvarts.run.sessions.values import SessionSettings

Run = Callable[..., tuple[int, str, str]]

SERVE = textwrap.dedent("""
    import sys
    from types import ModuleType

    from builders.fake_runtime import FakeRuntime

    class Runtime(FakeRuntime):
        async def shut_down(self):
            await super().shut_down()
            print("shut down", len(self.sessions), flush=True)

    opening = ModuleType("kvarts.run.sessions.opening")
    opening.open_sessions = lambda **settings: print(settings["defaults"], flush=True) or Runtime(
        defaults=settings["defaults"], step_s=0.01
    )
    sys.modules["kvarts.run.sessions.opening"] = opening
    from kvarts.cli.main import run

    sys.argv = ["kvarts", "serve", "sessions", *sys.argv[1:]]
    run()
""")


def start(*options: str) -> subprocess.Popen[str]:
    paths = [str(Path(__file__).parents[1]), *sys.path]
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, "--mock", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_says_where_it_listens_and_ends_in_good_order(number: signal.Signals) -> None:
    with start("--sink", "2", "--window", "8", "--set", "ttl=60") as process:
        try:
            assert process.stderr is not None and process.stdout is not None
            line = process.stderr.readline()
            assert line.startswith("kvarts: listening on 127.0.0.1:")
            assert line.endswith(" for sessions over gRPC (no TLS, no token is asked for)\n")
            assert process.stdout.readline() == f"{SessionSettings(sink=2, window=8, ttl_s=60.0)}\n"
            address = line.split()[3]
            with Sessions(address) as sessions:
                session = sessions.create()
                session.append([1])
                updates = session.generate(100_000)
                next(updates)
                process.send_signal(number)
                assert [type(update).__name__ for update in updates][-1] == "Done"
            output, errors = process.communicate(timeout=10)
        finally:
            process.kill()
    assert (process.returncode, output, errors) == (0, "shut down 1\n", "")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `open_sessions` is asked for; it refuses."""
    asked: list[dict[str, Any]] = []

    def open_sessions(*, say: Any, record: Any = None, **settings: Any) -> None:
        assert callable(say)
        asked.append(settings)
        raise KeyboardInterrupt

    opening = ModuleType("kvarts.run.sessions.opening")
    opening.open_sessions = open_sessions  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvarts.run.sessions.opening", opening)
    return asked


def test_options_are_what_a_runtime_is_opened_with(opened: list[dict[str, Any]], kvarts: Run, tmp_path: Path) -> None:
    engine = {"options": EngineOptions(), "at_capacity": "refuse"}
    assert kvarts("serve", "sessions", "--mock")[0] == 130
    assert opened.pop() == {"mock": True, "defaults": SessionSettings(), "max_sessions": 16_384, **engine}
    options = "--sink 0 --window all --set retention=pin --set past_max_positions=true --set max_sessions=9"
    options += (
        f" --session-memory 2GiB --set at_capacity=evict --state-dir {tmp_path} --set page_size=4 --dtype float32"
        " --set kv_groups=tails --set enforce_eager=true"
    )
    assert kvarts("serve", "sessions", "--model", "here", *options.split())[0] == 130
    assert opened.pop() == {
        **engine,
        "model": "here",
        "mock": False,
        "defaults": SessionSettings(sink=0, window=None, retention="pin", past_max_positions=True),
        "max_sessions": 9,
        "session_memory": 2 * 1024**3,
        "at_capacity": "evict",
        "state_dir": tmp_path,
        "options": EngineOptions(page_size=4, dtype="float32", kv_groups="tails", enforce_eager=True),
    }
    assert kvarts("serve", "sessions", "--mock", "--speedup", "2.5")[0] == 130
    assert opened.pop()["speedup"] == 2.5


@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        ("", 2, "model: give either. Give --model DIR or --mock."),
        ("--mock --model x", 2, "model: give either. Give --model DIR or --mock."),
        (
            "--model x --speedup 2",
            2,
            "--speedup: has no effect without --mock. Give --mock as well, or leave it out.",
        ),
        ("--mock --set positions=cache --window all", 2, "positions: 'cache' needs a window"),
        ("--mock --set ttl=0", 2, "ttl_s: must be above 0, got 0.0"),
        ("--mock --session-memory much", 2, "'much' is not a size in bytes"),
        ("--mock --host 0.0.0.0", 2, "host: other machines reach 0.0.0.0"),
        ("--mock --host here", 2, "host: other machines reach here"),
        ("--mock --tls-cert x.pem", 2, "--tls-cert: a certificate and its key go together."),
        ("--mock --tls-cert x.pem --tls-key y.pem", 3, "x.pem: no such file."),
        ("--mock --token-file none", 3, "none: no such file."),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    options: str, code: int, problem: str, opened: list[dict[str, Any]], kvarts: Run
) -> None:
    got, _, errors = kvarts("serve", "sessions", *options.split())
    assert (got, errors.count("\n")) == (code, 1)
    assert problem in errors
    assert opened == []


def test_without_grpc_a_line_says_what_to_install(kvarts: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    code, _, errors = kvarts("serve", "sessions", "--mock")
    assert code == 2
    assert errors.startswith("kvarts: sessions need gRPC (")
    assert errors.endswith("pip install 'kvarts[grpc]'.\n")
