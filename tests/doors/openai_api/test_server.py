"""A server over HTTP: errors, keys, clients that go, queues that are full, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvarts.base.clock import Clock, PacedClock
from kvarts.core.sampling import SamplingParams
from kvarts.doors.openai.running import RunningServer
from kvarts.doors.openai.served import Ask

from builders import preforked
from builders.http_client import OpenStream, call, raw

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def hello(**more: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 4, **more}


def live(server: RunningServer) -> int:
    return int(call(server.url, "/load").json["server_load"])


def wait_for(condition: Any, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/nothing", {}, 404, None),
        ("/v1/models/other", None, 404, "model"),
        ("/health", b"", 405, None),
        (COMPLETIONS, b"{", 400, None),
        (COMPLETIONS, b"\xff\xfe", 400, None),
        (COMPLETIONS, b'{"prompt": "\xff"}', 400, None),
        (COMPLETIONS, b"[]", 400, None),
        (COMPLETIONS, b"[" * 100_000, 400, None),
        (COMPLETIONS, {}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 3]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [1 << 32]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [10**30]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt"),
        (COMPLETIONS, hello(max_tokens=0), 400, "max_tokens"),
        (COMPLETIONS, hello(max_tokens="4"), 400, "max_tokens"),
        (COMPLETIONS, hello(max_tokens=1 << 40), 400, "max_tokens"),
        (COMPLETIONS, hello(n=0), 400, "n"),
        (COMPLETIONS, hello(n=1000), 400, "n"),
        (COMPLETIONS, hello(temperature=-1), 400, "temperature"),
        (COMPLETIONS, hello(top_p=0), 400, "top_p"),
        (COMPLETIONS, hello(stop=["", "a"]), 400, "stop"),
        (COMPLETIONS, hello(logprobs=99), 400, "logprobs"),
        (COMPLETIONS, hello(model="other"), 404, "model"),
        (CHAT, {}, 400, "messages"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400, "messages[0].content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, 400, "tool_choice"),
        ("/v1/responses", {}, 400, "input"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_none"}, 404, "previous_response_id"),
        ("/tokenize", {}, 400, "prompt"),
        ("/detokenize", {"tokens": [-4]}, 400, "tokens"),
        ("/detokenize", {}, 400, None),
        ("/admin/config", {"colour": "red"}, 400, "colour"),
        ("/admin/config", {"fail": "sometimes"}, 400, None),
        ("/admin/config", {"max_queued": "many"}, 400, "max_queued"),
        ("/v1/unload_lora_adapter", {"lora_name": "none"}, 404, "lora_name"),
    ],
)
def test_every_error_is_the_same_envelope(
    server: RunningServer, path: str, body: Any, status: int, param: str | None
) -> None:
    server.excuse("missing retry")
    reply = call(server.url, path, body, headers={"x-request-id": "abc"})
    assert (reply.status, reply.error["param"]) == (status, param), reply.payload
    assert reply.headers["x-request-id"] == "abc"
    assert call(server.url, COMPLETIONS, hello()).status == 200


def test_what_is_no_http_is_refused_in_the_envelope(server: RunningServer) -> None:
    answer = raw(server.url, b"NONSENSE\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 400


def test_a_request_that_can_never_fit_is_refused_with_a_reason(start: Any) -> None:
    server = start(pages=8, page_size=16)
    assert (
        "maximum context length is 128 tokens"
        in call(server.url, COMPLETIONS, {"prompt": [1] * 127, "max_tokens": 9}).error["message"]
    )
    assert call(server.url, COMPLETIONS, {"prompt": [1] * 120, "max_tokens": 8}).status == 200


def test_bodies_that_are_too_long_or_cut_off_leave_nothing_behind(start: Any) -> None:
    server = start()
    limit = server.opened.served.limits.max_body_bytes
    begin = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head = f"{begin}content-length: {limit + 1}\r\n\r\n".encode()
    assert b" 413 " in raw(server.url, head).partition(b"\r\n")[0]
    chunked = f"{begin}transfer-encoding: chunked\r\n\r\n".encode()
    assert raw(server.url, chunked + b'5\r\n{"pro') == b""
    assert raw(server.url, head.replace(str(limit + 1).encode(), b"100") + b'{"prompt"') == b""
    assert live(server) == 0 and server.requests == []


def test_a_key_is_asked_for(start: Any) -> None:
    server = start(api_key="secret")
    assert call(server.url, "/health").status == 200
    for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}, {"authorization": "Bearer "}):
        reply = call(server.url, COMPLETIONS, hello(), headers=headers)
        assert reply.status == 401 and reply.error["type"] == "AuthenticationError"
    assert call(server.url, "/v1/models").status == 401
    assert call(server.url, COMPLETIONS, hello(), headers={"authorization": "Bearer secret"}).status == 200


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_client_that_goes_frees_its_pages_within_a_step(start: Any, is_streaming: bool) -> None:
    server = start(cost="linear:step_ms=5")
    server.excuse("unread stream")
    core = server.opened.served.host.core
    connection = OpenStream(server.url, COMPLETIONS, hello(max_tokens=5000, stream=is_streaming))
    wait_for(lambda: len(server.timeline()) > 3)
    assert core.scheduler.cache.num_used > 0
    connection.close()
    num_steps = len(server.timeline())
    wait_for(lambda: core.scheduler.cache.num_used == 0)
    assert len(server.timeline()) - num_steps <= 3  # the one under way, and those until the loop hears of it
    assert live(server) == 0
    server.assert_conserved()


def test_a_client_that_does_not_read_holds_up_only_itself(start: Any) -> None:
    server = start(cost="linear:step_ms=0.05", pages=8192)
    server.excuse("unread stream")
    with OpenStream(server.url, COMPLETIONS, hello(max_tokens=100_000, ignore_eos=True, stream=True)):
        wait_for(lambda: len(server.timeline()) > 500)
        began = time.monotonic()
        assert call(server.url, COMPLETIONS, hello(max_tokens=50)).status == 200
        assert time.monotonic() - began < 4.0


def test_a_full_queue_says_when_to_come_again_and_takes_the_next_when_it_is_not_full(start: Any) -> None:
    server = start(max_seqs=1, max_queued=1, cost="linear:step_ms=5")
    server.excuse("missing retry")
    server.excuse("unread stream")
    body = hello(max_tokens=3000, ignore_eos=True, stream=True)
    with OpenStream(server.url, COMPLETIONS, body), OpenStream(server.url, COMPLETIONS, body):
        wait_for(lambda: live(server) == 2)
        reply = call(server.url, COMPLETIONS, hello())
        assert (reply.status, reply.headers["retry-after"]) == (429, "1") and reply.error["type"] == "RateLimitError"
        waits = 'vllm:num_requests_waiting{engine="0",model_name="mock"} 1.0'
        wait_for(lambda: waits in call(server.url, "/metrics").payload.decode())  # it is told once a step
        metrics = call(server.url, "/metrics").payload.decode()
        assert 'kvarts:requests_refused_total{engine="0",model_name="mock"} 1.0' in metrics
    wait_for(lambda: live(server) == 0)
    assert call(server.url, COMPLETIONS, hello()).status == 200


def test_a_server_that_drains_ends_what_it_began_and_begins_nothing(start: Any) -> None:
    server = start(cost="linear:step_ms=2")
    server.excuse("missing retry")
    reading = OpenStream(server.url, COMPLETIONS, hello(max_tokens=200, ignore_eos=True, stream=True))
    wait_for(lambda: live(server) == 1)
    stopping = threading.Thread(target=lambda: server.stop(drain_s=10.0))
    stopping.start()
    wait_for(lambda: server.opened.served.is_draining)
    assert call(server.url, "/health").status == 503
    assert call(server.url, COMPLETIONS, hello()).error["message"] == "the server is shutting down"
    assert reading.read().count(b"data: ") == 201
    reading.close()
    stopping.join(10.0)
    assert not stopping.is_alive()


def test_the_cache_is_not_reset_while_requests_hold_pages_unless_they_are_preempted(start: Any) -> None:
    server = start(cost="linear:step_ms=5", page_size=4)
    server.excuse("missing retry")
    reading = OpenStream(server.url, COMPLETIONS, hello(max_tokens=200, ignore_eos=True, stream=True))
    begun = reading.begin()
    while b"data: " not in begun:
        begun += reading.begin()
    assert call(server.url, "/reset_prefix_cache", b"").json == {"success": False}
    assert call(server.url, "/reset_prefix_cache?reset_running_requests=true", b"").json == {"success": True}
    wrong = call(server.url, "/reset_prefix_cache?reset_running_requests=maybe", b"")
    assert (wrong.status, wrong.error["param"]) == (400, "reset_running_requests")
    assert (begun + reading.read()).count(b"data: ") == 201  # all its tokens, computed again in part
    reading.close()
    assert call(server.url, "/reset_prefix_cache", b"").json == {"success": True}


def test_an_engine_that_dies_tells_every_client_and_its_health(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = start(cost="linear:step_ms=5")
    server.excuse("missing retry")
    reading = OpenStream(server.url, COMPLETIONS, hello(max_tokens=2000, ignore_eos=True, stream=True))
    wait_for(lambda: live(server) == 1)
    reply = call(server.url, COMPLETIONS, hello(), headers={"x-kvarts-fail": "die"})
    assert reply.status == 500
    told = reading.read()
    reading.close()
    assert b'"code":500' in told and b"Traceback" not in told
    why = "the engine has stopped after an error: RuntimeError: the engine dies on purpose"
    assert why.encode() in told and caplog.messages == [why]
    assert call(server.url, "/health").status == 503
    later = call(server.url, COMPLETIONS, hello()).error
    assert (later["type"], later["message"]) == ("InternalServerError", why)


def test_what_vllm_tells_of_itself_is_told(server: RunningServer) -> None:
    for path in (
        "/health",
        "/ping",
        "/version",
        "/load",
        "/metrics",
        "/v1/models",
        "/server_info",
        "/kv_event_sources",
    ):
        reply = call(server.url, path)
        assert reply.status == 200 and reply.headers["x-request-id"], path
    assert call(server.url, "/metrics", method="HEAD").payload == b""
    (model,) = call(server.url, "/v1/models").json["data"]
    assert (model["id"], model["object"]) == ("mock", "model")
    assert call(server.url, "/v1/models/mock").json == model
    told = call(server.url, "/get_server_info").json
    assert told["block_size"] == 16 and told == call(server.url, "/server_info").json
    # A router reads `cost` as a number, and nothing at all where it is none.
    assert "cost" not in told and isinstance(told["cost_model"], dict)
    refused = call(server.url, "/kv_event_sources?form=tree")
    assert refused.status == 400 and refused.json["error"]["param"] == "form"
    tokens = call(server.url, "/tokenize", {"prompt": "hello the world"}).json
    assert tokens["count"] == len(tokens["tokens"])
    assert call(server.url, "/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": "hello the world"}
    (rendered,) = call(server.url, "/v1/completions/render", hello(prompt="hello the world")).json
    assert rendered["token_ids"] == tokens["tokens"]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    rendered = call(server.url, "/v1/chat/completions/render", chat).json
    assert len(rendered["token_ids"]) == call(server.url, CHAT, chat).json["usage"]["prompt_tokens"]


def test_a_response_goes_on_with_the_one_before_it(server: RunningServer) -> None:
    first = call(server.url, "/v1/responses", {"input": "of the sea", "max_output_tokens": 30}).json
    assert (first["status"], first["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    second = call(
        server.url,
        "/v1/responses",
        {"input": "and of the land", "previous_response_id": first["id"], "max_output_tokens": 3},
    ).json
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"] // 16 * 16
    assert call(server.url, f"/v1/responses/{second['id']}").json == second
    assert call(server.url, f"/v1/responses/{second['id']}", method="DELETE").json["deleted"]
    assert call(server.url, f"/v1/responses/{second['id']}").status == 404
    reply = call(server.url, "/v1/responses", {"input": "of the sea", "max_output_tokens": 30, "stream": True})
    events = [json.loads(line[6:]) for line in reply.payload.decode().splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (
        "".join(event["delta"] for event in events if event["type"].endswith("delta"))
        == first["output"][0]["content"][0]["text"]
    )
    assert events[-1]["type"] == "response.incomplete"


def command(*arguments: str) -> preforked.Command:
    return preforked.start(
        *("mock", "--port", "0", "--cost", "linear:step_ms=1", *arguments),
        env={name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"},
    )


def test_the_command_listens_where_it_says_and_drains_at_sigterm(tmp_path: Any) -> None:
    record, log = tmp_path / "arrived.jsonl", tmp_path / "access.jsonl"
    process = command(
        *(
            "--set",
            "startup_delay=0.4",
            "--set",
            "drain_delay=0.7",
            "--record",
            str(record),
            "--set",
            f"access_log={log}",
        ),
        *("--model", "qwen3-8b", "--device", "h100-80gb"),
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = re.search(r"(http://127\.0\.0\.1:\d+)/v1", line)
        assert url is not None, line
        assert call(url[1], "/health").error["message"] == "the server is starting"
        wait_for(lambda: call(url[1], "/health").status == 200)
        reading = OpenStream(url[1], COMPLETIONS, hello(max_tokens=2000, ignore_eos=True, stream=True))
        wait_for(lambda: call(url[1], "/load").json["server_load"] == 1)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: call(url[1], "/health").status == 503)
        assert call(url[1], COMPLETIONS, hello(max_tokens=1)).status == 200  # load balancers have not noticed yet
        assert reading.read().rstrip(b"\r\n0").endswith(b"data: [DONE]")
        reading.close()
        assert process.wait(20) == 0
        assert "requests under way: 1" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close() if process.stderr is not None else None
    row, last = [json.loads(line) for line in record.read_text().splitlines()]
    assert (row["num_output_tokens"], row["ended"], len(row["output"])) == (2000, "finished", 2000)
    assert last["num_output_tokens"] == 1
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in logged if line["path"] == COMPLETIONS] == [200, 200]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "host: other machines reach 0.0.0.0"),
        (["--speedup", "0"], "speedup: must be a finite number above 0"),
        (["--fail", "often: 500"], "fail: 'often' names no requests"),
        (["--record", "x.csv"], "record: must end in .jsonl"),
        (["--model", "no-such-model", "--device", "l40s"], "no-such-model"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_listens(
    arguments: list[str], says: str, run_command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("mock", "--port", "0", *arguments) in (2, 3)
    assert says in capsys.readouterr().err


def test_a_port_that_is_taken_is_an_error_of_one_line(run_command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run_command("mock", "--port", str(taken.getsockname()[1]), "--cost", "linear:step_ms=1") == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_a_paced_clock_stands_still_while_there_is_work_and_counts_its_lag() -> None:
    class Wall(Clock):
        now = 0

        def now_ns(self) -> int:
            return self.now

        def wait_until_ns(self, at_ns: int) -> None:
            self.now = max(self.now, at_ns + 7)

    wall, work = Wall(), [False]
    clock = PacedClock(speedup=2.0, wall=wall)
    clock.is_at_rest = lambda: not work[0]
    wall.now = 50
    assert clock.now_ns() == 100
    work[0] = True
    wall.now = 60
    assert clock.now_ns() == 100
    clock.wait_until_ns(140)
    assert (clock.now_ns(), wall.now, clock.late_ns, clock.most_late_ns) == (140, 77, 7, 7)
    clock.wait_until_ns(142)
    assert (clock.now_ns(), clock.late_ns) == (142, 7)
    work[0] = False
    assert clock.now_ns() == 156


def test_a_model_of_which_nothing_is_known_may_be_meant_as_a_name(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("mock", "--model", "gpt-4o", "--port", "0") == 3
    assert "To serve a mock by this name: --served-model-name gpt-4o." in capsys.readouterr().err


def test_a_request_that_is_aborted_in_the_turn_in_which_it_came_is_answered(
    start: Callable[..., RunningServer],
) -> None:
    server = start()
    served = server.opened.served

    async def both() -> str | None:
        ask = Ask(tokens=[1, 2, 3], params=SamplingParams(max_tokens=500, temperature=1.0))
        answer, choices = served.start([ask])
        served.abort_all()
        try:
            async with asyncio.timeout(10):
                while True:
                    for piece in await answer.take():
                        if piece[3] is not None:
                            return piece[3]
        finally:
            served.finish(choices)

    assert server._loop is not None
    assert asyncio.run_coroutine_threadsafe(both(), server._loop).result(20) == "cancelled"
