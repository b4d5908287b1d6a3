"""A run directory: all results of one run, in self-contained files, and the typed contents of these.

A file with other contents raises InputError with its place.

`run.json` holds the command that made it; `report.json`, `requests.jsonl` and `distributions.json` are written by the
replay. Each replica has a timeline and a journal: `timeline.json.gz` and `events.jsonl.gz`, or with several replicas
`timeline-r0.json.gz` and so on. With several models, each has such a subdirectory, under its name, next to the common
report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from kvarts.base.errors import ConfigError, InputError, MissingFileError, parts_of
from kvarts.base.files import UNFINISHED, is_replaceable, reading
from kvarts.base.units import parse_bytes
from kvarts.core.config import Slo

__all__ = [
    "DISTRIBUTIONS",
    "EVENTS",
    "REPORT",
    "REQUESTS",
    "RUN",
    "TIMELINE",
    "About",
    "Distributions",
    "LimitedBy",
    "RequestRow",
    "RunConfig",
    "RunDirectory",
    "RunReport",
    "Spread",
    "decoded",
    "decoded_lines",
    "named",
    "of_replica",
    "per_replica",
    "run_json",
    "timelines_in",
]

REPORT = "report.json"
REQUESTS = "requests.jsonl"
RUN = "run.json"
DISTRIBUTIONS = "distributions.json"
TIMELINE = "timeline.json.gz"
EVENTS = "events.jsonl.gz"
_NUMBERED = r"-r(\d+)\."
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Real = Annotated[float, msgspec.Meta(ge=0, le=1e18)]

Value = TypeVar("Value")


class Spread(msgspec.Struct, frozen=True):
    """Mean, percentiles and maximum of a latency, in ms; None for a missing value."""

    mean: Real | None = None
    p50: Real | None = None
    p90: Real | None = None
    p95: Real | None = None
    p99: Real | None = None
    max: Real | None = None


class LimitedBy(msgspec.Struct, frozen=True):
    """Causes of waiting, and the share of each in the time spent waiting. `lane`: the channel of most loads."""

    cause: str = "nothing"
    lane: str = "-"
    share_of_waiting: dict[str, Real | None] = {}


class Goodput(msgspec.Struct, frozen=True):
    """Requests that kept the requested bounds."""

    requests_per_s: Real | None = None
    ratio: Real | None = None


class Wasted(msgspec.Struct, frozen=True):
    """Tokens computed for cancelled requests, and the number of requests sent again."""

    prompt_tokens: Count = 0
    output_tokens: Count = 0
    num_retries: Count = 0


class Moved(msgspec.Struct, frozen=True):
    """Bytes transferred between tiers, by direction."""

    bytes: dict[str, Count] = {}


class TierBelow(msgspec.Struct, frozen=True):
    """A tier of a list, in pages, or in bytes or text such as `64GiB`."""

    name: str
    pages: Count | None = None
    size: Count | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.size, str):
            parse_bytes(self.size)


class MemoryBelow(msgspec.Struct, frozen=True):
    """The tiers below the device in a run's configuration, in pages, or in bytes or text such as `64GiB`."""

    tiers: list[TierBelow] = []

    host_memory: Count | str | None = None
    host_pages: Count | None = None
    disk_memory: Count | str | None = None
    disk_pages: Count | None = None

    def __post_init__(self) -> None:
        for size in (self.host_memory, self.disk_memory):
            if isinstance(size, str):
                parse_bytes(size)


class Setup(msgspec.Struct, frozen=True):
    """The part of a run's configuration that is shown: only its types are used."""

    model: str | None = None
    device: str | None = None
    profile: str | None = None
    engine: str | None = None
    kv_groups: str | None = None
    pages: Count | None = None
    page_size: Count | None = None
    page_bytes: Real | None = None
    kv_bytes_per_token: Real | None = None
    replicas: Count | None = None
    offload: MemoryBelow | None = None
    cost: SetupCost | str | None = None


class SetupCost(msgspec.Struct, frozen=True):
    """The part of a cost model that is shown with a run's configuration."""

    model: str | None = None
    llm: str | None = None
    device: str | None = None
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    tensor_parallel: Count | None = None
    data_parallel: Count | None = None
    pipeline_parallel: Count | None = None


