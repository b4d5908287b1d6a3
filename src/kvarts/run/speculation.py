"""Speculation by n-grams: the tokens after an earlier occurrence of the last tokens are likely to follow again.

Text that is quoted, edited, listed or looped repeats itself, so its continuation is in the sequence already. Whether a
guess is worth a place in the step depends on how often guesses were right and on how much longer the step takes; the
second half of this module decides that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError, problem_of
from kvarts.base.limits import brief, check_whole
from kvarts.core.request import Request
from kvarts.core.sched.drafts import Drafter
from kvarts.core.sched.plan import Batch

__all__ = ["CarefulDrafter", "NgramDrafter", "SpeculativeConfig", "TimesByTokens", "find_ngram"]

_log = logging.getLogger(__name__)

Tokens = npt.NDArray[np.uint64]

NOTHING: Tokens = np.zeros(0, np.uint64)
MOST_TOKENS = 1024
FIRST_RATE = 0.8
"""Assumed acceptance rate before any guess was judged."""
GAIN, SHARED_GAIN = 1 / 4, 1 / 16
"""Weight of the last guess in the moving average of rates, per request and over all requests."""
MOST_BALANCE = 8.0
"""Initial and largest budget of wasted guesses, in steps."""
INCOME = 0.01
"""Budget added per step, which bounds the time spent on useless guesses to this share."""
TRY_MARGIN = 1.05


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of speculative decoding, with vLLM's names.

    `method`: `ngram` looks for the last tokens of a sequence earlier in the sequence. `num_speculative_tokens`: most
    tokens guessed per sequence and step. `prompt_lookup_max` and `prompt_lookup_min`: how many of the last tokens must
    occur before; the longest such n-gram is used, at its last occurrence. `draft_order`: with `last`, guesses take the
    tokens and pages that a step has left; with `first` they come before prompts, and others are preempted for their
    pages, as in vLLM. Raises ConfigError for a value out of range.
    """

    method: Literal["ngram"] = "ngram"
    num_speculative_tokens: int = 16
    prompt_lookup_max: int = 8
    prompt_lookup_min: int = 2
    draft_order: Literal["last", "first"] = "last"

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ConfigError(
                f"{brief(self.method)} is not known",
                field="speculative_config.method",
                hint="Known: ngram. There are no draft models.",
            )
        for field in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            check_whole(getattr(self, field), f"speculative_config.{field}", most=MOST_TOKENS)
        if self.draft_order not in ("last", "first"):
            raise ConfigError(
                f"must be 'last' or 'first', got {brief(self.draft_order)}", field="speculative_config.draft_order"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"{self.prompt_lookup_min} is more than prompt_lookup_max, {self.prompt_lookup_max}",
                field="speculative_config.prompt_lookup_min",
            )

    @classmethod
    def of(cls, given: Any) -> SpeculativeConfig | None:
        """Return the config for a setting: None, the name of a method, a mapping or its JSON text, or a config.

        Raise ConfigError for anything else.
        """
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            if not given.lstrip().startswith("{"):
                return cls(method=given)  # type: ignore[arg-type]
            try:
                given = msgspec.json.decode(given)
            except UNDECODED as error:
                raise ConfigError(f"is no JSON: {problem_of(error)}", field="speculative_config") from error
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"must be a name or a mapping, got {brief(given)}",
                field="speculative_config",
                hint='Give "ngram", or {"method": "ngram", "num_speculative_tokens": 8}.',
            )
        unknown = [key for key in given if key not in cls.__struct_fields__]
        if unknown:
            raise ConfigError(
                f"{brief(unknown[0])} is not known",
                field="speculative_config",
                hint=f"Known: {', '.join(cls.__struct_fields__)}.",
            )
        return cls(**given)


