"""The rules of a soak, each a pure function of its record, and the verdict: bounded, violated, or inconclusive.

The rules rely on the client's own count of each history, the tokens it sent and received, which a server cannot
falsify. The expected bytes of a session follow from this count and the bytes per token. These are given by the user, or
derived while sessions fill up: a value counts only if it explains at least two different lengths, so that a server that
reports a constant, or computes its bytes from a bound, does not pass.

The slope is the median of the slopes of all pairs, which is robust against outliers (Theil 1950; Sen 1968, "Estimates
of the regression coefficient based on Kendall's tau", JASA 63). Its interval is Sen's, as in Gilbert 1987, "Statistical
Methods for Environmental Pollution Monitoring", section 16.5: the pairs' slopes at ranks (N -+ z sqrt(Var S)) / 2, with
Var S = (n (n - 1) (2 n + 5) - sum t (t - 1) (2 t + 5)) / 18 for groups of t equal values.

That variance assumes independent noise, but slow minutes follow slow minutes. It is therefore multiplied by that of a
first-order process, (1 + r) / (1 - r), with r from the ranks of the residuals at the first lag if that is significant
at 95 %, corrected for its bias of (1 + 4 r) / n (Marriott and Pope 1954, "Bias in the estimation of autocorrelations",
Biometrika 41). Measured on 150 runs each of 40, 150 and 480 points with a trend in first-order noise: intervals
contained the truth in 94 to 97 % of runs without autocorrelation, and in 91 to 95 % at r = 0.5, 0.8 and 0.9.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.run.sessions.soak.run import KvLayers, Sample, SoakRecord
from kvarts.sim.report.page import LineChart, render_lines
from kvarts.sim.report.words import duration

__all__ = ["Slope", "SoakRuleResult", "SoakVerdict", "expected_bytes", "judge_soak", "render_soak_page", "slope_of"]

Z = 1.959963984540054
"""Normal quantile of a two-sided interval of 95 %."""
MAX_SECTIONS = 600
"""Longer series are replaced by the medians of this many sections, since the number of pairs grows quadratically."""
MAX_CORRELATION = 0.98
"""The largest autocorrelation of noise that can still be distinguished from a trend."""
MIN_FULL_TURNS = 8
"""Fewest turns of full sessions, over all sessions."""
MIN_POINTS = 20
"""Fewest points for a slope."""
WARM_UP_SHARE = 0.1
"""Share of all turns."""
BOOKKEEPING_BYTES = 8
"""Allowance per token in addition to its KV, since histories are kept and grow."""
MAX_LISTED = 5
MAX_POINTS = 4000
"""Most samples on the page; a longer run is thinned evenly. The verdict covers all samples."""
MIB = 1 << 20
EXIT_CODES = {"bounded": 0, "violated": 5, "inconclusive": 6}

Status = Literal["ok", "violated", "inconclusive", "not_run"]


class Slope(msgspec.Struct, frozen=True):
    """A line through measurements: `per_x`, its 95 % interval, and its value at the first x."""

    per_x: float
    low: float
    high: float
    first: float
    span_x: float
    num_points: int

    def growth(self, per_x: float) -> float:
        """Return the growth of a slope over the whole span, relative to the initial value."""
        return per_x * self.span_x / self.first


def slope_of(x: npt.ArrayLike, y: npt.ArrayLike) -> Slope:
    """Return the line through at least 3 points, with increasing x."""
    at, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(at) > MAX_SECTIONS:
        at, values = (
            np.array([np.median(part) for part in np.array_split(each, MAX_SECTIONS)]) for each in (at, values)
        )
    n = len(at)
    assert n >= 3, "a slope with an interval needs three points"
    left, right = np.triu_indices(n, 1)
    slopes = np.sort((values[right] - values[left]) / (at[right] - at[left]))
    slope = float(np.median(slopes))
    rest = values - slope * at
    ties = np.unique(values, return_counts=True)[1]
    variance = (n * (n - 1) * (2 * n + 5) - np.sum(ties * (ties - 1) * (2 * ties + 5))) / 18
    spread = Z * float(np.sqrt(max(0.0, variance) * _inflation(rest)))
    low, high = np.clip([(len(slopes) - spread) / 2 - 1, (len(slopes) + spread) / 2], 0, len(slopes) - 1)
    return Slope(
        per_x=slope,
        low=float(slopes[int(np.floor(low))]),
        high=float(slopes[int(np.ceil(high))]),
        first=float(np.median(rest) + slope * at[0]),
        span_x=float(at[-1] - at[0]),
        num_points=n,
    )


def _inflation(rest: npt.NDArray[np.float64]) -> float:
    """Return the factor by which autocorrelation of residuals increases the variance of S."""
    n, ranks = len(rest), np.unique(rest, return_inverse=True)[1].astype(np.float64)
    ranks -= ranks.mean()
    r = float(ranks[:-1] @ ranks[1:]) / (float(ranks @ ranks) or 1.0)
    if r <= Z / np.sqrt(n):
        return 1.0
    r = min(MAX_CORRELATION, r + (1 + 4 * r) / n)
    return (1 + r) / (1 - r)


class SoakRuleResult(msgspec.Struct, frozen=True):
    """The outcome of a rule, in words; and the slope that it judged, if any.

    `low_growth` and `high_growth`: the ends of a 95 % interval of growth over the run, relative to the initial value.
    """

    rule: str
    status: Status
    what: str
    num_violations: int = 0
    slope: Slope | None = None
    low_growth: float | None = None
    high_growth: float | None = None


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
        width = max(len(each.rule) for each in self.rules)
        rules = [f"  {each.rule:<{width}}  {each.status.replace('_', ' '):<12}  {each.what}\n" for each in self.rules]
        return "".join([f"{self.verdict}, {self.num_turns:,} turns\n", *rules])


def judge_soak(record: SoakRecord) -> SoakVerdict:
    """Judge a run: violated if any rule is, else inconclusive if any rule is, else bounded."""
    counters, points = ("inv1_violations", "inv2_violations"), [
        (float(sample.turn), sample.itl_s) for sample in _warm_turns(record) if sample.itl_s is not None
    ]  # fmt: skip
    rules = [
        _end(record),
        _every("history", record, ("history_length",), _miscounted, "as many tokens as the client sent and received"),
        _bytes(record),
        _allocated(record),
        _every("invariants", record, counters, _counted, "both counters are zero"),
        _growth("latency", points, record.plan.max_drift, 0.0, "time between tokens"),
        _rss(record),
    ]
    statuses = {result.status for result in rules}
    return SoakVerdict(
        verdict="violated" if "violated" in statuses else "inconclusive" if "inconclusive" in statuses else "bounded",
        num_turns=sum(sample.phase == "turn" for sample in record.samples),
        num_samples=len(record.samples),
        layers=_layers(record),
        rules=rules,
    )


def expected_bytes(layers: Sequence[KvLayers], num_tokens: int) -> int:
    """Return the exact bytes of a session of `num_tokens` tokens."""
    return sum(part.bytes_per_token * min(num_tokens, part.max_tokens) for part in layers)


def _layers(record: SoakRecord) -> tuple[KvLayers, ...]:
    """Return the bytes per token: from the plan, or derived from sessions that fill up; empty if not derivable."""
    plan = record.plan
    lengths_by_size: dict[int, list[int]] = defaultdict(list)
    for sample in record.samples:
        length, live = sample.num_sent_tokens, sample.kv_live_bytes
        if sample.phase == "append" and live and 0 < length <= plan.bound_tokens and live % length == 0:
            lengths_by_size[live // length].append(length)
    sizes = [(len(lengths), -size) for size, lengths in lengths_by_size.items() if len(set(lengths)) >= 2]
    if plan.layers or not sizes:
        return plan.layers
    return (KvLayers(plan.bound_tokens, -max(sizes)[1]),)


def _end(record: SoakRecord) -> SoakRuleResult:
    passed = f"{record.duration_s:,.0f} s of {record.plan.duration_s:,.0f} s"
    what = {
        "error": f"the run broke off: {record.why}", None: "the run has not ended", "duration": passed,
        "stopped": f"the run was stopped after {passed}",
    }[record.ended_by]  # fmt: skip
    return SoakRuleResult("end", "inconclusive" if record.ended_by in ("error", None) else "ok", what)


def _miscounted(sample: Sample) -> str | None:
    if sample.history_length == sample.num_sent_tokens:
        return None
    return f"{sample.history_length} tokens, and the client counts {sample.num_sent_tokens}"


def _counted(sample: Sample) -> str | None:
    counts = sample.inv1_violations, sample.inv2_violations
    return f"{counts[0]} and {counts[1]} violations counted" if any(counts) else None


def _bytes(record: SoakRecord) -> SoakRuleResult:
    """Judge whether sessions occupy exactly the bytes of their retained tokens, reach their bound, and stay at it."""
    name, layers = "kv_live_bytes", _layers(record)
    known = [sample.kv_live_bytes for sample in record.samples if sample.kv_live_bytes is not None]
    if known and not any(known):
        return SoakRuleResult(name, "inconclusive", "constant zero: nothing is measured")
    if known and not layers:
        what = "what a token takes cannot be derived: no two lengths below the bound agree on it. Give "
        return SoakRuleResult(name, "inconclusive", f"{what}--bytes-per-token")

    def complaint(sample: Sample) -> str | None:
        expected = expected_bytes(layers, sample.num_sent_tokens)
        # The last generated token is known, but has no KV until the next step.
        pending = expected_bytes(layers, sample.num_sent_tokens - (sample.phase == "turn"))
        if sample.kv_live_bytes in (expected, pending):
            return None
        return f"{sample.kv_live_bytes:,} bytes at {sample.num_sent_tokens:,} tokens, and not {expected:,}"

    bound_tokens = max((part.max_tokens for part in layers), default=0)
    what = f"to the byte; {expected_bytes(layers, bound_tokens):,} when full"
    result = _every(name, record, (name,), complaint, what)
    full = [each.session for each in record.samples if each.phase == "turn" and each.num_sent_tokens > bound_tokens]
    num_sessions = record.plan.num_sessions
    num_short, why = num_sessions - len(set(full)), None
    if num_short:
        why = f"{num_short} of {num_sessions} sessions never reached the bound of {bound_tokens} tokens"
    elif len(full) < MIN_FULL_TURNS:
        why = f"{len(full)} turns of full sessions are too few, {MIN_FULL_TURNS} are needed"
    return result if why is None or result.status != "ok" else SoakRuleResult(name, "inconclusive", why)


def _allocated(record: SoakRecord) -> SoakRuleResult:
    """Judge whether allocated pages stay within the server's stated bound and cover the live bytes."""
    fields = ("kv_allocated_bytes", "kv_bound_bytes")
    if all(getattr(sample, field) is None for sample in record.samples for field in fields):
        return SoakRuleResult("kv_allocated_bytes", "not_run", "the server does not say")
    bounds: dict[int, int] = {}

    def complaint(sample: Sample) -> str | None:
        allocated, bound, live = sample.kv_allocated_bytes, sample.kv_bound_bytes, sample.kv_live_bytes
        assert allocated is not None and bound is not None
        if allocated > bound:
            return f"{allocated:,} bytes, more than the bound of {bound:,}"
        if live is not None and live > allocated:
            return f"{allocated:,} bytes, less than the {live:,} that are live"
        if bounds.setdefault(sample.session, bound) != bound:
            return f"the bound was {bounds[sample.session]:,} bytes, and is {bound:,}"
        return None

    return _every("kv_allocated_bytes", record, fields, complaint, "pages stay within the server's bound")


