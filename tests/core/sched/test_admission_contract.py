"""What every admission policy promises: the default, and the one of docs/guide-policies.md."""

from __future__ import annotations

import pytest

from kvarts.core.request import RequestState
from kvarts.core.sched.policy import NEVER_NS, AdmissionPolicy, PriorityPolicy, QueuePolicy
from kvarts.testing import MS, AdmissionPolicyContract, waiting_request

from builders.guide_policies import ShortestFirst, shortest_first

pytestmark = pytest.mark.laws


class TestPriority(AdmissionPolicyContract):
    def make(self) -> AdmissionPolicy:
        return PriorityPolicy()


class TestQueue(AdmissionPolicyContract):
    def make(self) -> AdmissionPolicy:
        return QueuePolicy()

    def test_a_preempted_request_waits_again(self) -> None:
        """Behind those that came before it waits again, as in SGLang."""
        policy = self.make()
        one, two = waiting_request(0), waiting_request(1)
        for request in (one, two):
            policy.push(request)
        policy.remove(one)
        one.state = RequestState.PREEMPTED
        policy.push(one)
        assert [request.index for request in policy] == [1, 0] and policy.head(0) is two


class TestShortestFirst(AdmissionPolicyContract):
    def make(self) -> AdmissionPolicy:
        return ShortestFirst()


class TestShortestFirstWithoutPatience(AdmissionPolicyContract):
    def make(self) -> AdmissionPolicy:
        return shortest_first(30)()


def test_priorities_come_first_and_a_preempted_request_before_its_equals() -> None:
    policy = PriorityPolicy()
    for index, priority in enumerate((0, 1, 1, 0)):
        policy.push(waiting_request(index, priority=priority))
    back = waiting_request(4)
    back.state = RequestState.PREEMPTED
    policy.push(back)
    assert [request.index for request in policy] == [1, 2, 4, 0, 3]


def test_the_oldest_request_goes_first_when_its_patience_ends() -> None:
    policy = shortest_first(100)()
    policy.push(waiting_request(0, num_prompt_tokens=50))
    policy.push(waiting_request(1, num_prompt_tokens=2, arrival_ns=5 * MS))
    assert (policy.head(5 * MS).index, policy.holds_until_ns(5 * MS)) == (1, 100 * MS)
    assert (policy.head(100 * MS).index, policy.holds_until_ns(100 * MS)) == (0, NEVER_NS)
