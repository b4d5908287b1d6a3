"""`production-stack-prefix` and `vllm-ranks` against choices of the real routers, recorded by named_routers.py.

Where chance decides, the workers among which it decides must be the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvarts.core.content import Content, pack_units
from kvarts.core.request import Request
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.policies import policy_of
from kvarts.sim.routers.router import PolicyRouter
from kvarts.sim.routers.view import Asked, View, WorkerFacts

DATA = Path(__file__).parent / "data"
STACK: list[dict[str, Any]] = json.loads((DATA / "production-stack.json").read_text())
DIFFER = {3: 1, 8: 1, 16: 1}
"""Choices of a sequence for which kvarts would have chance decide among more workers."""
RANKS: list[dict[str, Any]] = json.loads((DATA / "vllm-ranks-0.32.json").read_text())


class Given:
    """A policy that makes given choices, and keeps the workers among which chance would decide."""

    def __init__(self, policy: Any, given: list[int]) -> None:
        self.policy, self.given, self.among = policy, given, list[list[int]]()
        self.needs = policy.needs

    def choose(self, asked: Asked, view: View) -> int:
        self.policy.choose(asked, view)
        return self.given[len(self.among) - 1]


def request(index: int, tokens: list[int]) -> Request:
    content = Content(pack_units(tokens), num_tokens=len(tokens), page_size=16, owner=index)
    return Request(index, content, num_prompt_tokens=len(tokens), max_tokens=1, arrival_ns=index)


@pytest.mark.parametrize("sequence", STACK, ids=range(len(STACK)))
def test_workers_are_those_of_the_production_stack(sequence: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(policy_of("production-stack-prefix"), [chosen for _, chosen, _ in sequence["rows"]])

    def any_of(view: View, among: list[int]) -> int:
        given.among.append(sorted(among))
        return among[0]

    monkeypatch.setattr(View, "any_of", any_of)
    router = PolicyRouter(
        given, WorkerFacts(sequence["workers"], 16),
        order="fcfs", queue_tokens=None, event_lag_ns=0, staleness_ns=0, seed=0,
    )  # fmt: skip
    for index, (text, _, _) in enumerate(sequence["rows"]):
        router.place(request(index, [ord(letter) for letter in text]), None, index)
    earlier = set()
    for (text, _, theirs), ours in zip(sequence["rows"], given.among, strict=True):
        if ours != theirs:  # the real index also has the end of a prompt that fills no chunk, for the same prompt alone
            assert set(theirs) < set(ours)
            assert len(text) % 32
            assert text in earlier
        earlier.add(text)
    assert sum(ours != row[2] for ours, row in zip(given.among, sequence["rows"], strict=True)) == DIFFER.get(
        STACK.index(sequence), 0
    )


@pytest.mark.parametrize("sequence", RANKS, ids=range(len(RANKS)))
def test_ranks_are_those_of_vllms_front_end(sequence: dict[str, Any]) -> None:
    router = Routing().open("vllm-ranks", WorkerFacts(sequence["workers"], 4, 64))
    index = 0
    for kind, value in sequence["events"]:
        if kind == "loads":
            for rank, (waiting, running, usage) in enumerate(value):
                router.report(rank, running, waiting, 0, 0, usage)
        elif kind == "ended":
            router.ended(value)
        else:
            assert router.place(request(index, [1] * 8), None, 0) == value
            index += 1
