"""Each policy against its rule over everything that the router was told, prompt by prompt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.events import PagesRemoved, PagesStored
from kvarts.core.request import Request
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.router import PolicyRouter
from kvarts.sim.routers.view import WorkerFacts

from oracles.naive_routers import NaiveRouter, Placed

pytestmark = pytest.mark.laws

PAGE = 16
PREFIXES = [tuple(range(100 * kind, 100 * kind + 100)) for kind in range(3)]
"""Prompts share up to 100 tokens: 6 pages, 3 chunks of the production stack."""

prompts = st.builds(
    lambda prefix, shared, own, tail: (*prefix[:shared], *range(1000 + own, 1000 + own + tail)),
    st.sampled_from(PREFIXES),
    st.integers(0, 100),
    st.integers(0, 3),
    st.integers(1, 60),
)

Told = tuple[PolicyRouter, NaiveRouter]


class Driven:
    """A router and the naive one, told the same."""

    def __init__(self, name: str, num_workers: int, **routing: Any) -> None:
        self.router = Routing(**routing).open(name, WorkerFacts(num_workers, PAGE, 64, tiers=("device", "host")))
        self.naive = NaiveRouter(num_workers, PAGE, metrics=[(0, 0, 0, 0, 0.0)] * num_workers)
        self.now_ns = 0

    def request(self, tokens: tuple[int, ...]) -> Request:
        index = len(self.naive.placed)
        return Request(index, Content.from_tokens(tokens, page_size=PAGE, owner=index), len(tokens), 1)

    def note(self, tokens: tuple[int, ...], worker: int) -> None:
        """Let the naive router know where the last request went."""
        pages = self.naive.pages(tokens)
        cached = self.naive.cache.matches(pages, len(pages)).get(worker, (0, 0))[0] * PAGE
        self.naive.placed.append(Placed(len(self.naive.placed), worker, tokens, self.now_ns, cached))

    def happen(self, data: st.DataObject) -> None:
        """Let something happen in the workers."""
        naive, router = self.naive, self.router
        self.now_ns += data.draw(st.sampled_from([0, 10, 25_000_000_000]))
        what = data.draw(st.sampled_from(["end", "prefill", "metrics", "cache", "nothing"]))
        worker = data.draw(st.integers(0, naive.num_workers - 1))
        flying = [each for each in naive.placed if not each.is_ended]
        if what == "end" and flying:
            gone = data.draw(st.sampled_from(flying))
            gone.is_ended = True
            router.ended(gone.index)
        elif what == "prefill" and flying:
            computed = data.draw(st.sampled_from(flying))
            computed.is_prefilled = True
            router.prefilled(computed.index)
        elif what == "metrics":
            report = data.draw(st.tuples(*[st.integers(0, 6)] * 4, st.sampled_from([0.0, 0.25, 0.5, 1.0])))
            naive.metrics[worker] = report
            router.report(worker, *report)
        elif what == "cache" and router.index is not None:
            self.change_cache(data, worker)

    def change_cache(self, data: st.DataObject, worker: int) -> None:
        tokens = data.draw(prompts)
        pages = self.naive.pages(tokens)
        if not pages:
            return
        tier = data.draw(st.sampled_from(["device", "host"]))
        end = data.draw(st.integers(1, len(pages)))
        cache, before = self.naive.cache, set(self.naive.cache.pages)
        start = next((n for n in range(end) if not cache.has(worker, tier, pages[: n + 1])), end)
        content = Content.from_tokens(tokens, page_size=PAGE, owner=99)
        if start < end:
            cache.store(worker, pages, start, end, tier)
            event: Any = PagesStored(content, start, end, None, tier)
        else:
            start = data.draw(st.integers(0, end - 1))
            cache.remove(worker, pages, start, end, tier)
            event = PagesRemoved(content, start, end, tier)
        if not cache.is_lawful():
            cache.pages = before
            return
        self.router._emit(worker, event, self.now_ns)
        self.router.catch_up(self.now_ns, ())


def allowed(name: str, driven: Driven, tokens: tuple[int, ...]) -> set[int]:
    """The workers that the rule of a policy allows."""
    naive = driven.naive
    match name:
        case "least-loaded":
            return naive.least_loaded(tokens)
        case "prefix":
            return naive.prefix(tokens)
        case "dynamo-kv":
            return about(naive.dynamo_costs(tokens), least=True)
        case "dynamo-kv:overlap_score_credit=0.5,prefill_load_scale=2,decode_active_request_weight=3":
            return about(naive.dynamo_costs(tokens, credit=0.5, scale=2, weight=3), least=True)
        case "dynamo-kv:overlap_score_credit_decay=0.5":
            return about(naive.dynamo_costs(tokens, decay=0.5), least=True)
        case "llm-d":
            return about(naive.llm_d(tokens), least=False)
        case "llm-d:prefix=1,queue=3":
            return about(naive.llm_d(tokens, prefix=1, queue=3, kv=0), least=False)
        case "sglang-cache-aware":
            return naive.sglang_cache_aware(tokens)
        case "production-stack-prefix":
            return naive.production_stack_prefix(tokens)
        case "production-stack-kv:threshold=40,chunk_tokens=32":
            return naive.production_stack_kv(tokens, 40, 32, driven.now_ns)
        case "aibrix-prefix":
            return naive.aibrix_prefix(tokens)
    raise AssertionError(name)


def about(values: list[float], *, least: bool) -> set[int]:
    best = min(values) if least else max(values)
    return {worker for worker, value in enumerate(values) if abs(value - best) < 1e-9}


NAMES = [
    "least-loaded",
    "prefix",
    "dynamo-kv",
    "dynamo-kv:overlap_score_credit=0.5,prefill_load_scale=2,decode_active_request_weight=3",
    "dynamo-kv:overlap_score_credit_decay=0.5",
    "llm-d",
    "llm-d:prefix=1,queue=3",
    "sglang-cache-aware",
    "production-stack-prefix",
    "production-stack-kv:threshold=40,chunk_tokens=32",
    "aibrix-prefix",
]


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
def test_a_policy_keeps_its_rule(name: str, data: st.DataObject) -> None:
    driven = Driven(name, data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(1, 25))):
        driven.happen(data)
        tokens = data.draw(prompts)
        allows = allowed(name, driven, tokens)
        worker = driven.router.place(driven.request(tokens), None, driven.now_ns)
        assert worker in allows
        driven.note(tokens, worker)


@pytest.mark.parametrize("name", ["sglang-cache-aware", "aibrix-prefix"])
def test_load_comes_first_where_it_is_far_apart(name: str) -> None:
    """The threshold of SGLang is 64 requests, that of AIBrix twice the mean and 8 requests."""
    driven = Driven(name, 3)
    tokens = tuple(range(64))
    chosen = []
    for _ in range(200):
        allows = allowed(name, driven, tokens)
        worker = driven.router.place(driven.request(tokens), None, 0)
        assert worker in allows
        driven.note(tokens, worker)
        chosen.append(worker)
    most = {"sglang-cache-aware": 66, "aibrix-prefix": 9}[name]
    assert len(set(chosen[: most - 1])) <= (1 if name.startswith("sglang") else 3)
    assert len(set(chosen)) > 1


@given(st.data(), st.sampled_from(["fcfs", "lcfs", "wspt"]))
def test_requests_wait_in_the_router_while_all_workers_are_busy(data: st.DataObject, order: str) -> None:
    """A request waits if every worker has more than 32 tokens to prefill, or another waits."""
    driven = Driven("dynamo-kv", 2, queue_threshold=0.5, queue=order)
    naive, held = driven.naive, dict[int, tuple[int, tuple[int, ...], float]]()
    requests: list[Request] = []

    def is_busy() -> bool:
        return all(
            sum(len(p.tokens) - p.cached for p in naive.in_flight(worker) if not p.is_prefilled) > 32
            for worker in naive.workers
        )

    for number in range(data.draw(st.integers(1, 20))):
        flying = [each for each in naive.placed if not each.is_ended and not each.is_prefilled]
        if flying and data.draw(st.sampled_from([False, True])):
            computed = data.draw(st.sampled_from(flying))
            computed.is_prefilled = True
            driven.router.prefilled(computed.index)
            for request, worker in driven.router.take_placed(number):
                assert not is_busy()
                first = min(held, key=lambda each: (held[each][2], held[each][0]))
                assert request.index == first
                naive.placed.append(Placed(first, worker, held.pop(first)[1], number, 0))
            assert not held or is_busy()
        tokens = data.draw(prompts)
        request = Request(
            number, Content.from_tokens(tokens, page_size=PAGE, owner=number), len(tokens), 1,
            priority=data.draw(st.integers(0, 2)),
        )  # fmt: skip
        requests.append(request)
        waits = bool(held) or is_busy()
        placed = driven.router.place(request, None, number)
        assert (placed is None) == waits
        if placed is None:
            key = {"fcfs": number, "lcfs": -number, "wspt": -(1 + request.priority) / len(tokens)}[order]
            held[number] = number, tokens, key
        else:
            naive.placed.append(Placed(number, placed, tokens, number, 0))
    assert driven.router.num_held == len(held)


def test_what_a_request_found_on_arrival_counts_when_it_leaves_the_queue() -> None:
    driven = Driven("dynamo-kv", 1, queue_threshold=0.0)
    tokens = tuple(range(48))
    content = Content.from_tokens(tokens, page_size=PAGE, owner=9)
    first, second = driven.request(tokens), Request(1, content, 48, 1)
    assert driven.router.place(first, None, 0) == 0
    assert driven.router.place(second, None, 1) is None
    driven.router._emit(0, PagesStored(content, 0, 3, None), 2)
    driven.router.catch_up(2, ())
    driven.router.prefilled(0)
    assert driven.router.take_placed(2) == [(second, 0)]
    assert driven.router.view.prefill_tokens == [48]


def test_sessions_stay_and_others_follow_the_rate() -> None:
    driven = Driven("session", 4)
    homes = [driven.router.place(driven.request((1, 2)), name, 0) for name in ("a", "b", "a", "c", "a")]
    assert homes[0] == homes[2] == homes[4]
    rates = list(driven.router.view.rates(0))
    assert driven.router.place(driven.request((3,)), None, 0) == rates.index(min(rates))


def test_workers_come_and_go() -> None:
    """A worker that leaves gets no more requests; numbers are not used again; most sessions stay where they are."""
    driven = Driven("session", 4)
    names = [str(number) for number in range(400)]
    before = [driven.router.place(driven.request((1,)), name, 0) for name in names]
    driven.router.leave(2)
    after = [driven.router.place(driven.request((1,)), name, 0) for name in names]
    assert 2 in before and 2 not in after
    assert all(a == b for a, b in zip(before, after, strict=True) if a != 2)
    assert driven.router.join() == 4
    grown = [driven.router.place(driven.request((1,)), name, 0) for name in names]
    assert 0.1 < grown.count(4) / 400 < 0.4
    assert all(a == b for a, b in zip(after, grown, strict=True) if b != 4)