def _rss(record: SoakRecord) -> SoakRuleResult:
    """Judge whether the server's memory stays constant after warm-up, except for histories."""
    warm = _warm_turns(record)
    points = [(sample.at_s, float(sample.rss_bytes)) for sample in warm if sample.rss_bytes is not None]
    if not record.plan.expects_rss:
        return SoakRuleResult("rss", "not_run", "the server's memory is not known. Give --set server_pid=PID")
    if len(points) < len(warm):
        return SoakRuleResult("rss", "inconclusive", f"missing in {len(warm) - len(points)} turns")
    added = sum(sample.num_generated + record.plan.prompt_tokens for sample in warm)
    return _growth("rss", points, record.plan.max_rss_growth, float(BOOKKEEPING_BYTES * added), "resident memory")


def _warm_turns(record: SoakRecord) -> list[Sample]:
    """Return the turns after the first tenth whose sessions were full when they began."""
    turns = [sample for sample in record.samples if sample.phase == "turn"]
    first = WARM_UP_SHARE * (turns[-1].turn + 1) if turns else 0
    bound = record.plan.bound_tokens
    return [each for each in turns if each.turn >= first and each.num_sent_tokens - each.num_generated > bound]


def _growth(
    rule: str, points: Sequence[tuple[float, float]], most: float, allowance: float, what: str
) -> SoakRuleResult:
    """Judge the growth over all points: at most the share `most` of the initial value, plus `allowance`."""
    if len(points) < MIN_POINTS:
        what = f"{len(points)} turns after warm-up are too few, {MIN_POINTS} are needed"
        return SoakRuleResult(rule, "inconclusive", what)
    slope = slope_of(*zip(*points, strict=True))
    if slope.first <= 0:
        return SoakRuleResult(rule, "inconclusive", f"{what}: {slope.first:g} at the beginning")
    low, high = slope.growth(slope.low), slope.growth(slope.high)
    limit = most + allowance / slope.first
    status: Status = "ok" if high <= limit else "violated" if low > limit else "inconclusive"
    text = f"{what} changed by {100 * low:+.2f} to {100 * high:+.2f} % (95 %), {100 * limit:.2f} % is allowed"
    text += ": too noisy, or too short, to tell" * (status == "inconclusive")
    return SoakRuleResult(rule, status, text, int(status == "violated"), slope, low, high)


