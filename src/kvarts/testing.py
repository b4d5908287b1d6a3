"""Contracts of what a user can replace: suites of tests that a subclass runs, with pytest, on a class of its own.

`EvictionOrderContract`, `AdmissionPolicyContract`, `RouterContract` and `TierContract` promise what kvarts relies on;
its own classes run through the same suites. A subclass makes the object to test:

>>> from kvarts.policies import LruOrder
>>> from kvarts.testing import EvictionOrderContract
>>> class TestMyOrder(EvictionOrderContract):
...     def make_order(self):
...         return LruOrder()

In a file `test_my_order.py`, `pytest` then runs all of them. An autouse fixture with `params` that sets an attribute
runs them for several objects.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("kvarts.testing needs pytest: pip install pytest", name="pytest") from error

from kvarts.core.content import Content
from kvarts.core.events import Event, PagesRemoved
from kvarts.core.kv.cache import BlockTable, Match
from kvarts.core.kv.eviction import EvictionOrder, PinnedPages
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import IdPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.policy import NEVER_NS, AdmissionPolicy
from kvarts.core.tiers.tier import MemoryTier
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.router import PolicyRouter
from kvarts.sim.routers.view import WorkerFacts
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace

__all__ = ["AdmissionPolicyContract", "EvictionOrderContract", "RouterContract", "TierContract"]


def hold_found(cache: PageCache, match: Match, start: int = 0) -> PinnedPages:
    """Hold what was found, from page `start` on, as a transfer does."""
    return cache.hold(cache.tree.cut(match), start, match.num_pages)


def leave(cache: PageCache, tokens: list[int], owner: int) -> Content:
    """Compute a prompt and let its request go."""
    content = Content.from_tokens(tokens, page_size=1, owner=owner)
    table = cache.open(cache.match(content, len(tokens)))
    cache.grow(table, len(tokens))
    cache.close(table, len(tokens), len(tokens))
    return content


def pages_in_order(order: EvictionOrder) -> list[tuple[Content, int]]:
    """Return the listed pages as they would be evicted if none followed another: run by run, from the tail."""
    return [(node.content, page) for node in order for page in range(node.end - 1, node.start - 1, -1)]


def drive(
    cache: PageCache,
    seed: int,
    num_turns: int,
    *,
    after: Callable[[PageCache], object] = lambda cache: None,
    transfers: Callable[[], Iterable[PinnedPages]] = list,
) -> None:
    """Open, grow, close, hold and let go at random, in a cache of some 24 pages; check laws L1 to L3 after each turn.

    `after` does something between turns, for which `transfers` hold paths.
    """
    dice = random.Random(seed)
    open_now: list[tuple[BlockTable, Content]] = []
    held: list[PinnedPages] = []
    for turn in range(num_turns):
        what = dice.random()
        if what < 0.5:
            tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 9))]
            content = Content.from_tokens(tokens, page_size=1, owner=turn)
            match = cache.match(content, len(tokens))
            if len(tokens) - match.num_shared <= cache.num_free:
                table = cache.open(match)
                cache.grow(table, len(tokens))
                open_now.append((table, content))
        elif what < 0.9 and open_now:
            table, content = open_now.pop(dice.randrange(len(open_now)))
            num_findable = table.path[-1].end if table.path else 0
            cache.close(table, dice.randint(num_findable, table.num_pages), table.num_pages)
        elif what < 0.95 and open_now:
            tokens = [dice.randrange(2) for _ in range(4)]
            held.append(hold_found(cache, cache.match(Content.from_tokens(tokens, page_size=1, owner=turn), 4)))
        elif held:
            cache.unhold(held.pop(dice.randrange(len(held))))
        after(cache)
        cache.check([(table, table.num_pages) for table, _ in open_now], [*held, *transfers()])
    for path in held:
        cache.unhold(path)
    for table, content in open_now:
        cache.close(table, content.num_known_pages, table.num_pages)
    cache.check([], transfers())


class EvictionOrderContract:
    """The promises of an EvictionOrder: a subclass makes it.

    Every unreferenced run is listed once; queries change nothing; held runs are skipped and keep their place; a split
    moves no page; descendants are evicted before their ancestors; the same calls have the same victims; pages add up
    after hundreds of random operations.
    """

    def make_order(self) -> EvictionOrder:
        """Return an order that lists nothing."""
        raise NotImplementedError

    def make_tree(self) -> PrefixTree:
        """Return an empty tree with the order."""
        return PrefixTree(self.make_order())

    def make_cache(self, num_pages: int = 24) -> PageCache:
        """Return an empty cache, whose pages have ids."""
        return PageCache(IdPool(num_pages), self.make_tree())

    def test_each_run_that_nothing_references_is_listed_once(self) -> None:
        cache = self.make_cache()
        leave(cache, [1, 2, 3], 0)
        leave(cache, [1, 2, 4, 5], 1)
        other = leave(cache, [7, 8], 2)
        order = cache.tree.order
        listed = [(node.content.owner, node.start, node.end) for node in order]
        assert len(listed) == len(set(listed)) == 4
        assert sum(end - start for _, start, end in listed) == cache.num_cached == 7
        table = cache.open(cache.match(other, 2))
        assert all(node.content is not other for node in order)
        cache.close(table, 2, 2)
        assert len(list(order)) == 4

    def test_asking_changes_nothing(self) -> None:
        cache = self.make_cache()
        for owner, tokens in enumerate(([1, 2, 3], [1, 2, 4], [5, 6])):
            leave(cache, tokens, owner)
        order = cache.tree.order
        before = list(order)
        assert order.next_run() is order.next_run() is before[0]
        assert list(order) == before

    def test_runs_that_a_transfer_holds_are_passed_by_and_keep_their_place(self) -> None:
        cache = self.make_cache(9)
        for owner, tokens in enumerate(([1, 2, 3], [4, 5, 6], [7, 8, 9])):
            leave(cache, tokens, owner)
        order = cache.tree.order
        before = list(order)
        first = before[0]
        path = hold_found(cache, cache.match(first.content, 3))
        assert list(order) == before
        assert order.next_run() is before[1]
        cache.evict(3)
        assert list(order) == [first, before[2]]
        cache.unhold(path)
        assert order.next_run() is first

    def test_what_was_held_while_it_was_referenced_is_passed_by_when_it_is_released(self) -> None:
        cache = self.make_cache(6)
        content = Content.from_tokens([1, 2, 3], page_size=1, owner=0)
        table = cache.open(cache.match(content, 0))
        cache.grow(table, 3)
        cache.publish_pages(table, 3)
        path = hold_found(cache, cache.match(content, 3))
        cache.close(table, 3, 3)
        other = leave(cache, [4, 5, 6], 1)
        assert cache.tree.order.next_run().content is other
        cache.unhold(path)
        cache.check([])
        cache.evict(6)
        assert list(cache.tree.order) == []

    def test_a_split_moves_no_page(self) -> None:
        cache = self.make_cache()
        contents = [leave(cache, tokens, owner) for owner, tokens in enumerate(([1, 2, 3, 4], [5, 6, 7], [8, 9]))]
        before = pages_in_order(cache.tree.order)
        tree = cache.tree
        tree.isolate(tree.cut(cache.match(contents[0], 4)), 1, 3)
        tree.isolate(tree.cut(cache.match(contents[1], 3)), 1, 2)
        assert pages_in_order(tree.order) == before
        assert len(list(tree.order)) == 7
        cache.check([])

    def test_a_run_is_eaten_from_its_tail_and_no_further_than_needed(self) -> None:
        cache = self.make_cache(6)
        content = leave(cache, [1, 2, 3, 4], 0)
        held = hold_found(cache, cache.match(content, 4))
        ids = cache.page_ids(held)
        cache.unhold(held)
        cache.take(2)
        assert cache.take(3) == list(reversed(ids[1:]))
        assert cache.match(content, 4).num_pages == 1

    def test_what_follows_a_run_goes_before_it(self) -> None:
        """L3, whatever is hit how often."""
        cache = self.make_cache(8)
        root, one, two = leave(cache, [1, 2], 0), leave(cache, [1, 2, 3], 1), leave(cache, [1, 2, 4, 5], 2)
        for _ in range(3):
            table = cache.open(cache.match(two, 4))
            cache.close(table, 4, 4)
        found = []
        while cache.num_cached:
            cache.evict(1)
            cache.check([])
            found.append([cache.match(content, 4).num_pages for content in (root, one, two)])
        assert all(min(first, 2) == min(second, 2) == min(third, 2) for first, second, third in found)
        assert found[-1] == [0, 0, 0]

    @pytest.mark.parametrize("seed", range(6))
    def test_the_laws_hold_after_everything(self, seed: int) -> None:
        """L1 to L3 at random, with a page for every id at the end."""
        cache = self.make_cache()
        drive(cache, seed, 300)
        cache.evict(cache.num_cached)
        cache.check([])
        assert list(cache.tree.order) == [] == list(cache.tree.nodes())
        assert cache.num_evicted > 24

    @pytest.mark.parametrize("seed", range(3))
    def test_the_same_calls_have_the_same_victims(self, seed: int) -> None:
        victims = []
        for _ in range(2):
            events: list[Event] = []
            cache = self.make_cache()
            cache.tree.emit = events.append
            drive(cache, seed, 200)
            victims.append(
                [
                    (event.content.owner, event.start_page, event.end_page)
                    for event in events
                    if isinstance(event, PagesRemoved)
                ]
            )
        assert victims[0] == victims[1] != []


MS = 1_000_000


def waiting_request(index: int, *, arrival_ns: int = 0, priority: int = 0, num_prompt_tokens: int = 4) -> Request:
    """Return a request that waits for admission."""
    tokens = range(num_prompt_tokens)
    request = Request(
        index,
        Content.from_tokens(tokens, page_size=1, owner=index),
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=1,
        arrival_ns=arrival_ns,
        priority=priority,
    )
    request.become(RequestState.WAITING)
    return request


class AdmissionPolicyContract:
    """The promises of an AdmissionPolicy: a subclass makes it.

    There is a head while requests wait, and it stays until the returned time unless a request is pushed or removed;
    queries change nothing; the same calls have the same answers; every request is admitted eventually.
    """

    def make(self) -> AdmissionPolicy:
        """Return a policy for which no request waits."""
        raise NotImplementedError

    def play(self, seed: int) -> Iterator[tuple[AdmissionPolicy, int, dict[int, Request]]]:
        """Let requests come and be admitted at random. Yield policy, time and what waits, after each time."""
        dice = random.Random(seed)
        policy, waiting, now_ns = self.make(), dict[int, Request](), 0
        for index in range(60):
            now_ns += dice.choice([0, MS, 40 * MS])
            arrival = waiting_request(
                index,
                arrival_ns=now_ns,
                priority=dice.choice([0, 0, 1, -1]),
                num_prompt_tokens=dice.randint(1, 9),
            )
            policy.push(arrival)
            waiting[index] = arrival
            assert 0 <= policy.num_ahead(arrival) < len(waiting)
            yield policy, now_ns, waiting
            while waiting and dice.random() < 0.45:
                now_ns += dice.choice([0, MS, 40 * MS])
                head = policy.head(now_ns)
                policy.remove(head)
                del waiting[head.index]
                if dice.random() < 0.2:
                    head.state = RequestState.PREEMPTED
                    policy.push(head)
                    waiting[head.index] = head
                elif waiting and dice.random() < 0.3:
                    cancelled = waiting.pop(dice.choice(list(waiting)))
                    policy.remove(cancelled)
                yield policy, now_ns, waiting

    @pytest.mark.parametrize("seed", range(4))
    def test_all_that_wait_are_listed_once_and_the_head_is_among_them(self, seed: int) -> None:
        for policy, now_ns, waiting in self.play(seed):
            listed = list(policy)
            assert sorted(request.index for request in listed) == sorted(waiting)
            if waiting:
                assert policy.head(now_ns) in listed

    @pytest.mark.parametrize("seed", range(4))
    def test_asking_changes_nothing(self, seed: int) -> None:
        for policy, now_ns, waiting in self.play(seed):
            if waiting:
                before = list(policy), policy.head(now_ns), policy.holds_until_ns(now_ns)
                assert (list(policy), policy.head(now_ns), policy.holds_until_ns(now_ns)) == before

    @pytest.mark.parametrize("seed", range(4))
    def test_the_head_stays_until_the_time_that_was_named(self, seed: int) -> None:
        """The promise that fast-forward lives on: L5."""
        for policy, now_ns, waiting in self.play(seed):
            if not waiting:
                continue
            until_ns = policy.holds_until_ns(now_ns)
            assert until_ns > now_ns
            head = policy.head(now_ns)
            last_ns = min(until_ns, now_ns + 10_000 * MS) - 1
            for at_ns in (now_ns + 1, (now_ns + last_ns) // 2, last_ns):
                if now_ns <= at_ns <= last_ns:
                    assert policy.head(at_ns) is head
            assert until_ns == NEVER_NS or policy.holds_until_ns(until_ns) > until_ns

    @pytest.mark.parametrize("seed", range(4))
    def test_the_same_calls_have_the_same_answers(self, seed: int) -> None:
        answers = [
            [
                (policy.head(now_ns).index, policy.holds_until_ns(now_ns), [request.index for request in policy])
                for policy, now_ns, waiting in self.play(seed)
                if waiting
            ]
            for _ in range(2)
        ]
        assert answers[0] == answers[1] != []

    def test_every_request_gets_its_turn(self) -> None:
        """L8: what is admitted one after the other is everything."""
        policy, now_ns = self.make(), 0
        for index in range(20):
            policy.push(waiting_request(index, num_prompt_tokens=1 + index % 7))
        admitted = []
        for _ in range(20):
            now_ns += MS
            head = policy.head(now_ns)
            policy.remove(head)
            admitted.append(head.index)
        assert sorted(admitted) == list(range(20))
        assert list(policy) == []

    def test_a_preempted_request_waits_again(self) -> None:
        policy = self.make()
        one, two = waiting_request(0), waiting_request(1)
        for request in (one, two):
            policy.push(request)
        head = policy.head(0)
        policy.remove(head)
        head.state = RequestState.PREEMPTED
        policy.push(head)
        assert {request.index for request in policy} == {0, 1}
        assert policy.head(0) is head, "nothing has changed but that it was preempted"


class RouterContract:
    """The promises of the policy of a router, see `kvarts.policies.RouterPolicy`: a subclass makes it.

    Every choice is one of the workers, whichever have left; choosing changes nothing in the view; the same history has
    the same choices, and another router does not change them; a replay ends, and is the same step by step.
    """

    def make(self) -> Any:
        """Return a policy that has seen nothing."""
        raise NotImplementedError

    def open(self, num_workers: int = 4) -> PolicyRouter:
        """Return a router of idle workers with the policy."""
        return Routing().open(self.make, WorkerFacts(num_workers, 16, 512, tiers=("device", "host")))

    def play(self, router: PolicyRouter, seed: int) -> Iterator[tuple[Request, int]]:
        """Let requests arrive and end, and workers report, leave and return, at random. Yield each choice."""
        dice, now_ns, flying = random.Random(seed), 0, list[int]()
        num_workers = len(router.view.workers)
        for index in range(120):
            now_ns += dice.choice([0, MS, 3_000 * MS])
            shared = [dice.randrange(3)] * (16 * dice.randrange(5))
            tokens = [*shared, *(1000 + index + place for place in range(dice.randrange(1, 40)))]
            content = Content.from_tokens(tokens, page_size=16, owner=index)
            request = Request(
                index, content, num_prompt_tokens=len(tokens), max_tokens=4, arrival_ns=now_ns, priority=index % 2
            )
            session = f"session {dice.randrange(6)}" if dice.random() < 0.5 else None
            worker = router.place(request, session, now_ns)
            assert worker is not None, "a router without a queue threshold places at once"
            yield request, worker
            flying.append(index)
            for _ in range(dice.randrange(3)):
                if flying and dice.random() < 0.6:
                    router.prefilled(flying[0])
                    router.ended(flying.pop(dice.randrange(len(flying))))
            running, waiting, used, wanted = (dice.randrange(9) for _ in range(4))
            router.report(dice.randrange(num_workers), running, waiting, used, wanted, dice.random())
            away = dice.randrange(num_workers)
            if away not in router.view.workers:
                router.enter(away)
            elif len(router.view.workers) > 1 and dice.random() < 0.2:
                router.leave(away)

    def test_every_choice_is_one_of_the_workers(self) -> None:
        for num_workers in (1, 2, 5):
            router = self.open(num_workers)
            for seed in range(3):
                for _, worker in self.play(router, seed):
                    assert worker in router.view.workers
                router = self.open(num_workers)

    def test_the_same_history_has_the_same_choices(self) -> None:
        """Whatever another router of the same kind does meanwhile."""
        alone = [worker for _, worker in self.play(self.open(), 7)]
        with_other, other = [], self.play(self.open(), 8)
        for _, worker in self.play(self.open(), 7):
            with_other.append(worker)
            next(other, None)
        assert with_other == alone

    def test_choosing_changes_nothing_in_the_view(self) -> None:
        router = self.open()
        policy, view = self.make(), router.view
        for request, _ in self.play(router, 3):
            asked = router._asked(request, None, request.arrival_ns)
            columns = (view.workers, view.num_requests, view.prefill_tokens, view.num_blocks, view.metrics.waiting)
            before = [list(column) for column in columns]
            assert policy.choose(asked, view) in view.workers
            assert [list(column) for column in columns] == before

    def test_a_replay_ends_and_is_the_same_step_by_step(self) -> None:
        trace = load_trace("sample:mooncake")
        few = Trace(list(trace)[:150], unit_tokens=trace.unit_tokens, name="few")
        reports = [
            replay(few, ReplayConfig(num_pages=900, page_size=512, replicas=3, router=self.make, step_by_step=alone))
            for alone in (False, True)
        ]
        assert reports[0].to_json() == reports[1].to_json()
        assert reports[0].summary["num_completed"] == 150


def content_of(tokens: range | list[int], owner: int = 0) -> Content:
    """Return the content of a prompt with a token per page."""
    return Content.from_tokens(tokens, page_size=1, owner=owner)


def stored(tier: MemoryTier, content: Content, end: int, start: int = 0) -> None:
    """Store pages."""
    store = tier.prepare_store(content, start, end)
    assert store is not None
    tier.complete_store(store)


class TierContract:
    """The promises of a tier of pages below the device: a subclass makes it.

    Nothing is found before its store is complete, and nothing is stored twice; pinned pages stay; what remains of an
    evicted prompt is a prefix; failures, broken pages and resets leave nothing behind; tenants share nothing.
    """

    outlives_requests = False
    """Whether pages stay when the process ends, as files do: then it keeps none whose tokens are unknown."""

    def make(self, num_pages: int) -> MemoryTier:
        """Return an empty tier of `num_pages` pages."""
        raise NotImplementedError

    def test_nothing_is_findable_before_its_store_is_complete(self) -> None:
        tier, content = self.make(8), content_of(range(6))
        store = tier.prepare_store(content, 0, 4)
        assert store is not None
        assert store.num_pages == 4
        assert tier.find(content, 0, 6) == 0
        assert tier.num_used_blocks == 4
        tier.complete_store(store)
        assert tier.find(content, 0, 6) == 4
        assert tier.num_used_blocks == 0

    def test_what_is_stored_or_coming_is_not_stored_again(self) -> None:
        tier, content = self.make(8), content_of(range(6))
        first = tier.prepare_store(content, 0, 3)
        assert first is not None
        second = tier.prepare_store(content, 0, 5)
        assert second is not None
        assert [(segment.start, segment.end) for segment in second.segments] == [(3, 5)]
        assert tier.prepare_store(content, 1, 5) is None
        tier.complete_store(first)
        tier.complete_store(second)
        assert tier.prepare_store(content, 0, 5) is None

    def test_a_failed_store_leaves_nothing(self) -> None:
        tier, content = self.make(4), content_of(range(6))
        store = tier.prepare_store(content, 0, 4)
        assert store is not None
        tier.complete_store(store, is_stored=False)
        assert tier.find(content, 0, 6) == 0
        assert tier.num_used_blocks == tier.num_cached_blocks == 0 or tier.num_used_blocks == 0
        stored(tier, content, 4)
        assert tier.find(content, 0, 6) == 4

    def test_a_lookup_is_contiguous_after_the_device_hit_and_keeps_within_its_limit(self) -> None:
        tier, content = self.make(8), content_of(range(8))
        stored(tier, content, 6)
        assert tier.lookup(1, content, 2, 8) == 4
        assert tier.lookup(1, content, 2, 5) == 3
        assert tier.lookup(1, content, 6, 8) == 0
        assert tier.lookup(1, content_of([0, 1, 9, 3], 1), 1, 4) == 1
        assert tier.lookup(1, content_of([9, 1, 2, 3], 2), 1, 4) == 0

    def test_a_repeated_lookup_piles_up_no_pins(self) -> None:
        tier, content = self.make(8), content_of(range(6))
        stored(tier, content, 6)
        for _ in range(5):
            tier.lookup(1, content, 0, 6)
        assert tier.num_used_blocks == 6
        tier.forget(1)
        tier.forget(1)
        assert tier.num_used_blocks == 0

    def test_a_lookup_disturbs_nobody_elses_order(self) -> None:
        tier = self.make(4)
        old, young = content_of([1, 2], 1), content_of([3, 4], 2)
        stored(tier, old, 2)
        stored(tier, young, 2)
        tier.lookup(1, old, 0, 2)
        tier.forget(1)
        stored(tier, content_of([5, 6], 3), 2)
        assert tier.find(old, 0, 2) == 0, "it was looked at, and not used"
        assert tier.find(young, 0, 2) == 2

    def test_a_hit_makes_its_pages_most_recent(self) -> None:
        tier = self.make(4)
        old, young = content_of([1, 2], 1), content_of([3, 4], 2)
        stored(tier, old, 2)
        stored(tier, young, 2)
        tier.lookup(1, old, 0, 2)
        tier.complete_load(tier.prepare_load(1))
        stored(tier, content_of([5, 6], 3), 2)
        assert tier.find(old, 0, 2) == 2
        assert tier.find(young, 0, 2) == 0

    def test_what_remains_of_an_evicted_prompt_is_a_usable_prefix(self) -> None:
        tier, content = self.make(64), content_of(range(64))
        stored(tier, content, 64)
        stored(tier, content_of(range(100, 128), 1), 28)
        assert tier.find(content, 0, 64) == 36
        assert tier.num_evicted_blocks == 28

    def test_what_is_pinned_stays(self) -> None:
        tier, content = self.make(4), content_of(range(4))
        stored(tier, content, 4)
        tier.lookup(1, content, 0, 3)
        other = content_of(range(10, 14), 1)
        store = tier.prepare_store(other, 0, 4)
        assert store is not None
        assert store.num_pages == 1, "three pages are pinned"
        tier.complete_store(store)
        assert tier.find(content, 0, 4) == 3

    def test_a_tier_too_small_for_a_request_degrades_to_a_miss(self) -> None:
        tier, content = self.make(2), content_of(range(8))
        stored(tier, content, 8)
        assert tier.find(content, 0, 8) == 2
        assert tier.find(content, 4, 8) == 0
        tier.lookup(1, content, 0, 8)
        assert tier.prepare_store(content_of([9], 1), 0, 1) is None

    def test_fewer_pages_may_be_taken_than_were_offered(self) -> None:
        tier, content = self.make(8), content_of(range(8))
        stored(tier, content, 8)
        assert tier.lookup(1, content, 2, 8) == 6
        load = tier.prepare_load(1, 3)
        assert (load.start, load.end) == (2, 5)
        assert tier.num_used_blocks == 5, "and what is before it"
        tier.complete_load(load)
        assert tier.num_used_blocks == 0

    def test_broken_pages_leave_the_index(self) -> None:
        tier, content = self.make(8), content_of(range(8))
        stored(tier, content, 8)
        tier.lookup(1, content, 2, 7)
        tier.complete_load(tier.prepare_load(1), 2)
        assert tier.find(content, 0, 8) == 4
        assert tier.num_used_blocks == 0

    def test_a_reset_with_transfers_under_way_registers_nothing(self) -> None:
        tier, content, coming = self.make(8), content_of(range(4)), content_of(range(10, 14), 1)
        stored(tier, content, 4)
        tier.lookup(1, content, 0, 4)
        load = tier.prepare_load(1)
        store = tier.prepare_store(coming, 0, 4)
        assert store is not None
        tier.reset()
        assert tier.find(content, 0, 4) == 0
        assert tier.num_used_blocks == 8, "what is in flight stays pinned"
        tier.complete_store(store)
        tier.complete_load(load)
        assert tier.find(coming, 0, 4) == 0
        assert tier.num_used_blocks == tier.num_cached_blocks == 0
        stored(tier, content, 4)
        assert tier.find(content, 0, 4) == 4

    def test_what_follows_a_page_that_is_nowhere_is_forgotten(self) -> None:
        """L3: the device had pages 0 and 1, and evicts them."""
        tier, content = self.make(8), content_of(range(4))
        stored(tier, content, 4, start=2)
        assert tier.find(content, 2, 4) == 2
        tier.lose(content, 0, 2)
        assert tier.find(content, 2, 4) == 0
        assert tier.num_used_blocks == 0

    def test_tenants_share_nothing(self) -> None:
        """L9."""
        tier = self.make(8)
        mine = Content.from_tokens([1, 2], page_size=1, owner=1, salt="me")
        stored(tier, mine, 2)
        assert tier.find(Content.from_tokens([1, 2], page_size=1, owner=2, salt="you"), 0, 2) == 0
        assert tier.find(Content.from_tokens([1, 2], page_size=1, owner=3), 0, 2) == 0

    def test_only_its_request_finds_pages_of_unknown_tokens(self) -> None:
        """Memory may keep them until the request ends; a file would outlive it."""
        tier, content = self.make(8), content_of(range(3))
        store = tier.prepare_store(content, 0, 6)
        assert store is not None
        tier.complete_store(store)
        num_kept = 3 if self.outlives_requests else 6
        assert [(segment.start, segment.end) for segment in store.segments] == [(0, num_kept)]
        assert tier.find(content, 0, 6) == num_kept
        assert tier.find(Content.from_tokens(range(3), page_size=1, owner=2), 0, 6) == 3
        tier.drop(content, 3)
        assert tier.find(content, 0, 6) == 3
