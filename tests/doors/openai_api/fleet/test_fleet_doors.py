"""The doors of a fleet over HTTP: the router's, and those of workers that send KV to each other."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from kvarts.doors.openai.running import RunningServer
from kvarts.sim.fleet.config import FleetConfig
from kvarts.sim.fleet.faults import Fault

from builders.http_client import OpenStream, call, events_of
from builders.live_fleet import RunningFleet, small_pool

PROMPT = "hello the world of one and two and three and once more to fill some pages of it"
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As the side car of llm-d sends them."""


def fleet_of(**settings: Any) -> FleetConfig:
    pools = small_pool("prefill", 2, step_ms=1.0), small_pool("decode", 2, step_ms=1.0)
    return FleetConfig(pools=pools, token_bytes=1000, **{"bytes_per_s": 1e7, **settings})


@pytest.fixture
def fleet() -> Iterator[RunningFleet]:
    with RunningFleet(fleet_of()) as running:
        yield running
        running.assert_at_rest()


def complete(url: str, **body: Any) -> Any:
    reply = call(url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 5, **body})
    assert reply.status == 200, reply.payload
    return reply.json


def leave(fleet: RunningFleet, worker: int = 0, **body: Any) -> dict[str, Any]:
    """Have a worker compute a prompt, and return what names its pages."""
    told = complete(fleet.urls[worker], max_tokens=1, kv_transfer_params=ASKED, **body)
    assert told["choices"][0]["finish_reason"] == "length" and told["usage"]["completion_tokens"] == 1
    params = told["kv_transfer_params"]
    assert isinstance(params, dict)
    return params


