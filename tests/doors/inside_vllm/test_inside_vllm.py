"""kvarts' tiers in a real vLLM on a CPU, with tiny random models: the same tokens as without tiers, and hits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvarts.doors.watch.metrics import parse_metrics

from builders.ports import free_port
from builders.vllm_python import vllm_environment, vllm_python

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[2] / "builders" / "vllm_engine.py"
WINDOWED = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
}
MODELS: dict[str, dict[str, Any]] = {"full": {}, "windowed": WINDOWED}
BLOCKS = {"full": 48, "windowed": 96}
"""Blocks of the device, too few to keep every prompt."""
PROMPTS = [Random(index).choices(range(1000), k=300) for index in range(6)]
LONGER = [prompt + [5] * 40 for prompt in PROMPTS]
ROUNDS = [PROMPTS, PROMPTS, LONGER]


class Engine:
    """One vLLM in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    def line(self) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line == "ready\n" or line.startswith("{"):
                return line
        raise AssertionError(self.log.read_text()[-3000:])

    def ask(self, prompts: list[list[int]]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": 8}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.line())
        assert answer.get("used", 0) == 0, "something is pinned, and nothing runs"
        return answer


@contextmanager
def engine(
    folder: Path, model: str = "full", tiers: dict[str, Any] | None = None, ports: list[int] | None = None
) -> Iterator[Engine]:
    settings: dict[str, Any] = {"folder": str(folder / model), "model": MODELS[model], "blocks": BLOCKS[model]}
    settings |= {"tiers": tiers, "ports": ports}
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [vllm_python(), SCRIPT, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=vllm_environment(),
        )
    started = Engine(process, log)
    try:
        assert started.line() == "ready\n"
        yield started
        if process.poll() is None:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(600) == 0
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module", params=list(MODELS))
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    """A model, and the tokens of every round without tiers."""
    with engine(tmp_path_factory.mktemp("without"), request.param) as plain:
        return request.param, [plain.ask(prompts)["tokens"] for prompts in ROUNDS]


def test_host_memory_gives_the_same_tokens_and_hits(expected: tuple[str, list[Any]], tmp_path: Path) -> None:
    model, tokens = expected
    with engine(tmp_path, model, {"host_memory": "64MB"}) as tiered:
        answers = [tiered.ask(prompts) for prompts in ROUNDS]
    assert [answer["tokens"] for answer in answers] == tokens
    assert min(answers[1]["cached"]) >= 288 and min(answers[2]["cached"]) >= 288
    assert answers[2]["counts"]["loaded"] > 0 and answers[2]["counts"]["evicted"] == 0
    # vLLM's registry has what the tiers had counted when the last step was planned.
    sample = parse_metrics(answers[2]["metrics"])
    assert sample.tier_pages["loaded"] == answers[2]["counts"]["loaded"]
    assert 0 < sample.tier_resident["host"] <= answers[2]["stored"]
    assert sample.num_loaded_bytes and sample.num_loaded_bytes % sample.tier_pages["loaded"] == 0


def test_tiers_that_are_too_small_give_the_same_tokens(expected: tuple[str, list[Any]], tmp_path: Path) -> None:
    model, tokens = expected
    tiers = {"host_memory": "1MB", "directory": str(tmp_path / "pages"), "disk": "2MB"}
    with engine(tmp_path, model, tiers) as tiered:
        answers = [tiered.ask(prompts) for prompts in ROUNDS]
    assert [answer["tokens"] for answer in answers] == tokens
    assert answers[2]["counts"]["evicted"] > 0
    assert sum(path.stat().st_size for path in (tmp_path / "pages").rglob("*.kv")) <= 2e6


def test_after_kill_9_pages_are_found_in_files(expected: tuple[str, list[Any]], tmp_path: Path) -> None:
    model, tokens = expected
    tiers = {"host_memory": "64MB", "directory": str(tmp_path / "pages"), "disk": "64MB"}
    with engine(tmp_path, model, tiers) as first:
        assert first.ask(PROMPTS)["tokens"] == tokens[0]
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    paths = sorted((tmp_path / "pages").rglob("*.kv"))
    assert len(paths) >= 6 * 9
    for path in paths[::20]:  # some prompts keep all of their pages
        text = bytearray(path.read_bytes())
        text[-1] ^= 1
        path.write_bytes(text)
    with engine(tmp_path, model, tiers) as second:
        answers = [second.ask(prompts) for prompts in ROUNDS]
    assert [answer["tokens"] for answer in answers] == tokens
    assert sum(answers[0]["cached"]) > 0 and answers[0]["counts"]["broken"] > 0


def test_watch_verify_and_story_follow_the_tiers(tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"host_memory": "1MB", "directory": str(tmp_path / "pages"), "disk": "2MB"}
    tiers["self_describing_kv_events"] = True
    ports = [free_port() for _ in range(3)]
    published, replayed, metrics = (f"127.0.0.1:{port}" for port in ports)
    command = [sys.executable, "-m", "kvarts"]
    watch = [
        *command,
        "watch",
        f"tcp://{published}",
        "--set",
        "bind=true",
        "--replay",
        f"tcp://{replayed}",
        "--json",
        "--set",
        "quiet=true",
    ]
    watch += ["--metrics", f"http://{metrics}/metrics", "--events", "journal.jsonl", "--timeline", "timeline.jsonl"]
    with engine(tmp_path, tiers=tiers, ports=ports) as tiered:
        watching = subprocess.Popen(watch, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        wait_until_listening(ports[0])
        for prompts in (*ROUNDS, PROMPTS):
            answer = tiered.ask(prompts)
        time.sleep(2.0)  # the last batches are published in a thread
        watching.send_signal(signal.SIGTERM)
        verdict = json.loads(watching.communicate(timeout=60)[0])
    assert verdict["verdict"] == "ok", verdict
    assert answer["counts"]["evicted"] > 0 and answer["counts"]["promoted"] > 0
    verified = subprocess.run(
        [*command, "verify", "timeline.jsonl"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0, verified.stdout
    story = [*command, "story", "journal.jsonl", "--block", "stream-0:3"]
    told = subprocess.run(story, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    for said in ("stored in host as well", "stored in disk as well", "gone from host"):
        assert said in told


def wait_until_listening(port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens at port {port}")


def test_a_directory_that_takes_nothing_leaves_host_memory(tmp_path: Path) -> None:
    tiers = {"host_memory": "64MB", "directory": str(tmp_path / "pages"), "disk": "64MB"}
    with engine(tmp_path, tiers=tiers) as tiered:
        (folder,) = (tmp_path / "pages").iterdir()
        for number in range(256):
            (folder / f"{number:02x}").write_text("in the way")
        tiered.ask(PROMPTS)
        answer = tiered.ask(PROMPTS)
    assert min(answer["cached"]) == 288 and answer["counts"]["written"] == 0


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ({}, "kv_connector_extra_config.host_memory: is missing"),
        ({"host_memory": "1kB"}, "do not hold one chunk"),
        ({"host_memory": "1MB", "disk": "1MB"}, "kv_connector_extra_config.directory: is missing"),
        ({"host_memory": "1MB", "hots_memory": 1}, "kv_connector_extra_config.hots_memory: is not known"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, tiers: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError) as raised, engine(tmp_path, tiers=tiers):
        pass
    assert said in (tmp_path / "log").read_text(), raised.value
