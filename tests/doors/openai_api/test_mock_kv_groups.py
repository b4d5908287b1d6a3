"""Mocks that count KV groups: blocks in metrics, the longest request, host memory and sessions."""

from __future__ import annotations

import asyncio
import re
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from cProfile import Profile
from random import Random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvarts.base.clock import VirtualClock
from kvarts.core.build import Storage, preparation_of
from kvarts.core.config import EngineConfig
from kvarts.core.kv.groups import STATE_SPAN, GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.sampling import SamplingParams
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.polynomial import LinearCost
from kvarts.doors.openai.opening import mock_model
from kvarts.run.page_bytes import FIRST_ROWS
from kvarts.run.sessions import opening

from builders import preforked
from builders.grouped import FULL, WINDOW
from builders.http_client import call

STATE = PartGroup(KvLayer(kind="state", state_bytes=1), 2)
GEMMA = ("--model", "gemma-3-27b", "--device", "h100-80gb", "--tensor-parallel", "2", "--kv-memory", "1GiB")


@contextmanager
def mocked(*args: str) -> Iterator[str]:
    with preforked.start("mock", *args, "--speedup", "1000", "--audit", "--port", "0") as process:
        assert process.stderr is not None
        url = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert url is not None
        yield url[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def pages(url: str) -> dict[str, dict[str, float]]:
    """Return the blocks in each state by model, and without a model of all."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(call(url, "/metrics").payload.decode()):
        for sample in family.samples:
            if sample.name == "kvarts:pages":
                found.setdefault(sample.labels["model_name"], {})[sample.labels["state"]] = sample.value
            elif sample.name == "vllm:cache_config_info":
                found[""] = {"total": float(sample.labels["num_gpu_blocks"])}
    return found


def test_a_window_that_was_passed_is_cached_and_not_used() -> None:
    prompt = " ".join(["word"] * 3000)
    with mocked(*GEMMA, "--set", "kv_groups=all") as url:
        reply = call(url, "/v1/completions", {"model": "gemma-3-27b", "prompt": prompt, "max_tokens": 8})
        assert reply.status == 200
        found = pages(url)
    of_model = found["gemma-3-27b"]
    assert of_model["used"] == 0
    assert sum(of_model.values()) == found[""]["total"]
    # A page has a part of two blocks in each fifth layer of the others: all are cached, those that a window passed too.
    assert of_model["cached"] > 3000 // 16


def test_a_request_may_be_longer_where_windows_give_back() -> None:
    lengths = []
    for kv_groups in ("off", "all"):
        with mocked(*GEMMA, "--set", f"kv_groups={kv_groups}", "--max-batched-tokens", "512") as url:
            (model,) = call(url, "/v1/models").json["data"]
            lengths.append(model["max_model_len"])
    assert lengths[1] > 3 * lengths[0]


def test_one_of_two_models_counts_its_groups() -> None:
    models = ("--model", "chat=gemma-3-27b:kv_groups=tails", "--model", "code=qwen3-8b")
    with mocked(*models, *GEMMA[2:]) as url:
        for name in ("chat", "code"):
            reply = call(url, "/v1/completions", {"model": name, "prompt": " ".join(["a"] * 50), "max_tokens": 4})
            assert reply.status == 200
        found = pages(url)
    for name in ("chat", "code"):
        states = found[name]
        assert states["cached"] > 0 == states["used"]
        assert states["elsewhere"] == 0, "what others have cached is free"


def cost_of(state: PartGroup, *, aligns: bool) -> tuple[int, int]:
    """Return the most memory that a mock takes for a prompt of 500 tokens, in bytes, and the calls that it makes."""
    config = EngineConfig(num_pages=100, page_size=16, max_num_batched_tokens=64, max_num_seqs=4)
    groups = GroupMemory((PartGroup(FULL, 1), state), aligns=aligns)
    profile = Profile()
    tracemalloc.start()
    try:
        host = mock_model(
            config, LinearCost(step_ms=1.0), token_bytes=100, storage=Storage(memory=groups), clock=VirtualClock()
        )
        host.loop.submit([7] * 500, SamplingParams(max_tokens=20))
        profile.enable()
        while host.loop.has_work:
            host.loop.step()
        profile.disable()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return peak, sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("aligns", [False, True])
def test_a_state_of_many_blocks_costs_what_one_of_few_does(aligns: bool) -> None:
    """A state by page is taken, named in plans, written and given back as one."""
    layer = KvLayer(kind="state", state_bytes=1, span=STATE_SPAN)
    _, few, many = (cost_of(PartGroup(layer, each), aligns=aligns) for each in (3, 3, 30_000))  # the first one imports
    assert many[1] < few[1] * 1.1
    untouched = 2 * 8 * 100 * 30_001 + FIRST_ROWS * 16 * 8  # zeros of PageSlots
    assert many[0] < few[0] + untouched + (1 << 20)


def test_a_mock_that_writes_a_state_by_page_elsewhere_is_noticed() -> None:
    """INV1 reads the block of each state that plans name: the others follow it."""
    from kvarts.run.sessions.values import SessionsConfig, SessionSettings

    from builders.sessions import OWNER, say

    config = EngineConfig(num_pages=60, page_size=4, max_num_batched_tokens=64, max_num_seqs=4)
    by_page = PartGroup(KvLayer(kind="state", state_bytes=1, span=STATE_SPAN), 3)
    memory = GroupMemory((PartGroup(FULL, 1), by_page), aligns=True)
    host = mock_model(
        config, LinearCost(step_ms=1.0), token_bytes=100, storage=Storage(memory=memory), clock=VirtualClock()
    )
    sessions = opening.sessions_on(host, SessionsConfig(defaults=SessionSettings(sink=3, window=10), chunk_tokens=16))

    async def violations(name: str) -> int:
        return int((await sessions.info(OWNER, name)).inv1_violations)

    async def talk() -> None:
        name, other = [await sessions.create(OWNER) for _ in range(2)]
        for each in (name, other):
            await say(sessions, each, [7] * 30, 5)
        assert await violations(name) == await violations(other) == 0
        held = [sessions._table.get(OWNER, each).pages for each in (name, other)]
        table, of_other = (pages.tables[1] for pages in held if pages is not None)
        own, table._page_ids = table._page_ids, of_other._page_ids
        assert await violations(name) == 0, "two sessions of one history, at the same position"
        await say(sessions, other, [7], 5)
        assert await violations(name) == 1
        table._page_ids = own
        assert await violations(name) == 1
        await sessions.close(OWNER, name)
        await sessions.shut_down()

    asyncio.run(talk())


@pytest.mark.parametrize(
    "models",
    [
        "--served-model-name chat --model granite-4.0-h-tiny --set mamba_cache_mode=align",
        "--model code=qwen3-8b --model chat=granite-4.0-h-tiny:mamba_cache_mode=align",
    ],
)
def test_states_by_page_let_a_request_go_on_from_an_answer(models: str) -> None:
    """Without them, a snapshot is taken where a prompt ends, and nothing of its answer is found."""
    engine = ("--device", "h100-80gb", "--kv-memory", "4GiB", "--max-seqs", "16")
    found = []
    for mode in ("snapshots", "align"):
        with mocked(*models.replace("align", mode).split(), *engine) as url:
            prompt = " ".join(["word"] * 100)
            first = call(url, "/v1/completions", {"model": "chat", "prompt": prompt, "max_tokens": 200})
            again = prompt + first.json["choices"][0]["text"]
            second = call(url, "/v1/completions", {"model": "chat", "prompt": again, "max_tokens": 1})
            found.append(second.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert 0 < found[0] < 100 < 200 < found[1]


def test_host_memory_keeps_what_the_device_evicts() -> None:
    prompts = [" ".join([word] * 4001) for word in "abcdefgh"]
    tier = (
        "--set",
        "kv_groups=tails",
        "--host-memory",
        "8GiB",
        "--set",
        "offload.h2d=10TB/s",
        "--set",
        "offload.d2h=10TB/s",
    )
    with mocked(*GEMMA, *tier) as url:
        for prompt in (*prompts, prompts[0]):
            reply = call(url, "/v1/completions", {"model": "gemma-3-27b", "prompt": prompt, "max_tokens": 4})
            assert reply.status == 200
        found = [
            sample.value
            for family in text_string_to_metric_families(call(url, "/metrics").payload.decode())
            for sample in family.samples
            if sample.name == "vllm:external_prefix_cache_hits_total"
        ]
    assert found and found[0] > 0


@pytest.mark.parametrize("kept", [{"sink": 3, "window": 10}, {"retention": "pin"}, {"retention": "host"}])
@pytest.mark.parametrize("groups", [(PartGroup(FULL, 1), WINDOW), (PartGroup(FULL, 1), WINDOW, STATE)])
def test_sessions_say_what_those_of_whole_pages_say(kept: dict[str, Any], groups: tuple[PartGroup, ...]) -> None:
    """L6 and L12, with host memory below; at rest nothing is in use."""
    from kvarts.run.sessions.values import SessionsConfig, SessionSettings

    from builders.sessions import OWNER, check_at_rest, say

    if STATE in groups and "window" in kept:
        pytest.skip("a state has no window")
    settings = SessionSettings(**{"window": None, **kept})
    config = EngineConfig(num_pages=60, page_size=4, max_num_batched_tokens=64, max_num_seqs=4)

    async def talk(sessions: Any) -> list[list[int]]:
        random = Random(1)
        names = [await sessions.create(OWNER, settings) for _ in range(3)]
        answers = []
        for turn in range(12):
            said = [random.randrange(90) for _ in range(random.randrange(1, 20))]
            answers.append(await say(sessions, names[turn % 3], said, 5))
        for name in names:
            info = await sessions.info(OWNER, name)
            assert (info.inv1_violations, info.inv2_violations) == (0, 0)
            await sessions.close(OWNER, name)
        await sessions.shut_down()
        return answers

    said = []
    for memory in (GroupMemory(groups), None):
        tiers = OffloadConfig(host_pages=200, kv_bytes_per_token=100)
        host = mock_model(
            config,
            LinearCost(step_ms=1.0),
            token_bytes=100,
            storage=Storage(memory=memory, tiers=preparation_of(tiers)),
            clock=VirtualClock(),
        )
        said.append(asyncio.run(talk(opening.sessions_on(host, SessionsConfig(defaults=settings, chunk_tokens=16)))))
        check_at_rest(host)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "tiers",
    [
        ("--set", "offload.host_pages=100", "--set", "offload.disk_pages=800"),
        ("--tier", "dram:pages=100", "--tier", "cxl:pages=120", "--tier", "nvme:kind=files,pages=800"),
    ],
)
@pytest.mark.parametrize("model", [("llama-3.1-8b", "150"), ("gemma-3-27b", "300")])
def test_a_mock_waits_for_a_load_that_a_replay_would_share_with_computing(
    model: tuple[str, str], tiers: tuple[str, ...]
) -> None:
    """Where the first pages are sooner computed and the last ones sooner loaded: a mock loads all, or computes all."""
    name, num_pages = model
    prompts = [" ".join([f"word{number}"] * 1000) for number in range(2)]
    with mocked("--model", name, "--device", "h100-80gb", "--pages", num_pages, *tiers) as url:
        for prompt in prompts * 3:
            body = {"model": name, "prompt": prompt, "max_tokens": 4}
            assert call(url, "/v1/completions", body).status == 200
