"""Several models on one device: memory, donors, loans and health, case by case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.request import Request
from kvarts.core.sched.policy import NEVER_NS
from kvarts.sim.sharing.device import Loan, SharedDevice, Victims, cheapest, debts

from builders.sharing_rigs import PAGE_SIZE, Rig


class PlainRig(Rig):
    def __init__(
        self,
        num_bytes: int,
        models: Mapping[str, int],
        *,
        guarantees: Mapping[str, int] | None = None,
        reclaim_after_ns: int = 0,
    ) -> None:
        """`models`: bytes of a page, by name."""
        super().__init__(SharedDevice(num_bytes, reclaim_after_ns=reclaim_after_ns))
        for name, page_bytes in models.items():
            part = self.device.register(name, page_bytes=page_bytes, guaranteed_bytes=(guarantees or {}).get(name, 0))
            config = EngineConfig(
                num_pages=part.pool.total, page_size=PAGE_SIZE, max_num_batched_tokens=1000, max_num_seqs=64
            )
            self.attach(name, part, part.cache, config)

    def used(self) -> dict[str, int]:
        return {name: scheduler.cache.num_used for name, scheduler in self.schedulers.items()}

    def cached(self) -> dict[str, int]:
        return {name: scheduler.cache.num_cached for name, scheduler in self.schedulers.items()}


def test_who_is_idle_lends_and_has_it_back_when_it_asks() -> None:
    rig = PlainRig(100, {"a": 10, "b": 10}, guarantees={"a": 50, "b": 50}, reclaim_after_ns=NEVER_NS)
    for _ in range(2):
        rig.add("a", 3, num_output=5)
    rig.turn("a")
    assert rig.device.loans(5) == [Loan("b", "a", 10, 5)]
    rig.turn("a")
    assert rig.device.loans(9) == [Loan("b", "a", 30, 5)], "since when it began, and how much now"
    waits = rig.add("b", 4)
    rig.turn("b")
    assert waits.admission < 0
    rig.add("a", 1)
    rig.turn("a")
    assert rig.used()["a"] == 8, "nobody is admitted to what was claimed before"
    for _ in range(40):
        rig.turn("a")
        rig.turn("b")
    assert waits.num_output_tokens == 2
    assert rig.used() == {"a": 0, "b": 0}
    assert rig.device.loans(99) == []


def test_a_loan_is_taken_back_at_once_or_after_the_time_that_was_said() -> None:
    for after_ns, turns in ((0, 1), (30, 4)):
        rig = PlainRig(100, {"a": 10, "b": 10}, guarantees={"a": 50, "b": 50}, reclaim_after_ns=after_ns)
        first, last = (rig.add("a", 3, num_output=8) for _ in range(2))
        rig.turn("a")
        waits = rig.add("b", 5, num_output=1)
        for turn in range(1, turns + 1):
            assert waits.admission < 0
            rig.turn("b", now_ns=turn * 10)
        assert waits.num_output_tokens == 1
        assert (first.num_preemptions, last.num_preemptions) == (0, 1), "least work, and no more than is short"
        rig.turn("a", now_ns=100)
        assert last.num_output_tokens > 0


def test_what_waits_is_kept_for_it_and_what_runs_may_grow() -> None:
    """A model with a waiting request gets its whole entitlement, not one head after the other."""
    rig = PlainRig(140, {"a": 10, "b": 10}, guarantees={"a": 70, "b": 70}, reclaim_after_ns=NEVER_NS)
    grown = rig.add("a", 5, num_output=9)
    rig.add("a", 2, num_output=2)
    rig.turn("a")
    waiting = [rig.add("b", 3, num_output=2) for _ in range(2)]
    small = rig.add("a", 1)
    rig.turn("a")
    assert small.admission < 0, "two pages were free, and b wants six"
    assert rig.used()["a"] == 6, "what runs took another page"
    rig.turn("b")
    rig.turn("b")
    assert [request.num_output_tokens for request in waiting] == [2, 2]
    rig.turn("a")
    assert small.admission >= 0
    assert grown.num_preemptions == 0


def test_what_runs_within_a_guarantee_grows_at_the_cost_of_borrowers_and_not_of_its_own() -> None:
    """It preempted its own requests, with memory of its own on loan."""
    for after_ns, lost in ((0, (0, 1)), (30, (0, 1)), (NEVER_NS, (1, 0))):
        rig = PlainRig(100, {"a": 10, "b": 10}, guarantees={"a": 50, "b": 50}, reclaim_after_ns=after_ns)
        rig.add("b", 2, num_output=6)
        mine = rig.add("b", 2, num_output=6)
        rig.turn("b")
        rig.add("a", 3)
        theirs = rig.add("a", 3)
        rig.turn("a")
        assert rig.used() == {"a": 6, "b": 4}
        rig.turn("b")
        assert (mine.num_preemptions, theirs.num_preemptions) == lost, after_ns


def test_cached_pages_go_before_running_work_and_those_beyond_a_guarantee_first() -> None:
    rig = PlainRig(120, {"a": 10, "b": 10, "c": 10}, guarantees={"a": 40, "b": 20, "c": 20})
    for model, num_pages in (("b", 3), ("a", 3), ("b", 4)):
        rig.add(model, num_pages, num_output=1)
        rig.turn(model)
    assert rig.cached() == {"a": 3, "b": 7, "c": 0}
    rig.add("c", 4, num_output=4)
    rig.turn("c")
    assert rig.cached() == {"a": 3, "b": 5, "c": 0}, "two were empty, two were beyond b's guarantee"
    rig.turn("c")
    assert rig.cached() == {"a": 3, "b": 4, "c": 0}
    rig.add("c", 4, num_output=1)
    rig.turn("c")
    assert rig.cached() == {"a": 1, "b": 2, "c": 4}, "what it has to run may push out what others only keep"


def test_a_page_is_as_large_as_its_model_makes_it() -> None:
    rig = PlainRig(100, {"a": 30, "b": 7})
    rig.add("a", 2, num_output=1)
    rig.turn("a")
    rig.add("b", 6, num_output=1)
    rig.turn("b")
    assert rig.cached() == {"a": 1, "b": 6}
    assert rig.device.memory.num_empty_bytes == 100 - 30 - 42


def grown(rig: Rig, model: str, sizes: list[int], priority: int) -> list[Request]:
    requests = [rig.add(model, size, num_output=4, priority=priority) for size in sizes]
    rig.turn(model)
    return requests


def test_pages_come_from_less_important_work_and_as_little_as_is_enough() -> None:
    rig = PlainRig(240, {"a": 10, "b": 10, "c": 10})
    grown(rig, "a", [3, 6], priority=1)
    grown(rig, "b", [2, 9], priority=0)
    grown(rig, "c", [4], priority=2)
    donation = rig.device.request_pages("c", 4, 2)
    assert donation.is_granted
    assert donation.victims == (("b", 3),), "nine pages of b cost more than six of a, and are less important"
    assert donation.lost_tokens == 36
    assert rig.cached()["b"] == 9, "it stays cached until it is taken"
    assert rig.device.num_reclaimed("b") == 1
    rig.device.check()
    rig = PlainRig(240, {"a": 10, "b": 10, "c": 10})
    grown(rig, "a", [3, 6], priority=0)
    grown(rig, "b", [2, 9], priority=0)
    grown(rig, "c", [4], priority=2)
    donation = rig.device.request_pages("c", 4, 2)
    assert donation.victims == (("a", 1),), "of equal priority the cheaper one"


def test_more_important_work_is_not_lost_because_it_is_cheaper() -> None:
    rig = PlainRig(150, {"a": 10, "b": 10, "c": 10})
    grown(rig, "a", [5], priority=8)
    grown(rig, "b", [6], priority=0)
    grown(rig, "c", [4], priority=9)
    donation = rig.device.request_pages("c", 5, 9)
    assert donation.victims == (("b", 1),), "24 tokens of priority 0, not 20 of priority 8"


def test_several_give_way_where_one_is_not_enough() -> None:
    rig = PlainRig(130, {"a": 10, "b": 10, "c": 10})
    grown(rig, "a", [5], priority=0)
    grown(rig, "b", [5], priority=0)
    grown(rig, "c", [3], priority=1)
    donation = rig.device.request_pages("c", 9, 1)
    assert donation.is_granted
    assert sorted(donation.victims) == [("a", 0), ("b", 1)]


def test_no_donor_is_a_clear_answer_and_nobody_loses_anything() -> None:
    rig = PlainRig(100, {"a": 10, "b": 10}, guarantees={"a": 30})
    grown(rig, "a", [6], priority=1)
    grown(rig, "b", [4], priority=1)
    for num_pages, priority, short in ((1, 1, 1), (2, 0, 2), (4, 2, 4)):
        donation = rig.device.request_pages("b", num_pages, priority)
        assert not donation.is_granted
        assert (donation.num_pages_short, donation.victims) == (short, ())
    assert rig.used() == {"a": 6, "b": 4}, "three of a's six pages are its own"
    assert rig.device.request_pages("b", 3, 2).is_granted
    with pytest.raises(ConfigError, match="num_pages: must be at least 1"):
        rig.device.request_pages("b", 0, 1)
    with pytest.raises(ConfigError, match=r"x: is not registered\. There are: a, b"):
        rig.device.request_pages("x", 1, 1)


def test_a_preemption_for_another_model_is_told_with_its_name() -> None:
    rig = PlainRig(100, {"a": 10, "b": 20})
    grown(rig, "a", [9], priority=0)
    high = rig.add("b", 2, num_output=2, priority=3)
    rig.turn("b")
    assert high.admission < 0, "beyond its guarantee it waits"
    rig = PlainRig(100, {"a": 10, "b": 20}, guarantees={"b": 40})
    low = grown(rig, "a", [4, 4], priority=0)[1]
    high = rig.add("b", 2, num_output=1, priority=3)
    rig.turn("b")
    assert high.num_output_tokens == 1
    assert low.num_preemptions == 1
    preemption = rig.schedulers["a"].schedule(0).preemptions[0]
    assert (preemption.model, preemption.asker, preemption.victim) == ("b", high.index, low.index)
    assert (preemption.num_pages_asked, preemption.num_pages_short) == (2, 2), "20 bytes, in pages of a"


# Health ---------------------------------------------------------------------------------------------------


def test_a_dead_model_gives_everything_back_and_the_others_go_on() -> None:
    rig = PlainRig(100, {"a": 10, "b": 10}, guarantees={"a": 10})
    running = grown(rig, "a", [6], priority=0)[0]
    waiting = rig.add("a", 9)
    rig.add("b", 8)
    rig.turn("b")
    assert rig.used() == {"a": 6, "b": 0}
    assert rig.device.set_health("a", "dead") == [running, waiting]
    assert rig.device.memory.num_empty_bytes == 100
    rig.turn("b")
    assert rig.used() == {"a": 0, "b": 8}
    assert rig.device.health("a") == "dead"
    with pytest.raises(ConfigError, match=r"a\.health: must be 'healthy', 'degraded' or 'dead'"):
        rig.device.set_health("a", "ill")  # type: ignore[arg-type]


def test_a_degraded_model_goes_on_with_what_runs_and_admits_nobody() -> None:
    rig = PlainRig(100, {"a": 10})
    running = rig.add("a", 2, num_output=3)
    rig.turn("a")
    assert rig.device.set_health("a", "degraded") == []
    waiting = rig.add("a", 2, num_output=1)
    for _ in range(5):
        rig.turn("a")
    assert running.num_output_tokens == 3
    assert waiting.num_output_tokens == 0
    rig.device.set_health("a", "healthy")
    rig.turn("a")
    assert waiting.num_output_tokens == 1


def test_a_request_that_cannot_be_sure_of_room_is_refused() -> None:
    rig = PlainRig(100, {"a": 10, "b": 10}, guarantees={"a": 60, "b": 20})
    content = Content.from_tokens(range(200), page_size=PAGE_SIZE, owner=0)
    assert rig.schedulers["b"].add(Request(0, content, 16, 1)) is None
    reason = rig.schedulers["b"].add(Request(0, content, 17, 1))
    assert reason == (
        "needs 5 pages of 4 tokens for 17 prompt and 1 output tokens; "
        "beside what is guaranteed to other models there are 4"
    )


def test_what_cannot_be_is_named() -> None:
    device = SharedDevice(100)
    device.register("a", page_bytes=10, guaranteed_bytes=60)
    for call, says in (
        (lambda: SharedDevice(0), "kv_memory: must be at least 1 byte"),
        (lambda: device.register("b", page_bytes=101), "b.page_bytes: one page has 101 bytes; the device has 100"),
        (lambda: device.register("b", page_bytes=1, guaranteed_bytes=41), "b.guarantee: would bring all guarantees"),
        (lambda: device.register("b", page_bytes=1, guaranteed_bytes=-1), "b.guarantee: must be at least 0"),
        (lambda: device.register("a", page_bytes=99), "a: is there already"),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value).startswith(says)
    assert list(device.memory.parts) == ["a"], "who was refused leaves nothing behind"


# Laws -----------------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20), st.integers(0, 2)), max_size=4)


@pytest.mark.laws
@given(st.lists(st.tuples(steps, st.integers(0, 60)), max_size=3), st.integers(1, 80))
def test_no_other_way_loses_less(models: list[tuple[list[tuple[int, int, int]], int]], num_bytes: int) -> None:
    """Against all ways there are: of the highest priority as little as can be, then of the next."""
    choices, gone = [], []
    for sizes, _ in models:
        of_model = sorted(sizes, key=lambda victim: victim[2])
        victims = []
        for count in range(1, len(of_model) + 1):
            lost = {
                priority: (sum(v[1] for v in of_model[:count] if v[2] == priority), number)
                for priority in range(3)
                if (number := sum(v[2] == priority for v in of_model[:count]))
            }
            victims.append(Victims(count, sum(v[0] for v in of_model[:count]), lost))
        choices.append(victims)
        gone.append(of_model)
    limits = [limit for _, limit in models]

    def cost(counts: Sequence[int]) -> tuple[bool, list[tuple[int, int]]]:
        freed = 0
        lost = [[0, 0], [0, 0], [0, 0]]
        for of_model, limit, count in zip(gone, limits, counts, strict=True):
            freed += min(sum(size for size, _, _ in of_model[:count]), limit)
            for _, tokens, priority in of_model[:count]:
                lost[2 - priority][0] += tokens
                lost[2 - priority][1] += 1
        return freed >= num_bytes, [(tokens, number) for tokens, number in lost]

    ways = [cost(counts) for counts in product(*(range(len(of_model) + 1) for of_model in gone))]
    best = min((lost for is_enough, lost in ways if is_enough), default=None)
    found = cheapest(choices, limits, num_bytes)
    if best is None:
        assert found is None
    else:
        assert found is not None
        assert cost(found) == (True, best)


shares = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), min_size=1, max_size=5)


@pytest.mark.laws
@given(shares, st.integers(0, 1 << 40), st.randoms(use_true_random=False))
def test_debts_add_up(models: list[tuple[int, int]], common: int, random: object) -> None:
    """What is used beyond guarantees, and beyond what is nobody's, is owed; nobody lends what it uses."""
    names = [f"m{place}" for place in range(len(models))]
    guaranteed = {name: part for name, (part, _) in zip(names, models, strict=True)}
    num_bytes = sum(guaranteed.values()) + common
    used, left = {}, num_bytes
    for name, (_, wish) in zip(names, models, strict=True):
        used[name] = min(wish, left)
        left -= used[name]
    owed = debts(num_bytes, guaranteed, used)
    excess = {name: max(0, used[name] - guaranteed[name]) for name in names}
    assert sum(owed.values()) == max(0, sum(excess.values()) - common)
    for name in names:
        borrowed = sum(count for (_, borrower), count in owed.items() if borrower == name)
        lent = sum(count for (lender, _), count in owed.items() if lender == name)
        assert borrowed <= excess[name] + len(names)
        assert lent <= max(0, guaranteed[name] - used[name]) + len(names)
    assert not any(lender == borrower for lender, borrower in owed)
    order = names[:]
    random.shuffle(order)  # type: ignore[attr-defined]
    there = debts(num_bytes, {name: guaranteed[name] for name in order}, used)
    for pair in {*owed, *there}:
        assert abs(owed.get(pair, 0) - there.get(pair, 0)) <= 1, "who registered first matters to the last byte only"
