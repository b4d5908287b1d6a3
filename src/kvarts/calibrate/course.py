"""The course of a replay: the batches that an engine computed, with their weights in the means of its latencies.

An engine under a closed or an offline load makes the same decisions regardless of step times, so its means are weighted
sums of step times with fixed weights: mean TPOT is the mean over requests of (last token - first token) / (tokens - 1),
and each step between the two tokens counts once. A fit then only prices batches again, without replays. Under an open
load, or with a significant front-end delay, this holds as long as step times change little.

Courses of equal engines (the same model, device, parallelism and settings) are priced as one: their steps are rows of
the same arrays. A hundred engines with 86,000 steps then take some 60 ms per set of constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log1p
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.calibrate.points import METRICS, Point
from kvarts.errors import ConfigError
from kvarts.executor.roofline import RooflineCost
from kvarts.executor.roofline_settings import COEFFICIENTS, LINKS
from kvarts.executor.step_arrays import StepArrays
from kvarts.report.requests import COMPLETED
from kvarts.sched.plan import Batch
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay_one

__all__ = ["Course", "Pricing", "course_of", "means_of", "with_constants"]

Values = npt.NDArray[np.float64]
Times = npt.NDArray[np.int64]


class _Recorded:
    """A roofline that records its calls and answers, in order: one entry per step or leap."""

    def __init__(self, cost: RooflineCost) -> None:
        self._cost = cost
        self.asked: list[tuple[Batch, ...]] = []
        self.answered_ns: list[int] = []
        self.num_ranks = cost.num_ranks

    def _keep(self, batches: tuple[Batch, ...], durations_ns: list[int]) -> list[int]:
        self.asked.append(batches)
        self.answered_ns.append(durations_ns[0])
        return durations_ns

    def step_ns(self, batch: Batch) -> int:
        return self._keep((batch,), [self._cost.step_ns(batch)])[0]

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        durations_ns = self._cost.decode_ns(num_decodes, known_tokens, pool_tokens, num_steps)
        return self._keep((Batch((), num_decodes, known_tokens, pool_tokens),), durations_ns)

    def together_ns(self, batches: Sequence[Batch]) -> int:
        return self._keep(tuple(batches), [self._cost.together_ns(batches)])[0]

    def decodes_together_ns(self, decodes: Sequence[tuple[int, int]], num_steps: int) -> list[int]:
        durations_ns = self._cost.decodes_together_ns(decodes, num_steps)
        return self._keep(tuple(Batch((), num, known, 1) for num, known in decodes), durations_ns)


class Course(NamedTuple):
    """The computations of an engine for `point`; similar steps are merged into one entry.

    `batches`: those of one typical step, one per rank. `weights`: the weights of the steps in TPOT, TTFT, E2E and the
    total time, shape [entries, 4]. `delay_ms`: time in the front end. `cost`: the cost model of the replay.
    """

    point: Point
    batches: list[tuple[Batch, ...]]
    weights: Values
    output_tokens: int
    delay_ms: float
    cost: RooflineCost

    def predicted(self, cost: RooflineCost) -> dict[str, float]:
        """Return the means under `cost`, named like the fields of Point that they are compared with."""
        steps_ms = StepArrays(cost, self.batches).times_ms(cost)
        return dict(zip(METRICS, means_of([self], (steps_ms @ self.weights)[None])[0].tolist(), strict=True))


def means_of(courses: Sequence[Course], sums_ms: Values) -> Values:
    """Return the METRICS of each course, given its weighted sums of step times: shapes [courses, 4]."""
    tpot_ms, ttft_ms, e2e_ms, total_ms = sums_ms.T
    delay_ms = np.array([course.delay_ms for course in courses])
    tokens = np.array([course.output_tokens / course.point.num_gpus for course in courses])
    columns = {
        "tok_s_gpu": tokens / ((total_ms + delay_ms) / 1e3),
        "ttft_ms": ttft_ms + delay_ms,
        "tpot_ms": tpot_ms,
        "e2e_ms": e2e_ms + delay_ms,
    }
    return np.column_stack([columns[name] for name in METRICS])


def course_of(point: Point, config: ReplayConfig) -> Course:
    """Replay `point` on one engine of `config`, and return its course. Raise ConfigError if a request is refused."""
    cost: RooflineCost = config.cost
    recorded = _Recorded(cost)
    report = replay_one(point.trace(), msgspec.structs.replace(config, cost=recorded))
    spans = [log.spans for log in report.step_logs]
    starts, first = np.unique(np.concatenate([each["start_ns"] for each in spans]), return_index=True)
    ends = np.concatenate([each["start_ns"] + each["duration_ns"] for each in spans])[first]
    num_steps = np.concatenate([each["num_steps"] for each in spans])[first]
    assert len(starts) == len(recorded.asked), "a replay asks once for each step and each leap"
    columns = report.request_columns
    if (columns["status"] != COMPLETED).any():
        raise ConfigError("has requests that do not fit in the memory of the device", field="point")
    sent, first_ns, last_ns = (columns[name] for name in ("arrival_ns", "first_token_ns", "last_token_ns"))
    arrived = sent + config.frontend_ns
    outputs = columns["output_tokens"]
    share = np.full(len(arrived), 1.0 / len(arrived))
    several = outputs > 1
    of_token = 1.0 / np.maximum(outputs - 1, 1)[several] / max(1, several.sum())
    counted = [
        _weights(starts, ends, first_ns[several], last_ns[several], of_token),
        _weights(starts, ends, arrived, first_ns, share),
        _weights(starts, ends, arrived, last_ns, share),
        np.ones(len(starts)),
    ]
    weights = np.column_stack(counted) * num_steps[:, None]
    merged: dict[tuple[int, ...], list[int]] = {}
    for place, batches in enumerate(recorded.asked):
        merged.setdefault(_kind(batches), []).append(place)
    answered = np.array(recorded.answered_ns, np.float64)
    typical = []
    for places in merged.values():
        steps = num_steps[places]
        mean_ns = (answered[places] * steps).sum() / steps.sum()
        place = places[int(np.argmin(np.abs(answered[places] - mean_ns)))]
        typical.append(_middle(recorded.asked[place], int(num_steps[place])))
    summed = np.array([weights[places].sum(axis=0) for places in merged.values()])
    return Course(point, typical, summed, int(outputs.sum()), config.frontend_ms, cost)


def _weights(starts: Times, ends: Times, begins: Times, stops: Times, shares: Values) -> Values:
    """Return the weight of each step: the sum of the shares of requests that are between `begins` and `stops`.

    A request that arrives during a step waits for the rest of it.
    """
    changes = np.zeros(len(starts) + 1)
    first = np.searchsorted(starts, begins, "left")
    np.add.at(changes, first, shares)
    np.add.at(changes, np.searchsorted(starts, stops, "left"), -shares)
    weights: Values = np.cumsum(changes)[:-1]
    before = np.maximum(first - 1, 0)
    rest = (ends[before] - begins) / np.maximum(ends[before] - starts[before], 1)
    np.add.at(weights, before, np.where(first > 0, np.clip(rest, 0.0, 1.0), 0.0) * shares)
    return weights


def _middle(batches: tuple[Batch, ...], num_steps: int) -> tuple[Batch, ...]:
    """Return the batches of the middle step of a leap of `num_steps` steps."""
    later = (num_steps - 1) // 2
    return tuple(
        Batch(each.chunks, each.num_decodes, each.decode_known_tokens + later * each.num_decodes, 1) for each in batches
    )


def _kind(batches: tuple[Batch, ...]) -> tuple[int, ...]:
    """Return the key of steps that are priced as one: the sizes of their work, rounded on a logarithmic scale."""
    kind: list[int] = []
    for batch in batches:
        chunk_tokens = sum(chunk.num_tokens for chunk in batch.chunks)
        before = sum(chunk.start * chunk.num_tokens for chunk in batch.chunks)
        sizes = (chunk_tokens, 0.25), (batch.num_decodes, 0.12), (batch.decode_known_tokens, 0.3), (before, 1.0)
        kind += [round(log1p(size) / step) for size, step in sizes]
        kind.append(bool(batch.chunks))
    return tuple(kind)


def with_constants(cost: RooflineCost, values: Mapping[str, float]) -> RooflineCost:
    """Return `cost` with constants; those of links only if the device has NVLink, for which they were fitted."""
    is_fitted_link = cost.hardware.link_kind == "nvlink"
    changes = {name: value for name, value in values.items() if is_fitted_link or name not in LINKS}
    changed = msgspec.structs.replace(cost, **changes)
    vars(changed).update(geometry=cost.geometry, hardware=cost.hardware)  # these take longest, and do not change
    return changed


class _Engine(NamedTuple):
    """Courses of equal engines. `places`: theirs among all courses. `first`: the first row of each in `steps`."""

    cost: RooflineCost
    active: frozenset[str]
    places: list[int]
    courses: list[Course]
    steps: StepArrays
    weights: Values
    first: npt.NDArray[np.int64]


class Pricing:
    """Courses, taken apart into arrays once."""

    def __init__(self, courses: Sequence[Course]) -> None:
        self._num_courses = len(courses)
        equal: dict[tuple[object, ...], list[int]] = {}
        for place, course in enumerate(courses):
            equal.setdefault(_engine_of(course.cost), []).append(place)
        self._engines = [_engine([courses[place] for place in places], places) for places in equal.values()]

    @property
    def active(self) -> frozenset[str]:
        """The constants that any course depends on."""
        return frozenset(name for engine in self._engines for name in engine.active)

    def predicted(self, values: Mapping[str, float]) -> Values:
        """Return the means under constants: shape [courses, METRICS]."""
        means = np.empty((self._num_courses, len(METRICS)))
        for engine in self._engines:
            means[engine.places] = _means(engine, values)
        return means

    def moved(self, means: Values, name: str, values: Mapping[str, float]) -> Values:
        """Return the means under `values`, given those under constants that differ in `name` only."""
        moved = means.copy()
        for engine in self._engines:
            if name in engine.active:
                moved[engine.places] = _means(engine, values)
        return moved


def _engine_of(cost: RooflineCost) -> tuple[object, ...]:
    """Return all fields of `cost` but its constants."""
    return tuple(
        getattr(cost, name) for name in cost.__struct_fields__ if name not in COEFFICIENTS and name != "uncertainty"
    )


def _engine(courses: list[Course], places: list[int]) -> _Engine:
    cost = courses[0].cost
    sizes = np.array([len(course.batches) for course in courses], np.int64)
    steps = StepArrays(cost, [batches for course in courses for batches in course.batches])
    weights = np.concatenate([course.weights for course in courses])
    return _Engine(cost, frozenset(cost.active_coefficients), places, courses, steps, weights, np.cumsum(sizes) - sizes)


def _means(engine: _Engine, values: Mapping[str, float]) -> Values:
    steps_ms = engine.steps.times_ms(with_constants(engine.cost, values))
    sums_ms: Values = np.add.reduceat(steps_ms[:, None] * engine.weights, engine.first)
    return means_of(engine.courses, sums_ms)
