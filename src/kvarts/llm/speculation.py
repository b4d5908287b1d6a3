"""Speculation by n-grams: what followed the last tokens where they occurred before may follow them again.

Text that is quoted, edited, listed or looped repeats itself; its continuation is in the sequence already. Whether a
guess is worth a place in the step depends on how often guesses were right, and on how much longer the step takes: that
is what the second half of this module decides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.errors import ConfigError
from kvarts.limits import brief, check_whole
from kvarts.request import Request
from kvarts.sched.drafts import Drafter
from kvarts.sched.plan import Batch

__all__ = ["CarefulDrafter", "NgramDrafter", "SpeculativeConfig", "StepTimes", "find_ngram"]

_log = logging.getLogger(__name__)

Tokens = npt.NDArray[np.uint64]

NOTHING: Tokens = np.zeros(0, np.uint64)
MOST_TOKENS = 1024
FIRST_RATE = 0.8
"""How often a guess is taken to be right before any was judged."""
GAIN, SHARED_GAIN = 1 / 4, 1 / 16
"""How much of what is known of guesses the last one is: of a request, and of all."""
MOST_BALANCE = 8.0
"""Steps that guesses may cost, at first and at most."""
INCOME = 0.01
"""The share of steps that is spent on guesses where they bring nothing."""
TRY_MARGIN = 1.05


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are guessed. The names are those of vLLM.

    `method`: `ngram` looks for the last tokens of a sequence in the sequence itself. `num_speculative_tokens`: guessed
    in a step, of each sequence, at most. `prompt_lookup_max` and `prompt_lookup_min`: how many of the last tokens have
    to occur before; the longest such n-gram counts, where it occurred last. Raises ConfigError for a value out of
    range.
    """

    method: Literal["ngram"] = "ngram"
    num_speculative_tokens: int = 16
    prompt_lookup_max: int = 8
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ConfigError(
                f"{brief(self.method)} is not known",
                field="speculative_config.method",
                hint="Known: ngram. There are no draft models.",
            )
        for field in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            check_whole(getattr(self, field), f"speculative_config.{field}", most=MOST_TOKENS)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"{self.prompt_lookup_min} is more than prompt_lookup_max, {self.prompt_lookup_max}",
                field="speculative_config.prompt_lookup_min",
            )

    @classmethod
    def of(cls, given: Any) -> SpeculativeConfig | None:
        """Return what a setting says: None, the name of a method, a mapping or the text of one, or a config.

        Raise ConfigError for anything else.
        """
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            if not given.lstrip().startswith("{"):
                return cls(method=given)  # type: ignore[arg-type]
            try:
                given = msgspec.json.decode(given)
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
                raise ConfigError(f"is no JSON: {error}", field="speculative_config") from error
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
    """Return where the last tokens occurred before, and how many of them; None if fewer than `least` did.

    Of `least` to `most` last tokens, the longest n-gram that occurred; where it did last. The place is that of the
    token after it.
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


class StepTimes:
    """How long a step of so many tokens takes, from some that were measured: (tokens, seconds), in rising order.

    Without any, weights are taken to cost as much as 16 tokens.
    """

    def __init__(self, measured: Sequence[tuple[int, float]] = ()) -> None:
        if len(measured) < 2 or min(seconds for _, seconds in measured) <= 0.0:
            measured = ((0, 16.0), (1, 17.0))
        # More tokens never take less time; beyond the last, each takes as long as the last ones did.
        self._counts = np.array([count for count, _ in measured], np.float64)
        self._seconds = np.maximum.accumulate([seconds for _, seconds in measured])
        self._slope = (self._seconds[-1] - self._seconds[-2]) / (self._counts[-1] - self._counts[-2])

    def beyond(self, num_tokens: int, num_more: int) -> npt.NDArray[np.float64]:
        """Return how much longer a step of `num_tokens` takes with 1, 2, ... `num_more` tokens more, in such steps."""
        counts = np.arange(num_tokens, num_tokens + num_more + 1, dtype=np.float64)
        seconds = np.interp(counts, self._counts, self._seconds)
        seconds += np.maximum(counts - self._counts[-1], 0.0) * self._slope
        longer: npt.NDArray[np.float64] = seconds[1:] / seconds[0] - 1.0
        return longer


class _Known(msgspec.Struct):
    """What is known of the guesses for a request. `rates`: how often they are right, by the length of the n-gram.

    Of the guess under way: `count`, the length that was found; `cost`, how much longer the step takes, in steps;
    `gain`, what each right token is worth, in steps.
    """

    index: int
    rates: list[float]
    count: int = 0
    cost: float = 0.0
    gain: float = 0.0


class NgramDrafter:
    """A Drafter that guesses what followed the last tokens before. Owner of how often that is right.

    It guesses as many tokens as are worth the time that they add to a step: the n-th is right with the n-th power of
    the rate at which guesses are right, and is then worth the share of a step that the token would have taken. Guesses
    that seem not to be worth it are tried now and then. What guesses cost and did not bring is paid from a balance,
    which is small, and rises by a hundredth of each step: so they never make the whole much slower.
    """

    def __init__(self, config: SpeculativeConfig, max_num_seqs: int, times: StepTimes | None = None) -> None:
        self._config = config
        self._times = StepTimes() if times is None else times
        least, most = config.prompt_lookup_min, config.prompt_lookup_max
        self._rates = [0.0] * least + [FIRST_RATE] * (most + 1 - least)
        """Of all requests, by the length of the n-gram."""
        self._of_rows: list[_Known | None] = [None] * max_num_seqs
        self._balance = MOST_BALANCE

    def draft(self, request: Request, num_most: int, batch: Batch) -> Tokens:
        """Return tokens that may follow the known ones of `request`, at most `num_most`, perhaps none."""
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
        # What follows may be cut short by the end of the sequence: then it is a loop, and goes on as it began.
        return np.resize(tokens[start : start + count], count)

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Take note of how many of the tokens that were drafted for `request` were right."""
        known = self._of_rows[request.row]
        assert known is not None and known.index == request.index
        self._balance = min(MOST_BALANCE, self._balance + num_accepted * known.gain - known.cost)
        for rates, gain in ((known.rates, GAIN), (self._rates, SHARED_GAIN)):
            rate = 1.0 - (1.0 - rates[known.count]) * (1.0 - gain) ** num_accepted
            rates[known.count] = rate if num_accepted == num_drafted else rate * (1.0 - gain)


