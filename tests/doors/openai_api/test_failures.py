"""Failures on purpose: the script, the header, at run time; and the fixture that tells a client what it did wrong."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.doors.openai.failures import NO_FAILURE, FailureScript, parse_failure

from builders.http_client import call, events_of, raw
from builders.plugin import PLUGIN

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 8, "stream": True}


def statuses(script: str, count: int, seed: int = 0) -> list[int]:
    plan = FailureScript(script, seed=seed)
    return [plan.next().status for _ in range(count)]


def test_the_first_rule_that_applies_decides() -> None:
    script = "first 2: 429 retry_after=1; every 5th: 503; 8-9: 500; 11: 400"
    assert statuses(script, 12) == [429, 429, 0, 0, 503, 0, 0, 500, 500, 503, 400, 0]
    assert statuses("all: 500", 2) == [500, 500]
    assert statuses("1: ok; rest: 500", 3) == [0, 500, 500]
    assert statuses("first 1: 429; then ok", 2) == [429, 0]
    assert statuses("", 2) == [0, 0]


@given(st.integers(0, 1000), st.integers(0, 100))
def test_a_rate_is_drawn_by_the_seed_and_the_number(seed: int, percent: int) -> None:
    script = f"rate {percent}%: 500"
    assert statuses(script, 50, seed) == statuses(script, 50, seed)
    if percent in (0, 100):
        assert set(statuses(script, 50, seed)) == {5 * percent}


def test_a_rate_is_about_what_it_says() -> None:
    assert 60 < statuses("rate 10%: 500", 1000).count(500) < 140


@pytest.mark.parametrize(
    "script",
    [
        "often: 500",
        "first 2: 200",
        "every 0th: 500",
        "0: 500",
        "first 0: 500",
        "7-5: 500",
        "transfers first 0: fail",
        "rate 101%: 500",
        f"rate {'9' * 400}%: 500",
        f"all: cut after {'9' * 5000} chunks",
        f"all: 503 retry_after={'9' * 400}",
        f"all: stall {'9' * 400}s",
        "stall",
        "first two: 500",
        "1: retry",
        "transfers: 500",
        "transfers often: fail",
        "transfers every 0th: fail",
        "all: fail",
    ],
)
def test_what_is_no_script_is_refused(script: str) -> None:
    with pytest.raises(ConfigError, match="A rule is WHICH"):
        FailureScript(script)


@given(st.text(max_size=40))
def test_any_text_is_a_script_or_is_refused(script: str) -> None:
    try:
        plan = FailureScript(script)
    except ConfigError:
        return
    plan.next()


def test_failures_are_read_as_they_are_written() -> None:
    assert parse_failure(" 429   retry_after=2.5s ").retry_after_s == 2.5
    assert parse_failure("stall 250 ms").stall_s == 0.25
    assert parse_failure("cut after 3 chunks").cut_after == 3
    assert parse_failure("ok") is NO_FAILURE


def test_a_refusal_says_when_to_come_again(start: Any) -> None:
    server = start(fail="first 1: 429 retry_after=2")
    reply = call(server.url, COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    assert (reply.status, reply.headers["retry-after"]) == (429, "2") and "on purpose" in reply.error["message"]
    assert call(server.url, COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status == 200
    assert server.complaints() == []


@pytest.mark.parametrize("status", [500, 503])
def test_a_failure_on_purpose_is_no_bug(start: Any, caplog: pytest.LogCaptureFixture, status: int) -> None:
    """It keeps its words and its delay, and nothing is logged."""
    server = start(fail=f"all: {status} retry_after=2")
    reply = call(server.url, COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    assert (reply.status, reply.headers["retry-after"]) == (status, "2")
    assert reply.error["message"] == f"fails on purpose: {status} retry_after=2"
    assert not caplog.records


def test_a_stream_is_cut_where_it_was_to_be(start: Any) -> None:
    server = start(fail="all: cut after 3 chunks")
    body = json.dumps(BODY).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    try:
        answer = raw(server.url, head + body, shut=False)
    except ConnectionResetError:
        answer = b"data: " * 3
    assert answer.count(b"data: ") == 3 and b"[DONE]" not in answer
    server.settle()
    assert server.complaints() == [], "it was the server that cut it"


def test_an_answer_is_dropped_or_cut_in_half(start: Any) -> None:
    server = start(fail="1: drop; 2: cut")
    for _ in range(2):
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            call(server.url, COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    assert call(server.url, COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status == 200


def test_a_chunk_is_spoiled_and_a_reason_is_missing(start: Any) -> None:
    server = start(fail="1: bad chunk; 2: no finish_reason")
    with pytest.raises(json.JSONDecodeError):
        events_of(call(server.url, COMPLETIONS, BODY).payload)
    events = events_of(call(server.url, COMPLETIONS, BODY).payload)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 8


def test_a_request_asks_for_its_own_failure(start: Any) -> None:
    server = start()
    server.excuse("missing retry")
    body = {"prompt": "x", "max_tokens": 1}
    assert call(server.url, COMPLETIONS, body, headers={"x-return-error": "503"}).status == 503
    assert call(server.url, COMPLETIONS, body, headers={"x-kvarts-fail": "404"}).error["type"] == "NotFoundError"
    assert call(server.url, COMPLETIONS, body, headers={"x-kvarts-fail": "nonsense"}).status == 400
    assert call(server.url, COMPLETIONS, body).status == 200


def test_failures_are_changed_at_run_time(start: Any) -> None:
    server = start()
    server.excuse("missing retry")
    told = call(server.url, "/admin/config", {"fail": "first 1: 500", "max_queued": 3}).json
    assert (told["fail"], told["max_queued"]) == ("first 1: 500", 3)
    body = {"prompt": "x", "max_tokens": 1}
    assert [call(server.url, COMPLETIONS, body).status for _ in range(2)] == [500, 200]
    assert call(server.url, "/admin/config").json["num_requests"] == 2


pytest_plugins = ["pytester"]

TEST = """
import http.client, json, pytest

