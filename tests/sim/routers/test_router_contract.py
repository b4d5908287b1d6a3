"""The contract of routers on every named one, and on the one of docs/guide-policies.md."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvarts.sim.routers.policies import POLICIES, policy_of
from kvarts.testing import RouterContract


class TestNamed(RouterContract):
    @pytest.fixture(autouse=True, params=sorted(set(POLICIES) - {"vllm-ranks"}))
    def _take_name(self, request: pytest.FixtureRequest) -> None:
        self.name = request.param

    def make(self) -> Any:
        return policy_of(self.name)


class Forgetful:
    """Shares its state with all other routers of its kind."""

    turns: ClassVar[list[int]] = []

    def choose(self, asked: Any, view: Any) -> int:
        self.turns.append(asked.index)
        found: int = view.workers[len(self.turns) % len(view.workers)]
        return found


class Meddler:
    """Changes the view."""

    def choose(self, asked: Any, view: Any) -> int:
        view.num_requests[0] += 1
        found: int = view.workers[0]
        return found


class Outsider:
    """Chooses a worker that has left."""

    def choose(self, asked: Any, view: Any) -> int:
        return 0


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (Forgetful, "test_the_same_history_has_the_same_choices"),
        (Meddler, "test_choosing_changes_nothing_in_the_view"),
        (Outsider, "test_every_choice_is_one_of_the_workers"),
    ],
)
def test_the_contract_finds(policy: Any, test: str) -> None:
    class Of(RouterContract):
        def make(self) -> Any:
            return policy()

    with pytest.raises((AssertionError, ValueError, TypeError, Exception)):
        getattr(Of(), test)()
