"""The rules of a soak, each a pure function of its record, and the verdict: bounded, violated, or inconclusive.

The rules rely on the client's own count of each history, the tokens it sent and received, which a server cannot
falsify. The expected bytes of a session follow from this count and the bytes per token. These are given by the user, or
derived while sessions fill up: a value counts only if it explains at least two different lengths, so that a server that
reports a constant, or computes its bytes from a bound, does not pass.

The page of a soak is self-contained HTML: its verdict, bytes, latency, and the server's memory.

The slope is the median of the slopes of all pairs, which is robust against outliers (Theil 1950; Sen 1968, "Estimates
of the regression coefficient based on Kendall's tau", JASA 63). Its interval is Sen's, as in Gilbert 1987, "Statistical
Methods for Environmental Pollution Monitoring", section 16.5: the pairs' slopes at ranks (N -+ z sqrt(Var S)) / 2, with
Var S = (n (n - 1) (2 n + 5) - sum t (t - 1) (2 t + 5)) / 18 for groups of t equal values.

That variance assumes independent noise, but slow minutes follow slow minutes. It is therefore multiplied by a
correction for autocorrelation of the ranks of the residuals: the larger of two estimates, and at least 1. One is
equation 9 of Hamed and Rao 1998, "A modified Mann-Kendall trend test for autocorrelated data", J. Hydrology 204, over
the lags up to the first negative one, as in Geyer 1992, "Practical Markov Chain Monte Carlo", section 3.3. The other is
that of a first-order process, (1 + r) / (1 - r), with r from the first lag if that is significant at 95 %, corrected
for its bias of (1 + 4 r) / n (Marriott and Pope 1954, "Bias in the estimation of autocorrelations", Biometrika 41).

Measured on 150 runs each of 40, 150 and 480 points with a trend in first-order noise: intervals contained the truth in
93 to 98 % of runs without autocorrelation, and in 91 % or more at r = 0.5, 0.8 and 0.9. With Hamed and Rao's sum over
all significant lags, which includes negative ones, they did in 63 to 84 %.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.report.page import fill_page
from kvarts.report.words import duration
from kvarts.session.soak.run import KvLayers, Sample, SoakRecord

__all__ = [
    "RULES",
    "Slope",
    "SoakRuleResult",
    "SoakVerdict",
    "Status",
    "derived_layers",
    "expected_bytes",
    "judge_soak",
    "latency_points",
    "render_soak_page",
    "slope_of",
]

Z = 1.959963984540054
"""Normal quantile of a two-sided interval of 95 %."""
MAX_SECTIONS = 600
"""Longer series are replaced by the medians of this many sections, since the number of pairs grows quadratically."""

MAX_CORRELATION = 0.98
"""The largest autocorrelation of noise that can still be distinguished from a trend."""

Column = npt.NDArray[np.float64]


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
    at, values = _thinned(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64))
    n = len(at)
    assert n >= 3, "a slope with an interval needs three points"
    left, right = np.triu_indices(n, 1)
    slopes = np.sort((values[right] - values[left]) / (at[right] - at[left]))
    slope = float(np.median(slopes))
    rest = values - slope * at
    _, ties = np.unique(values, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - np.sum(ties * (ties - 1) * (2 * ties + 5))) / 18
    spread = Z * float(np.sqrt(max(0.0, variance) * _inflation(rest)))
    low = int(np.clip(np.floor((len(slopes) - spread) / 2) - 1, 0, len(slopes) - 1))
    high = int(np.clip(np.ceil((len(slopes) + spread) / 2), 0, len(slopes) - 1))
    return Slope(
        per_x=slope,
        low=float(slopes[low]),
        high=float(slopes[high]),
        first=float(np.median(rest) + slope * at[0]),
        span_x=float(at[-1] - at[0]),
        num_points=n,
    )


def _thinned(at: Column, values: Column) -> tuple[Column, Column]:
    if len(at) <= MAX_SECTIONS:
        return at, values
    bounds = np.linspace(0, len(at), MAX_SECTIONS + 1).astype(int)
    stretches = [slice(begin, end) for begin, end in pairwise(bounds)]
    at_medians, medians = (np.array([np.median(column[part]) for part in stretches]) for column in (at, values))
    return at_medians, medians


def _inflation(rest: Column) -> float:
    """Return the factor by which autocorrelation increases the variance of S."""
    n = len(rest)
    ranks = np.unique(rest, return_inverse=True)[1].astype(np.float64)
    ranks -= ranks.mean()
    power = float(ranks @ ranks)
    if not power:
        return 1.0
    correlation = np.array([float(ranks[:-lag] @ ranks[lag:]) / power for lag in range(1, n - 2)])
    if not len(correlation):
        return 1.0
    negative = np.flatnonzero(correlation < 0)
    lags = np.arange(1, 1 + (negative[0] if len(negative) else len(correlation)))
    weights = (n - lags) * (n - lags - 1.0) * (n - lags - 2.0)
    by_lags = 1.0 + 2.0 / (n * (n - 1.0) * (n - 2.0)) * float(weights @ correlation[: len(lags)])
    of_order_one = 1.0
    if correlation[0] > Z / np.sqrt(n):
        r = min(MAX_CORRELATION, correlation[0] + (1 + 4 * correlation[0]) / n)
        of_order_one = (1 + r) / (1 - r)
    return float(max(1.0, by_lags, of_order_one))


Status = Literal["ok", "violated", "inconclusive", "not_run"]

MIN_FULL_TURNS = 8
"""Fewest turns of full sessions, over all sessions."""
MIN_POINTS = 20
"""Fewest points for a slope."""
WARM_UP_SHARE = 0.1
"""Share of all turns."""
BOOKKEEPING_BYTES = 8
"""Allowance per token in addition to its KV, since histories are kept and grow."""
MAX_LISTED = 5
EXIT_CODES = {"bounded": 0, "violated": 5, "inconclusive": 6}
MIB = 1 << 20
MAX_POINTS = 4000
"""Most samples on the page; a longer run is thinned evenly. The verdict covers all samples."""


class SoakRuleResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a rule, in words; and the slope that it judged, if any."""

    rule: str
    status: Status
    what: str
    num_violations: int = 0
    slope: Slope | None = None
    low_growth: float | None = None
    high_growth: float | None = None
    """Growth over the run relative to the initial value: the ends of a 95 % interval."""


