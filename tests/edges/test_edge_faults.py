"""Faults of the file system at every call in turn: the old file or the new one, and the right code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from builders.calls import CALLS, path_params, snapshot
from builders.faults import ERRORS, Disk, without_inodes

Run = Callable[..., tuple[int, bytes, str]]

WRITES: dict[str, tuple[str, ...]] = {
    "calibrate": (*CALLS["calibrate"].arguments, "--out", "x.toml"),
    "compare": (*CALLS["compare"].arguments, "--html", "x.html"),
    "replay": ("trace.jsonl", "--config", "config.toml", "--report", "x.json", "--requests", "y.jsonl", "--timeline",
               "z.json.gz", "--events", "e.jsonl"),
    "replay --run-dir": ("trace.jsonl", "--run-dir", "new"),
    "report": (*CALLS["report"].arguments, "--html", "x.html"),
    "soak": (*CALLS["soak"].arguments, "--json", "x.json", "--page", "x.html"),
    "mock": ("--record", "x.jsonl", "--set", "access_log=y.log"),
    "model show": CALLS["model show"].arguments,
    "serve sessions": ("--mock", "--kv-timeline", "z.json"),
    "story": CALLS["story"].arguments,
    **{
        f"plan {name}": (*CALLS[f"plan {name}"].arguments, "--html", "x.html")
        for name in ("curve", "fleet", "policies", "slo", "users")
    },
    "plan routers": (*CALLS["plan routers"].arguments, "--config", "config.toml"),
    "trace info": CALLS["trace info"].arguments,
    "watch": (*CALLS["watch"].arguments, "--events", "e.jsonl.gz", "--timeline", "t.jsonl", "--verdict", "x.json"),
    "why": CALLS["why"].arguments,
    **{
        name: (*CALLS[name].arguments, "--output", "x.jsonl")
        for name in ("trace anonymize", "trace convert", "trace merge", "trace scale", "trace slice")
    },
}  # fmt: skip
"""Calls that read and write as much as they can."""
NOT_HERE = {
    "profile": "real models",
    "generate": "real models",
    "serve model": "real models",
    "sweep": "its journal grows while it runs: see test_edge_survivors",
}
GROW = {"y.log", "z.json", "e.jsonl.gz", "t.jsonl"}
"""Files that grow while a command runs: after a fault they have what was written until then."""
CODES = {"mock": 0, "serve sessions": 0}
"""Where the calls of the table end otherwise, as they have no address."""
FAST = ("replay", "replay --run-dir", "report")


def test_the_table_has_every_command_with_files() -> None:
    with_files = {each.command for each in path_params("input", "output", "derived")} - set(NOT_HERE)
    assert with_files <= {*(name.removesuffix(" --run-dir") for name in WRITES), "verify"}


def words_of(name: str) -> list[str]:
    return [*name.removesuffix(" --run-dir").split(), *WRITES[name]]


def fail_at_each_call(
    name: str, here: Path, call: Run, monkeypatch: pytest.MonkeyPatch, errors: tuple[int, ...]
) -> None:
    if not CALLS[name.removesuffix(" --run-dir")].needs:
        pytest.skip("what the command needs is not installed")
    words = words_of(name)
    old = {path: b"old" for path in ("x.json", "x.toml", "y.jsonl", "e.jsonl", "x.html") if path in words}
    for path, data in old.items():
        (here / path).write_bytes(data)
    before = snapshot(here)
    with monkeypatch.context() as patch:
        disk = Disk(here, patch)
        with disk.failing(-1, 0):
            code, out, err = call(*words)
        assert code == CODES.get(name, CALLS[name.removesuffix(" --run-dir")].code), err
        num_calls = len(disk.calls)
        assert num_calls > 1
        after = snapshot(here)
        for error in errors:
            for place in range(num_calls):
                restore(here, before)
                with disk.failing(place, error):
                    got, printed, err = call(*words)
                failed = f"{disk.calls[place]} at {place} with {error}: {got} {err}"
                found = snapshot(here)
                if got == code:
                    assert found == after and printed == out, failed  # a fault that nothing depends on
                else:
                    assert got in (3, 4, 7), failed
                    assert err.count("\n") <= 2 and "Traceback" not in err, failed
                    assert os.strerror(error) in err and any(path in err for path in {*before, *after}), failed
                for each, held in found.items():
                    grows = each in GROW and (after[each] or b"").startswith((held or b"")[:9])
                    assert grows or held in (before.get(each, b"?"), after.get(each, b"?")), f"{each}: {failed}"
                if disk.calls[place] == "write":
                    assert got == 7, failed
                if disk.calls[place] == "read":
                    assert got == 4, failed
                if got != code:
                    assert (call(*words)[0], snapshot(here)) == (code, after), failed


def restore(here: Path, before: dict[str, bytes | None]) -> None:
    found = snapshot(here)
    for path in sorted(set(found) - set(before)):
        shutil.rmtree(here / path) if (here / path).is_dir() else (here / path).unlink(missing_ok=True)
    for path, data in before.items():
        if data is not None and found.get(path) != data:
            (here / path).write_bytes(data)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name != "report" else name for name in FAST]
)
def test_a_fault_at_each_call(name: str, here: Path, call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_each_call(name, here, call, monkeypatch, ERRORS[:1])


@pytest.mark.parametrize("name", FAST)
def test_without_inodes_nothing_changes_and_the_code_is_that_of_a_full_disk(
    name: str, here: Path, call: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(here)
    with monkeypatch.context() as patch:
        without_inodes(patch)
        code, _, err = call(*words_of(name))
    assert code == 7 and "No space left on device" in err and "Traceback" not in err, err
    assert snapshot(here) == before


@pytest.mark.long
@pytest.mark.parametrize("name", WRITES)
def test_every_fault_at_each_call(name: str, here: Path, call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_each_call(name, here, call, monkeypatch, ERRORS[:1] if name == "watch" else ERRORS)


@pytest.mark.parametrize("name", ["replay", "replay --run-dir", "report", "soak"])
def test_writes_that_take_less_at_a_time_lose_nothing(
    name: str, here: Path, call: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(*words_of(name))[0] == CALLS[name.removesuffix(" --run-dir")].code
    expected = snapshot(here)
    restore(here, {path: data for path, data in expected.items() if not path.startswith("new")})
    with monkeypatch.context() as patch:
        disk = Disk(here, patch)
        disk.is_short = True
        with disk.failing(-1, 0):
            assert call(*words_of(name))[0] == CALLS[name.removesuffix(" --run-dir")].code
    assert snapshot(here) == expected
