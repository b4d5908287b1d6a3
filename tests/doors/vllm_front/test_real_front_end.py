"""vLLM's own front end before the core: every endpoint, on each available version."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from builders.real_front_end import ARGUMENTS, MODEL, RealFrontEnd, left_of, real_front_end, vllm_script
from builders.tiny_model import tiny_model

pytestmark = pytest.mark.long

LONG_PROMPT = "the people said that it was in the house of the city and the state " * 8
ROOT = Path(__file__).resolve().parents[3]
CHAT = [{"role": "user", "content": "hello"}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "number"}, "minItems": 2}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["0.32", "0.33"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFrontEnd]:
    pytest.importorskip("llguidance")
    options = ["--cost", "linear:step_ms=5", "--pages", "4096"]
    directory = tmp_path_factory.mktemp("front")
    with real_front_end(request.param, directory, options, [*ARGUMENTS, "--reasoning-parser", "qwen3"]) as started:
        yield started


def chat(front: RealFrontEnd, **body: Any) -> dict[str, Any]:
    status, answer = front.call("/v1/chat/completions", {"model": MODEL, "messages": CHAT, **body})
    assert status == 200, answer
    return dict(answer)


def complete(front: RealFrontEnd, model: str = MODEL, **body: Any) -> dict[str, Any]:
    status, answer = front.call("/v1/completions", {"model": model, "prompt": "the people said", **body})
    assert status == 200, answer
    return dict(answer)


def events_of(text: str) -> list[dict[str, Any]]:
    told = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in told if each != "[DONE]"]


# Calls: every endpoint, and every way to ask that the core has a part in -----------------------------------

TEXT = {"model": MODEL, "prompt": "the people said", "max_tokens": 3}
TALK = {"model": MODEL, "messages": CHAT, "max_tokens": 3}
CALLING = {"model": MODEL, "messages": CHAT, "tools": [LOOK]}
SCHEMA_FORM = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
ADAPTER = {"lora_name": "called", "lora_path": "/adapters/called"}
CALLS: list[tuple[str, dict[str, Any] | None, int]] = [
    ("/health", None, 200),
    ("/v1/models", None, 200),
    ("/version", None, 200),
    ("/load", None, 200),
    ("/server_info", None, 200),
    ("/metrics", None, 200),
    ("/tokenize", {"model": MODEL, "prompt": "the people"}, 200),
    ("/detokenize", {"model": MODEL, "tokens": [116, 104, 101]}, 200),
    ("/v1/completions", TEXT, 200),
    ("/v1/completions", {**TEXT, "prompt": ["the", "people"]}, 200),
    ("/v1/completions", {**TEXT, "prompt": [116, 104], "stream": True}, 200),
    ("/v1/completions", {**TEXT, "n": 2}, 200),
    ("/v1/completions", {**TEXT, "n": 2, "use_beam_search": True}, 200),
    ("/v1/completions", {**TEXT, "stop": [" law"], "max_tokens": 20}, 200),
    ("/v1/completions", {**TEXT, "stop_token_ids": [116], "min_tokens": 2, "max_tokens": 20}, 200),
    ("/v1/completions", {**TEXT, "logprobs": 2}, 200),
    ("/v1/completions", {**TEXT, "logprobs": 2, "echo": True, "prompt_logprobs": 2}, 200),
    ("/v1/completions", {**TEXT, "priority": 0, "cache_salt": "tenant"}, 200),
    ("/v1/completions", {**TEXT, "max_tokens": 9_999_999}, 400),
    ("/v1/completions", {**TEXT, "model": "another"}, 404),
    ("/v1/chat/completions", TALK, 200),
    ("/v1/chat/completions", {**TALK, "stream": True, "stream_options": {"include_usage": True}}, 200),
    ("/v1/chat/completions", {**TALK, "logprobs": True, "top_logprobs": 2}, 200),
    ("/v1/chat/completions", {**CALLING, "max_tokens": 5}, 200),
    ("/v1/chat/completions", {**CALLING, "max_tokens": 5, "stream": True}, 200),
    ("/v1/chat/completions", {**CALLING, "tool_choice": "required"}, 200),
    ("/v1/chat/completions", {**CALLING, "tool_choice": "required", "stream": True}, 200),
    ("/v1/chat/completions", {**CALLING, "tool_choice": {"type": "function", "function": {"name": "look"}}}, 200),
    ("/v1/chat/completions", {**TALK, "response_format": SCHEMA_FORM, "max_tokens": 200}, 200),
    ("/v1/chat/completions", {**TALK, "response_format": {"type": "json_object"}, "max_tokens": 200}, 200),
    ("/v1/chat/completions", {**TALK, "structured_outputs": {"regex": "[0-9]{3}"}, "max_tokens": 60}, 200),
    ("/v1/chat/completions", {**TALK, "vllm_xargs": {"kvarts_answer": '{"text": "yes"}'}}, 200),
    ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 4}, 200),
    ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 4, "stream": True}, 200),
    ("/v1/messages", {**TALK, "max_tokens": 4}, 200),
    ("/v1/messages", {**TALK, "max_tokens": 4, "stream": True}, 200),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": CHAT}, 200),
    ("/v1/embeddings", {"model": MODEL, "input": "hello"}, 404),
    ("/v1/load_lora_adapter", ADAPTER, 200),
    ("/v1/completions", {**TEXT, "model": "called"}, 200),
    ("/v1/unload_lora_adapter", {"lora_name": "called"}, 200),
    ("/reset_prefix_cache", {}, 200),
    ("/reset_mm_cache", {}, 200),
    ("/sleep?level=1", {}, 200),
    ("/is_sleeping", None, 200),
    ("/wake_up", {}, 200),
    ("/pause", {}, 200),
    ("/is_paused", None, 200),
    ("/resume", {}, 200),
    ("/collective_rpc", {"method": "check"}, 200),
    ("/inference/v1/generate", {}, 403),
]


def test_calls_have_their_status(front: RealFrontEnd) -> None:
    """The table states one status for both versions."""
    found = [(path, body, front.call(path, body)) for path, body, _ in CALLS]
    wrong = [(path, body, *answer) for (path, body, answer), (_, _, status) in zip(found, CALLS, strict=True)
             if answer[0] != status]  # fmt: skip
    assert not wrong, front.log
    for path, body, (status, answer) in found:
        if status == 200 and (body or {}).get("stream"):
            assert "data: " in answer, path
            assert '"error"' not in answer, path


def test_same_prompt_is_a_hit_in_usage_and_metrics(front: RealFrontEnd) -> None:
    before = front.metric("vllm:prefix_cache_hits_total")
    found = [complete(front, prompt=LONG_PROMPT, max_tokens=2)["usage"] for _ in range(2)]
    num_prompt = found[0]["prompt_tokens"]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in found]
    assert cached == [0, (num_prompt - 1) // 16 * 16]
    assert front.metric("vllm:prefix_cache_hits_total") - before == cached[1]


def test_forced_call_of_a_tool(front: RealFrontEnd) -> None:
    named = {"type": "function", "function": {"name": "look"}}
    for choice in ("required", named):
        message = chat(front, tools=[LOOK], tool_choice=choice)["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"], message
        assert isinstance(json.loads(message["tool_calls"][0]["function"]["arguments"]), dict)
        assert message["reasoning"], message


def test_call_of_a_tool_in_a_stream(front: RealFrontEnd) -> None:
    body = {"model": MODEL, "messages": CHAT, "tools": [LOOK], "tool_choice": "required", "stream": True}
    status, text = front.call("/v1/chat/completions", body)
    assert status == 200
    calls = [call for event in events_of(text) for choice in event["choices"]
             for call in choice["delta"].get("tool_calls") or ()]  # fmt: skip
    json.loads("".join(call["function"].get("arguments") or "" for call in calls))
    assert [call["function"]["name"] for call in calls if call["function"].get("name")] == ["look"]


def test_schema_is_obeyed_after_reasoning(front: RealFrontEnd) -> None:
    message = chat(front, response_format=SCHEMA_FORM)["choices"][0]["message"]
    value = json.loads(message["content"])
    assert set(value) == {"name", "sizes"}
    assert len(value["sizes"]) >= 2
    assert message["reasoning"]


def test_grammars(front: RealFrontEnd) -> None:
    def content(**constraint: Any) -> str:
        return str(chat(front, structured_outputs=constraint)["choices"][0]["message"]["content"]).strip()

    assert content(choice=["yes", "no"]) in ("yes", "no")
    assert content(regex="[0-9]{3}-[a-z]{4}")[3] == "-"
    assert isinstance(json.loads(content(json_object=True)), dict)


def test_answer_that_a_request_brings(front: RealFrontEnd) -> None:
    brought = {"text": "so it is", "reasoning": "because", "calls": [{"name": "look", "arguments": {"city": "Rome"}}]}
    answer = chat(front, tools=[LOOK], vllm_xargs={"kvarts_answer": json.dumps(brought)})["choices"][0]
    message = answer["message"]
    assert message["content"].strip() == "so it is"
    assert message["reasoning"].strip() == "because"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    assert answer["finish_reason"] == "tool_calls"


def test_logprobs_echo_and_choices(front: RealFrontEnd) -> None:
    echoed = complete(front, max_tokens=1, logprobs=2, echo=True)["choices"][0]["logprobs"]
    assert echoed["token_logprobs"][0] is None
    assert all(value < 0 for value in echoed["token_logprobs"][1:])
    top = chat(front, max_tokens=2, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in top] == [2, 2]
    texts = {choice["text"] for choice in complete(front, n=3, max_tokens=6)["choices"]}
    assert len(texts) == 3


def test_stop_text_and_natural_end(front: RealFrontEnd) -> None:
    words = complete(front, max_tokens=20)["choices"][0]["text"].split()
    stopped = complete(front, max_tokens=20, stop=[f" {words[3]}"])["choices"][0]
    assert (stopped["finish_reason"], stopped["text"].split()) == ("stop", words[:3])
    ended = chat(front)["choices"][0]
    assert ended["finish_reason"] == "stop"
    assert ended["message"]["content"].split()


def test_closed_stream_is_aborted(front: RealFrontEnd) -> None:
    connection = HTTPConnection("127.0.0.1", front.port, timeout=30)
    body = {"model": MODEL, "prompt": "the", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    assert connection.getresponse().read(10)
    connection.close()
    deadline_s = monotonic() + 10.0
    while front.metric("vllm:num_requests_running") and monotonic() < deadline_s:
        sleep(0.1)
    assert front.metric("vllm:num_requests_running") == 0
    assert front.metric("vllm:kv_cache_usage_perc") == 0


def test_sleep_and_pause(front: RealFrontEnd) -> None:
    def state(path: str) -> Any:
        return next(iter(front.call(path)[1].values()))

    complete(front, prompt=LONG_PROMPT, max_tokens=1)
    for path, asks, on in (("/sleep?level=1", "/is_sleeping", True), ("/wake_up", "/is_sleeping", False),
                           ("/pause", "/is_paused", True), ("/resume", "/is_paused", False)):  # fmt: skip
        assert front.call(path, {})[0] == 200
        assert state(asks) is on
    usage = complete(front, prompt=LONG_PROMPT, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_adapter_has_its_own_cache(front: RealFrontEnd, tmp_path: Path) -> None:
    status, answer = front.call("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(tmp_path)})
    assert status == 200, answer
    for model in (MODEL, "mine", "mine"):
        usage = complete(front, model, prompt=f"x {LONG_PROMPT}", max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert front.call("/v1/unload_lora_adapter", {"lora_name": "mine"})[0] == 200


def test_times_of_requests_are_those_of_the_engine(front: RealFrontEnd) -> None:
    names = [f"vllm:request_{what}_time_seconds" for what in ("queue", "prefill", "decode", "inference")]
    before = [front.metric(f"{name}_sum") for name in names]
    complete(front, max_tokens=21)
    queue, prefill, decode, inference = (
        front.metric(f"{name}_sum") - was for name, was in zip(names, before, strict=True)
    )
    assert queue >= 0.0
    assert decode == pytest.approx(0.1, rel=1e-3), "20 steps of 5 ms, however late the machine is"
    assert inference == pytest.approx(prefill + decode, rel=1e-3)


HISTOGRAMS = ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds",
              "request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens",
              "request_max_num_generation_tokens", "request_queue_time_seconds", "request_prefill_time_seconds",
              "request_decode_time_seconds", "iteration_tokens_total")  # fmt: skip
OTHERS = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
          "generation_tokens_total", "request_success_total", "prefix_cache_hits_total",
          "prefix_cache_queries_total")  # fmt: skip


def test_metrics_of_the_dashboards_have_data(front: RealFrontEnd) -> None:
    """All that the five dashboards of vLLM 0.33 query."""
    complete(front, prompt=LONG_PROMPT, max_tokens=2)
    text = str(front.call("/metrics")[1])
    for name in HISTOGRAMS:
        assert f"vllm:{name}_bucket{{" in text, name
        assert front.metric(f"vllm:{name}_count") > 0, name
    for name in OTHERS:
        assert f"vllm:{name}{{" in text, name


# Ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_front_end_that_is_killed_ends_the_engine(version: str, tmp_path: Path) -> None:
    with real_front_end(version, tmp_path, ["--cost", "linear:step_ms=5", "--pages", "256"]) as front:
        os.kill(front.front_pid(), signal.SIGKILL)
        assert front.process.wait(30.0) == 1
        assert "vllm serve has ended with status -9" in front.log


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_requests_under_way_are_aborted_by_sigterm(version: str, tmp_path: Path) -> None:
    """The engine ends them; vllm serve alone would wait for its open connections, and for ever."""
    with real_front_end(version, tmp_path, ["--cost", "linear:step_ms=5", "--pages", "2048"]) as front:
        connection = HTTPConnection("127.0.0.1", front.port, timeout=60)
        body = {"model": MODEL, "prompt": "the", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        first = answer.read(10)
        front.process.send_signal(signal.SIGTERM)
        events = events_of((first + answer.read()).decode())
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        assert front.process.wait(60.0) == 0, front.log
        connection.close()


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_engine_that_is_killed_leaves_no_front_end(version: str, tmp_path: Path) -> None:
    with real_front_end(version, tmp_path, ["--cost", "linear:step_ms=5", "--pages", "256"]) as front:
        group = front.front_pid()
        front.process.kill()
        front.process.wait()
        assert not left_of(group)


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_engine_that_dies_tells_the_front_end(version: str, tmp_path: Path) -> None:
    options = ["--cost", "linear:step_ms=5", "--pages", "256", "--fail", "2: die"]
    with real_front_end(version, tmp_path, options) as front:
        assert complete(front, max_tokens=2)
        status, _ = front.call("/v1/completions", {"model": MODEL, "prompt": "the", "max_tokens": 2}, timeout_s=30.0)
        assert status in (500, 503)
        assert front.process.wait(60.0) == 1
        assert "the engine has failed" in front.log


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_several_ranks_share_the_load(version: str, tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, "--data-parallel-size", "2", "--api-server-count", "1"]
    with real_front_end(version, tmp_path, ["--cost", "linear:step_ms=5", "--pages", "256"], arguments) as front:
        for number in range(8):
            complete(front, prompt=f"{number} people said", max_tokens=2)
        text = str(front.call("/metrics")[1])
        for rank in (0, 1):
            lines = [line for line in text.splitlines()
                     if line.startswith("vllm:prompt_tokens_total{") and f'engine="{rank}"' in line]  # fmt: skip
            assert sum(float(line.split()[-1]) for line in lines) > 0, lines


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_embeddings(version: str, tmp_path: Path) -> None:
    arguments = ["--runner", "pooling", "--convert", "embed", "--max-model-len", "4096"]
    with real_front_end(version, tmp_path, ["--cost", "linear:step_ms=5", "--pages", "256"], arguments) as front:
        vectors = []
        for text in ("the people", "the people", "the house"):
            status, answer = front.call("/v1/embeddings", {"model": MODEL, "input": text})
            assert status == 200, front.log
            vectors.append(answer["data"][0]["embedding"])
        assert vectors[0] == vectors[1] != vectors[2]
        assert len(vectors[0]) == 256


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_trace_has_the_hits_and_times_of_its_replay(version: str, tmp_path: Path) -> None:
    script, environment = vllm_script(version)
    words = [sys.executable, str(ROOT / "benchmarks" / "front_end.py"), "trace", "--vllm", str(script), "--model",
             str(tiny_model(tmp_path / "model")), "--requests", "40", "--pages", "8192"]  # fmt: skip
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["is_equal"]
    assert found["prefix_cache_hits_total"]["front_end"] > 0


def test_front_end_that_refuses_its_arguments_is_quoted(tmp_path: Path) -> None:
    options = ["--cost", "linear:step_ms=5", "--pages", "256"]
    with real_front_end("0.32", tmp_path, options, ["--tool-call-parser", "nonesuch"], waits=False) as front:
        assert front.process.wait(300.0) == 1
        assert "nonesuch" in front.log
        assert "vllm serve has ended with status" in front.log


def test_front_end_that_is_not_up_in_time_is_ended(tmp_path: Path) -> None:
    options = ["--cost", "linear:step_ms=5", "--pages", "256", "--set", "front_end_start=1"]
    with real_front_end("0.32", tmp_path, options, waits=False) as front:
        assert front.process.wait(60.0) == 1
        assert "vllm serve did not come up in time" in front.log
