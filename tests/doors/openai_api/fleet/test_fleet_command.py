"""`kvarts mock --fleet`: what it serves, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders.http_client import OpenStream, call
from builders.kv_event_client import open_client
from builders.server_process import Process, kvarts_process, python_process

pytest.importorskip("zmq")

Run = Callable[..., int]
FLEET = """
pages = 400
page_size = 16
cost = "linear:step_ms=2,chunk_token_ms=0.02"

[transfer]
rate = "1GB/s"
token_bytes = 131072

[[pool]]
role = "prefill"
replicas = 2
router = "dynamo-kv"

[[pool]]
role = "decode"
replicas = 2
pages = 200
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    return path


def urls_of(process: Process) -> list[str]:
    """The URLs of the router and of the workers."""
    process.wait_for(r"worker 3 \(decode\) on http")
    return re.findall(r"http://127\.0\.0\.1:\d+", "".join(process.lines))


def test_a_fleet_is_served_recorded_and_replayed(file: Path, tmp_path: Path, run_command: Run) -> None:
    record, rows_file = tmp_path / "run.jsonl", tmp_path / "rows.jsonl"
    with kvarts_process("mock", "--fleet", str(file), "--port", "0", "--record", str(record)) as process:
        urls = urls_of(process)
        assert len(urls) == 5

        def ask(number: int) -> None:
            text = f"hello {'the world ' * (20 + number % 5 * 30)}"
            body: dict[str, Any] = {"prompt": text, "max_tokens": 5 + number}
            url = urls[0] if number % 4 else urls[4]
            if not number % 4:
                asked = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
                body["kv_transfer_params"] = call(urls[1], "/v1/completions", asked).json["kv_transfer_params"]
            assert call(url, "/v1/completions", body).status == 200

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        finished = [requests_of(url) for url in urls[1:]]
        assert process.stop() == 0
    assert not any("Traceback" in line for line in process.lines)
    command = ("replay", record, "--config", file, "--requests", rows_file, "--report", tmp_path / "report.json")
    assert run_command(*command) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["num_completed"] == 25
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    prompts = [sum(row["prefill_replica"] == worker for row in rows) for worker in range(2)]
    answers = [sum(row["replica"] == worker and row["output_tokens"] > 1 for row in rows) for worker in (2, 3)]
    # The five prompts that were left at worker 0 have a row of their own, and the requests that fetched them another.
    assert [prompts[0] - 5, prompts[1], *answers] == finished


def requests_of(url: str) -> int:
    text = call(url, "/metrics").payload.decode()
    return int(sum(map(float, re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.MULTILINE))))


def test_each_worker_publishes_its_own_kv_events(file: Path) -> None:
    events = ("--kv-events", "tcp://127.0.0.1:0", "--set", "kv_events_replay=tcp://127.0.0.1:0")
    with kvarts_process("mock", "--fleet", str(file), "--port", "0", *events) as process:
        urls = urls_of(process)
        sources = call(urls[0], "/kv_event_sources?form=list").json
        assert [source["endpoint"] for source in sources] == [
            call(url, "/kv_event_sources?form=list").json[0]["endpoint"] for url in urls[1:]
        ]
        assert len({source["endpoint"] for source in sources}) == 4
        assert call(urls[0], "/v1/completions", {"prompt": "hello " * 100, "max_tokens": 2}).status == 200
        held = []
        for source in sources:
            with open_client(source["endpoint"], source["replay_endpoint"]) as client:
                held.append(sum(b"BlockStored" in payload for _, _, payload in client.replay(0)))
        assert [sum(map(bool, of_pool)) for of_pool in (held[:2], held[2:])] == [1, 1]
        assert process.stop() == 0


def test_a_signal_waits_for_requests_under_way(file: Path) -> None:
    with kvarts_process("mock", "--fleet", str(file), "--port", "0", "--set", "drain=20") as process:
        urls = urls_of(process)
        body = {"prompt": "hello", "max_tokens": 400, "stream": True, "ignore_eos": True}
        streams = [OpenStream(url, "/v1/completions", body) for url in (urls[0], urls[4])]
        for each in streams:
            each.begin()
        process.popen.terminate()
        for each in streams:
            assert each.read().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            each.close()
        assert process.popen.wait(30) == 0


@pytest.mark.parametrize(
    ("more", "text", "said"),
    [
        ((), "pages = 100\n", "has no pools"),
        (("--model", "a=llama-3.1-8b"), FLEET, "does not go with several models on a device"),
        (("--set", "session_window=64"), FLEET, "--set session_window: does not go with a fleet"),
        (("--set", "max_sessions=3"), FLEET, "--set max_sessions: does not go with a fleet"),
        ((), '[[pool]]\nrole = "prefill"\n', "leaves a fleet of prefill workers only"),
        ((), "[[pool]]\nrole = 1\n", "role"),
        ((), "[transfer]\nhold_s = -1\n[[pool]]\n[[pool]]\nrole='prefill'\n[[pool]]\nrole='decode'\n", "hold_s"),
    ],
)
def test_what_it_does_not_do_is_refused(
    more: tuple[str, ...], text: str, said: str, file: Path, run_command: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert run_command("mock", "--fleet", file, "--port", "0", *more) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(file: Path, run_command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run_command("mock", "--fleet", file, "--port", port - 1) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_the_guide_works_as_it_stands_there(tmp_path: Path, run_command: Run) -> None:
    text = (Path(__file__).parents[4] / "docs" / "guide-fleet.md").read_text()
    _, _, text = text.partition("## The same fleet on the wall clock")
    config, serve, side_car, replay = re.findall(r"^```(?:toml|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "fleet.toml").write_text(config)
    command = serve.split("#")[0].replace("8000", "0").split()
    with python_process(*command, cwd=tmp_path) as server:
        urls = urls_of(server)
        _, *code, end = side_car.splitlines()
        assert end == "END"
        ports = {f"{8000 + number}": url.rpartition(":")[2] for number, url in enumerate(urls)}
        text = re.sub(r"\b800\d\b", lambda found: ports[found[0]], "\n".join(code))
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) == 8
        assert server.stop() == 0
    words = [tmp_path / word if word.endswith((".jsonl", ".toml")) else word for word in replay.split()[1:]]
    assert run_command(*words) == 0
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [(row["prefill_replica"], row["replica"]) for row in rows] == [(0, 0), (0, 2)]