def test_the_router_answers_as_one_mock_would(fleet: RunningFleet) -> None:
    with RunningServer(page_size=4) as alone:
        for body in ({}, {"seed": 3}, {"stop": " one"}, {"max_tokens": 40, "logprobs": 2}, {"n": 2, "max_tokens": 3}):
            mine, other = complete(fleet.url, **body), complete(alone.url, **body)
            assert mine["choices"] == other["choices"]
            assert mine["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
        alone.excuse("missing retry")


def test_prompts_are_computed_by_prefill_workers_and_continued_by_others(fleet: RunningFleet) -> None:
    first = complete(fleet.url)
    num_prompt = first["usage"]["prompt_tokens"]
    assert [fleet.metric(worker, "vllm:prompt_tokens_total") for worker in range(4)] == [num_prompt, 0, num_prompt, 0]
    assert [fleet.metric(worker, "vllm:generation_tokens_total") for worker in range(4)] == [0, 0, 5, 0]
    assert fleet.metric(2, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == num_prompt
    complete(fleet.url), complete(fleet.url)
    assert [fleet.metric(worker, "vllm:request_success_total") for worker in range(4)] == [2, 1, 2, 1]
    assert fleet.metric(0, "vllm:prefix_cache_hits_total") > 0
    at_router = call(fleet.url, "/metrics").payload.decode()
    assert {*re.findall(r'vllm:num_requests_running{engine="(\d)"', at_router)} == {"0", "1", "2", "3"}


def test_a_worker_holds_a_prompt_and_another_one_fetches_it(fleet: RunningFleet) -> None:
    expected = complete(fleet.url, max_tokens=6)["choices"][0]["text"]
    params = leave(fleet, 1)
    num_prompt = params["remote_num_tokens"]
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    assert params["remote_port"] == int(fleet.urls[1].rpartition(":")[2]) and params["remote_host"] == "127.0.0.1"
    held = fleet.metric(1, "kvarts:pages", state="used")
    assert held == len(params["remote_block_ids"]) == -(-num_prompt // 4)
    body = {"prompt": PROMPT, "max_tokens": 6, "stream": True, "kv_transfer_params": params}
    events = events_of(call(fleet.urls[3], "/v1/completions", body).payload)
    assert "".join(each["choices"][0]["text"] for each in events) == expected
    assert fleet.metric(1, "kvarts:pages", state="used") == 0
    assert fleet.metric(3, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == num_prompt
    # They are held for one request.
    complete(fleet.urls[2], kv_transfer_params=params)
    assert fleet.metric(2, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == num_prompt * (
        fleet.metric(2, "vllm:request_success_total") - 1
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"remote_engine_id": "another"},
        {"remote_request_id": "another-1"},
        {"remote_request_id": "no number"},
        {"remote_block_ids": []},
        {"remote_block_ids": None},
        {"remote_host": None},
    ],
)
def test_with_an_unknown_remote_a_request_computes_its_prompt(fleet: RunningFleet, changed: dict[str, Any]) -> None:
    params = leave(fleet)
    text = complete(fleet.urls[2], kv_transfer_params={**params, **changed})["choices"][0]["text"]
    assert fleet.metric(2, "vllm:prompt_tokens_by_source_total", source="local_compute") == params["remote_num_tokens"]
    assert complete(fleet.urls[3], kv_transfer_params=params)["choices"][0]["text"] == text  # they are still there
    assert fleet.metric(3, "vllm:prompt_tokens_by_source_total", source="local_compute") == 0


def test_another_prompt_is_not_fetched_and_the_holder_releases(fleet: RunningFleet) -> None:
    params = leave(fleet)
    told = complete(fleet.urls[2], prompt=f"other {PROMPT}", kv_transfer_params=params)
    assert (
        fleet.metric(2, "vllm:prompt_tokens_by_source_total", source="local_compute") == told["usage"]["prompt_tokens"]
    )
    assert fleet.metric(0, "kvarts:pages", state="used") == 0


def test_pages_are_released_if_nobody_fetches_them_in_time() -> None:
    with RunningFleet(fleet_of(hold_s=0.3)) as fleet:
        params = leave(fleet)
        assert fleet.metric(0, "kvarts:pages", state="used") > 0
        fleet.wait_until(lambda: fleet.metric(0, "kvarts:pages", state="used") == 0)
        complete(fleet.urls[2], kv_transfer_params=params)
        assert fleet.metric(2, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 0
        fleet.assert_at_rest()


def test_a_worker_that_is_down_refuses_and_says_until_when() -> None:
    faults = Fault("down", 0, 0, 30_000_000_000), Fault("down", 2, 0)
    with RunningFleet(fleet_of(faults=faults)) as fleet:
        for worker, retry_after in ((0, 30), (2, None)):
            reply = call(fleet.urls[worker], "/v1/completions", {"prompt": PROMPT, "max_tokens": 5})
            assert (reply.status, reply.json["error"]["message"]) == (503, f"worker {worker} is down")
            assert reply.json["error"]["type"] == "ServiceUnavailableError"
            told = reply.headers.get("retry-after")
            assert told is None if retry_after is None else retry_after - 15 < int(told or 0) <= retry_after
        complete(fleet.urls[3])
        complete(fleet.url)
        fleet.assert_at_rest()


def test_a_worker_that_goes_down_says_so_to_those_it_was_answering(caplog: pytest.LogCaptureFixture) -> None:
    pools = small_pool("prefill", 1), small_pool("decode", 2, step_ms=10.0)
    faults = (Fault("down", 2, 300_000_000),)
    with RunningFleet(FleetConfig(pools=pools, faults=faults)) as fleet:
        reply = call(fleet.urls[2], "/v1/completions", {"prompt": PROMPT, "max_tokens": 150})
        assert (reply.status, reply.json["error"]["message"]) == (503, "worker 2 is down")
        complete(fleet.url)
        fleet.assert_at_rest()
    assert "unexpected" not in caplog.text


def test_a_prompt_that_no_worker_of_a_role_holds_is_refused() -> None:
    pools = small_pool("prefill", 1, step_ms=1.0), small_pool("decode", 1, step_ms=1.0, num_pages=3)
    with RunningFleet(FleetConfig(pools=pools)) as fleet:
        reply = call(fleet.url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 5})
        assert reply.status == 400, reply.payload
        fleet.assert_at_rest()


def test_a_client_that_goes_leaves_nothing_at_either_worker() -> None:
    with RunningFleet(fleet_of(bytes_per_s=2e4)) as fleet:  # a second for each transfer
        for seconds in (0.05, 0.4):
            params = leave(fleet)
            body = {"prompt": PROMPT, "max_tokens": 50, "kv_transfer_params": params}
            gone = OpenStream(fleet.urls[2], "/v1/completions", body)
            fleet.wait_until(lambda: fleet.num_live > 0)  # else nobody has fetched the prompt, which is held for 30 s
            time.sleep(seconds)
            gone.close()
            fleet.wait_until(lambda: not any(fleet.metric(worker, "kvarts:pages", state="used") for worker in (0, 2)))
        fleet.assert_at_rest()


@pytest.mark.parametrize(
    ("params", "more", "said"),
    [
        ({"do_remote_decode": "yes"}, {}, "Expected `bool | null`"),
        ({"do_remote_prefill": True, "remote_block_ids": 7}, {}, "Expected `array | null`"),
        ({"do_remote_decode": True}, {"max_tokens": 5}, "max_tokens is 1"),
        ({"do_remote_decode": True}, {"n": 2}, "one prompt and one choice"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, {}, "is one of them"),
        ([1], {}, "kv_transfer_params"),
    ],
)
def test_a_bad_request_ends_itself(fleet: RunningFleet, params: Any, more: dict[str, Any], said: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": params, **more}
    reply = call(fleet.urls[0], "/v1/completions", body)
    assert reply.status == 400 and said in reply.payload.decode()
    complete(fleet.urls[0])


def test_several_clients_at_all_doors_get_whole_answers(fleet: RunningFleet) -> None:
    def one(number: int) -> int:
        prompt = f"{PROMPT} {number % 7} {'again ' * (number % 5)}"
        worker = number % 3
        params = None
        if number % 4 == 1:
            params = leave(fleet, number % 2, prompt=prompt)
        url = fleet.url if worker == 0 else fleet.urls[worker + 1]
        return int(complete(url, prompt=prompt, max_tokens=8, kv_transfer_params=params)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(24) as pool:
        assert set(pool.map(one, range(120))) == {8}


def test_the_pages_of_a_worker_are_reset_at_its_door_and_of_all_at_the_routers(fleet: RunningFleet) -> None:
    complete(fleet.url), complete(fleet.urls[1])
    cached = [fleet.metric(worker, "kvarts:pages", state="cached") for worker in range(4)]
    assert cached[0] and cached[1] and cached[2]
    assert call(fleet.urls[0], "/reset_prefix_cache", {}).status == 200
    assert fleet.metric(0, "kvarts:pages", state="cached") == 0 < fleet.metric(1, "kvarts:pages", state="cached")
    assert call(fleet.url, "/reset_prefix_cache", {}).status == 200
    assert not any(fleet.metric(worker, "kvarts:pages", state="cached") for worker in range(4))


def test_a_request_is_let_in_while_another_worker_computes() -> None:
    pools = (small_pool("mixed", 2, step_ms=1000.0),)
    with RunningFleet(FleetConfig(pools=pools)) as fleet:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(complete, fleet.url, max_tokens=1)
            time.sleep(0.3)
            second = pool.submit(complete, fleet.url, max_tokens=1)
            second.result()
            first.result()
        # In the time of the engines: the second one does not wait for the step of the first one's worker, for 0.7 s.
        assert [fleet.metric(worker, "vllm:request_success_total") for worker in (0, 1)] == [1, 1]
        assert sum(fleet.metric(worker, "vllm:request_queue_time_seconds_sum") for worker in (0, 1)) < 0.05


def test_a_drain_waits_for_requests_at_all_doors() -> None:
    fleet = RunningFleet(fleet_of(), hosts=None, allows_failures=False)
    ends: list[int] = []

    def ask(url: str) -> None:
        ends.append(complete(url, max_tokens=100)["usage"]["completion_tokens"])

    threads = [threading.Thread(target=ask, args=(url,)) for url in (fleet.url, fleet.urls[0], fleet.urls[3])]
    for thread in threads:
        thread.start()
    fleet.wait_until(lambda: fleet.num_live == 3)
    assert fleet.stop(drain_s=20.0)
    for thread in threads:
        thread.join()
    assert ends == [100, 100, 100]


@pytest.mark.slow
def test_openais_client_under_load_at_the_router_and_as_a_side_car(fleet: RunningFleet) -> None:
    openai = pytest.importorskip("openai")

    async def all_of_them() -> list[tuple[int, int, int]]:
        clients = [
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in (fleet.url, *fleet.urls)
        ]
        limit = asyncio.Semaphore(48)

        async def streamed(client: Any, number: int, params: Any) -> tuple[int, int, int]:
            chunks = await client.completions.create(
                model="mock",
                prompt=f"{PROMPT} {number % 9} {'again ' * (number % 7)}",
                max_tokens=4 + number % 13,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"kv_transfer_params": params},
            )
            words, usage = 0, None
            async for chunk in chunks:
                words += sum(len(choice.text.split()) for choice in chunk.choices)
                usage = chunk.usage or usage
            assert usage is not None
            return number, words, usage.completion_tokens

        async def one(number: int) -> tuple[int, int, int]:
            async with limit:
                if number % 3:
                    return await streamed(clients[0], number, None)
                held = await clients[1 + number % 2].completions.create(
                    model="mock",
                    prompt=f"{PROMPT} {number % 9} {'again ' * (number % 7)}",
                    max_tokens=1,
                    extra_body={"kv_transfer_params": ASKED},
                )
                return await streamed(clients[3 + number % 2], number, held.model_extra["kv_transfer_params"])

        ends = await asyncio.gather(*(one(number) for number in range(300)))
        for client in clients:
            await client.close()
        return ends

    ends = asyncio.run(all_of_them())
    assert ends == [(number, 4 + number % 13, 4 + number % 13) for number in range(300)]
    sources = ["local_compute", "local_cache_hit", "external_kv_transfer"]
    of_decodes = [
        sum(fleet.metric(worker, "vllm:prompt_tokens_by_source_total", source=source) for worker in (2, 3))
        for source in sources
    ]
    assert of_decodes[:2] == [0, 0] and of_decodes[2] > 300 * len(PROMPT.split())
    assert sum(fleet.metric(worker, "vllm:request_success_total") for worker in range(4)) == 600


@pytest.fixture
def two_models() -> Iterator[RunningFleet]:
    chat = replace(small_pool("mixed", 1), name="chat", served_model_name="chat")
    code = [
        replace(small_pool(role, 1), name=f"code-{role}", served_model_name="code") for role in ("prefill", "decode")
    ]
    with RunningFleet(FleetConfig(pools=(chat, *code), token_bytes=1000, bytes_per_s=1e7)) as running:
        yield running
        running.assert_at_rest()


def test_the_router_lists_all_models_and_a_request_gets_its_own(two_models: RunningFleet) -> None:
    fleet = two_models
    listed = call(fleet.url, "/v1/models").json["data"]
    assert [each["id"] for each in listed] == ["chat", "code"]
    assert [[each["id"] for each in call(url, "/v1/models").json["data"]] for url in fleet.urls] == [
        ["chat"], ["code"], ["code"]
    ]  # fmt: skip

    def ended() -> list[float]:
        return [fleet.metric(worker, "vllm:request_success_total") for worker in range(3)]

    assert complete(fleet.url, model="code")["model"] == "code"
    assert ended() == [0, 1, 1]
    assert complete(fleet.url, model="chat")["model"] == "chat"
    assert ended() == [1, 1, 1]
    complete(fleet.url)  # the first one answers requests without a model
    assert ended() == [2, 1, 1]
    reply = call(fleet.url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "model": "mistral"})
    assert reply.status == 404
    assert reply.json["error"]["message"] == "the model 'mistral' does not exist; there is 'chat', 'code'"


@pytest.mark.parametrize("order", [(None, "chat"), ("chat", None)])
def test_a_model_without_a_name_is_served_as_the_mock(order: tuple[str | None, str | None]) -> None:
    pools = tuple(replace(small_pool("mixed", 1), name=f"p{i}", served_model_name=name) for i, name in enumerate(order))
    with RunningFleet(FleetConfig(pools=pools)) as fleet:
        listed = call(fleet.url, "/v1/models").json["data"]
        assert [each["id"] for each in listed] == [name or "mock" for name in order]
        for name in order:
            assert complete(fleet.url, model=name or "mock")["model"] == (name or "mock")


def test_the_port_of_a_worker_has_its_model_alone(two_models: RunningFleet) -> None:
    fleet = two_models
    assert complete(fleet.urls[2], model="code")["model"] == "code"
    assert fleet.metric(2, "vllm:request_success_total", model_name="code") == 1
    reply = call(fleet.urls[0], "/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "model": "code"})
    assert reply.status == 404
    held = complete(fleet.urls[1], max_tokens=1, model="code", kv_transfer_params=ASKED)["kv_transfer_params"]
    # KV is of one model: another one computes the prompt, and the pages are released.
    complete(fleet.urls[0], kv_transfer_params=held)
    assert fleet.metric(0, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 0
