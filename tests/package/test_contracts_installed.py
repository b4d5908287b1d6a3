"""The contract suites of `kvarts.testing` in the tests of a user."""

from __future__ import annotations

import pytest

from builders.plugin import PLUGIN

pytest_plugins = ["pytester"]

INSIDE = """
import pytest
from kvarts.core.sched.policy import PriorityPolicy
from kvarts.policies import LruOrder, MemoryTier
from kvarts.testing import AdmissionPolicyContract, EvictionOrderContract, RouterContract, TierContract

class TestOrder(EvictionOrderContract):
    def make_order(self):
        return LruOrder()

class Forgets(LruOrder):
    def split(self, head, tail):
        pass  # the first part of a split run is listed by nobody

class TestForgets(EvictionOrderContract):
    def make_order(self):
        return Forgets()

class TestAdmission(AdmissionPolicyContract):
    def make(self):
        return PriorityPolicy()

class InTurn:
    def __init__(self, start=0):
        self.turn = start

    def choose(self, asked, view):
        self.turn += 1
        return view.workers[self.turn % len(view.workers)]

class TestRouter(RouterContract):
    @pytest.fixture(autouse=True, params=[0, 1])
    def _start(self, request):
        self.start = request.param

    def make(self):
        return InTurn(self.start)

class TestTier(TierContract):
    def make(self, num_pages):
        return MemoryTier("host", num_pages)
"""


def test_a_user_runs_them_by_subclasses(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(INSIDE)
    result = pytester.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider", "-n", "0", "-W", "error")
    outcomes = result.parseoutcomes()
    failed = {line.split("::")[1] for line in result.outlines if line.startswith("FAILED")}
    assert failed == {"TestForgets"} and outcomes["passed"] > 60 and "errors" not in outcomes
    assert "where" in result.stdout.str() or "assert" in result.stdout.str(), "asserts explain themselves"
