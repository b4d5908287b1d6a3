"""Workers that have left: no policy counts on what they had."""

from __future__ import annotations

import pytest

from kvarts.content import Content
from kvarts.events import PagesStored
from kvarts.request import Request
from kvarts.routers.config import Routing
from kvarts.routers.spec import POLICIES

TOKENS = list(range(64))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_prefix_that_only_a_worker_has_that_left_is_computed_on_another(name: str) -> None:
    router = Routing().open(
        f"{name}:threshold=0,chunk_tokens=16" if name == "production-stack-kv" else name,
        num_workers=3, page_size=16, max_num_batched_tokens=512, tiers=("device",), directory=None,
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
