"""A run directory: everything about one run, in files that stand on their own.

`report.json` and `requests.jsonl` as the replay writes them, `distributions.json`; and for each replica a timeline and
a journal: `timeline.json.gz` and `events.jsonl.gz`, or with several `timeline-r0.json.gz` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvarts.errors import InputError, MissingFileError

__all__ = ["DISTRIBUTIONS", "EVENTS", "REPORT", "REQUESTS", "TIMELINE", "RunDirectory", "named", "per_replica"]

REPORT = "report.json"
REQUESTS = "requests.jsonl"
DISTRIBUTIONS = "distributions.json"
TIMELINE = "timeline.json.gz"
EVENTS = "events.jsonl.gz"

_NUMBERED = r"-r(\d+)\."


def per_replica(path: Path, replicas: int) -> Iterator[Path]:
    """Return a path for each replica: its number goes before the suffixes that name the form."""
    if replicas == 1:
        yield path
        return
    suffix = _form_suffix(path)
    for replica in range(replicas):
        yield path.with_name(f"{path.name.removesuffix(suffix)}-r{replica}{suffix}")


def named(path: Path | None, name: str | None) -> Path | None:
    """Return the path with a model's name, where there is one, before the suffixes that name the form."""
    if path is None or name is None:
        return path
    suffix = _form_suffix(path)
    return path.with_name(f"{path.name.removesuffix(suffix)}-{name}{suffix}")


def _form_suffix(path: Path) -> str:
    return "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])


class RunDirectory:
    """Reads a run directory. Raises MissingFileError if there is none, or no report in it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise MissingFileError("no such directory", path=path, hint="Write one with `kvarts replay --run-dir`.")
        self.report = self._json(self.path / REPORT)
        if not isinstance(self.report, dict):
            raise InputError("is no report", path=self.path / REPORT)

    def timelines(self) -> list[tuple[int, Path]]:
        """Return the number of each replica, and its timeline: .json, .jsonl or .parquet, packed or not."""
        return self._of_replicas("timeline")

    def journals(self) -> list[tuple[int, Path]]:
        """Return the number of each replica, and its journal."""
        return self._of_replicas("events")

    def requests(self) -> list[dict[str, Any]]:
        """Return a row a request; none where there is no such file."""
        path = self.path / REQUESTS
        if not path.exists():
            return []
        try:
            rows = msgspec.json.Decoder(dict[str, Any]).decode_lines(path.read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise InputError(f"cannot be read: {error}", path=path) from error
        return rows

    def distributions(self) -> dict[str, Any]:
        """Return histograms by name; none where there is no such file."""
        path = self.path / DISTRIBUTIONS
        value = self._json(path) if path.exists() else {}
        if not isinstance(value, dict):
            raise InputError("holds no histograms", path=path)
        return value

    def _of_replicas(self, name: str) -> list[tuple[int, Path]]:
        found = []
        for path in self.path.iterdir():
            if path.name.startswith(f"{name}.") or re.match(rf"{name}-r\d+\.", path.name):
                number = re.search(_NUMBERED, path.name)
                found.append((int(number[1]) if number else 0, path))
        return sorted(found)

    def _json(self, path: Path) -> Any:
        try:
            return msgspec.json.decode(path.read_bytes())
        except FileNotFoundError:
            raise MissingFileError("no such file", path=path, hint="Is this a run directory?") from None
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise InputError(f"cannot be read: {error}", path=path) from error
