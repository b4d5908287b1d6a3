"""The tiers below an engine, as what they are."""

from __future__ import annotations

from kvarts.core.content import Content
from kvarts.core.engine import Engine
from kvarts.core.kv.runs import table_of_transfer
from kvarts.core.kv.span_tree import SpanTree
from kvarts.core.tiers.offloader import Offloader
from kvarts.core.tiers.page_layout import PageLayout
from kvarts.core.tiers.part_tier import PartTier
from kvarts.sim.replica import Replica

__all__ = ["offloader_of", "store_parts"]


def offloader_of(engine: Engine | Replica) -> Offloader[PageLayout]:
    """What is below `engine`, which has tiers."""
    tiers = engine.scheduler.tiers
    assert isinstance(tiers, Offloader)
    return tiers


def store_parts(tier: PartTier, tree: SpanTree, content: Content, group: int, start: int, end: int) -> None:
    """Store what is missing of pages [start, end) of a group in `tier`, whose parts are in `tree`."""
    pin = table_of_transfer(len(tier.groups))
    with tree.spans_of(content, end) as spans:
        for span, begin, stop in spans:
            page = max(begin, start)
            while page < stop and (missing := tier.gap(span, group, page, stop))[0] < stop:
                tier.place(span, group, *missing, pin)
                page = missing[1]
    tier.settle(pin, is_stored=True)
