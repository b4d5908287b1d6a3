"""A run directory: all results of one run, in self-contained files.

`run.json` holds the command that made it; `report.json`, `requests.jsonl` and `distributions.json` are written by the
replay. Each replica has a timeline and a journal: `timeline.json.gz` and `events.jsonl.gz`, or with several replicas
`timeline-r0.json.gz` and so on. With several models, each has such a subdirectory, under its name, next to the common
report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvarts.errors import ConfigError, InputError, MissingFileError
from kvarts.files import is_replaceable, reading
from kvarts.report.run_values import About, Distributions, RequestRow, RunReport, decoded, decoded_lines

__all__ = [
    "DISTRIBUTIONS",
    "EVENTS",
    "REPORT",
    "REQUESTS",
    "RUN",
    "TIMELINE",
    "RunDirectory",
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
        return decoded_lines(path, RequestRow) if path.exists() else []

    def distributions(self) -> Distributions:
        """Return histograms by name; empty if the file is missing."""
        path = self.path / DISTRIBUTIONS
        return decoded(path, Distributions) if path.exists() else Distributions()

    def about(self) -> About:
        """Return the version and command of the run; empty if the file is missing."""
        path = self.path / RUN
        return decoded(path, About) if path.exists() else About()


def timelines_in(path: Path) -> list[Path]:
    """Return the timelines of a run directory and of its models; empty if `path` is not a directory.

    Raise MissingFileError for a directory without any.
    """
    with reading(path):
        if not path.is_dir():
            return []
        folders = [path, *sorted(folder for folder in path.iterdir() if folder.is_dir())]
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
