"""Options of `kvarts.mock` and of the fixtures: models, devices, names, several servers, and a router."""

from __future__ import annotations

from typing import Any

import pytest

import kvarts
from kvarts.base.errors import KvartsError
from kvarts.core.kv.eviction import LruOrder
from kvarts.sim.config import ReplayConfig

from builders.http_client import call
from builders.plugin import PLUGIN

pytest_plugins = ["pytester"]

PROMPT = list(range(1, 65))


def step_ms(**options: Any) -> float:
    """The time of the step that computes a prompt of 64 tokens."""
    with kvarts.mock(**options) as server:
        call(server.url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
        return server.timeline()[0]["duration_ns"] / 1e6


def test_a_step_takes_the_time_of_the_model_on_the_device() -> None:
    assert step_ms() == 1.0
    small, large = step_ms(model="llama-3.1-8b", speedup=20), step_ms(model="llama-3.1-70b", device="b200", speedup=20)
    slow = step_ms(model="llama-3.1-8b", device="l40s", speedup=20)
    assert small < slow and small < large
    assert small == step_ms(device="h100-80gb", speedup=20), "the defaults are those of the command"


def test_pages_are_those_that_fit_and_settings_go_by_the_names_of_options() -> None:
    with kvarts.mock(model="llama-3.1-8b", device="h100-80gb", max_seqs=7, host_memory="1GiB") as server:
        assert server.config == ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", max_seqs=7, host_memory="1GiB")
        assert server.model == "llama-3.1-8b"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devise": "h100-80gb"}, "devise: is not an option of a mock. Did you mean device?"),
        ({"spedup": 2}, "Did you mean speedup?"),
        ({"retry_afters": 2}, "Did you mean retry_after_s"),
        ({"model": "gpt-4o"}, "served_model_name='gpt-4o'"),
        ({"device": "h100-81gb"}, "Did you mean h100-80gb"),
        ({"speedup": "fast"}, "speedup: expected `float`, got `str`"),
        ({"speedup": 0}, "speedup: must be above 0"),
        ({"max_queued": "many"}, "max_queued: expected `int`"),
        ({"max_queued": -1}, "max_queued: must be from 0"),
        ({"config": ReplayConfig(), "model": "llama-3.1-8b"}, "model: is of the configuration"),
        ({"config": ReplayConfig(), "device": ""}, "device: is of the configuration"),
        ({"served_model_name": 3}, "served_model_name: expected `str | array`, got `int`"),
        ({"served_model_name": ["gpt-4o", 3]}, "served_model_name[1]: expected `str`, got `int`"),
        ({"kv_events": "tcp://0.0.0.0:5557"}, "kv_events: other machines reach"),
    ],
)
def test_what_is_wrong_is_said_by_its_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(KvartsError) as caught:
        kvarts.mock(**options)
    assert said in str(caught.value)


def test_any_model_is_answered_by_the_one_engine() -> None:
    ask = {"model": "gpt-4o", "prompt": PROMPT, "max_tokens": 2}
    with kvarts.mock(any_model=True) as server:
        answers = [
            call(server.url, "/v1/completions", {**ask, "model": name}).json for name in ("gpt-4o", "o5", "mock")
        ]
        assert [answer["model"] for answer in answers] == ["gpt-4o", "o5", "mock"]
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        assert [each["id"] for each in call(server.url, "/v1/models").json["data"]] == ["mock"]
        assert call(server.url, "/v1/models/gpt-4o").json["id"] == "gpt-4o"
        chat = {"model": "claude", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello."}]}
        assert call(server.url, "/v1/messages", chat).status == 200
        assert call(server.url, "/v1/completions", {**ask, "model": ""}).status == 404
    with kvarts.mock() as server:
        refused = call(server.url, "/v1/completions", ask)
        assert refused.status == 404 and "'mock'" in refused.json["error"]["message"]


def test_replicas_are_workers_behind_a_router() -> None:
    with kvarts.mock(replicas=3, router="prefix", kv_events=True, cost="linear:step_ms=0.1") as server:
        assert len(set(server.workers)) == 3 == len(server.kv_event_sources)
        assert sorted(source["worker"] for source in server.kv_event_sources) == [0, 1, 2]
        for _ in range(3):
            call(server.url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
        assert server.cache_hits() == 2 * 48, "the prefix router has sent all of them to one worker"
        server.assert_conserved()


def test_an_object_goes_where_the_command_line_has_a_name() -> None:
    with kvarts.mock(eviction=LruOrder, cost=kvarts.LinearCost(step_ms=0.1)) as server:
        assert call(server.url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}).status == 200
        assert server.timeline()[0]["duration_ns"] == 100_000


INSIDE = """
import pytest, json, urllib.error, urllib.request

def ask(url, model="gpt-4o", **fields):
    body = json.dumps({"model": model, "prompt": list(range(64)), "max_tokens": 1, **fields}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code

def test_any_name(kvarts_server):
    assert ask(kvarts_server.url) == 200

@pytest.mark.kvarts(any_model=False)
def test_own_names(kvarts_server):
    assert ask(kvarts_server.url) == 404 and ask(kvarts_server.url, "mock") == 200

@pytest.mark.kvarts(model="llama-3.1-8b", device="h100-80gb", speedup=10)
def test_device(kvarts_server):
    assert ask(kvarts_server.url) == 200 and kvarts_server.timeline()[0]["duration_ns"] != 1_000_000

@pytest.mark.kvarts(devise="h100-80gb")
def test_typo(kvarts_server):
    pass

@pytest.mark.kvarts("h100-80gb")
def test_positional(kvarts_server):
    pass

@pytest.mark.kvarts(fail="first 1: 503 retry_after=0")
def test_fails_over(kvarts_servers):
    first, second, third = kvarts_servers(3, cost="linear:step_ms=0.1")
    assert ask(first.url) == 503 and ask(second.url) == 503 and ask(second.url) == 200 and not third.requests

@pytest.mark.kvarts(fail="first 1: 503 retry_after=0")
def test_gives_up(kvarts_servers):
    first, second = kvarts_servers(2)
    assert ask(second.url) == 503

def test_a_router(kvarts_servers):
    router = kvarts_servers.fleet(2, router="prefix")
    assert [ask(router.url), ask(router.url)] == [200, 200] and router.cache_hits() == 48
"""


def test_the_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(INSIDE)
    result = pytester.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider", "-n", "0", "-W", "error")
    result.assert_outcomes(passed=6, failed=0, errors=3)
    text = result.stdout.str()
    assert "devise: is not an option of a mock. Did you mean device?" in text and "Traceback" not in text
    assert "takes options by name only, got 'h100-80gb'" in text
    assert "server 1: request 1 to /v1/completions was answered 503 and was not sent again" in text
    assert "test_fails_over" not in text.partition("short test summary")[2]