def find_ngram(tokens: Tokens, least: int, most: int) -> tuple[int, int] | None:
    """Return (place, count) of an earlier occurrence of the last tokens; None if fewer than `least` match.

    `count`, from `least` to `most`, is the length of the longest n-gram of last tokens that occurred before, and
    `place` the index of the token after its last occurrence.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    count = 1
    while count < most:
        longer = ends[ends >= count]
        if len(longer):
            longer = longer[tokens[longer - count] == tokens[last - count]]
        if not len(longer):
            break
        ends = longer
        count += 1
    return (int(ends[-1]) + 1, count) if len(ends) and count >= least else None


class TimesByTokens:
    """Duration of a step by number of tokens, interpolated between measurements (tokens, seconds) in rising order.

    Without measurements, reading the weights is assumed to cost as much as 16 tokens.
    """

    def __init__(self, measured: Sequence[tuple[int, float]] = ()) -> None:
        if len(measured) < 2 or min(seconds for _, seconds in measured) <= 0.0:
            measured = ((0, 16.0), (1, 17.0))
        # More tokens never take less time; beyond the last measurement, the last slope continues.
        self._counts = np.array([count for count, _ in measured], np.float64)
        self._seconds = np.maximum.accumulate([seconds for _, seconds in measured])
        self._slope = (self._seconds[-1] - self._seconds[-2]) / (self._counts[-1] - self._counts[-2])

    def beyond(self, num_tokens: int, num_more: int) -> npt.NDArray[np.float64]:
        """Return how much longer a step of `num_tokens` takes with 1, 2, ... `num_more` extra tokens, relative
        to it.
        """
        counts = np.arange(num_tokens, num_tokens + num_more + 1, dtype=np.float64)
        seconds = np.interp(counts, self._counts, self._seconds)
        seconds += np.maximum(counts - self._counts[-1], 0.0) * self._slope
        longer: npt.NDArray[np.float64] = seconds[1:] / seconds[0] - 1.0
        return longer


class _Known(msgspec.Struct):
    """Statistics of the guesses for a request. `rates`: acceptance rate by length of the n-gram.

    For the current guess: `count`, the length of the n-gram; `cost`, the extra time of the step; `gain`, the value of
    each right token. Both are in steps.
    """

    index: int
    rates: list[float]
    count: int = 0
    cost: float = 0.0
    gain: float = 0.0


class NgramDrafter:
    """A Drafter that guesses the tokens after an earlier occurrence of the last ones. Owner of the acceptance rates.

    It guesses as many tokens as are worth the time that they add to a step: the n-th is right with the n-th power of
    the acceptance rate, and is then worth the share of a step that the token would have taken. Guesses that seem not
    worth it are tried from time to time. The net cost of guesses is paid from a balance, which is small and rises by a
    hundredth of each step, so guesses never slow the engine down much.
    """

    def __init__(self, config: SpeculativeConfig, max_num_seqs: int, times: TimesByTokens | None = None) -> None:
        self._config = config
        self._times = TimesByTokens() if times is None else times
        least, most = config.prompt_lookup_min, config.prompt_lookup_max
        self._rates = [0.0] * least + [FIRST_RATE] * (most + 1 - least)
        """Acceptance rate over all requests, by length of the n-gram."""
        self._of_rows: list[_Known | None] = [None] * max_num_seqs
        self._balance = MOST_BALANCE

    def draft(self, request: Request, num_most: int, batch: Batch) -> Tokens:
        """Return tokens that may follow the known ones of `request`, at most `num_most`, possibly none."""
        config = self._config
        known = self._of_rows[request.row]
        if known is None or known.index != request.index:
            known = self._of_rows[request.row] = _Known(request.index, self._rates.copy())
        gain = known.gain = 1.0 / batch.num_decodes
        self._balance = min(MOST_BALANCE, self._balance + INCOME * gain)
        tokens = np.frombuffer(request.content.units, np.uint64)
        found = find_ngram(tokens, config.prompt_lookup_min, config.prompt_lookup_max)
        if found is None:
            return NOTHING
        start, known.count = found
        costs = self._times.beyond(batch.num_tokens, min(num_most, config.num_speculative_tokens))
        count = num_worthwhile(known.rates[known.count], gain, costs) or num_to_try(gain, costs)
        if not count or costs[count - 1] > self._balance:
            return NOTHING
        known.cost = float(costs[count - 1])
        # The continuation may reach the end of the sequence: then it is a loop, and is repeated from its start.
        return np.resize(tokens[start : start + count], count)

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Update the rates with how many of the tokens drafted for `request` were right."""
        known = self._of_rows[request.row]
        assert known is not None and known.index == request.index
        self._balance = min(MOST_BALANCE, self._balance + num_accepted * known.gain - known.cost)
        for rates, gain in ((known.rates, GAIN), (self._rates, SHARED_GAIN)):
            rate = 1.0 - (1.0 - rates[known.count]) * (1.0 - gain) ** num_accepted
            rates[known.count] = rate if num_accepted == num_drafted else rate * (1.0 - gain)


class CarefulDrafter:
    """A Drafter around another that logs its errors and then drafts nothing, which changes no token."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def draft(self, request: Request, num_most: int, batch: Batch) -> Tokens:
        """Return the other drafter's tokens, or none after an error."""
        try:
            return self._drafter.draft(request, num_most, batch)
        except Exception:
            _log.exception("request %d: no tokens could be guessed", request.index)
            return NOTHING

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Forward the counts to the other drafter."""
        try:
            self._drafter.judge(request, num_drafted, num_accepted)
        except Exception:
            _log.exception("request %d: a guess could not be judged", request.index)


def num_worthwhile(rate: float, gain: float, costs: npt.NDArray[np.float64]) -> int:
    """Return the best number of tokens to guess; 0 if none is worth it.

    Each is right with probability `rate` if those before it are. `gain`: the value of a right one; `costs`: the cost of
    1, 2, ... tokens.
    """
    worth = gain * np.cumsum(rate ** np.arange(1, len(costs) + 1)) - costs
    best = int(worth.argmax())
    return best + 1 if worth[best] > 0.0 else 0


def num_to_try(gain: float, costs: npt.NDArray[np.float64]) -> int:
    """Return the smallest number of tokens that pays if all are right; 0 if no number does."""
    is_worth = gain * np.arange(1, len(costs) + 1) > costs * TRY_MARGIN
    return int(is_worth.argmax()) + 1 if is_worth.any() else 0