class RunReport(msgspec.Struct, frozen=True):
    """The part of a report that is shown."""

    trace: str | None = None
    config: dict[str, Any] = {}
    duration_ms: Real | None = None
    num_requests: Count | None = None
    num_completed: Count | None = None
    num_rejected: Count | None = None
    num_failed: Count | None = None
    num_cancelled: Count | None = None
    cancelled: Wasted | None = None
    num_steps: Count | None = None
    num_input_tokens: Count | None = None
    num_output_tokens: Count | None = None
    num_preemptions: Count | None = None
    num_recomputed_tokens: Count | None = None
    num_evicted_pages: Count | None = None
    ttft_ms: Spread | None = None
    itl_ms: Spread | None = None
    tpot_ms: Spread | None = None
    e2e_ms: Spread | None = None
    queue_ms: Spread | None = None
    uncertainty: dict[str, Spread] | None = None
    request_throughput_per_s: Real | None = None
    input_throughput_tokens_per_s: Real | None = None
    output_throughput_tokens_per_s: Real | None = None
    goodput: Goodput | None = None
    prefix_hit_ratio: Real | None = None
    prefix_hit_ratio_by_tier: dict[str, Real | None] = {}
    transfers: Moved | None = None
    peak_used_pct: Real | None = None
    mean_used_pct: Real | None = None
    distinct_pages: Count | None = None
    limited_by: LimitedBy | None = None
    advice: str | None = None
    models: dict[str, dict[str, Any]] | None = None
    """Report of each model, in a run of several."""

    def __post_init__(self) -> None:
        try:
            msgspec.convert(self.config, Setup)
        except (msgspec.ValidationError, ConfigError) as error:
            what, field = parts_of(error)
            raise ValueError(f"is not the configuration of a run: {field or 'a size'}: {what}") from error


class RequestRow(msgspec.Struct, frozen=True, gc=False):
    """The part of a request that is shown. Times are in ms from the start; None for an event that never happened."""

    arrival_ms: Real
    first_admitted_ms: Real | None = None
    first_token_ms: Real | None = None
    last_token_ms: Real | None = None
    input_tokens: Count = 0
    output_tokens: Count = 0
    cached_tokens: Count = 0
    request_id: str = ""
    replica: Annotated[int, msgspec.Meta(ge=-1, le=1 << 60)] = 0
    """-1: its client gave it up while it waited in the router."""
    preemptions: Count = 0


class Histogram(msgspec.Struct, frozen=True):
    """Counts of values up to each bound."""

    upper_ms: list[Real] = []
    counts: list[Count] = []

    def __post_init__(self) -> None:
        if len(self.upper_ms) != len(self.counts) or sorted(self.upper_ms) != self.upper_ms:
            raise ValueError("has no bound for each count, in order")


class Distributions(msgspec.Struct, frozen=True):
    """Histograms by name."""

    itl_ms: Histogram = Histogram()


class About(msgspec.Struct, frozen=True):
    """Version and command of the run."""

    kvarts: str | None = None
    command: list[str] | None = None


