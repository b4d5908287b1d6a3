"""SIGINT, SIGTERM and kill -9 at random moments of every command that writes: the old files, or whole new ones."""

from __future__ import annotations

import asyncio
import builtins
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import kvarts
from kvarts.cli.process import handle_signals

from builders.calls import CALLS, commands, path_params, snapshot
from builders.forked import fork, run_forked, wait_for

WRITING: dict[str, tuple[str, ...]] = {
    "calibrate": (*CALLS["calibrate"].arguments, "--out", "x.toml"),
    "compare": (*CALLS["compare"].arguments, "--html", "x.html"),
    "profile": (
        *CALLS["profile"].arguments, "--record", "x.jsonl", "--set", "write_trace=y.jsonl",
        "--kv-timeline", "live.jsonl",
    ),
    "replay": (
        "--report", "x.json", "--requests", "y.jsonl", "--timeline", "z.json.gz", "--events", "e.jsonl", "--run-dir",
        "new", "--pages", "2000",
    ),
    "report": (*CALLS["report"].arguments, "--html", "x.html"),
    "soak": ("--virtual", "--duration", "10m", "--json", "x.json", "--page", "x.html"),
    "model tiny": ("new",),
    **{
        name: (*CALLS[name].arguments, "--html", "x.html")
        for name in ("plan curve", "plan fleet", "plan policies", "plan slo", "plan users")
    },
    **{
        name: (*CALLS[name].arguments, "--output", "x.jsonl")
        for name in ("trace anonymize", "trace convert", "trace merge", "trace scale", "trace slice")
    },
}  # fmt: skip
"""Each command that writes, and a call that writes all it can."""
LIVE = {"live.jsonl"}
"""What is there while it is written: it says so."""
SERVERS = {"mock", "serve model", "serve sessions", "watch"}
"""They run until a signal ends them: see tests/doors/grpc and tests/doors/watch."""
SIGNALS = {signal.SIGINT: {130}, signal.SIGTERM: {143}, signal.SIGKILL: {-signal.SIGKILL}}


def test_the_table_has_every_command_that_writes() -> None:
    writing = {each.command for each in path_params("output", "derived")} | ({"model tiny"} & set(commands()))
    assert writing - SERVERS == set(WRITING)
    assert writing >= SERVERS
    assert set(WRITING) <= set(commands())


def check(folder: Path, number: signal.Signals, before: dict[str, bytes | None], whole: set[str]) -> None:
    """Assert that nothing is half there. `whole`: what a complete run leaves, new or as it was."""
    after = snapshot(folder)
    for path, data in before.items():
        assert after.get(path) == data or path in whole, f"{path} was changed"
    for path in set(after) - set(before) - LIVE:
        is_hidden = any(part.startswith(".kvarts-") for part in Path(path).parts)
        if number != signal.SIGKILL:
            assert not is_hidden, f"{path} was left"
        assert is_hidden or path in whole or (number == signal.SIGKILL and path == "new"), f"{path} was left"


def hit(name: str, err: Path, number: signal.Signals, after_s: float) -> None:
    arguments = [*name.split(), *WRITING[name]]
    process = fork(arguments, err)
    time.sleep(after_s)
    os.kill(process, number)
    ended = wait_for(process, err)
    # Soak takes the first signal for the end of the run, which is judged then.
    allowed = SIGNALS[number] | {0} | ({5, 6} if name == "soak" else set())
    assert ended.code in allowed, (ended.code, ended.err)
    assert "Traceback" not in ended.err
    assert "Exception ignored" not in ended.err


def strike(name: str, folder: Path, tmp_path: Path, number: signal.Signals, times: int) -> None:
    if not CALLS[name].needs:
        pytest.skip("what the command needs is not installed")
    err = tmp_path / "err"
    if "tiny" in WRITING[name]:
        assert run_forked(["model", "tiny", "tiny"], err).code == 0
    before = snapshot(folder)
    begin_s = time.monotonic()
    assert run_forked([*name.split(), *WRITING[name]], err).code in (0, 6), err.read_text()
    lasts_s = time.monotonic() - begin_s
    whole = set(snapshot(folder)) - set(before)
    chance = random.Random(f"{name} {number}")
    for _ in range(times):
        clear(folder, before)
        hit(name, err, number, chance.random() * lasts_s)
        check(folder, number, before, whole)
        for path in whole & set(snapshot(folder)):
            assert (folder / path).is_dir() or (folder / path).stat().st_size or path in LIVE, f"{path} is empty"
    # What a killed process left keeps nothing from being done again.
    assert run_forked([*name.split(), *WRITING[name]], err).code in (0, 6, 7)


