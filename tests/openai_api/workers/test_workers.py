"""Several workers behind one port: any of them answers for all."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvarts.openai_api.workers.together import merged

from builders import preforked
from builders.http_client import OpenStream, call, events_of
from builders.server_process import Process, kvarts_process, python_process

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
FAST = ("--pages", "512", "--cost", "linear:step_ms=1", "--port", "0", "--served-model-name", "mock")
MANY = 24
"""Connections, of which each worker has some: that one has none is as likely as 1 in 8 million."""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel shares out connections")


@contextmanager
def workers(*options: str, num: int = 2) -> Iterator[tuple[Process, str]]:
    with kvarts_process("mock", "--workers", str(num), *FAST, *options) as process:
        yield process, process.wait_for(r"(http://[\d.:]+)/v1")[1]
        if process.popen.poll() is None:
            process.stop()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, str]]:
    """Two workers that all tests ask, with no import before their start."""
    with python_process("kvarts", "mock", "--workers", "2", *FAST, "--allow-failures") as process:
        yield process, process.wait_for(r"(http://[\d.:]+)/v1")[1]
        process.stop()


def metrics(url: str) -> str:
    return call(url, "/metrics").payload.decode()


def values_of(text: str, name: str) -> dict[str, float]:
    """The values of a series by its labels."""
    return {labels: float(value) for labels, value in re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", text, re.M)}


def ranks_of(text: str, name: str) -> list[str]:
    return sorted(re.search(r'engine="(\d+)"', labels)[1] for labels in values_of(text, name))  # type: ignore[index]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_metrics_of_any_worker_are_those_of_all(pair: tuple[Process, str]) -> None:
    _, url = pair
    name = "vllm:generation_tokens_total"
    before = sum(values_of(metrics(url), name).values())
    for number in range(MANY):
        call(url, COMPLETIONS, {"prompt": f"number {number}", "max_tokens": 5, "ignore_eos": True})
    for _ in range(MANY):  # whichever worker answers
        text = metrics(url)
        of_engines = values_of(text, name)
        assert ranks_of(text, name) == ["0", "1"]
        assert all(value > 0 for value in of_engines.values()), of_engines
        assert sum(of_engines.values()) == before + 5 * MANY
    assert values_of(text, "kvarts:workers") == {"": 2.0}
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len({line.rpartition(" ")[0] for line in lines}) == len(lines), "a series is there once"
    types = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(set(types)) == len(types), "a family is there once"
    assert values_of(text, "process_resident_memory_bytes")[""] > 30e6
    call(url, "/metrics", method="HEAD")


def test_the_metrics_parse_as_prometheus_reads_them(pair: tuple[Process, str]) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(metrics(pair[1]))}
    assert len(families["vllm:num_requests_running"].samples) == 2
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"


def test_a_response_is_found_and_continued_on_any_connection(pair: tuple[Process, str]) -> None:
    _, url = pair
    ids = []
    for number in range(8):
        made = call(url, RESPONSES, {"input": f"Say {number}.", "max_output_tokens": 4}).json
        ids.append(made["id"])
        for _ in range(6):
            assert call(url, f"{RESPONSES}/{made['id']}").json == made
        more = call(url, RESPONSES, {"input": "More.", "previous_response_id": made["id"], "stream": True})
        assert b"response.completed" in more.payload and more.status == 200
    assert {response_id[-2:] for response_id in ids} == {"00", "01"}
    for response_id in ids:
        assert call(url, f"{RESPONSES}/{response_id}", method="DELETE").json["deleted"]
    for response_id in ids:
        assert call(url, f"{RESPONSES}/{response_id}").status == 404
    assert call(url, f"{RESPONSES}/resp_unknown").status == 404


@pytest.mark.parametrize(
    "payload",
    [
        b'{"input": "a", "session_id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"input": "a", "previous_response_id": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
        b'{"input": "previous_response_id", "other": ' + b"[" * 100_000,
        b'{"input": "a", "session_id": "\xff"}',
        b'{"input": "a", "session_id": [1, 2]}',
        b'{"input": "a", "session_id": 7}',
    ],
)
def test_a_body_that_is_wrong_where_it_decides_on_the_worker_is_refused(
    pair: tuple[Process, str], payload: bytes
) -> None:
    refused = call(pair[1], RESPONSES, payload)
    assert refused.status == 400 and refused.error


def test_a_script_of_failures_is_refused_however_its_name_is_written(pair: tuple[Process, str]) -> None:
    refused = call(pair[1], "/admin/config", b'{"f\\u0061il": "all: 503"}')
    assert (refused.status, refused.error["param"]) == (400, "fail")


def test_metrics_are_merged_whatever_the_labels_are() -> None:
    label = "# HELP a b\u2028c\x85d\x0ce"
    page = (
        f'# HELP one It is one.\n# TYPE one gauge\none{{name="{label}"}} 1.0\n# HELP two It is two.\n# TYPE two gauge\n'
    )
    page += "two 2.0\n"
    told = merged([page.encode(), page.encode()]).decode()
    assert told.startswith(page) and told.count(label) == 1


def test_the_turns_of_a_session_are_of_one_worker(pair: tuple[Process, str]) -> None:
    _, url = pair
    for name in ("red", "green", "blue"):
        text = f"The history of {name} begins here, and it is long enough for a page of tokens, or even two. " * 3
        for turn in range(4):
            header = {"x-session-id": name} if turn % 2 else {}
            body = {"prompt": text, "max_tokens": 4, "stream": turn == 3} | ({} if header else {"session_id": name})
            reply = call(url, COMPLETIONS, body, headers=header)
            assert reply.status == 200
            if turn == 3:
                events_of(reply.payload)
            else:
                usage = reply.json["usage"]
                cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
                assert cached > 0 if turn else cached == 0
                text += reply.json["choices"][0]["text"] + " And on."
    assert sum(values_of(metrics(url), "kvarts:sessions").values()) == 3


def test_what_changes_the_server_changes_all_workers(pair: tuple[Process, str]) -> None:
    _, url = pair
    assert call(url, "/sleep", {}).status == 200
    assert all(call(url, "/is_sleeping").json["is_sleeping"] for _ in range(MANY))
    assert call(url, "/wake_up", {}).status == 200
    assert not any(call(url, "/is_sleeping").json["is_sleeping"] for _ in range(MANY))
    names = [f"adapter-{number}" for number in range(6)]
    for name in names:
        assert call(url, "/v1/load_lora_adapter", {"lora_name": name}).status == 200
    for _ in range(MANY):
        assert [model["id"] for model in call(url, "/v1/models").json["data"]] == ["mock", *names]
        assert call(url, "/v1/load_lora_adapter", {"lora_name": names[0]}).status == 400
    assert call(url, "/metrics").status == 200
    assert call(url, "/admin/config", {"max_queued": 77}).json["max_queued"] == 77
    told = [call(url, "/admin/config").json for _ in range(MANY)]
    assert all(each == told[0] for each in told) and told[0]["max_queued"] == 77
    assert "one order" in call(url, "/admin/config", {"fail": "all: 503"}).error["message"]
    call(url, "/reset_prefix_cache", {})
    assert sum(values_of(metrics(url), "kvarts:pages").values()) == 1024


def test_load_and_the_live_page_are_of_all_workers(pair: tuple[Process, str]) -> None:
    _, url = pair
    endless = {"prompt": "on and on", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    streams = [OpenStream(url, COMPLETIONS, endless) for _ in range(6)]
    try:
        for stream in streams:
            assert stream.begin().startswith(b"HTTP/1.1 200")
        assert all(call(url, "/load").json == {"server_load": 6} for _ in range(MANY))
        engines = call(url, "/live").json
        assert [engine["name"] for engine in engines] == ["mock 0", "mock 1"]
        assert sum(len(engine["holders"]) for engine in engines) == 6
        call(url, "/abort_requests", {})
        wait_for(lambda: call(url, "/load").json == {"server_load": 0})
    finally:
        for stream in streams:
            stream.close()


def test_a_client_that_leaves_ends_its_relayed_request(pair: tuple[Process, str]) -> None:
    _, url = pair
    body = {"prompt": "left", "max_tokens": 5000, "ignore_eos": True, "stream": True, "session_id": "left"}
    for _ in range(6):
        with OpenStream(url, COMPLETIONS, body) as stream:
            assert stream.begin().startswith(b"HTTP/1.1 200")
        wait_for(lambda: call(url, "/load").json == {"server_load": 0})


def test_a_failure_is_the_same_on_any_connection(pair: tuple[Process, str]) -> None:
    _, url = pair
    for _ in range(6):
        body = {"prompt": "a", "max_tokens": 4, "session_id": "failing"}
        assert call(url, COMPLETIONS, body, headers={"x-kvarts-fail": "429"}).status == 429
        with pytest.raises((OSError, Exception)):
            call(url, COMPLETIONS, body, headers={"x-kvarts-fail": "drop"})


def test_keys_are_asked_for_whichever_worker_answers() -> None:
    with workers("--api-key", "mine", "--admin-key", "theirs") as (_, url):
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
        for number in range(6):
            name = {"session_id": f"s{number}"}
            body = {"prompt": "a", "max_tokens": 2, **name}
            assert call(url, "/health").status == 200
            assert [call(url, path).status for path in ("/metrics", "/load", "/admin/config")] == [401] * 3
            assert call(url, COMPLETIONS, body).status == 401
            assert call(url, COMPLETIONS, body, headers=mine).status == 200
            assert ranks_of(call(url, "/metrics", headers=mine).payload.decode(), "kvarts:steps_total") == ["0", "1"]
            assert call(url, "/sleep", {}, headers=mine).status == 403
            assert call(url, "/reset_prefix_cache", {}, headers=theirs).status == 200


def test_one_dead_engine_makes_every_worker_unhealthy() -> None:
    with workers("--allow-failures") as (process, url):
        assert all(call(url, "/health").status == 200 for _ in range(8))
        call(url, COMPLETIONS, {"prompt": "a", "max_tokens": 4}, headers={"x-kvarts-fail": "die"})
        assert all(call(url, "/health").status == 503 for _ in range(MANY))
        assert process.popen.poll() is None


def test_a_worker_that_is_killed_ends_the_server() -> None:
    with workers() as (process, _):
        os.kill(children_of(process.popen.pid)[1], signal.SIGKILL)
        assert process.popen.wait(20) == 137
        assert "worker 1 was ended by signal 9: all others end as well" in "".join(process.lines)


def test_workers_end_if_their_parent_is_killed() -> None:
    with workers() as (process, url):
        pids = children_of(process.popen.pid)
        process.popen.kill()
        wait_for(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))
        with pytest.raises(ConnectionRefusedError):
            call(url, "/health")


def test_a_signal_lets_requests_of_all_workers_end() -> None:
    with workers("--drain", "20") as (process, url):
        body = {"prompt": "slow", "max_tokens": 400, "ignore_eos": True, "stream": True}
        streams = [OpenStream(url, COMPLETIONS, body | {"session_id": f"s{number}"}) for number in range(8)]
        for stream in streams:
            assert stream.begin().startswith(b"HTTP/1.1 200")
        pids = children_of(process.popen.pid)
        assert process.stop() == 0
        assert all(stream.read().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for stream in streams)
        for stream in streams:
            stream.close()
        assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)


def test_a_key_of_the_terminal_ends_them_once() -> None:
    with workers() as (process, url):
        with OpenStream(
            url, COMPLETIONS, {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}
        ) as one:
            assert one.begin().startswith(b"HTTP/1.1 200")
            process.popen.send_signal(signal.SIGINT)
            assert one.read().endswith(b"0\r\n\r\n")
        assert process.popen.wait(20) == 0


def test_every_request_is_logged_once(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    with workers("--access-log", str(log)) as (process, url):
        for number in range(MANY):
            call(url, COMPLETIONS, {"prompt": "a", "max_tokens": 1, "session_id": f"s{number}"})
        call(url, "/metrics")
        call(url, "/sleep", {})
        process.stop()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["path"] for line in lines) == sorted([COMPLETIONS] * MANY + ["/metrics", "/sleep"])
    assert all(line["client"] == "127.0.0.1" and line["status"] == 200 for line in lines)


def test_each_worker_publishes_the_events_of_its_engine(tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    options = ("--kv-events", f"ipc://{tmp_path}/events", "--kv-events-replay", f"ipc://{tmp_path}/replay")
    with workers(*options) as (_, url):
        for _ in range(8):
            sources = call(url, "/kv_event_sources").json
            assert sorted(sources) == ["0", "1"]
            assert [sources[rank]["data_parallel_rank"] for rank in ("0", "1")] == [0, 1]
            assert sources["1"]["endpoint"] == f"ipc://{tmp_path}/events_dp1"
        assert len(call(url, "/kv_event_sources?form=list").json) == 2


def run(*options: str) -> tuple[int, str]:
    done = preforked.run("mock", "--workers", "2", *options)
    return done.returncode, done.stderr


def rules(tmp_path: Path, rule: dict[str, Any]) -> str:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps([rule]))
    return str(path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--fail all:503", "--fail: does not go with several workers"),
        ("--record DIR/arrived.jsonl", "--record: does not go with several workers"),
        (
            "--record-from http://127.0.0.1:1/v1 --recordings DIR/a.jsonl",
            "--record-from: does not go with several workers",
        ),
        ("--state-dir DIR/there", "--state-dir: does not go with several workers"),
        ("--model a=llama-3.1-8b --model b=llama-3.1-8b", "--workers: does not go with several models"),
        ("--kv-events tcp://127.0.0.1:5557 --kv-events-replay tcp://127.0.0.1:5558", "further apart"),
    ],
)
def test_what_does_not_combine_is_refused(tmp_path: Path, options: str, told: str) -> None:
    code, text = run(*options.replace("DIR", str(tmp_path)).split())
    assert code == 2 and told in text, text


def test_rules_with_a_number_of_uses_are_refused(tmp_path: Path) -> None:
    code, text = run("--answers", rules(tmp_path, {"text": "once", "times": 1}))
    assert code == 2 and "uses are counted in one process" in text


def test_an_error_of_all_workers_is_told_once(tmp_path: Path) -> None:
    code, text = run("--port", "0", "--pages", "64", "--kv-events", f"ipc://{tmp_path}/no/where")
    assert code == 2 and text.count("kvarts: ") == 1, text


def test_a_port_in_use_is_refused(pair: tuple[Process, str]) -> None:
    code, text = run("--port", pair[1].rpartition(":")[2])
    assert code == 2 and "cannot listen on 127.0.0.1" in text
