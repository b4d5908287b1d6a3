"""`sglang-cache-aware` against the choices of sglang-router 0.3.2, which benchmarks/sglang_router.py recorded.

A worker's number is its place in the router's own list, which is another one each time it starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvarts.core.content import Content, pack_units
from kvarts.core.request import Request
from kvarts.sim.routers.policies import policy_of
from kvarts.sim.routers.router import PolicyRouter
from kvarts.sim.routers.view import Asked, View, WorkerFacts

RECORDED = json.loads((Path(__file__).parent / "data" / "sglang-router-0.3.2.json").read_text())
SEQUENCES: list[dict[str, Any]] = RECORDED["sequences"]


class Given:
    """A policy that makes given choices, and keeps its own."""

    def __init__(self, policy: Any, given: list[int]) -> None:
        self.policy, self.given, self.own = policy, given, list[int]()
        self.needs = policy.needs

    def choose(self, asked: Asked, view: View) -> int:
        self.own.append(self.policy.choose(asked, view))
        return self.given[len(self.own) - 1]


def choices(sequence: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The workers of the requests of a sequence: kvarts' choices, each after those of sglang-router, and these."""
    theirs = [event[2] for event in sequence["events"] if len(event) > 1]
    options = ",".join(f"{name}={value}" for name, value in sequence["options"].items())
    given = Given(policy_of(f"sglang-cache-aware:{options}".rstrip(":")), theirs)
    router = PolicyRouter(
        given,
        WorkerFacts(sequence["workers"], 16),
        order="fcfs",
        queue_tokens=None,
        event_lag_ns=0,
        staleness_ns=0,
        seed=0,
    )
    for number, event in enumerate(sequence["events"]):
        if len(event) == 1:
            router.ended(event[0])
            continue
        index, tokens, _ = event
        content = Content(pack_units(tokens), num_tokens=len(tokens), page_size=16, owner=index)
        request = Request(index, content, num_prompt_tokens=len(tokens), max_tokens=1, arrival_ns=number)
        router.place(request, None, number)
    return given.own, theirs


@pytest.mark.parametrize("place", range(len(SEQUENCES)))
def test_each_choice_is_that_of_sglang_router(place: int) -> None:
    ours, theirs = choices(SEQUENCES[place])
    assert ours == theirs
