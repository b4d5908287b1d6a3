"""How sure a plan is: the evidence for its step times, their error, and the worlds in which its answer holds; and its
sensitivity: how far the traffic may differ before the answer changes.

A world is one possible error of the cost model: a factor on all step times. Its logarithm is normal, so that one in ten
exceeds 1 + the error that nine of ten measurements keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.base.settings import SettingError
from kvarts.base.units import as_percent
from kvarts.plan.purchases import Prices, first_from, first_that

if TYPE_CHECKING:
    from kvarts.sim.config import ReplayConfig
    from kvarts.sim.traffic.trace import Trace

__all__ = [
    "EIGHTHS",
    "NUM_WORLDS",
    "SLOWER_WORLDS",
    "SLO_SHARE",
    "Goal",
    "cost_error_of",
    "error_of",
    "find_confidence",
    "find_lead",
    "how_long",
    "largest_rate",
    "lead_factors",
    "shares_of_agents",
    "step_times",
    "world_factor",
    "would_change",
]

SLO_SHARE = 0.99
COST_ERROR = 0.15
"""Relative error of costs that is assumed if the cost model gives none."""
NINE_IN_TEN = 1.28
"""One-sided normal quantile of 0.9, in standard deviations."""
SLOWER_WORLDS = (0.126, 0.385, 0.674, 1.036, 1.645)
"""The middles of the upper five tenths of a normal distribution, in standard deviations."""
NUM_WORLDS = 2 * len(SLOWER_WORLDS)
WIDER = {"measured": 1.0, "near": 1.0, "extrapolated": 1.4, "unknown": 1.0}
"""Factors on the held-out error, by evidence: those with which nine of ten held-out points were within nine of ten
worlds are 0.8, 0.9 and 1.4 (`benchmarks/plan_worlds.py`)."""
MOST_ERROR = 0.9
MOST_RATE = 64.0
RATE_TOLERANCE = 0.1
EIGHTHS = 8
"""Parts of the KV memory of an answer: the fewest that are enough are found."""
LENGTHS = (1.1, 1.25, 1.5, 2.0)
"""Factors on the lengths of prompts that are tried."""
Share = Callable[..., float]
"""Returns the share of requests that keep the SLO, with `rate=`, `length=` or `agents=` changed."""
Outcome = tuple[bool, float]
"""Whether an SLO is kept for enough requests, and the requests per second that keep it."""
WORDS = {
    "measured": "this model was measured on this device",
    "near": "this device was measured, with other models",
    "extrapolated": "this device was not measured",
    "unknown": "no measurement is known for these step times",
}


class Goal(msgspec.Struct, frozen=True):
    """What an answer of a plan must keep, and how it is judged.

    `slo_share`: the share of requests that must keep the SLO. `cost_error`: relative error of costs, for which the
    answer must hold; None: that of the cost model. `prices`: decide which answer is the cheapest. `is_quick`: without
    replays of other traffic. Raises SettingError for an error of costs that is no share.
    """

    slo_share: float = SLO_SHARE
    cost_error: float | None = None
    prices: Prices = Prices()
    is_quick: bool = False

    def __post_init__(self) -> None:
        if self.cost_error is not None and not 0 < self.cost_error < 1:
            raise SettingError(f"must be between 0 and 1, got {self.cost_error}", "cost_error")

    def error(self, config: ReplayConfig, trace: Trace) -> float:
        """Return the relative error of the costs of `config` on `trace`."""
        return cost_error_of(config, trace) if self.cost_error is None else self.cost_error

    def prices_to_builtins(self) -> dict[str, Any]:
        """Return the prices, and the sentence that states them, JSON-able."""
        return {**msgspec.to_builtins(self.prices), "text": self.prices.sentence()}


def cost_error_of(config: ReplayConfig, trace: Trace) -> float:
    """Return the relative slowdown of steps that is not exceeded in 9 of 10 cases.

    It is computed from the held-out errors of the built-in constants under such a load, or is COST_ERROR where there
    are none, and is larger for a model or device that was not measured.
    """
    error = (config.held_out(trace) or {}).get("tpot")
    one_sigma: float = COST_ERROR / NINE_IN_TEN if error is None else error.one_sigma
    return error_of(one_sigma, WIDER[_evidence(config.cost)])


def error_of(one_sigma: float, wider: float) -> float:
    """Return the slowdown that 9 of 10 cases do not exceed, with a held-out error that is `wider` times as large."""
    return round(min(MOST_ERROR, NINE_IN_TEN * one_sigma * wider), 2)


def _evidence(cost: object) -> str:
    """Return a key of WORDS; `unknown` for constants that are neither those that ship nor from a calibration."""
    if getattr(cost, "uncertainty", None) is None and not getattr(cost, "is_shipped", False):
        return "unknown"
    return str(getattr(cost, "evidence", "unknown"))


def find_confidence(replayed: Callable[[float], Outcome], cost: object, cost_error: float) -> dict[str, Any]:
    """Return the confidence in an answer that holds with the predicted times, JSON-able.

    `replayed`: whether it holds with a factor on step times, and its goodput then.
    """
    is_sure, least = replayed(world_factor(cost_error, NINE_IN_TEN))
    _, most = replayed(world_factor(cost_error, -NINE_IN_TEN))
    kept = num_kept(lambda factor: replayed(factor)[0], cost_error, is_sure=is_sure)
    return {"goodput_per_s": {"least": least, "most": most}, **_stated(kept, cost, cost_error)}


def _stated(kept: int, cost: object, cost_error: float) -> dict[str, Any]:
    """Return in how many worlds an answer holds, and the evidence for its step times, JSON-able and in words."""
    evidence, error = _evidence(cost), as_percent(cost_error)
    return {
        "kept": kept,
        "of": NUM_WORLDS,
        "cost_error": cost_error,
        "evidence": evidence,
        "text": f"in {kept} of {NUM_WORLDS} worlds ({evidence}: {WORDS[evidence]}; step times ± {error})",
    }


def lead_factors(cost_error: float) -> list[float]:
    """Return the factors on step times of all worlds, ascending."""
    both = [*(-each for each in SLOWER_WORLDS), *SLOWER_WORLDS]
    return sorted(world_factor(cost_error, each) for each in both)


def find_lead(is_ahead: Sequence[bool], cost: object, cost_error: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the confidence in a choice that is ahead of others, and how long steps may be, both JSON-able.

    `is_ahead`: in each world, in the order of `lead_factors`. A comparison may turn with shorter steps, too.
    """
    slower = list(zip(lead_factors(cost_error), is_ahead, strict=True))[len(SLOWER_WORLDS) :]
    fails_at = next((factor for factor, ahead in slower if not ahead), None)
    up_to = max((factor for factor, _ in slower if fails_at is None or factor < fails_at), default=1.0)
    return _stated(sum(is_ahead), cost, cost_error), {"up_to": up_to, "fails_at": fails_at}