class CarefulDrafter:
    """A Drafter around another: an error in one guess is logged, and there is no guess. It would change no token."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def draft(self, request: Request, num_most: int, batch: Batch) -> Tokens:
        """Return what the other guesses, or nothing."""
        try:
            return self._drafter.draft(request, num_most, batch)
        except Exception:
            _log.exception("request %d: no tokens could be guessed", request.index)
            return NOTHING

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Tell the other how many were right."""
        try:
            self._drafter.judge(request, num_drafted, num_accepted)
        except Exception:
            _log.exception("request %d: a guess could not be judged", request.index)


def num_worthwhile(rate: float, gain: float, costs: npt.NDArray[np.float64]) -> int:
    """Return how many tokens to guess, of which each is right at `rate` if those before it are; 0 if none is worth it.

    `gain`: what a right one is worth; `costs`: what 1, 2, ... cost.
    """
    worth = gain * np.cumsum(rate ** np.arange(1, len(costs) + 1)) - costs
    best = int(worth.argmax())
    return best + 1 if worth[best] > 0.0 else 0


def num_to_try(gain: float, costs: npt.NDArray[np.float64]) -> int:
    """Return the fewest tokens that are worth it if all are right; 0 if there is no such number."""
    is_worth = gain * np.arange(1, len(costs) + 1) > costs * TRY_MARGIN
    return int(is_worth.argmax()) + 1 if is_worth.any() else 0
