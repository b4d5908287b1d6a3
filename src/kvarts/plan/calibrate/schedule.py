"""The course of a replay: the batches that an engine computed, with their weights in the means of its latencies.

An engine under a closed or an offline load makes the same decisions regardless of step times, so its means are weighted
sums of step times with fixed weights: mean TPOT is the mean over requests of (last token - first token) / (tokens - 1),
and each step between the two tokens counts once. A fit then only prices batches again, without replays. Under an open
load, or with a significant front-end delay, this holds as long as step times change little.

Courses of equal engines (the same model, device, parallelism and settings) are priced as one: their steps are rows of
the same arrays. A hundred engines with 86,000 steps then take some 60 ms per set of constants.

Measured points are rows of a table whose columns are the fields of `Point`; docs/reference.md documents them. A point
does not list its requests, so a replay generates a load of the stated lengths, and its means are compared with the
measured ones.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from math import log1p
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.errors import ConfigError, InputError, parts_of
from kvarts.base.files import read_text
from kvarts.base.limits import brief
from kvarts.core.sched.plan import Batch
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.cost.roofline import RooflineCost
from kvarts.cost.roofline_settings import COEFFICIENTS, LINKS
from kvarts.cost.step_arrays import StepArrays
from kvarts.sim.config import ReplayConfig, make_config
from kvarts.sim.replay import replay_one
from kvarts.sim.report.requests import COMPLETED
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.workload import Length, UniformLength, Workload

__all__ = ["METRICS", "Course", "Point", "Pricing", "course_of", "load_points", "means_of", "with_constants"]

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
METRICS = ("tok_s_gpu", "ttft_ms", "tpot_ms", "e2e_ms")
"""The fields of a point that were measured, and are predicted."""
REPEATED_PROMPTS = 45


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured load. Lengths are in tokens, times in milliseconds; None: not measured.

    `load`: closed, with `level` requests in flight; open, with `level` random arrivals per second; offline, all at
    once. `ratio`: lengths are uniform from `ratio` times `isl` (or `osl`) up to it. `cached`: prompts repeat, so that
    they are prefix hits. `tok_s_gpu`: output tokens per second and device.
    """

    model: str
    gpu: str
    isl: Count
    osl: Count
    load: Literal["closed", "open", "offline"]
    level: Positive
    source: str = ""
    engine: str = ""
    version: str = ""
    gpus: Count | None = None
    tp: Count = 1
    pp: Count = 1
    dp: Count = 1
    ep: Count = 1
    weight: str | None = None
    kv: str | None = None
    ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    requests: Count | None = None
    batched_tokens: Count = 8192
    seqs: Count = 256
    cached: bool = False
    tok_s_gpu: Positive | None = None
    ttft_ms: Positive | None = None
    ttft_stat: str = ""
    tpot_ms: Positive | None = None
    e2e_ms: Positive | None = None

    @property
    def num_requests(self) -> int:
        """The number of requests to replay."""
        return self.requests or max(64, round(4 * self.level))

    @property
    def num_gpus(self) -> int:
        """The number of devices."""
        return self.gpus or self.tp * self.pp * self.dp

    def settings(self) -> dict[str, Any]:
        """Return the settings of a replay of this point, by setting key."""
        settings: dict[str, Any] = {
            "model": self.model,
            "device": self.gpu,
            "tensor_parallel": self.tp,
            "pipeline_parallel": self.pp,
            "max_batched_tokens": self.batched_tokens,
            "max_seqs": self.seqs,
        }
        if self.dp > 1:
            settings["data_parallel"] = self.dp
        if self.ep > 1 and self.ep == self.tp * self.dp:
            settings["expert_parallel"] = self.ep
        if self.weight is not None and self.weight != load_geometry(self.model).expert_dtype:
            settings["weight_dtype"] = self.weight
        if self.engine:
            settings["engine"] = self.engine
            if self.engine == "vllm" and self.version and _is_before(self.version, (0, 14)):
                settings["async_scheduling"] = False
        if self.kv is not None:
            settings["kv_dtype"] = self.kv
        if self.load == "closed":
            settings["concurrency"] = max(1, round(self.level))
        return settings

    def config(self) -> ReplayConfig:
        """Return the configuration of a replay of this point. Raise ConfigError for incompatible values."""
        return make_config(self.settings(), counts_groups=False)

    def trace(self) -> Trace:
        """Return a load with these lengths. Equal points give equal loads."""
        num = self.num_requests
        prefix = self.isl - 1 if self.cached and self.isl > 1 else 0
        workload = Workload(
            num_sessions=num,
            new_tokens=_uniform(self.isl - prefix, 1.0 if prefix else self.ratio),
            output_tokens=_uniform(self.osl, self.ratio),
            sessions_per_s=self.level if self.load == "open" else 0.0,
            num_prefix_groups=min(num, REPEATED_PROMPTS) if prefix else 1,
            prefix_tokens=prefix,
        )
        return workload.trace()

    @property
    def measured(self) -> dict[str, float]:
        """The measured values, by metric."""
        values = {name: getattr(self, name) for name in METRICS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def cost(self) -> RooflineCost:
        """The cost model of the replay."""
        cost: RooflineCost = self.config().cost
        return cost


def _is_before(version: str, first: tuple[int, ...]) -> bool:
    numbers = version.split(".")[: len(first)]
    return all(number.isdigit() for number in numbers) and tuple(map(int, numbers)) < first


def _uniform(most: int, ratio: float) -> Length:
    return UniformLength(low=max(1, round(ratio * most)), high=most)


def load_points(path: Path | str) -> list[Point]:
    """Read a table of points: CSV with a header. Raise MissingFileError; InputError with line and field.

    A model ending in .json is a config.json, with a path relative to the table's directory.
    """
    path = Path(path)
    reader = csv.DictReader(io.StringIO(read_text(path, hint="Check the path of the table of points.")))
    points: list[Point] = []
    try:
        _check_header(reader.fieldnames or (), path)
        points += [_point_of(row, path, reader.line_num) for row in reader]
    except csv.Error as error:
        raise InputError(f"is not a CSV file: {error}", path=path, line=reader.line_num + 1) from error
    if not points:
        raise InputError("holds no point", path=path)
    return points


def _check_header(names: Sequence[str], path: Path) -> None:
    fields = Point.__struct_fields__
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InputError(f"{brief(name)} is a column twice", path=path, line=1, field="header")
        if name not in fields:
            hint = f"Use {', '.join(fields)}."
            raise InputError(f"{brief(name)} is not a column", path=path, line=1, field="header", hint=hint)


def _point_of(row: dict[str, str | None], path: Path, line: int) -> Point:
    if None in row:
        raise InputError("has more columns than the header", path=path, line=line)
    values = {name: text.strip() for name, text in row.items() if text is not None and text.strip()}
    try:
        point = msgspec.convert(values, Point, strict=False)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, line=line, field=field) from error
    if not point.measured:
        raise InputError("has nothing measured", path=path, line=line, hint=f"Give one of {', '.join(METRICS)}.")
    return msgspec.structs.replace(point, model=_model_of(point.model, path.parent))


def _model_of(name: str, folder: Path) -> str:
    if not name.endswith(".json"):
        return name
    for candidate in (folder / name, folder / Path(name).name):
        if candidate.exists():
            return str(candidate)
    return name


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
