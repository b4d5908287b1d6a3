"""Sessions of `kvarts mock` and `kvarts serve --model`: what they keep and reserve, and what they leave alone."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.tenants import ANYONE
from kvarts.core.sampling import SamplingParams
from kvarts.cost.polynomial import LinearCost
from kvarts.doors.openai.running import RunningServer
from kvarts.doors.openai.served import Ask
from kvarts.run.sessions.values import SessionsConfig, SessionSettings

from builders import preforked
from builders.http_client import OpenStream, Reply, call, events_of

CHAT = "/v1/chat/completions"
FIRST = [{"role": "user", "content": "Tell me of the sea, and of the land beside it, and of all the ships there."}]
Start = Callable[..., RunningServer]
Run = Callable[..., int]


def say(url: str, messages: Any = FIRST, headers: Any = None, **fields: Any) -> Reply:
    return call(url, CHAT, {"messages": messages, "max_tokens": 6, **fields}, headers=headers)


def cached(reply: Reply) -> int:
    assert reply.status == 200, reply.payload
    return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def metrics(url: str) -> dict[str, float]:
    text = call(url, "/metrics").payload.decode()
    lines = [line for line in text.splitlines() if line.startswith("kvarts:") and "_created" not in line]
    labels = re.compile(r"\{.*?(?:(?:reason|state)=\"(\w+)\")?\}")
    return {labels.sub(r" \1", line.rpartition(" ")[0]).strip(): float(line.split()[-1]) for line in lines}


def go_on(url: str, name: str, num_turns: int, **fields: Any) -> list[tuple[int, int]]:
    """Have a conversation; return of each turn what was cached, and how long the history was before."""
    messages, length, seen = list(FIRST), 0, []
    for turn in range(num_turns):
        reply = say(url, messages, session_id=name, **fields)
        seen.append((cached(reply), length))
        length = reply.json["usage"]["total_tokens"]
        messages += [
            reply.json["choices"][0]["message"],
            {"role": "user", "content": f"And then, for the time {turn}?"},
        ]
    return seen


def bounded(window: int = 16, **settings: Any) -> SessionsConfig:
    return SessionsConfig(
        defaults=SessionSettings(sink=2, window=window),
        **{"at_capacity": "evict", "max_pages": 64, "chunk_tokens": 64, **settings},
    )


def unbounded(**settings: Any) -> SessionsConfig:
    return SessionsConfig(defaults=SessionSettings(window=None), **{"at_capacity": "evict", **settings})


def test_a_windowed_session_of_a_mock_pays_for_what_is_new_only(start: Start) -> None:
    server = start(sessions=bounded())
    assert all(found == length for found, length in go_on(server.url, "a", 4))


def test_an_unbounded_session_answers_as_none_and_finds_as_much(start: Start) -> None:
    server, plain = start(sessions=unbounded()), start()
    in_session = [say(server.url, session_id="a") for _ in range(2)]
    without = [say(plain.url) for _ in range(2)]
    assert [reply.json["choices"] for reply in in_session] == [reply.json["choices"] for reply in without]
    # The last token of a prompt is computed in any case.
    assert [cached(reply) - cached(plain) for reply, plain in zip(in_session, without, strict=True)] in (
        [0, 0],
        [0, 16],
    )
    assert server.opened.served.host.core.scheduler.cache.num_reserved == 0


def test_what_sessions_reserve_is_bounded_and_counted(start: Start) -> None:
    server = start(pages=128, sessions=bounded(window=32, max_pages=16))
    seen = set()
    for number in range(12):
        assert say(server.url, session_id=f"s{number}").status == 200
        told = metrics(server.url)
        assert told["kvarts:session_reserved_pages"] <= 16
        assert told["kvarts:pages used"] >= told["kvarts:session_reserved_pages"] > 0
        seen.add(told["kvarts:sessions"])
    assert max(seen) < 12 and told["kvarts:sessions_ended_total evicted"] == 12 - told["kvarts:sessions"]
    assert told["kvarts:session_tokens"] > 0
    # What names no session has the rest of the pages.
    assert call(server.url, "/v1/completions", {"prompt": [1] * 1500, "max_tokens": 8}).status == 200


def test_no_more_sessions_than_the_most_are_kept(start: Start) -> None:
    server = start(sessions=unbounded(max_sessions=3))
    for number in range(8):
        assert say(server.url, session_id=f"s{number}").status == 200
    told = metrics(server.url)
    assert told["kvarts:sessions"] == 3 and told["kvarts:sessions_ended_total evicted"] == 5
    assert cached(say(server.url, session_id="s0")) > 0  # its KV is in the prefix cache all the same


@pytest.mark.parametrize("header", ["x-session-id", "X-Session-Affinity", "X-Dynamo-Session-ID"])
def test_a_header_is_a_hint_and_what_no_session_can_do_is_answered_without(start: Start, header: str) -> None:
    server = start(sessions=bounded())
    assert say(server.url, headers={header: "a"}).status == 200
    assert metrics(server.url)["kvarts:sessions"] == 1
    assert len(say(server.url, headers={header: "b"}, n=2).json["choices"]) == 2
    assert say(server.url, session_id="b", n=2).status == 400
    assert metrics(server.url)["kvarts:sessions"] == 1


def test_salts_share_no_session(start: Start) -> None:
    server = start(sessions=bounded())
    assert [cached(say(server.url, session_id="a", cache_salt=salt)) for salt in ("x", "y", None)] == [0, 0, 0]
    assert metrics(server.url)["kvarts:sessions"] == 3
    assert cached(say(server.url, session_id="a", cache_salt="x")) > 0


@pytest.mark.parametrize("is_prefilling", [False, True])
def test_a_client_that_goes_ends_its_turn_at_once(start: Start, is_prefilling: bool) -> None:
    cost = LinearCost(step_ms=1.0, chunk_token_ms=1.0) if is_prefilling else LinearCost(step_ms=5.0)
    server = start(sessions=bounded(), cost=cost, max_batched_tokens=64, max_seqs=8)
    prompt = [index % 1000 for index in range(6000 if is_prefilling else 40)]
    body = {"prompt": prompt, "max_tokens": 2000, "stream": True, "session_id": "a"}
    with OpenStream(server.url, "/v1/completions", body):
        while not metrics(server.url).get("kvarts:session_tokens"):
            pass
    num_steps = len(server.timeline())
    server.settle(2.0)
    assert server.opened.served.num_live == 0
    assert len(server.timeline()) - num_steps < 20  # of 94 that the prompt takes, or 2000 of its answer
    again = call(server.url, "/v1/completions", {"prompt": prompt[:30], "max_tokens": 2, "session_id": "b"})
    assert again.status == 200
    assert metrics(server.url)["kvarts:requests_aborted_total"] == 1


def test_all_requests_can_be_aborted_also_those_of_sessions(start: Start) -> None:
    server = start(sessions=bounded(), cost=LinearCost(step_ms=5.0))
    body = {"messages": FIRST, "max_tokens": 5000, "ignore_eos": True, "stream": True, "session_id": "a"}
    found: list[Reply] = []
    asking = threading.Thread(target=lambda: found.append(call(server.url, CHAT, body)))
    asking.start()
    while not metrics(server.url).get("kvarts:session_tokens"):
        pass
    call(server.url, "/abort_requests", {})
    asking.join(20)
    assert [event["choices"][0]["finish_reason"] for event in events_of(found[0].payload)][-1] == "abort"
    assert say(server.url, session_id="a").status == 200


def test_a_turn_that_is_ended_before_it_has_begun_is_told_its_end(start: Start) -> None:
    server = start(sessions=bounded())
    served = server.opened.served

    async def begin_and_abort() -> tuple[Any, Any]:
        assert served.sessions is not None
        ask = Ask(tokens=array("Q", [1, 2, 3]), params=SamplingParams(max_tokens=4))
        tasks = []
        begin = partial(served.sessions.begin, "", "a")
        answer, choices = served.start([ask], ANYONE, begin=lambda ask, choice: tasks.append(begin(ask, choice)))
        (task,) = tasks
        served.abort_all()
        pieces = await asyncio.wait_for(answer.take(), 10)
        served.finish(choices)
        return pieces, task

    assert server._loop is not None
    ((piece,), task) = asyncio.run_coroutine_threadsafe(begin_and_abort(), server._loop).result(20)
    assert piece[3] == "cancelled" and task.cancelled()


def test_an_append_that_is_ended_from_elsewhere_ends_the_answer(start: Start) -> None:
    server = start(sessions=bounded(), cost=LinearCost(step_ms=1.0, chunk_token_ms=1.0), max_batched_tokens=64)
    served = server.opened.served
    assert served.sessions is not None
    store = served.sessions._store  # type: ignore[attr-defined]
    found: list[Reply] = []
    body = {"prompt": [index % 1000 for index in range(6000)], "max_tokens": 2, "session_id": "a"}
    asking = threading.Thread(target=lambda: found.append(call(server.url, "/v1/completions", body)))
    asking.start()
    while not metrics(server.url).get("kvarts:session_tokens"):
        pass

    async def cancel() -> None:
        (info,) = await store.list("")
        await store.cancel("", info.session_id)

    assert server._loop is not None
    asyncio.run_coroutine_threadsafe(cancel(), server._loop).result(10)
    asking.join(20)
    assert found and found[0].json["choices"][0]["finish_reason"] == "abort"


def test_responses_go_on_in_a_session(start: Start) -> None:
    server = start(sessions=bounded())
    first = call(
        server.url, "/v1/responses", {"input": "Tell me of the sea.", "max_output_tokens": 6, "session_id": "a"}
    )
    second = call(
        server.url,
        "/v1/responses",
        {"input": "And?", "max_output_tokens": 6, "session_id": "a", "previous_response_id": first.json["id"]},
    )
    assert second.json["usage"]["input_tokens_details"]["cached_tokens"] >= first.json["usage"]["total_tokens"]


# The command ---------------------------------------------------------------------------------------------


@contextmanager
def mock(*options: str, env: Any = None) -> Iterator[str]:
    with preforked.start("mock", "--port", "0", "--cost", "linear:step_ms=1", *options) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert url is not None, line
            yield url[0]
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(20) == 0 and "Traceback" not in rest, rest


def test_sessions_outlive_the_process_in_their_directory(tmp_path: Path) -> None:
    options = ("--pages", "512", "--set", "session_window=32", "--state-dir", str(tmp_path / "kept"))
    with mock(*options) as url:
        before = say(url, session_id="a")
        assert cached(before) == 0
    with mock(*options) as url:
        assert metrics(url)["kvarts:sessions"] == 1
        messages = [*FIRST, before.json["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        assert cached(say(url, messages, session_id="a")) == before.json["usage"]["total_tokens"]


def test_a_mock_has_sessions_unless_it_is_told_otherwise() -> None:
    with mock("--pages", "512") as url:
        assert "kvarts:sessions" not in metrics(url)  # none was named, and nothing is there for them
        assert say(url, headers={"x-session-affinity": "a"}).status == 200
        assert metrics(url)["kvarts:sessions"] == 1
        assert metrics(url)["kvarts:session_reserved_pages"] == 0


MODELS = ("--model", "chat=llama-3.1-8b", "--model", "code=qwen3-8b", "--device", "h100-80gb")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            (*MODELS, "--set", "session_window=32"),
            "--set session_window: is of sessions: sessions cannot be combined with several models on a device",
        ),
        (
            ("--record", "x.jsonl", "--set", "max_sessions=3"),
            "cannot be combined with sessions, since it is replayed request by request",
        ),
        (("--set", "no_sessions=true", "--state-dir", "x"), "--set no_sessions=true was given"),
        (("--set", "session_memory=1GiB"), "--set session_memory: is of sessions with a window"),
        (("--set", "session_window=8", "--set", "session_retention=pin"), "is of sessions without a window"),
        (
            ("--cost", "linear:step_ms=1", "--set", "session_window=8", "--set", "session_memory=1GiB"),
            "how many bytes a token",
        ),
        (("--pages", "10", "--set", "session_window=200"), "one session needs"),
        (("--set", "session_retention=host", "--pages", "64"), "needs host memory"),
    ],
)
def test_what_sessions_cannot_be_is_refused(
    run_command: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvarts.cli.mock.serve_http", lambda *_, **__: None)
    assert run_command("mock", *options, "--port", "0") == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        MODELS,
        ("--cost", "linear:step_ms=1", "--record", "written.jsonl"),
        ("--model", "gemma-4-31b", "--device", "h200", "--tensor-parallel", "2"),
        ("--model", "gpt-oss-20b", "--device", "h100-80gb"),
        ("--engine", "sglang", "--cost", "linear:step_ms=1"),
    ],
)
def test_where_there_can_be_no_session_a_body_that_asks_for_one_is_told_so(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    options = tuple(str(tmp_path / option) if option.endswith(".jsonl") else option for option in options)
    with preforked.start("mock", "--port", "0", *options) as process:
        assert process.stderr is not None
        url = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert url is not None
        refused = say(url[0], session_id="a")
        assert refused.status == 400 and refused.error["param"] == "session_id"
        assert "there are no sessions here" in refused.error["message"]
        assert say(url[0], headers={"x-session-affinity": "a"}).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