def expected_bytes(layers: Sequence[KvLayers], num_tokens: int) -> int:
    """Return the exact bytes of a session of `num_tokens` tokens."""
    return sum(part.bytes_per_token * min(num_tokens, part.max_tokens) for part in layers)


def derived_layers(record: SoakRecord) -> tuple[KvLayers, ...] | None:
    """Return the bytes per token: from the plan, or derived from sessions that fill up. None if not derivable."""
    plan = record.plan
    if plan.layers:
        return plan.layers
    lengths_by_size: dict[int, set[int]] = defaultdict(set)
    votes: Counter[int] = Counter()
    for sample in record.samples:
        length, live = sample.num_sent_tokens, sample.kv_live_bytes
        if sample.phase == "append" and live and 0 < length <= plan.bound_tokens and live % length == 0:
            lengths_by_size[live // length].add(length)
            votes[live // length] += 1
    sizes = [size for size, lengths in lengths_by_size.items() if len(lengths) >= 2]
    if not sizes:
        return None
    return (KvLayers(plan.bound_tokens, max(sizes, key=lambda size: (votes[size], -size))),)


def judge_end(record: SoakRecord) -> SoakRuleResult:
    """Judge whether the run ended as planned."""
    if record.ended_by == "error":
        return SoakRuleResult(rule="end", status="inconclusive", what=f"the run broke off: {record.why}")
    if record.ended_by is None:
        return SoakRuleResult(rule="end", status="inconclusive", what="the run has not ended")
    planned = f"{record.duration_s:,.0f} s of {record.plan.duration_s:,.0f} s"
    if record.ended_by == "stopped":
        return SoakRuleResult(rule="end", status="ok", what=f"the run was stopped after {planned}")
    return SoakRuleResult(rule="end", status="ok", what=planned)


def judge_history(record: SoakRecord) -> SoakRuleResult:
    """Judge whether the server's histories have as many tokens as the client sent and received."""
    return _every(
        "history",
        record,
        ("history_length",),
        lambda sample: (
            None
            if sample.history_length == sample.num_sent_tokens
            else f"{sample.history_length} tokens, and the client counts {sample.num_sent_tokens}"
        ),
        "as many tokens as the client sent and received",
    )


def judge_bytes(record: SoakRecord) -> SoakRuleResult:
    """Judge whether sessions occupy exactly the bytes of their retained tokens, reach their bound, and stay at it."""
    name = "kv_live_bytes"
    if all(sample.kv_live_bytes is None for sample in record.samples):
        return _missing(name, record, (name,)) or _no_samples(name)
    if not any(sample.kv_live_bytes for sample in record.samples):
        return SoakRuleResult(rule=name, status="inconclusive", what="constant zero: nothing is measured")
    layers = derived_layers(record)
    if layers is None:
        return SoakRuleResult(
            rule=name,
            status="inconclusive",
            what="what a token takes cannot be derived: no two lengths below the bound agree on it. "
            "Give --bytes-per-token",
        )

    def complaint(sample: Sample) -> str | None:
        expected = expected_bytes(layers, sample.num_sent_tokens)
        # The last generated token is known, but has no KV until the next step.
        pending = expected_bytes(layers, sample.num_sent_tokens - 1) if sample.phase == "turn" else expected
        if sample.kv_live_bytes in (expected, pending):
            return None
        return f"{sample.kv_live_bytes:,} bytes at {sample.num_sent_tokens:,} tokens, and not {expected:,}"

    bound_tokens = max(part.max_tokens for part in layers)
    bound = expected_bytes(layers, bound_tokens)
    result = _every(name, record, (name,), complaint, f"to the byte; {bound:,} when full")
    if result.status != "ok":
        return result
    full = Counter(
        sample.session for sample in record.samples if sample.phase == "turn" and sample.num_sent_tokens > bound_tokens
    )
    short = [session for session in range(record.plan.num_sessions) if not full[session]]
    why = None
    if short:
        why = f"{len(short)} of {record.plan.num_sessions} sessions never reached the bound of {bound_tokens} tokens"
    elif full.total() < MIN_FULL_TURNS:
        why = f"{full.total()} turns of full sessions are too few, {MIN_FULL_TURNS} are needed"
    return result if why is None else SoakRuleResult(rule=name, status="inconclusive", what=why)


def judge_allocated(record: SoakRecord) -> SoakRuleResult:
    """Judge whether allocated pages stay within the server's stated bound and cover the live bytes."""
    fields = ("kv_allocated_bytes", "kv_bound_bytes")
    if all(getattr(sample, field) is None for sample in record.samples for field in fields):
        return SoakRuleResult(rule="kv_allocated_bytes", status="not_run", what="the server does not say")
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


def judge_invariants(record: SoakRecord) -> SoakRuleResult:
    """Judge whether the server counted no violations of its invariants."""
    return _every(
        "invariants",
        record,
        ("inv1_violations", "inv2_violations"),
        lambda sample: (
            f"{sample.inv1_violations} and {sample.inv2_violations} violations counted"
            if sample.inv1_violations or sample.inv2_violations
            else None
        ),
        "both counters are zero",
    )


def judge_latency(record: SoakRecord) -> SoakRuleResult:
    """Judge whether the time per token is the same at the end as after warm-up."""
    turns, seconds = latency_points(record)
    return _growth("latency", turns, seconds, record.plan.max_drift, 0.0, "time between tokens")


def judge_rss(record: SoakRecord) -> SoakRuleResult:
    """Judge whether the server's memory stays constant after warm-up, except for histories."""
    warm = _warm_turns(record)
    known = [sample for sample in warm if sample.rss_bytes is not None]
    if not record.plan.expects_rss:
        return SoakRuleResult(rule="rss", status="not_run", what="the server's memory is not known. Give --server-pid")
    if len(known) < len(warm):
        return SoakRuleResult(rule="rss", status="inconclusive", what=f"missing in {len(warm) - len(known)} turns")
    added = sum(sample.num_generated + record.plan.prompt_tokens for sample in known)
    return _growth(
        "rss",
        [sample.at_s for sample in known],
        [float(sample.rss_bytes or 0) for sample in known],
        record.plan.max_rss_growth,
        float(BOOKKEEPING_BYTES * added),
        "resident memory",
    )


RULES: tuple[Callable[[SoakRecord], SoakRuleResult], ...] = (
    judge_end,
    judge_history,
    judge_bytes,
    judge_allocated,
    judge_invariants,
    judge_latency,
    judge_rss,
)


def latency_points(record: SoakRecord) -> tuple[list[float], list[float]]:
    """Return turns after warm-up, and the time between their tokens in seconds."""
    known = [(float(sample.turn), sample.itl_s) for sample in _warm_turns(record) if sample.itl_s is not None]
    return [turn for turn, _ in known], [seconds for _, seconds in known if seconds is not None]


def _warm_turns(record: SoakRecord) -> list[Sample]:
    """Return the turns after the first tenth whose sessions were full when they began."""
    turns = [sample for sample in record.samples if sample.phase == "turn"]
    first = WARM_UP_SHARE * (turns[-1].turn + 1) if turns else 0
    return [
        sample
        for sample in turns
        if sample.turn >= first and sample.num_sent_tokens - sample.num_generated > record.plan.bound_tokens
    ]


def _growth(
    rule: str, x: Sequence[float], y: Sequence[float], most: float, allowance: float, what: str
) -> SoakRuleResult:
    """Judge the growth over all points: at most the share `most` of the initial value, plus `allowance`."""
    if len(x) < MIN_POINTS:
        return SoakRuleResult(
            rule=rule, status="inconclusive", what=f"{len(x)} turns after warm-up are too few, {MIN_POINTS} are needed"
        )
    slope = slope_of(x, y)
    if slope.first <= 0:
        return SoakRuleResult(rule=rule, status="inconclusive", what=f"{what}: {slope.first:g} at the beginning")
    low, high = slope.growth(slope.low), slope.growth(slope.high)
    limit = most + allowance / slope.first
    status: Status = "ok" if high <= limit else "violated" if low > limit else "inconclusive"
    text = f"{what} changed by {100 * low:+.2f} to {100 * high:+.2f} % (95 %), {100 * limit:.2f} % is allowed"
    return SoakRuleResult(
        rule=rule,
        status=status,
        what=text if status != "inconclusive" else f"{text}: too noisy, or too short, to tell",
        num_violations=int(status == "violated"),
        slope=slope,
        low_growth=low,
        high_growth=high,
    )


def _missing(rule: str, record: SoakRecord, fields: Sequence[str]) -> SoakRuleResult | None:
    if not record.samples:
        return _no_samples(rule)
    for field in fields:
        lacking = sum(getattr(sample, field) is None for sample in record.samples)
        if lacking:
            return SoakRuleResult(
                rule=rule,
                status="inconclusive",
                what=f"{field} is missing in {lacking:,} of {len(record.samples):,} samples",
            )
    return None


def _no_samples(rule: str) -> SoakRuleResult:
    return SoakRuleResult(rule=rule, status="inconclusive", what="there are no samples")


def _every(
    rule: str, record: SoakRecord, fields: Sequence[str], complaint: Callable[[Sample], str | None], what: str
) -> SoakRuleResult:
    """Judge each sample that has all fields. A violation counts even if other samples are incomplete."""
    found = []
    for sample in record.samples:
        if all(getattr(sample, field) is not None for field in fields):
            text = complaint(sample)
            if text is not None:
                found.append(f"turn {sample.turn}, session {sample.session}: {text}")
    if found:
        more = f"; and {len(found) - MAX_LISTED:,} more" if len(found) > MAX_LISTED else ""
        return SoakRuleResult(
            rule=rule, status="violated", what="; ".join(found[:MAX_LISTED]) + more, num_violations=len(found)
        )
    return _missing(rule, record, fields) or SoakRuleResult(
        rule=rule, status="ok", what=f"{what}, in {len(record.samples):,} samples"
    )


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


def render_soak_page(record: SoakRecord, verdict: SoakVerdict) -> bytes:
    """Return the page of a soak."""
    shown = record.samples[:: -(-len(record.samples) // MAX_POINTS) or 1]
    turns = [sample for sample in shown if sample.phase == "turn"]
    slope = next((result.slope for result in verdict.rules if result.rule == "latency"), None)
    plan = record.plan
    data: dict[str, Any] = {
        "title": f"Soak of {plan.target}: {verdict.verdict}",
        "subtitle": f"{plan.num_sessions} sessions of {plan.sink} + {plan.window} tokens, {verdict.num_turns:,} turns, "
        f"{duration(1e3 * record.duration_s)}",
        "rules": msgspec.to_builtins(verdict.rules),
        "bytes": {
            "t": [sample.at_s for sample in shown],
            "live_mib": [_mib(sample.kv_live_bytes) for sample in shown],
            "expected_mib": [_mib(_expected(verdict, sample)) for sample in shown],
            "bound_mib": _mib(expected_bytes(verdict.layers, plan.bound_tokens) if verdict.layers else None),
        },
        "turns": {
            "turn": [sample.turn for sample in turns],
            "itl_ms": [_ms(sample.itl_s) for sample in turns],
            "ttft_ms": [_ms(sample.ttft_s) for sample in turns],
            "rss_mib": [_mib(sample.rss_bytes) for sample in turns],
        },
        "slope": None if slope is None else msgspec.to_builtins(slope),
    }
    assets = files("kvarts.session.soak") / "assets"
    template = (assets / "soak.html").read_text(encoding="utf-8")
    return fill_page(template, {"soak.js": (assets / "soak.js").read_text(encoding="utf-8")}, data)


def _expected(verdict: SoakVerdict, sample: Sample) -> int | None:
    return expected_bytes(verdict.layers, sample.num_sent_tokens) if verdict.layers else None


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / MIB


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
