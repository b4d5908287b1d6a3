"""`kvarts engine` as a process, behind a front end that is played here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

import kvarts

from builders.fake_front_end import FakeFrontEnd
from builders.ports import free_port
from builders.tiny_model import tiny_model

pytestmark = pytest.mark.slow
PROMPT = list(range(300, 370))


@contextmanager
def engine(directory: Path, front: FakeFrontEnd, *options: str) -> Iterator[subprocess.Popen[str]]:
    model = tiny_model(directory / "model")
    words = [sys.executable, "-m", "kvarts", "engine", "--handshake", front.handshake, "--model", str(model), "--cost",
             "linear:step_ms=1", "--pages", "64", *options]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(kvarts.__file__).parents[1])}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_it_serves_publishes_its_blocks_and_ends_by_a_signal(tmp_path: Path) -> None:
    port = free_port()
    with (
        FakeFrontEnd("0.33.0") as front,
        zmq.Context() as context,
        context.socket(zmq.SUB) as events,
        engine(tmp_path, front, "--kv-events", f"tcp://127.0.0.1:{port}") as own,
    ):
        events.setsockopt(zmq.RCVTIMEO, 20_000)
        events.connect(f"tcp://127.0.0.1:{port}")
        events.subscribe(b"")
        front.shake_hands()
        assert front.told["num_gpu_blocks"] == 64
        number = 0
        while not events.poll(100):  # until the subscription has arrived
            number += 1
            front.add(str(number), [number, *PROMPT])
            front.answers(str(number))
            assert number < 100
        _, _, payload = events.recv_multipart()
        (stored,) = msgspec.msgpack.decode(payload)[1]
        assert stored["type"] == "BlockStored"
        assert stored["block_size"] == 16
        own.send_signal(signal.SIGTERM)
        assert own.wait(20.0) == 0
        while not front.outputs().get("dead"):
            pass


def test_it_ends_with_its_front_end(tmp_path: Path) -> None:
    with FakeFrontEnd("0.32.0") as front, engine(tmp_path, front, "--set", "vllm_version=0.32") as own:
        front.shake_hands()
        front.close()
        assert own.wait(20.0) == 1
        assert own.stderr is not None
        assert "the front end has ended" in own.stderr.read()


def test_no_front_end_is_an_error(tmp_path: Path) -> None:
    with FakeFrontEnd("0.33.0") as front, engine(tmp_path, front, "--set", "front_end_start=1") as own:
        assert own.wait(30.0) == 2
        assert own.stderr is not None
        assert "no front end has answered within 1 s" in own.stderr.read()


def test_rank_and_its_number_of_ranks(tmp_path: Path) -> None:
    with FakeFrontEnd("0.33.0") as front:
        with engine(tmp_path, front, "--rank", "1", "--set", "ranks=2") as own:
            front.shake_hands()
            assert front._identity == b"\x01\x00"
            assert (front.told["data_parallel_rank"], front.told["data_parallel_size"]) == (1, 2)
            own.send_signal(signal.SIGTERM)
            assert own.wait(20.0) in (0, 143), "143 if it still starts"
        with engine(tmp_path, front, "--rank", "1") as own:
            assert own.wait(20.0) == 2
