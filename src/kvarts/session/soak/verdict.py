"""Verdict on a soak: bounded, violated, or inconclusive."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvarts.session.soak.record import KvLayers, SoakRecord
from kvarts.session.soak.rules import RULES, SoakRuleResult, derived_layers

__all__ = ["SoakVerdict", "judge_soak"]

EXIT_CODES = {"bounded": 0, "violated": 5, "inconclusive": 6}


class SoakVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a run. `layers`: bytes per token, given or derived; empty if neither."""

    verdict: Literal["bounded", "violated", "inconclusive"]
    num_turns: int
    num_samples: int
    layers: tuple[KvLayers, ...]
    rules: list[SoakRuleResult]

    @property
    def exit_code(self) -> int:
        """0 bounded, 5 violated, 6 inconclusive."""
        return EXIT_CODES[self.verdict]

    def to_text(self) -> str:
        """Return the verdict as text, with a line end."""
        width = max(len(result.rule) for result in self.rules)
        lines = [f"{self.verdict}, {self.num_turns:,} turns"]
        lines += [
            f"  {result.rule:<{width}}  {result.status.replace('_', ' '):<12}  {result.what}" for result in self.rules
        ]
        return "\n".join(lines) + "\n"


def judge_soak(record: SoakRecord) -> SoakVerdict:
    """Judge a run: violated if any rule is, else inconclusive if any rule is, else bounded."""
    results = [rule(record) for rule in RULES]
    statuses = {result.status for result in results}
    verdict: Literal["bounded", "violated", "inconclusive"] = "bounded"
    if "violated" in statuses:
        verdict = "violated"
    elif "inconclusive" in statuses:
        verdict = "inconclusive"
    return SoakVerdict(
        verdict=verdict,
        num_turns=sum(sample.phase == "turn" for sample in record.samples),
        num_samples=len(record.samples),
        layers=derived_layers(record) or (),
        rules=results,
    )
