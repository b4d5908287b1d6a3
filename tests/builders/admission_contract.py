"""What every admission policy promises the scheduler. A subclass brings the policy."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvarts.core.content import Content
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.policy import NEVER_NS, AdmissionPolicy

__all__ = ["AdmissionPolicyContract", "waiting_request"]

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
    """Run these by a subclass that makes the policy."""

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
