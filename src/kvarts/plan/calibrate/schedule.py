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
import re
from collections import Counter
from collections.abc import Sequence
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
from kvarts.cost.hardware.device import load_device
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.cost.roofline import RooflineCost
from kvarts.cost.roofline_settings import COEFFICIENTS, LINKS, Constants, ScaleOf, canonical
from kvarts.cost.step_arrays import StepArrays
from kvarts.sim.config import ReplayConfig, make_config
from kvarts.sim.replay import replay_one
from kvarts.sim.report.requests import COMPLETED
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.workload import Length, UniformLength, Workload

__all__ = ["METRICS", "Course", "Point", "Pricing", "course_of", "load_points", "means_of", "usable", "with_constants"]

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
METRICS = ("tok_s_gpu", "ttft_ms", "tpot_ms", "e2e_ms")
"""The fields of a point that were measured, and are predicted."""
REPEATED_PROMPTS = 45
MOST_IMPLIED = 0.6
"""Share of the specified arithmetic above which a measurement is of something else than the row states."""
MEANS = ("", "?", "mean")
"""Stated statistics that are compared with means: a source that does not state one publishes means."""
OTHERS = re.compile(r"[a-z][a-z0-9]*_(ttft|tpot)")
"""Names of the columns for other predictors."""


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured load. Lengths are in tokens, times in milliseconds; None: not measured.

    `load`: closed, with `level` requests in flight; open, with `level` random arrivals per second; offline or batch,
    all at once. `ratio`: lengths are uniform from `ratio` times `isl` (or `osl`) up to it. `draw`: `numpy:ISL:OSL` or
    `sgl:ISL:OSL`, the lengths that NumPy draws uniformly from 1 with seed 1, as the load generator of SGLang does.
    `cached`: prompts repeat, so that they are prefix hits. `tok_s_gpu`: output tokens per second and device.
    `ttft_stat`, `tpot_stat`: the statistic that was published; only means are compared. `speculative`: the engine
    drafted tokens. `pd`: pools of prefill and decode. `others`: predictions of others, by predictor and metric. `id`,
    `commit`, `licence`, `date`, `note`: where the point is from.
    """

    model: str
    gpu: str
    isl: Count
    osl: Count
    load: Literal["closed", "open", "offline", "batch"]
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
    tpot_stat: str = ""
    e2e_ms: Positive | None = None
    draw: Annotated[str, msgspec.Meta(pattern=r"^(numpy|sgl):[1-9][0-9]{0,8}:[1-9][0-9]{0,8}$")] | None = None
    pd: str = ""
    speculative: bool = False
    id: str = ""
    commit: str = ""
    licence: str = ""
    date: str = ""
    note: str = ""
    others: dict[str, dict[str, Positive]] = {}

    @property
    def num_requests(self) -> int:
        """The number of requests to replay."""
        return self.requests or max(64, round(4 * self.level))

    @property
    def num_gpus(self) -> int:
        """The number of devices."""
        return self.gpus or self.tp * self.pp * self.dp

    @property
    def engine_name(self) -> str:
        """The engine, with its version up to the last number that is known: sglang==0.5.12, vllm==0.19."""
        engine = canonical(self.engine)
        numbers = re.match(r"\d+(\.\d+)*", self.version)
        if not engine or numbers is None:
            return engine
        return f"{engine}=={'.'.join(numbers[0].split('.')[: 3 if engine == 'sglang' else 2])}"

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
            settings["engine"] = self.engine_name
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
        if self.draw is not None:
            most = [int(text) for text in self.draw.split(":")[1:]]
            rng = np.random.RandomState(1)  # the generator that the benchmark used
            new: Any
            output: Any
            new, output = (_Listed(rng.randint(1, high + 1, size=num).tolist()) for high in most)
            rate = self.level if self.load == "open" else 0.0
            return Workload(num_sessions=num, new_tokens=new, output_tokens=output, sessions_per_s=rate).trace()
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
        """The measured means, by metric."""
        values = {name: getattr(self, name) for name in METRICS}
        is_mean = {"ttft_ms": self.ttft_stat in MEANS, "tpot_ms": self.tpot_stat in MEANS}
        return {name: value for name, value in values.items() if value is not None and is_mean.get(name, True)}

    @property
    def implied_share(self) -> float:
        """The share of the arithmetic that the devices are specified for, if prompts and outputs were computed.

        0 if the measured values give no throughput, or if prompts repeat.
        """
        requests_per_s = self._requests_per_s
        if self.cached or requests_per_s is None:
            return 0.0
        geometry = load_geometry(self.model, self.weight)
        tokens_per_s = requests_per_s * (self.isl + self.osl) * (1.0 + self.ratio) / 2.0
        device = load_device(self.gpu)
        flops = device.flops_per_s(geometry.expert_dtype) * self.num_gpus
        return tokens_per_s * 2 * geometry.num_active_parameters / flops

    @property
    def _requests_per_s(self) -> float | None:
        if self.tok_s_gpu is not None:
            return self.tok_s_gpu * self.num_gpus / (self.osl * (1.0 + self.ratio) / 2.0)
        if self.load != "closed" or self.tpot_ms is None:
            return None
        e2e_ms = (self.ttft_ms or 0.0) + self.tpot_ms * self.osl * (1.0 + self.ratio) / 2.0
        return self.level / (e2e_ms / 1e3)

    @property
    def left_out(self) -> str | None:
        """Why the point is neither fitted nor compared; None if it is."""
        if self.pd:
            return "pools of prefill and decode"
        if self.speculative:
            return "speculative tokens"
        if not self.measured:
            return "no mean"
        if self.implied_share > MOST_IMPLIED:
            return f"more than {MOST_IMPLIED:.0%} of the specified arithmetic"
        return None

    @property
    def cost(self) -> RooflineCost:
        """The cost model of the replay."""
        cost: RooflineCost = self.config().cost
        return cost


class _Listed(msgspec.Struct, frozen=True):
    """Given lengths in tokens."""

    tokens: list[int]

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return the lengths."""
        assert count == len(self.tokens)
        return self.tokens


