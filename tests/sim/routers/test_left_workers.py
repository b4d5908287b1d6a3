"""Workers that have left: no policy counts on what they had."""

from __future__ import annotations

import pytest

from kvarts.core.content import Content
from kvarts.core.events import PagesStored
from kvarts.core.request import Request
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.policies import POLICIES
from kvarts.sim.routers.view import WorkerFacts

TOKENS = list(range(64))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_prefix_that_only_a_worker_has_that_left_is_computed_on_another(name: str) -> None:
    router = Routing().open(
        f"{name}:threshold=0,chunk_tokens=16" if name == "production-stack-kv" else name,
        WorkerFacts(3, 16, 512),
    )  # fmt: skip
    content = Content.from_tokens(TOKENS, page_size=16, owner=0)
    reader = router.reader_of(1)
    if reader is not None:
        reader.observe([PagesStored(content, 0, 4, None, "device")])
    router.catch_up(0, [0, 1, 2])
    router.leave(1)
    for index in range(4):
        request = Request(index, content, num_prompt_tokens=64, max_tokens=2, arrival_ns=0)
        assert router.place(request, None, 0) in (0, 2)
    router.forget(1)
    router.catch_up(0, [0, 1, 2])
    assert router.index is None or not router.index.matches(content, 4)


def test_what_a_failed_worker_had_does_not_count_where_its_request_is_placed_again() -> None:
    """In a router with a queue, which applies what it is told when it looks at its queue next."""
    router = Routing(queue_threshold=0.5).open(
        "least-loaded", WorkerFacts(2, 16, 64),
    )  # fmt: skip
    content = Content.from_tokens(TOKENS, page_size=16, owner=0)
    first, second = (Request(index, content, num_prompt_tokens=64, max_tokens=2, arrival_ns=0) for index in (0, 1))
    failed = router.place(first, None, 0)
    assert failed is not None
    router.leave(failed)
    router.ended(first.index)
    other = router.place(first, None, 1)
    router.enter(failed)
    assert other is not None and other != failed and router.take_placed(2) == []
    assert [router.view.prefill_tokens[worker] for worker in (failed, other)] == [0, 64]
    assert [router.view.num_requests[worker] for worker in (failed, other)] == [0, 1]
    assert router.place(second, None, 3) == failed
