"""What a router sees of tiers below the device, where it asks caches with KV groups and where it reads events."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.replaying import replay
from kvarts.sim.routers.policies import PrefixAware
from kvarts.sim.routers.view import Asked, View

from builders.case import Case, Row
from builders.grouped import FULL

A_TOKEN_A_MS = LinearCost(step_ms=0.0, chunk_token_ms=1.0, decode_ms=1.0)


class Noting:
    """The prefix router, which notes what it sees."""

    seen: ClassVar[list[dict[int, tuple[int, ...]]]] = []
    needs = PrefixAware.needs

    def choose(self, asked: Asked, view: View) -> int:
        pages = view.pages(asked, (asked.num_tokens - 1) // view.page_size)
        without_zeros = {worker: counts for worker, counts in pages.items() if any(counts)}
        self.seen.append(without_zeros)
        return PrefixAware().choose(asked, view)


def seen(prompts: list[list[int]], num_pages: int, **memory: Any) -> list[dict[int, tuple[int, ...]]]:
    """What the router of two replicas sees, a request each ten seconds."""
    rows = [Row(place * 10_000, units, len(units), 2, None, 0, None) for place, units in enumerate(prompts)]
    case = Case(rows, 1, 4, num_pages, 8192, 8, "default", 2)
    Noting.seen.clear()
    replay(case.trace(), case.config(replicas=2, router=Noting, cost=A_TOKEN_A_MS, audit=True, **memory))
    return list(Noting.seen)


def below(*, disk: int | None = None) -> OffloadConfig:
    return OffloadConfig(
        host_pages=100, disk_pages=disk, kv_bytes_per_token=1000, h2d=10**12, d2h=10**12, latency_us=0.0,
        disk_read=10**12, disk_write=10**12, disk_latency_us=0.0,
    )  # fmt: skip


texts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=2, max_size=12).map(
    lambda prompts: [[unit for unit in units for _ in range(5)] for units in prompts]
)


@pytest.mark.laws
@given(texts, st.integers(7, 12), st.sampled_from([None, 100]))
def test_a_router_sees_of_one_full_group_what_it_sees_of_whole_pages(
    prompts: list[list[int]], num_pages: int, disk: int | None
) -> None:
    """On the device and below, where there is room for all."""
    offload = below(disk=disk)
    whole = seen(prompts, num_pages, offload=offload)
    assert seen(prompts, num_pages, offload=offload, kv_groups="all", groups=(PartGroup(FULL, 1),)) == whole


def test_a_router_sees_what_a_window_can_resume_from_in_host_memory() -> None:
    """Host memory has of the window what its next token attends to; the device has evicted all of the prompt."""
    window = KvLayer(kind="window", num_heads=1, head_numbers=2, span=6)
    groups = (PartGroup(FULL, 1), PartGroup(window, 1))
    first = [1] * 41
    rows = seen([first, [2] * 41, [3] * 41, [4] * 41, first], 14, offload=below(), kv_groups="all", groups=groups)
    (pages,) = rows[-1].values()
    assert pages == (0, 10)