def clear(folder: Path, before: dict[str, bytes | None]) -> None:
    import shutil

    for path in sorted(set(snapshot(folder)) - set(before)):
        if (folder / path).is_dir():
            shutil.rmtree(folder / path)
        else:
            (folder / path).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("replay", signal.SIGTERM),
        *(pytest.param("replay", number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGKILL)),
        *(("report", number) for number in SIGNALS),
    ],
)
def test_signals_at_some_moments(name: str, number: signal.Signals, here: Path, tmp_path: Path) -> None:
    strike(name, here, tmp_path, number, 2)


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("name", WRITING)
def test_signals_at_two_hundred_moments(name: str, number: signal.Signals, here: Path, tmp_path: Path) -> None:
    strike(name, here, tmp_path, number, 200)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("delay_s", [0.03, 0.1])
def test_a_signal_while_the_command_is_loaded(number: signal.Signals, code: int, delay_s: float, here: Path) -> None:
    """From the first line of kvarts on; what the interpreter does before that is its own."""
    script = "import sys, kvarts.__main__ as m; sys.stdout.write('.'); sys.stdout.flush(); m.run()"
    command = [sys.executable, "-c", script, "replay", "--pages", "2000", "--run-dir", "new"]
    environment = {**os.environ, "PYTHONPATH": str(Path(kvarts.__file__).resolve().parents[1])}
    # A suite that runs in the background of a shell ignores SIGINT, and what it starts would, too.
    before = signal.signal(number, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    finally:
        signal.signal(number, before)
    with process:
        assert process.stdout is not None
        process.stdout.read(1)
        time.sleep(delay_s)
        process.send_signal(number)
        _, err = process.communicate()
    assert (process.returncode, b"Traceback" in err) == (code, False), err
    assert not Path("new").exists()


STRUCK = """
import signal, sys
import kvarts.__main__ as m

class Strikes:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(Strikes)
            signal.raise_signal(number)

module, number = sys.argv.pop(1), int(sys.argv.pop(1))
sys.meta_path.insert(0, Strikes)
signal.signal(signal.SIGINT, signal.default_int_handler)
m.run()
"""
"""Raises a signal when a module is imported: its arguments are the module's name, the signal's number, the command."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("module", ["datetime", "kvarts.base.settings"])
def test_a_signal_while_a_module_is_imported(module: str, number: signal.Signals, code: int, here: Path) -> None:
    """msgspec does not notice that its import of `datetime` was interrupted, and would crash when it converts."""
    command = [sys.executable, "-c", STRUCK, module, str(int(number)), "replay", "--pages", "2000", "--run-dir", "new"]
    environment = {**os.environ, "PYTHONPATH": str(Path(kvarts.__file__).resolve().parents[1])}
    ended = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (ended.returncode, b"Traceback" in ended.stderr) == (code, False), ended.stderr
    assert not Path("new").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", ["handle_signals", "main"])
def test_a_signal_before_or_after_all_that_handles_it(
    moment: str, number: signal.Signals, code: int, here: Path, tmp_path: Path
) -> None:
    """Between the first handler and the command, and between the command and the end of the process."""

    def prepare() -> None:
        def strike() -> None:
            if moment == "handle_signals":
                handle_signals()
            signal.raise_signal(number)

        pytest.MonkeyPatch().setattr(f"kvarts.cli.main.{moment}", strike)

    ended = run_forked(["model", "list"], tmp_path / "err", prepare)
    assert (ended.code, "Traceback" in ended.err) == (code, False), ended.err


@pytest.mark.parametrize("call", ["open", "mkdir", "rename", "replace", "rmdir"])
@pytest.mark.parametrize("nth", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_signal_right_after_a_call_of_the_file_system(call: str, nth: int, here: Path, tmp_path: Path) -> None:
    """Before its result is known: what was made is removed all the same."""
    before = snapshot(here)
    real = getattr(os, call)
    calls = []

    def then_strike(path: Any, *rest: Any, **options: Any) -> Any:
        result = real(path, *rest, **options)
        if call != "open" or rest[0] & os.O_CREAT:
            calls.append(path)
            if len(calls) == nth:
                signal.raise_signal(signal.SIGTERM)
        return result

    def prepare() -> None:
        pytest.MonkeyPatch().setattr(os, call, then_strike)

    ended = run_forked(["replay", *WRITING["replay"]], tmp_path / "err", prepare)
    assert ended.code in (143, 0)
    left = set(snapshot(here)) - set(before)
    assert not any(".kvarts-" in path for path in left)
    if ended.code:
        # A directory that was made in the moment before is empty; a file has all that it would have.
        assert left <= {"new", "x.json", "y.jsonl", "z.json.gz", "e.jsonl"}
        assert all((here / path).is_dir() or (here / path).stat().st_size for path in left)


@pytest.mark.skipif(not CALLS["calibrate"].needs, reason="needs SciPy")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_became_another_error(number: signal.Signals, code: int, here: Path, tmp_path: Path) -> None:
    """As it does while an extension module is loaded: what was imported is not there, and no package lacks."""

    import_module = builtins.__import__

    def load(name: str, *rest: Any, **options: Any) -> Any:
        if name != "scipy.optimize":
            return import_module(name, *rest, **options)
        try:
            return signal.raise_signal(number)
        except BaseException:
            raise ImportError("not initialised") from None

    def prepare() -> None:
        pytest.MonkeyPatch().setattr(builtins, "__import__", load)

    ended = run_forked(["calibrate", *WRITING["calibrate"]], tmp_path / "err", prepare)
    said = "interrupted" if number == signal.SIGINT else "terminated"
    assert (ended.code, ended.err.strip()) == (code, f"kvarts: {said}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_between_a_coroutine_and_its_loop(
    number: signal.Signals, code: int, here: Path, tmp_path: Path
) -> None:
    """What is collected then has not been awaited, a file not closed, a loop half made: all go without a word."""

    def run(coroutine: object) -> None:
        file = Path("trace.jsonl").open("rb")  # noqa: SIM115, F841
        loop = asyncio.SelectorEventLoop.__new__(asyncio.SelectorEventLoop)  # noqa: F841
        signal.raise_signal(number)

    def prepare() -> None:
        pytest.MonkeyPatch().setattr("asyncio.run", run)

    ended = run_forked(["soak", *WRITING["soak"]], tmp_path / "err", prepare)
    said = "interrupted" if number == signal.SIGINT else "terminated"
    assert (ended.code, ended.err.strip().splitlines()[-1:]) == (code, [f"kvarts: {said}"]), ended.err
    assert all(word not in ended.err for word in ("never awaited", "ResourceWarning", "Exception ignored"))


@pytest.mark.skipif(not CALLS["model tiny"].needs, reason="needs PyTorch")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_pytorch_is_loaded(number: signal.Signals, code: int, here: Path, tmp_path: Path) -> None:
    """An exception there would end the process by SIGABRT."""
    import_module = builtins.__import__

    def load(name: str, *rest: Any, **options: Any) -> Any:
        if name == "torch":
            try:
                signal.raise_signal(number)
            except BaseException:
                os.kill(os.getpid(), signal.SIGKILL)
        return import_module(name, *rest, **options)

    def prepare() -> None:
        pytest.MonkeyPatch().setattr(builtins, "__import__", load)

    ended = run_forked(["model", "tiny", "new"], tmp_path / "err", prepare)
    said = "interrupted" if number == signal.SIGINT else "terminated"
    assert (ended.code, ended.err.strip()) == (code, f"kvarts: {said}")
    assert not Path("new").exists()


def test_two_processes_do_not_share_a_run_directory(here: Path, tmp_path: Path) -> None:
    errs = [tmp_path / "first", tmp_path / "second"]
    for _ in range(3):
        processes = [fork(["replay", "trace.jsonl", "--run-dir", "new"], err) for err in errs]
        codes = [wait_for(process, err).code for process, err in zip(processes, errs, strict=True)]
        assert sorted(codes) in ([0, 7], [7, 7])
        assert 0 in codes or not Path("new").exists()
        clear(here, {path: None for path in snapshot(here) if not path.startswith("new")})