def _every(
    rule: str, record: SoakRecord, fields: Sequence[str], complaint: Callable[[Sample], str | None], what: str
) -> SoakRuleResult:
    """Judge each sample that has all fields. A violation counts even if other samples are incomplete."""
    complete = [each for each in record.samples if all(getattr(each, field) is not None for field in fields)]
    found = [(sample, text) for sample in complete if (text := complaint(sample)) is not None]
    if found:
        shown = [f"turn {sample.turn}, session {sample.session}: {text}" for sample, text in found[:MAX_LISTED]]
        more = f"; and {len(found) - MAX_LISTED:,} more" if len(found) > MAX_LISTED else ""
        return SoakRuleResult(rule, "violated", "; ".join(shown) + more, len(found))
    if not record.samples:
        return SoakRuleResult(rule, "inconclusive", "there are no samples")
    for field in fields:
        if lacking := sum(getattr(sample, field) is None for sample in record.samples):
            missing = f"{field} is missing in {lacking:,} of {len(record.samples):,} samples"
            return SoakRuleResult(rule, "inconclusive", missing)
    return SoakRuleResult(rule, "ok", f"{what}, in {len(record.samples):,} samples")


def render_soak_page(record: SoakRecord, verdict: SoakVerdict) -> bytes:
    """Return the page of a soak: the verdict, bytes, latency, and the server's memory."""
    samples, plan, layers = record.samples, record.plan, verdict.layers
    shown = samples[:: -(-len(samples) // MAX_POINTS) or 1]
    turns = [sample for sample in shown if sample.phase == "turn"]
    numbers = [float(sample.turn) for sample in turns]
    memory = LineChart("KV memory of a session", ("time", "ms"), ("KV memory", "MiB"), [1e3 * s.at_s for s in shown])
    if layers:
        memory.add("bound", "red", [expected_bytes(layers, plan.bound_tokens) / MIB] * len(shown), "dashes")
        memory.add("expected", "orange", [expected_bytes(layers, s.num_sent_tokens) / MIB for s in shown], "rings")
    memory.add("live", "blue", [_times(s.kv_live_bytes, 1 / MIB) for s in shown], "dots")
    itl, ttft, rss = (
        LineChart(name, ("turn", ""), y, numbers, is_near=True)
        for name, y in (
            ("Time between tokens, mean of each turn", ("time", "ms")), ("Time to first token", ("time", "ms")),
            ("Memory of the server", ("resident memory", "MiB")),
        )
    )  # fmt: skip
    for slope in (each.slope for each in verdict.rules if each.rule == "latency" and each.slope is not None):
        since = [turn - numbers[-1] + slope.span_x for turn in numbers]
        fitted = [None if turns < 0 else 1e3 * (slope.first + slope.per_x * turns) for turns in since]
        itl.add("slope after warm-up", "orange", fitted)
    itl.add("time", "blue", [_times(sample.itl_s, 1e3) for sample in turns], "dots")
    ttft.add("time", "green", [_times(sample.ttft_s, 1e3) for sample in turns], "dots")
    rss.add("resident", "violet", [_times(sample.rss_bytes, 1 / MIB) for sample in turns])
    title = f"Soak of {plan.target}: {verdict.verdict}"
    what = f"{plan.num_sessions} sessions of {plan.sink} + {plan.window} tokens, {verdict.num_turns:,} turns"
    rows = [[result.rule, result.status.replace("_", " "), result.what] for result in verdict.rules]
    subtitle = f"{what}, {duration(1e3 * record.duration_s)}"
    return render_lines(title, subtitle, ["rule", "status", "what"], rows, [memory, itl, ttft, rss])


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
