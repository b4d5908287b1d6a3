"""A sweep that was killed anywhere, or runs elsewhere, gives the table of one that was not, and leaves no process."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.plan.grid import run_sweep

SAMPLE = Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))
CONFIG = """
trace = "trace.jsonl"
page_size = 512
cost = "linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,context_token_ms=0"

[grid]
pages = [400, 600, 800, 1200, 1600, 2400]
speedup = [1.0, 4.0]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "trace.jsonl").write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:150]))
    path = tmp_path / "sweep.toml"
    path.write_text(CONFIG)
    return path


def tables(directory: Path) -> list[bytes]:
    return [
        (directory / name).read_bytes() for name in ("points.json", "points.parquet") if (directory / name).exists()
    ]


def sweep(config: Path, directory: Path, *more: object) -> list[str]:
    return [sys.executable, "-m", "kvarts", "sweep", str(config), "-o", str(directory), *map(str, more)]


def square(point: dict[str, Any]) -> dict[str, Any]:
    return {"y": point["x"] ** 2}


def test_a_line_that_has_changed_is_not_believed(tmp_path: Path) -> None:
    """Each byte of a journal is changed in turn, to each of a few others: the rows are the same."""
    points: list[dict[str, Any]] = [{"x": 3}, {"x": -1}]
    journal = tmp_path / "journal.jsonl"
    rows = run_sweep(points, square, journal, workers=1)
    whole = journal.read_bytes()
    for place in range(len(whole)):
        for other in (whole[place] ^ 1, whole[place] ^ 128, ord("["), ord("\n")):
            journal.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
            assert run_sweep(points, square, journal, workers=1) == rows
    for line in (b"[" * 100_000, b'{"key":"a","row":' + b"[" * 100_000, b'{"key":"a","row":3,"checksum":0}'):
        journal.write_bytes(line + b"\n" + whole)
        assert run_sweep(points, square, journal, workers=1) == rows


@given(st.data())
def test_any_beginning_of_a_journal_is_gone_on_from(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Rows that were written whole are not run again, whatever was being written when the process was killed."""
    journal = tmp_path_factory.mktemp("sweep") / "journal.jsonl"
    points = [{"x": x, "text": "\u00e5\n"} for x in range(6)]
    ran: list[int] = []

    def run(point: dict[str, Any]) -> dict[str, Any]:
        ran.append(point["x"])
        return {"y": point["x"] / 3, "text": point["text"]}

    rows = run_sweep(points, run, journal, workers=1)
    whole = journal.read_bytes()
    for cut in data.draw(st.lists(st.integers(0, len(whole)), min_size=1, max_size=3)):
        kept = journal.read_bytes()[:cut]
        journal.write_bytes(kept)
        ran.clear()
        assert run_sweep(points, run, journal, workers=1) == rows
        assert len(ran) == len(points) - len({key for line in kept.split(b"\n") for key in key_of(line)})


def key_of(line: bytes) -> list[str]:
    """The key in a line of a journal, if the line is whole."""
    try:
        return [json.loads(line)["key"]]
    except ValueError:
        return []


@pytest.mark.long
def test_a_sweep_that_is_killed_at_random_gives_the_same_table_and_leaves_no_process(
    config: Path, tmp_path: Path, run_command: Callable[..., int]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_command("sweep", config, "-o", whole, "--workers", 1) == 0
    journal = cut / "journal.jsonl"
    chance = random.Random(5)
    num_killed = 0
    for num_rows in (1, 7):
        with subprocess.Popen(
            sweep(config, cut, "--workers", 2), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            until = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < until:
                if journal.exists() and journal.read_bytes().count(b"\n") >= num_rows:
                    time.sleep(chance.random() * 0.1)
                    break
                time.sleep(0.005)
            workers = children(process.pid)
            process.send_signal(signal.SIGKILL)
            num_killed += process.wait() == -signal.SIGKILL
        until = time.monotonic() + 20
        while any(map(is_running, workers)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(is_running, workers))
    assert num_killed
    assert run_command("sweep", config, "-o", cut, "--workers", 1) == 0
    assert tables(whole) == tables(cut)
    keys = [key for line in journal.read_bytes().splitlines() for key in key_of(line)]
    assert len(keys) == len(set(keys)) == 12


def children(process_id: int) -> list[int]:
    """The processes below one, where /proc has them."""
    path = Path(f"/proc/{process_id}/task/{process_id}/children")
    return [int(text) for text in path.read_text().split()] if path.exists() else []


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process_id}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def end(point: dict[str, Any]) -> dict[str, Any]:
    """A point that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    return point


def test_a_worker_that_is_killed_is_told(tmp_path: Path) -> None:
    from kvarts.base.errors import OutputError

    with pytest.raises(OutputError, match="a worker process has ended"):
        run_sweep([{"x": 1}, {"x": 2}], end, tmp_path / "journal.jsonl", workers=2)


@pytest.mark.long
def test_eight_workers_give_the_same_bytes(config: Path, tmp_path: Path, run_command: Callable[..., int]) -> None:
    for workers in (1, 8):
        assert run_command("sweep", config, "-o", tmp_path / str(workers), "--workers", workers) == 0
    assert tables(tmp_path / "1") == tables(tmp_path / "8")


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'kvarts[ray]'")
def test_a_cluster_of_two_nodes_gives_the_same_bytes(
    config: Path, tmp_path: Path, run_command: Callable[..., int]
) -> None:
    from ray.cluster_utils import Cluster

    assert run_command("sweep", config, "-o", tmp_path / "one", "--workers", 1) == 0
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        command = sweep(config, tmp_path / "ray", "--ray", cluster.address)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        cluster.shutdown()
    assert tables(tmp_path / "one") == tables(tmp_path / "ray")


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'kvarts[ray]'")
def test_workers_of_ray_that_are_killed_lose_nothing_and_a_point_that_kills_its_worker_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.cluster_utils import Cluster

    from kvarts.base.errors import OutputError

    # Its workers import this module.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    journal = tmp_path / "journal.jsonl"
    try:
        killed = tmp_path / "killed"
        points = [{"x": x, "killed": str(killed)} for x in range(6)]
        rows = run_sweep(points, dies_once, tmp_path / "once.jsonl", workers=1, ray_address=cluster.address)
        assert rows == [{"y": x**2} for x in range(6)] and killed.exists()
        with pytest.raises(OutputError, match="a worker of the Ray cluster has ended before its point was done"):
            run_sweep([{"x": 1}], end, journal, workers=1, ray_address=cluster.address)
        assert not ray.is_initialized()
    finally:
        cluster.shutdown()


def dies_once(point: dict[str, Any]) -> dict[str, Any]:
    """A worker that is killed in the first attempt at a point."""
    if point["x"] == 3 and not Path(point["killed"]).exists():
        Path(point["killed"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return square(point)
