"""Judges a timeline from any recorder: ok, violated or inconclusive, with every violation and every rule not run.

It shares no code with kvarts' own accounting: it reads the rows and checks their sums.

The rules that a timeline is judged by are independent, and are fed chunk by chunk.

A rule keeps the state that it needs of earlier rows, and records violations with their step and numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from kvarts.base.errors import InputError
from kvarts.proof.verify.chunk import Recording, RowChunk, is_count
from kvarts.proof.verify.reader import BodyRecording, TextRecording, open_recording
from kvarts.proof.verify.rule import (
    BlockConservation,
    Boundedness,
    Flux,
    GroupParts,
    Leak,
    PeakConsistency,
    PreemptionNeeded,
    PreemptionTrigger,
    RuleResult,
    Schema,
    StepOrder,
    TimelineLimits,
    TimelineRule,
    UsedPctArithmetic,
    Violation,
)

__all__ = ["RuleResult", "TimelineLimits", "Verdict", "Violation", "make_rules", "verify", "verify_file"]

EXIT_CODES = {"ok": 0, "violated": 5, "inconclusive": 6}
TIERS = ("host", "disk")


def make_rules(total: int | None, top: dict[str, Any], limits: TimelineLimits) -> list[TimelineRule]:
    """Return all rules except the schema's. `total`: blocks of the device; None if the body does not give them."""

    def said(name: str) -> int | None:
        return top[name] if is_count(top.get(name)) else None

    tiers = {tier: blocks for tier in TIERS if (blocks := said(f"{tier}_total_blocks")) is not None}
    listed = [(tier["name"], tier["total_blocks"]) for tier in _listed(top)]
    every = said("every")
    rules: list[TimelineRule] = [
        _without_total(BlockConservation) if total is None else BlockConservation(total, tiers, listed),
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


def _listed(top: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tiers that a body lists; none if the list is malformed."""
    tiers = top.get("tiers")
    if not isinstance(tiers, list):
        return []
    known = [tier for tier in tiers if isinstance(tier, dict) and "name" in tier and is_count(tier.get("total_blocks"))]
    return known if len(known) == len(tiers) else []


def _without_total(of_total: type[TimelineRule]) -> TimelineRule:
    rule = TimelineRule()
    rule.name = of_total.name
    rule.why_not = "total_blocks is not known"
    return rule


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a timeline. Violations are ordered by rule, then by row.

    `why`: the reason of an inconclusive verdict. `notes`: other remarks.
    """

    verdict: Literal["ok", "violated", "inconclusive"]
    why: str | None
    num_rows: int
    rules: list[RuleResult]
    violations: list[Violation]
    notes: list[str]

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 ok, 5 violated, 6 inconclusive."""
        return EXIT_CODES[self.verdict]

    def to_text(self) -> str:
        """Return the verdict as readable text that ends in a line end."""
        lines = [self.verdict + (f": {self.why}" if self.why else f", {self.num_rows:,} rows")]
        by_rule: dict[str, list[Violation]] = {}
        for violation in self.violations:
            by_rule.setdefault(violation.rule, []).append(violation)
        for result in self.rules:
            status = result.status.replace("_", " ")
            if result.num_violations:
                status += " once" if result.num_violations == 1 else f" {result.num_violations:,} times"
            lines.append(f"  {result.rule:<20} {status}" + (f": {result.why}" if result.why else ""))
            listed = by_rule.get(result.rule, [])
            for violation in listed:
                step = "" if violation.step is None else f"step {violation.step}: "
                row = f"row {violation.row}: " if violation.step is None and violation.row is not None else ""
                lines.append(f"    {step}{row}{violation.what}")
            if len(listed) < result.num_violations:
                lines.append(f"    and {result.num_violations - len(listed):,} more that are not listed")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines) + "\n"


def verify(
    body: Any,
    *,
    preempt_threshold: float = 0.95,
    max_bytes: int | None = None,
    block_bytes: int | None = None,
) -> Verdict:
    """Judge a body in memory: the object itself, or its JSON text.

    `preempt_threshold`: preemption below this share of used blocks is a violation, unless the step lists its asks.
    `max_bytes` enables `boundedness`; `block_bytes` is the size of a block where the body lacks it. Raise ConfigError
    for a value out of range, InputError for a body that is not an object or a text that is not JSON.
    """
    limits = TimelineLimits.checked(preempt_threshold, max_bytes, block_bytes)
    if not isinstance(body, str | bytes | bytearray):
        return _judge(BodyRecording(body), limits)
    try:
        text = body.encode() if isinstance(body, str) else bytes(body)
    except UnicodeEncodeError as error:
        raise InputError(f"is no text: {error}", field="body") from error
    return _judge(TextRecording(text), limits)


def verify_file(
    path: Path | str,
    *,
    preempt_threshold: float = 0.95,
    max_bytes: int | None = None,
    block_bytes: int | None = None,
) -> Verdict:
    """Judge a file in bounded memory, as `verify` judges a body. Raise MissingFileError and InputError."""
    limits = TimelineLimits.checked(preempt_threshold, max_bytes, block_bytes)
    return _judge(open_recording(path), limits)


def _judge(recording: Recording, limits: TimelineLimits) -> Verdict:
    # Top-level fields may follow the rows. Until they are read, the first row supplies the total; if it was wrong,
    # the rows are read again.
    reading = _Reading(None, limits)
    reading.read(recording)
    if reading.needs_another(recording.top):
        reading = _Reading(recording.top, limits)
        reading.read(recording)
    return reading.verdict(recording)


class _Reading:
    """One pass over the rows. `top`: the top-level fields of the body, if known beforehand."""

    def __init__(self, top: dict[str, Any] | None, limits: TimelineLimits) -> None:
        self._limits = limits
        self._schema = Schema()
        self._rules: list[TimelineRule] | None = None if top is None else make_rules(_total(top), top, limits)
        self._assumed: tuple[Any, ...] = () if top is None else _relied_on(top)
        self._num_rows = 0
        self._num_left_out = 0
        self._max_used = 0

    def read(self, recording: Recording) -> None:
        for chunk in recording.chunks():
            self._num_left_out += len({complaint.row for complaint in chunk.complaints})
            self._schema.feed(chunk)
            if not len(chunk.rows):
                continue
            if self._rules is None:
                self._rules = self._guess(chunk, recording.top)
            self._num_rows += len(chunk.rows)
            self._max_used = max(self._max_used, int(chunk.columns["used_blocks"].max()))
            for rule in self._rules:
                rule.feed(chunk)

    def _guess(self, chunk: RowChunk, top: dict[str, Any]) -> list[TimelineRule]:
        """Make rules from the fields before the rows, with the total of the first row where it is not given."""
        guess = dict(top)
        guess.setdefault("total_blocks", int(chunk.columns["used_blocks"][0] + chunk.columns["free_blocks"][0]))
        self._assumed = _relied_on(guess)
        return make_rules(_total(guess), guess, self._limits)

    def needs_another(self, top: dict[str, Any]) -> bool:
        """Return whether the rules were made from fields that turned out different."""
        return self._rules is None or self._assumed != _relied_on(top)

    def verdict(self, recording: Recording) -> Verdict:
        top = recording.top
        self._schema.look_at(top, recording.twice, has_timeline=recording.has_timeline, is_cut=recording.is_cut)
        rules = self._rules or make_rules(_total(top), top, self._limits)
        notes = list(recording.notes)
        if recording.is_cut:
            notes.append("the recording breaks off: it has no totals")
        every = top.get("every")
        if is_count(every) and every > 1:
            notes.append(f"the recording has every {every}th row, and those that matter most")
        if self._num_left_out:
            notes.append(f"{self._num_left_out:,} rows are malformed, and only the schema speaks of them")
        for rule in rules:
            rule.finish(top)
            notes += rule.notes
            if not self._num_rows and rule.result.status == "ok" and rule.name != "peak_consistency":
                rule.why_not = "there is no row"
        results = [self._schema.result, *(rule.result for rule in rules)]
        violations = [*self._schema.violations, *(v for rule in rules for v in rule.violations)]
        why = None
        verdict: Literal["ok", "violated", "inconclusive"] = "ok"
        if violations:
            verdict = "violated"
        else:
            why = self._why_inconclusive(results)
            if why is not None:
                verdict = "inconclusive"
        return Verdict(
            verdict=verdict, why=why, num_rows=self._num_rows, rules=results, violations=violations, notes=notes
        )

    def _why_inconclusive(self, results: list[RuleResult]) -> str | None:
        if not self._num_rows:
            unobserved = self._schema.why_open
            return "the timeline is empty" + (f": {unobserved}" if unobserved else "")
        if not self._max_used:
            return "no block is ever used"
        if self._num_rows < 2:
            return "a single row shows no change"
        for result in results:
            if result.status == "inconclusive" or (result.rule == "boundedness" and result.status == "not_run"):
                return result.why
        return None


def _total(top: dict[str, Any]) -> int | None:
    total = top.get("total_blocks")
    return total if is_count(total) and total > 0 else None


def _relied_on(top: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that rules need before the first row."""
    counts = (top.get(name) if is_count(top.get(name)) else None for name in _EARLY)
    return _total(top), top.get("kv_groups"), _listed(top), *counts


_EARLY = ("initial_used_blocks", "block_bytes", "every", "host_total_blocks", "disk_total_blocks")
