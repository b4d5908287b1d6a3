"""The rules that a KV timeline is judged by. They are independent and are fed chunk by chunk.

A rule keeps the state that it needs of earlier rows, and records violations with their step and numbers.
"""

from __future__ import annotations

from typing import Any

from kvarts.verify.block_rules import (
    BlockConservation,
    Boundedness,
    Flux,
    GroupParts,
    Leak,
    PeakConsistency,
    UsedPctArithmetic,
)
from kvarts.verify.chunk import is_count
from kvarts.verify.order_rules import PreemptionNeeded, PreemptionTrigger, StepOrder
from kvarts.verify.rule import TimelineLimits, TimelineRule

__all__ = ["make_rules"]

TIERS = ("host", "disk")


def make_rules(total: int | None, top: dict[str, Any], limits: TimelineLimits) -> list[TimelineRule]:
    """Return all rules except the schema's. `total`: blocks of the device; None if the body does not give them."""

    def said(name: str) -> int | None:
        return top[name] if is_count(top.get(name)) else None

    tiers = {tier: blocks for tier in TIERS if (blocks := said(f"{tier}_total_blocks")) is not None}
    every = said("every")
    rules: list[TimelineRule] = [
        _without_total(BlockConservation) if total is None else BlockConservation(total, tiers),
        _without_total(UsedPctArithmetic) if total is None else UsedPctArithmetic(total),
        PeakConsistency(),
        PreemptionTrigger(limits.preempt_threshold),
        PreemptionNeeded(total),
        StepOrder(every if every else None),
        Flux(said("initial_used_blocks")),
        Leak(),
    ]
    if "kv_groups" in top:
        rules.append(GroupParts(top["kv_groups"]))
    if limits.max_bytes is not None:
        rules.append(Boundedness(limits.max_bytes, limits.block_bytes or said("block_bytes")))
    return rules


def _without_total(of_total: type[TimelineRule]) -> TimelineRule:
    rule = TimelineRule()
    rule.name = of_total.name
    rule.why_not = "total_blocks is not known"
    return rule