def ask(server, **more):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "hello", "max_tokens": 4, **more}))
    return connection, connection.getresponse()

@pytest.mark.kvarts_server(served_model_name="chat", any_model=False, pages=64, seed=3)
def test_well_behaved(kvarts_server):
    for _ in range(2):
        connection, response = ask(kvarts_server, prompt=[1] * 40, model="chat")
        assert response.status == 200 and response.read()
        connection.close()
    assert kvarts_server.cache_hits() == 32
    assert [seen.body["max_tokens"] for seen in kvarts_server.requests] == [4, 4]
    assert len(kvarts_server.timeline()) == 8
    kvarts_server.assert_conserved()

@pytest.mark.kvarts_server(fail="first 1: 429 retry_after=0")
def test_never_again(kvarts_server):
    connection, response = ask(kvarts_server)
    response.read()
    connection.close()

@pytest.mark.kvarts_server(cost="linear:step_ms=5")
def test_goes_away(kvarts_server):
    connection, response = ask(kvarts_server, stream=True, max_tokens=2000)
    response.read(20)
    response.close()
    connection.close()

@pytest.mark.kvarts_server(fail="first 1: 429")
def test_excused(kvarts_server):
    kvarts_server.excuse("missing retry")
    connection, response = ask(kvarts_server)
    response.read()
    connection.close()
"""


def test_the_fixture_says_what_a_client_did_wrong(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TEST)
    result = pytester.runpytest_inprocess(*PLUGIN, "-p", "no:cacheprovider", "-n", "0")
    result.assert_outcomes(passed=4, errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "*request 1 to /v1/completions was answered 429 and was not sent again",
            "*the answer to request 1 to /v1/completions was not read to its end",
        ]
    )


# Of the engine ----------------------------------------------------------------------------------------------


def test_transfers_fail_by_number_and_by_seed() -> None:
    plan = FailureScript("first 1: 429; transfers every 3rd: fail; transfers 4-5: fail")
    assert [plan.transfer_fails(number) for number in range(1, 8)] == [False, False, True, True, True, True, False]
    assert plan.has_transfers and plan.next().status == 429 and plan.next() is NO_FAILURE
    rate = [FailureScript("transfers rate 30%: fail", seed=seed) for seed in (1, 1, 2)]
    drawn = [[plan.transfer_fails(number) for number in range(1, 100)] for plan in rate]
    assert drawn[0] == drawn[1] != drawn[2] and 10 < sum(drawn[0]) < 60


@pytest.mark.parametrize("at_run_time", [False, True])
def test_a_transfer_that_fails_costs_a_prompt_computed_again_and_no_page(start: Any, *, at_run_time: bool) -> None:
    from kvarts.core.tiers.config import OffloadConfig

    script = "transfers: fail"
    offload = OffloadConfig(host_pages=400, policy="eager")
    # Computing costs more than loading: what is below is worth a load.
    cost = "linear:step_ms=0.2,chunk_token_ms=0.05"
    server = start(pages=40, page_size=4, max_seqs=4, cost=cost, offload=offload, fail="" if at_run_time else script)
    if at_run_time:
        assert call(server.url, "/admin/config", {"fail": script}).status == 200
    prompts = [[number] * 60 for number in range(8)]
    answers: dict[int, str] = {}
    for _ in range(2):
        for number, prompt in enumerate(prompts):
            reply = call(server.url, COMPLETIONS, {"prompt": prompt, "max_tokens": 4})
            assert reply.status == 200
            assert answers.setdefault(number, reply.json["choices"][0]["text"]) == reply.json["choices"][0]["text"]
    text = call(server.url, "/metrics").payload.decode()
    assert re.search(r'kvarts:transfers_total\{[^}]*kind="failed"[^}]*\} [1-9]', text)
    assert re.search(r'kvarts:transfers_total\{[^}]*kind="stores"[^}]*\} [1-9]', text)
    assert re.search(r"vllm:external_prefix_cache_hits_total\{[^}]*\} 0", text)
    call(server.url, "/admin/config", {"fail": ""})
    for prompt in prompts * 2:
        call(server.url, COMPLETIONS, {"prompt": prompt, "max_tokens": 4})
    text = call(server.url, "/metrics").payload.decode()
    assert re.search(r"vllm:external_prefix_cache_hits_total\{[^}]*\} [1-9]", text)


def test_transfers_that_there_are_not_cannot_fail(start: Any) -> None:
    with pytest.raises(ConfigError, match="no tiers"):
        start(fail="transfers: fail")
    server = start()
    refused = call(server.url, "/admin/config", {"fail": "transfers: fail", "max_queued": 7})
    assert refused.status == 400 and refused.error["param"] == "fail"
    assert call(server.url, "/admin/config").json["max_queued"] == 1024
