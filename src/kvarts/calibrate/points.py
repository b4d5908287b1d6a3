"""A table of measured points: one row per load, with the engine it ran on and the measured means.

The columns are the fields of `Point`; docs/reference.md documents them. A point does not list its requests, so a replay
generates a load of the stated lengths, and its means are compared with the measured ones.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvarts.errors import InputError, parts_of
from kvarts.executor.roofline import RooflineCost
from kvarts.files import read_text
from kvarts.hardware.model_config import load_geometry
from kvarts.limits import brief
from kvarts.sim.config import ReplayConfig, make_config
from kvarts.traffic.trace import Trace
from kvarts.traffic.workload import Length, UniformLength, Workload

__all__ = ["METRICS", "Point", "load_points"]

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


def load_points(path: Path | str, *, keep: Callable[[Point], bool] | None = None) -> list[Point]:
    """Read a table of points: CSV with a header. Raise MissingFileError; InputError with line and field.

    A model ending in .json is a config.json, with a path relative to the table's directory.
    """
    path = Path(path)
    reader = csv.DictReader(io.StringIO(read_text(path, hint="Check the path of the table of points.")))
    points: list[Point] = []
    try:
        _check_header(reader.fieldnames or (), path)
        for row in reader:
            point = _point_of(row, path, reader.line_num)
            if keep is None or keep(point):
                points.append(point)
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
