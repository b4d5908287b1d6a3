"""The residency of KV blocks, beside a model that follows every page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from kvarts.base.errors import ConfigError
from kvarts.core.content import Content
from kvarts.core.events import Admitted, CacheCleared, PagesRemoved, PagesStored, StepEnded, StepStarted
from kvarts.doors.openai.meter import RESIDENCY_S, Residency
from kvarts.doors.openai.metrics import ServerMetrics
from kvarts.doors.openai.running import RunningServer

from builders.http_client import call

COMPLETIONS = "/v1/completions"
FAMILIES = ("lifetime", "idle_before_evict", "reuse_gap")


class Naive:
    """An EventReader: every page of the device, by all tokens up to its end, in a dict."""

    wants_details = True

    def __init__(self) -> None:
        self.pages: dict[Any, list[int]] = {}
        self.num_stored = 0
        self.seen: dict[str, list[float]] = {name: [] for name in FAMILIES}
        self.now_ns = 0

    def observe(self, events: Sequence[Any]) -> None:
        for event in events:
            match event:
                case StepStarted():
                    self.now_ns = event.start_ns
                case StepEnded():
                    self.now_ns = event.end_ns
                case PagesStored():
                    for page in range(event.start_page, event.end_page):
                        self.pages[self.key(event.content, page, event.group)] = [self.now_ns]
                        self.num_stored += 1
                case Admitted():
                    for page in range(event.num_hit_pages):
                        self.pages[self.key(event.content, page, None)].append(self.now_ns)
                case CacheCleared():
                    self.pages.clear()
                case PagesRemoved():
                    for page in range(event.start_page, event.end_page):
                        self.evict(self.pages.pop(self.key(event.content, page, event.group), None))

    def key(self, content: Any, page: int, group: int | None) -> Any:
        assert page < content.num_known_pages
        return content.salt, group, tuple(content.tokens(0, (page + 1) * content.page_size))

    def evict(self, times: list[int] | None) -> None:
        if times is None:
            return
        self.seen["lifetime"].append((self.now_ns - times[0]) / 1e9)
        self.seen["idle_before_evict"].append((self.now_ns - times[-1]) / 1e9)
        uses = times[1:][-4:]
        self.seen["reuse_gap"] += [(later - earlier) / 1e9 for earlier, later in pairwise(uses)]


def counted(values: Sequence[float]) -> list[int]:
    """How many values are at most each bound, and all."""
    return [*(sum(value <= bound for value in values) for bound in RESIDENCY_S), len(values)]


def exposed(server: RunningServer, name: str) -> tuple[list[int], float]:
    text = ServerMetrics(server.opened.models).exposition()[0].decode()
    buckets = re.findall(rf"^vllm:kv_block_{name}_seconds_bucket{{.*}} (\S+)$", text, re.M)
    (total,) = re.findall(rf"^vllm:kv_block_{name}_seconds_sum{{.*}} (\S+)$", text, re.M)
    return [round(float(bucket)) for bucket in buckets], float(total)


def serve(server: RunningServer, num_requests: int, seed: int = 0) -> None:
    random = Random(seed)
    for _ in range(num_requests):
        prompt = f"number {random.randrange(6)} " * 40 + f"and {random.randrange(3)} " * random.randrange(30)
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": random.randrange(1, 40), "ignore_eos": True}
        if random.random() < 0.2:
            body["cache_salt"] = "red"
        assert call(server.url, COMPLETIONS, body).status == 200


def test_all_blocks_are_counted_as_a_model_of_pages_counts_them() -> None:
    naive = Naive()
    with RunningServer(pages=40, readers=[naive], residency_share=1.0) as server:
        serve(server, 60)
        call(server.url, "/reset_prefix_cache", {})
        serve(server, 20, seed=1)
        for name in FAMILIES:
            buckets, total = exposed(server, name)
            assert buckets == counted(naive.seen[name]), name
            assert total == pytest.approx(sum(naive.seen[name])), name
    assert len(naive.seen["lifetime"]) > 100
    assert len(naive.seen["reuse_gap"]) > 10


@pytest.mark.slow
def test_a_share_of_the_blocks_is_counted_and_the_same_one_again() -> None:
    naive = Naive()
    with RunningServer(pages=40, readers=[naive], residency_share=0.2) as server:
        serve(server, 120)
        num_counted = exposed(server, "lifetime")[0][-1]
        num_evicted = len(naive.seen["lifetime"])
        assert num_evicted > 500
        assert 0.12 * num_evicted < num_counted < 0.3 * num_evicted
    with RunningServer(pages=40, residency_share=0.2) as server:
        serve(server, 120)
        assert exposed(server, "lifetime")[0][-1] == num_counted


def test_times_are_those_of_a_clock_on_the_wall() -> None:
    with RunningServer(pages=40, residency_share=1.0, speedup=10.0) as server:
        serve(server, 30)
        _, sum_s = exposed(server, "lifetime")
        num = exposed(server, "lifetime")[0][-1]
    assert 0 < sum_s / num < 30


def test_without_the_option_there_are_neither_series_nor_events_of_pages() -> None:
    with RunningServer(pages=40) as server:
        serve(server, 3)
        assert b"kv_block" not in ServerMetrics(server.opened.models).exposition()[0]
        assert server.opened.served.host.core.log.emit_details is None


def test_groups_of_layers_have_blocks_of_their_own() -> None:
    residency = Residency(1.0)
    content = Content.from_tokens(range(64), page_size=16, owner=0)
    residency.observe([
        StepStarted(0, 0), PagesStored(content, 0, 4, None, group=0), PagesStored(content, 2, 4, None, group=1),
        StepStarted(1, 1_000_000_000), PagesRemoved(content, 2, 4, group=1),
    ])  # fmt: skip
    assert (residency.lifetime_s.cumulative()[-1], residency.lifetime_s.total) == (2, 2.0)
    residency.observe([StepStarted(2, 3_000_000_000), PagesRemoved(content, 0, 4, group=0)])
    assert (residency.lifetime_s.cumulative()[-1], residency.lifetime_s.total) == (6, 14.0)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_is_above_0_and_at_most_1(share: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        Residency(share)
