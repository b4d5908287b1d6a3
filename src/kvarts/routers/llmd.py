"""llm-d's endpoint picker: a weighted sum of scores in [0, 1]; the highest wins. Names and defaults are llm-d's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from kvarts.limits import check_number
from kvarts.routers.approximate import IndexRule
from kvarts.routers.view import Asked, Needs, View

__all__ = ["LlmD"]

Scores = list[float]

MOST_PREFIX_TOKENS = 131_072
MOST_PREFIX_BLOCKS = 31_250
LONG_TOKENS = 8192
MOST_TOKENS = 4_194_304
MOST_WAITING = 128
MOST_COLD = 1024
CPU_WEIGHT = 0.8


class LlmD(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each field but `length` is the weight of a scorer; without any, the weights are queue 2, kv 2 and prefix 3.

    `prefix`: share of the prompt's blocks that were placed there before, by a placement index; with `length` w, it is
    (1 - w) of that plus w times the squared ratio of matched tokens to 8,192. `precise`: the same share by cache
    events, where blocks in tiers below the device count 0.8. `queue`: waiting requests; the fewest score 1 and the most
    0. `running`: the same for running requests. `kv`: share of free pages. `active`: requests in flight from this
    router. `tokens`: prompt tokens in flight, relative to 4,194,304. `load`: 0.5, decreasing to 0 with up to 128
    waiting requests. `cold`: a request whose prefix no worker has is placed on the worker that least recently received
    such a request.
    """

    prefix: float | None = None
    queue: float | None = None
    kv: float | None = None
    precise: float | None = None
    running: float | None = None
    active: float | None = None
    tokens: float | None = None
    load: float | None = None
    cold: float | None = None
    length: float = 0.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value is not None:
                check_number(value, field, most=1.0 if field == "length" else 1e6)

    @property
    def weights(self) -> dict[str, float]:
        """The scorers in use and their weights."""
        given = {field: getattr(self, field) for field in self.__struct_fields__ if field != "length"}
        weights = {field: weight for field, weight in given.items() if weight is not None}
        return weights or {"prefix": 3.0, "queue": 2.0, "kv": 2.0}

    @property
    def needs(self) -> Needs:
        """The data that the scorers in use read."""
        used = set(self.weights)
        return Needs(
            pages="end" if "precise" in used else "no",
            placements=IndexRule(most_tokens=MOST_PREFIX_TOKENS, most_blocks=MOST_PREFIX_BLOCKS)
            if used & {"prefix", "cold"}
            else None,
            metrics=bool(used & set(OF_METRICS)),
            prefills="tokens" in used,
        )

    def open(self) -> OpenLlmD:
        """Return the policy with its own state."""
        return OpenLlmD(self)


class OpenLlmD:
    """One llm-d router. Owner of the state of its scorers between requests."""

    def __init__(self, settings: LlmD) -> None:
        self._settings = settings
        self.needs = settings.needs
        scorers: dict[str, Callable[[Asked, View], Scores | None]] = {
            "prefix": self._prefix,
            "precise": self._precise,
            "active": lambda asked, view: _active(view),
            "tokens": lambda asked, view: [
                1 - min(tokens + asked.num_tokens, MOST_TOKENS) / MOST_TOKENS for tokens in view.prefill_tokens
            ],
            "cold": self._cold,
        }
        self._scorers = [(weight, scorers[name]) for name, weight in settings.weights.items() if name in scorers]
        self._metric_scorers = [
            (weight, OF_METRICS[name]) for name, weight in settings.weights.items() if name in OF_METRICS
        ]
        self._is_cold = False
        self._cold_last: OrderedDict[int, None] = OrderedDict()
        """Workers that received a request without a hit, the least recent first."""
        self._base: tuple[Any, Scores] = None, []
        """Version of the metrics, and the sum of the scorers that read only metrics, computed from it."""

    def choose(self, asked: Asked, view: View) -> int:
        """Return a worker of the highest score."""
        scores = self._of_metrics(view)
        for weight, scorer in self._scorers:
            of_scorer = scorer(asked, view)
            if of_scorer is not None:
                scores = [score + weight * each for score, each in zip(scores, of_scorer, strict=True)]
        most = max(map(scores.__getitem__, view.workers))
        chosen = view.any_of([worker for worker in view.workers if scores[worker] == most])
        if self._is_cold:
            self._cold_last.pop(chosen, None)
            self._cold_last[chosen] = None
            if len(self._cold_last) > MOST_COLD:
                self._cold_last.popitem(last=False)
        return chosen

    def _of_metrics(self, view: View) -> Scores:
        made_from = view.metrics.num_reports, len(view.num_requests), tuple(view.workers)
        if self._base[0] != made_from:
            scores = [0.0] * len(view.num_requests)
            for weight, scorer in self._metric_scorers:
                scores = [score + weight * each for score, each in zip(scores, scorer(view), strict=True)]
            self._base = made_from, scores
        return self._base[1]

    def _prefix(self, asked: Asked, view: View) -> Scores | None:
        found, num_blocks = view.placements(asked)
        if not found:
            return None
        assert view.index is not None
        length = self._settings.length
        scores = [0.0] * len(view.num_requests)
        for worker, blocks in found.items():
            scores[worker] = (1 - length) * blocks / num_blocks
            scores[worker] += length * min(1.0, blocks * view.index.block_tokens / LONG_TOKENS) ** 2
        return scores

    def _precise(self, asked: Asked, view: View) -> Scores | None:
        num_blocks = asked.num_tokens // view.page_size
        scores = [0.0] * len(view.num_requests)
        for worker, (pages, *below) in view.pages(asked, num_blocks).items():
            scores[worker] = (pages + CPU_WEIGHT * sum(below)) / num_blocks
        return scores

    def _cold(self, asked: Asked, view: View) -> Scores | None:
        self._is_cold = not view.placements(asked)[0]
        scores = [0.5] * len(view.num_requests)
        num_workers = len(view.workers)
        if not self._is_cold or num_workers == 1:
            return scores
        never = [worker for worker in view.workers if worker not in self._cold_last]
        ranked = never + [worker for worker in self._cold_last if worker in view.workers]
        for rank, worker in enumerate(ranked):
            scores[worker] = 1 - rank / (num_workers - 1)
        return scores


def _spread(values: list[int], view: View) -> Scores:
    """Return 1 for the least value and 0 for the largest, linearly; 1 for all if they are equal."""
    among = [values[worker] for worker in view.workers]
    most, least = max(among), min(among)
    if most == least:
        return [1.0] * len(values)
    return [(most - value) / (most - least) for value in values]


def _active(view: View) -> Scores:
    """Return 1 for a worker without requests in flight, otherwise its relative distance from the most loaded worker."""
    counts = view.num_requests
    most = max(map(counts.__getitem__, view.workers)) or 1
    return [1.0 if not count else (most - count) / most for count in counts]


OF_METRICS: dict[str, Callable[[View], Scores]] = {
    "queue": lambda view: _spread(view.metrics.waiting, view),
    "kv": lambda view: [1 - usage for usage in view.metrics.usage],
    "running": lambda view: _spread(view.metrics.running, view),
    "load": lambda view: [0.5 * (1 - min(waiting, MOST_WAITING) / MOST_WAITING) for waiting in view.metrics.waiting],
}
"""Scorers that read only metrics."""
