"""Several models behind one address: the model that a request names answers, and one that dies takes no other along."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvarts.doors.openai.running import RunningServer
from openai_api.sharing.test_several_parity import shared

from builders.http_client import OpenStream, call

COMPLETIONS = "/v1/completions"


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with RunningServer(shared(2000, 64, 8, has_host=False), speedup=0.05) as running:
        yield running
        running.settle()
        running.assert_conserved()


def sample(text: str, name: str, **labels: str) -> float:
    """The value of one sample of an exposition."""
    for line in text.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} of {labels}")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.002)


def ask(server: RunningServer, model: str | None, num_tokens: int = 4, **fields: Any) -> Any:
    return call(server.url, COMPLETIONS, {"model": model, "prompt": "the sea", "max_tokens": num_tokens, **fields})


def test_each_model_answers_under_its_name_and_counts_for_itself(server: RunningServer) -> None:
    listed = call(server.url, "/v1/models").json["data"]
    assert [model["id"] for model in listed] == ["chat", "code"]
    for model, num_tokens in (("chat", 3), ("code", 5), (None, 4)):
        reply = ask(server, model, num_tokens)
        assert reply.status == 200 and reply.json["model"] == (model or "chat")
    text = call(server.url, "/metrics").payload.decode()
    assert sample(text, "vllm:generation_tokens_total", model_name="chat") == 7
    assert sample(text, "vllm:generation_tokens_total", model_name="code") == 5
    assert text.count("# TYPE vllm:generation_tokens counter") + text.count("# TYPE vllm:generation_tokens_total") == 1
    unknown = ask(server, "other")
    assert unknown.status == 404 and "'chat', 'code'" in unknown.error["message"]


def test_what_one_model_has_cached_is_no_hit_of_another(server: RunningServer) -> None:
    prompt = "a page of words " * 20
    found = []
    for model in ("chat", "code", "chat", "code"):
        reply = call(server.url, COMPLETIONS, {"model": model, "prompt": prompt, "max_tokens": 2})
        found.append(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found[:2] == [0, 0] and found[2] == found[3] > 0


def test_a_model_that_dies_fails_its_own_requests_and_no_others(server: RunningServer) -> None:
    body = {"prompt": "the land", "max_tokens": 600, "stream": True}
    with (
        OpenStream(server.url, COMPLETIONS, {**body, "model": "code"}) as dying,
        OpenStream(server.url, COMPLETIONS, {**body, "model": "chat", "max_tokens": 60}) as living,
    ):
        wait_for(lambda: sum(served.num_live for served in server.opened.models) == 2)
        told = call(server.url, "/admin/config", {"health": {"code": "dead"}})
        assert told.json["health"] == {"chat": "healthy", "code": "dead"}
        rest = dying.read()
        assert b"the model has died" in rest
        assert b"data: [DONE]" in living.read()
    refused = ask(server, "code")
    assert refused.status == 503 and refused.error["message"] == "the model has died"
    assert call(server.url, "/health").status == 200
    assert ask(server, "chat").status == 200
    call(server.url, "/admin/config", {"health": {"code": "healthy"}})
    assert ask(server, "code").status == 200
    for model in ("chat", "code"):
        server.excuse("missing retry")
        assert sample(call(server.url, "/metrics").payload.decode(), "kvarts:model_health", model_name=model) == 1


def test_a_script_lets_a_model_die_at_its_request(server: RunningServer) -> None:
    server.fail_next("first 1: die")
    assert ask(server, "code").status == 503
    assert ask(server, "code").status == 503
    assert ask(server, "chat").status == 200
    server.excuse("missing retry")


@pytest.mark.parametrize("health", [{"other": "dead"}, {"chat": "ill"}, "dead"])
def test_health_that_cannot_be_is_refused(server: RunningServer, health: Any) -> None:
    reply = call(server.url, "/admin/config", {"health": health})
    assert reply.status in (400, 404) and reply.error["message"]
    assert call(server.url, "/admin/config").json["health"] == {"chat": "healthy", "code": "healthy"}


def test_a_degraded_model_admits_nothing_until_it_is_healthy_again(server: RunningServer) -> None:
    call(server.url, "/admin/config", {"health": {"code": "degraded"}})
    with OpenStream(server.url, COMPLETIONS, {"model": "code", "prompt": "x", "max_tokens": 3, "stream": True}) as one:
        assert ask(server, "chat").status == 200
        assert (
            sample(call(server.url, "/metrics").payload.decode(), "vllm:num_requests_waiting", model_name="code") == 1
        )
        call(server.url, "/admin/config", {"health": {"code": "healthy"}})
        assert b"data: [DONE]" in one.read()