def world_factor(cost_error: float, deviations: float) -> float:
    """Return the factor on step times that is `deviations` standard deviations above the predicted time."""
    factor: float = (1.0 + cost_error) ** (deviations / NINE_IN_TEN)
    return round(factor, 4)


def num_kept(keeps: Callable[[float], bool], cost_error: float, *, is_sure: bool) -> int:
    """Return in how many of NUM_WORLDS equally likely worlds an answer holds, which holds with the predicted times.

    `keeps`: whether it holds with a factor on step times; `is_sure`: with one that one in ten exceeds. It holds in the
    five worlds with shorter steps.
    """
    last = len(SLOWER_WORLDS) - 1
    kept, fails = (last, last + 1) if is_sure else (0, last)
    while kept < fails:
        middle = (kept + fails) // 2
        if keeps(world_factor(cost_error, SLOWER_WORLDS[middle])):
            kept = middle + 1
        else:
            fails = middle
    return len(SLOWER_WORLDS) + kept


# Sensitivity ----------------------------------------------------------------------------------------------------


def step_times(confidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return the largest factor on step times, of those of worlds, with which an answer holds, and the next."""
    slower = [world_factor(confidence["cost_error"], each) for each in SLOWER_WORLDS]
    num_slower = confidence["kept"] - len(SLOWER_WORLDS)
    return {
        "up_to": slower[num_slower - 1] if num_slower else 1.0,
        "fails_at": slower[num_slower] if num_slower < len(slower) else None,
    }


def largest_rate(share: Share, slo_share: float, rate: float) -> dict[str, Any]:
    """Return the highest rate at which an answer keeps the SLO, and one at which it does not, from `rate` on.

    Either is None if none was found. `tolerance`: how far they may be apart.
    """
    low = high = None
    while low is None or high is None:
        if share(rate=rate) >= slo_share:
            low = rate
            rate *= 2
        elif high is not None and share(rate=rate) <= share(rate=high):
            high = rate
            break  # halving the rate did not help, so the rate is not the cause
        else:
            high = rate
            rate /= 2
        if not 1 / MOST_RATE <= rate <= MOST_RATE:
            break
    while low is not None and high is not None and high / low > 1 + RATE_TOLERANCE:
        middle = (low * high) ** 0.5
        if share(rate=middle) >= slo_share:
            low = middle
        else:
            high = middle
    return {"up_to": low, "fails_at": high, "tolerance": RATE_TOLERANCE}


def how_long(share: Share, slo_share: float) -> dict[str, Any]:
    """Return the largest of LENGTHS with which an answer keeps the SLO, else 1, and the next, if it does not."""

    def breaks(place: int) -> bool:
        return share(length=LENGTHS[place]) < slo_share

    fails = first_that(breaks, 1, len(LENGTHS))
    if fails is None:
        return {"up_to": LENGTHS[-1], "fails_at": None}
    return {"up_to": 1.0 if fails == 0 else LENGTHS[fails - 1], "fails_at": LENGTHS[fails]}


def shares_of_agents(share: Share, slo_share: float, of_trace: float | None) -> dict[str, Any]:
    """Return the shares of agents nearest to all and none with which an answer keeps the SLO, and the next ones.

    Shares are quarters of the way from that of the trace, and only that is returned if it is unknown, 0 or 1.
    """
    if of_trace is None or not 0 < of_trace < 1:
        return {"share": of_trace}

    def toward(most: float) -> tuple[float, float | None]:
        shares = [of_trace + (most - of_trace) * quarter / 4 for quarter in range(5)]
        fails = first_from(lambda place: share(agents=shares[place]) < slo_share, 0, len(shares))
        return (shares[-1], None) if fails is None else (shares[fails - 1], shares[fails])

    up_to, fails_above = toward(1.0)
    down_to, fails_below = toward(0.0)
    return {
        "share": of_trace,
        "up_to": up_to,
        "fails_above": fails_above,
        "down_to": down_to,
        "fails_below": fails_below,
    }


def would_change(sensitivity: Mapping[str, Any]) -> list[str]:
    """Return how far the traffic and the cost model may differ before the answer changes, in sentences."""
    texts = []
    if (rate := sensitivity.get("rate")) is not None and rate["up_to"] is not None:
        until = "" if rate["fails_at"] is None else f", and not at {rate['fails_at']:.3g} times"
        texts.append(f"rate: it lasts to {rate['up_to']:.3g} times that of the trace{until}")
    if (length := sensitivity.get("prompt_length")) is not None:
        until = "" if length["fails_at"] is None else f", and not {length['fails_at']:g} times"
        longer = f"they may be {length['up_to']:g} times as long{until}"
        texts.append(f"prompts: {longer if length['up_to'] > 1 else 'they may not be a tenth longer'}")
    if (agents := sensitivity.get("agents")) is not None:
        texts.append(_of_agents(agents))
    if (memory := sensitivity.get("memory")) is not None and memory["share"] < 1:
        texts.append(f"memory: {as_percent(memory['share'])} of the KV memory would be enough")
    if (hits := sensitivity.get("hit_ratio")) is not None:
        fails_at = as_percent(hits["fails_at"], bound=hits["down_to"])
        until = "" if hits["fails_at"] is None else f", and not to {fails_at}"
        texts.append(f"hits: they may fall to {as_percent(hits['down_to'])}{until}")
    if (times := sensitivity.get("step_times")) is not None:
        until = "" if times["fails_at"] is None else f", and not {times['fails_at']:.2f} times"
        texts.append(f"steps: they may take {times['up_to']:.2f} times as long as the cost model predicts{until}")
        if (shorter := times.get("shorter")) is not None and shorter["keeps_slo"]:
            texts.append(f"steps: with {shorter['factor']:.2f} times, {shorter['step']} would be enough")
    return texts


def _of_agents(agents: Mapping[str, Any]) -> str:
    """Return the shares of agents with which the SLO is kept, or why they are not known."""
    share = agents["share"]
    if share is None:
        return "share of agents: n/a, the trace does not tell sessions apart"
    if not 0 < share < 1:
        return f"share of agents: n/a, {'every' if share else 'no'} request is of a session with several turns"
    missed = " or ".join(
        as_percent(each) for end in ("fails_below", "fails_above") if (each := agents[end]) is not None
    )
    until = f", and not {missed}" if missed else ""
    return f"share of agents: {as_percent(agents['down_to'])} to {as_percent(agents['up_to'])}{until}"