def decoded(path: Path, kind: type[Value]) -> Value:
    """Return the contents of a file. Raise InputError with file and field, or FileNotFoundError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=field) from error
    except (OSError, ValueError, RecursionError, OverflowError) as error:
        raise InputError(f"cannot be read: {error}", path=path) from error


def decoded_lines(path: Path, kind: type[Value]) -> list[Value]:
    """Return the contents of each line of a file. Raise InputError with the file, line and field."""
    decode = msgspec.json.Decoder(kind).decode
    rows = []
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):  # noqa: B007 - used in the error
                if line.strip():
                    rows.append(decode(line))
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, line=number, field=field) from error
    except (OSError, ValueError, RecursionError, OverflowError) as error:
        raise InputError(f"cannot be read: {error}", path=path, line=number or None) from error
    return rows


class RunConfig(Protocol):
    """The part of a run's configuration that a report reads."""

    @property
    def num_pages(self) -> int:
        """Pages of each replica."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def replicas(self) -> int:
        """Number of engines with this configuration."""

    @property
    def slo(self) -> Slo:
        """Bounds for goodput."""

    def to_builtins(self) -> dict[str, Any]:
        """Return the configuration, JSON-able, by the names that a file and the command line use."""


def per_replica(path: Path, replicas: int) -> Iterator[Path]:
    """Return a path per replica, with its number before the suffixes that name the format.

    Raise ConfigError for a device or a pipe, which cannot be several files.
    """
    if replicas == 1:
        yield path
    else:
        yield from (of_replica(path, replica) for replica in range(replicas))


def of_replica(path: Path, replica: int) -> Path:
    """Return the path with a replica's number before the suffixes that name the format.

    Raise ConfigError for a device or a pipe.
    """
    _refuse_one(path)
    suffix = _form_suffix(path)
    return path.with_name(f"{path.name.removesuffix(suffix)}-r{replica}{suffix}")


def named(path: Path | None, name: str | None) -> Path | None:
    """Return the path with a model's name, if there is one, before the suffixes that name the format.

    Raise ConfigError for a device or a pipe.
    """
    if path is None or name is None:
        return path
    _refuse_one(path)
    suffix = _form_suffix(path)
    return path.with_name(f"{path.name.removesuffix(suffix)}-{name}{suffix}")


def _refuse_one(path: Path) -> None:
    if not is_replaceable(path):
        raise ConfigError("is one output, and there are several files", path=path, hint="Give the path of a file.")


def _form_suffix(path: Path) -> str:
    return "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])


class RunDirectory:
    """Reader of a run directory. Raises MissingFileError if it or its report is missing, InputError if malformed."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with reading(self.path):
            is_there = self.path.is_dir()
        if not is_there and self.path.exists():
            raise InputError(
                "is a file, not a run directory", path=path, hint="Write one with `kvarts replay --run-dir DIR`."
            )
        if not is_there:
            raise MissingFileError("no such directory", path=path, hint="Write one with `kvarts replay --run-dir`.")
        try:
            self.summary = decoded(self.path / REPORT, RunReport)
        except FileNotFoundError:
            hint = "Is this a run directory?"
            raise MissingFileError("no such file", path=self.path / REPORT, hint=hint) from None

    def runs(self) -> list[RunDirectory]:
        """Return the run of each model, or only this run without models."""
        if self.summary.models is None:
            return [self]
        runs = []
        for name in self.summary.models:
            if name in ("", ".", "..") or set(name) & set("/\\\0"):
                raise InputError(f"{name!r} is not the name of a model", path=self.path / REPORT, field="models")
            runs.append(RunDirectory(self.path / name))
        return runs

    def timelines(self) -> list[tuple[int, Path]]:
        """Return the number of each replica, and its timeline: .json, .jsonl or .parquet, gzipped or not."""
        return _of_replicas(self.path, "timeline")

    def journals(self) -> list[tuple[int, Path]]:
        """Return the number of each replica, and its journal."""
        return _of_replicas(self.path, "events")

    def requests(self) -> list[RequestRow]:
        """Return one row per request; empty if the file is missing."""
        path = self.path / REQUESTS
        return decoded_lines(path, RequestRow) if _is_there(path) else []

    def distributions(self) -> Distributions:
        """Return histograms by name; empty if the file is missing."""
        path = self.path / DISTRIBUTIONS
        return decoded(path, Distributions) if _is_there(path) else Distributions()

    def about(self) -> About:
        """Return the version and command of the run; empty if the file is missing."""
        path = self.path / RUN
        return decoded(path, About) if _is_there(path) else About()


def _is_there(path: Path) -> bool:
    with reading(path):
        return path.exists()


def timelines_in(path: Path) -> list[Path]:
    """Return the timelines of a run directory and of its models; empty if `path` is not a directory.

    Raise MissingFileError for a directory without any.
    """
    with reading(path):
        if not path.is_dir():
            return []
        folders = [path, *sorted(folder for folder in path.iterdir() if folder.is_dir())]
    if path / UNFINISHED in folders:
        what = f"holds {UNFINISHED}: the run was killed while this was written"
        raise InputError(what, path=path, hint="Run it again, or give a file.")
    found = [timeline for folder in folders for _, timeline in _of_replicas(folder, "timeline")]
    if not found:
        raise MissingFileError("has no timeline", path=path, hint="Write one with `kvarts replay --run-dir`.")
    return found


def _of_replicas(folder: Path, name: str) -> list[tuple[int, Path]]:
    found = []
    with reading(folder):
        paths = list(folder.iterdir())
    for path in paths:
        if path.name.startswith(f"{name}.") or re.match(rf"{name}-r\d+\.", path.name):
            number = re.search(_NUMBERED, path.name)
            found.append((int(number[1][:9]) if number else 0, path))
    return sorted(found)


def run_json(version: str, command: list[str]) -> bytes:
    """Return the contents of RUN."""
    return msgspec.json.format(msgspec.json.encode(About(version, command)), indent=2) + b"\n"