def _uniform(most: int, ratio: float) -> Length:
    return UniformLength(low=max(1, round(ratio * most)), high=most)


def load_points(path: Path | str) -> list[Point]:
    """Read a table of points: CSV with a header. Raise MissingFileError; InputError with line and field.

    A model ending in .json is a config.json, with a path relative to the table's directory. A column `NAME_ttft` or
    `NAME_tpot` holds what another predictor answered, in milliseconds.
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
        if name not in fields[:-1] and OTHERS.fullmatch(name) is None:
            hint = f"Use {', '.join(fields[:-1])}; NAME_ttft and NAME_tpot for another predictor's."
            raise InputError(f"{brief(name)} is not a column", path=path, line=1, field="header", hint=hint)


def _point_of(row: dict[str, str | None], path: Path, line: int) -> Point:
    if None in row:
        raise InputError("has more columns than the header", path=path, line=line)
    given = {name: text.strip() for name, text in row.items() if text is not None and text.strip()}
    values: dict[str, Any] = {name: text for name, text in given.items() if name in Point.__struct_fields__}
    others: dict[str, dict[str, str]] = {}
    for name in given.keys() - values.keys():
        predictor, metric = name.rsplit("_", 1)
        others.setdefault(predictor, {})[f"{metric}_ms"] = given[name]
    values["others"] = others
    try:
        point = msgspec.convert(values, Point, strict=False)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, line=line, field=field) from error
    if not any(getattr(point, name) for name in METRICS):
        raise InputError("has nothing measured", path=path, line=line, hint=f"Give one of {', '.join(METRICS)}.")
    return msgspec.structs.replace(point, model=_model_of(point.model, path.parent))


def _model_of(name: str, folder: Path) -> str:
    if not name.endswith(".json"):
        return name
    for candidate in (folder / name, folder / Path(name).name):
        if candidate.exists():
            return str(candidate)
    return name


def usable(points: Sequence[Point]) -> tuple[list[Point], dict[str, int]]:
    """Return the points that can be fitted and compared, and the number of the others, by reason.

    Raise ConfigError, naming the point, for an unknown model or device.
    """
    kept, counts = [], Counter[str]()
    for point in points:
        try:
            reason = point.left_out
        except ConfigError as error:
            where = f"{point.model} on {point.gpu}"
            raise ConfigError(f"{where}: {error.what}", field=error.field, hint=error.hint) from error
        if reason is None:
            kept.append(point)
        else:
            counts[reason] += 1
    return kept, dict(sorted(counts.items()))


Values = npt.NDArray[np.float64]
Times = npt.NDArray[np.int64]


class _Recorded:
    """A roofline that records its calls and answers, in order.

    A driver also asks how long a leap would take, and may then make another step or none: see `of_steps`.
    """

    def __init__(self, cost: RooflineCost) -> None:
        self._cost = cost
        self._entries: list[tuple[tuple[Batch, ...], list[int]]] = []
        self.num_ranks = cost.num_ranks

    def _keep(self, batches: tuple[Batch, ...], durations_ns: list[int]) -> list[int]:
        self._entries.append((batches, list(durations_ns)))
        return durations_ns

    def of_steps(self, num_steps: Times, durations_ns: Times) -> tuple[list[tuple[Batch, ...]], Values]:
        """Return what was asked for each step or leap of a replay, and the duration of its first step."""
        entries = iter(self._entries)
        found = []
        for num, duration_ns in zip(num_steps.tolist(), durations_ns.tolist(), strict=True):
            made = (each for each in entries if len(each[1]) >= num and sum(each[1][:num]) == duration_ns)
            entry = next(made, None)
            assert entry is not None, "a replay asks for each step and each leap"
            found.append(entry)
        return [batches for batches, _ in found], np.array([answer[0] for _, answer in found], np.float64)

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
    asked, answered = recorded.of_steps(num_steps, ends - starts)
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
    for place, batches in enumerate(asked):
        merged.setdefault(_kind(batches), []).append(place)
    typical = []
    for places in merged.values():
        steps = num_steps[places]
        mean_ns = (answered[places] * steps).sum() / steps.sum()
        place = places[int(np.argmin(np.abs(answered[places] - mean_ns)))]
        typical.append(_middle(asked[place], int(num_steps[place])))
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


def with_constants(cost: RooflineCost, constants: Constants, engine: str = "") -> RooflineCost:
    """Return `cost` with constants, and with the scale of `engine` and of the device.

    The constants of links are used only if the device has NVLink, for which they were fitted.
    """
    is_fitted_link = cost.hardware.link_kind == "nvlink"
    changes: dict[str, Any] = {
        name: value for name, value in constants.values.items() if is_fitted_link or name not in LINKS
    }
    changes["scale"] = constants.scale_of(engine, cost)
    changed = msgspec.structs.replace(cost, **changes)
    vars(changed).update(geometry=cost.geometry, hardware=cost.hardware)  # these take longest, and do not change
    return changed


class _Engine(NamedTuple):
    """Courses of equal engines. `name`: that of the engine and its version. `places`: theirs among all courses.

    `first`: the first row of each in `steps`.
    """

    cost: RooflineCost
    name: str
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
            equal.setdefault((*_engine_of(course.cost), course.point.engine_name), []).append(place)
        self._engines = [_engine([courses[place] for place in places], places) for places in equal.values()]

    @property
    def active(self) -> frozenset[str]:
        """The constants that any course depends on."""
        return frozenset(name for engine in self._engines for name in engine.active)

    def has(self, row: ScaleOf) -> bool:
        """Return whether a scale is that of any engine or device."""
        return any(row.holds_for(engine.name, engine.cost) for engine in self._engines)

    def predicted(self, constants: Constants) -> Values:
        """Return the means under constants: shape [courses, METRICS]."""
        means = np.empty((self._num_courses, len(METRICS)))
        for engine in self._engines:
            means[engine.places] = _means(engine, constants)
        return means

    def moved(self, means: Values, what: str | ScaleOf, constants: Constants) -> Values:
        """Return the means under `constants`, given those under constants that differ in one constant or scale."""
        moved = means.copy()
        for engine in self._engines:
            if what.holds_for(engine.name, engine.cost) if isinstance(what, ScaleOf) else what in engine.active:
                moved[engine.places] = _means(engine, constants)
        return moved


def _engine_of(cost: RooflineCost) -> tuple[object, ...]:
    """Return all fields of `cost` but its constants."""
    return tuple(
        getattr(cost, name) for name in cost.__struct_fields__ if name not in (*COEFFICIENTS, "uncertainty", "scale")
    )


def _engine(courses: list[Course], places: list[int]) -> _Engine:
    cost = courses[0].cost
    sizes = np.array([len(course.batches) for course in courses], np.int64)
    steps = StepArrays(cost, [batches for course in courses for batches in course.batches])
    weights = np.concatenate([course.weights for course in courses])
    return _Engine(
        cost,
        courses[0].point.engine_name,
        frozenset(cost.active_coefficients),
        places,
        courses,
        steps,
        weights,
        np.cumsum(sizes) - sizes,
    )


def _means(engine: _Engine, constants: Constants) -> Values:
    steps_ms = engine.steps.times_ms(with_constants(engine.cost, constants, engine.name))
    sums_ms: Values = np.add.reduceat(steps_ms[:, None] * engine.weights, engine.first)
    return means_of(engine.courses, sums_ms)
