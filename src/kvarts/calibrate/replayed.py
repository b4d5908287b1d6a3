"""A replay in the form used for comparison with a measurement, from a report or from the files of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.calibrate.series import Series
from kvarts.errors import InputError
from kvarts.files import read_bytes, reading
from kvarts.report.report import Report
from kvarts.report.run_directory import RunDirectory
from kvarts.verify.reader import open_recording

__all__ = ["Replayed", "load_replayed", "replayed_of"]

Values = npt.NDArray[np.float64]


class Replayed(msgspec.Struct, frozen=True):
    """Requests in order of arrival. Times are in ms; arrays have shape [n].

    `curve`, if known: per step, its start in seconds, running and waiting requests, and KV use in per cent.
    `request_ids`: None if unknown; the order is then that of the measurement.
    """

    arrival_ms: Values
    first_token_ms: Values
    last_token_ms: Values
    output_tokens: npt.NDArray[np.int64]
    num_preemptions: int
    curve: Series | None = None
    request_ids: list[str] | None = None

    def ordered(self, order: npt.NDArray[np.int64]) -> Replayed:
        """Return the same replay with its requests in `order`."""
        return Replayed(
            self.arrival_ms[order],
            self.first_token_ms[order],
            self.last_token_ms[order],
            self.output_tokens[order],
            self.num_preemptions,
            self.curve,
            None if self.request_ids is None else [self.request_ids[place] for place in order.tolist()],
        )


def replayed_of(report: Report) -> Replayed:
    """Return the replay of `report`, with its curve if it has a single engine."""
    rows, steps = report.requests, report.steps
    curve = None
    if report.config.replicas == 1:
        curve = Series(
            time_s=np.asarray(steps["start_ms"]) / 1e3,
            running=np.asarray(steps["running"], np.float64),
            waiting=np.asarray(steps["waiting"], np.float64),
            kv_pct=np.asarray(steps["used_pages"]) * (100.0 / report.config.num_pages),
        )
    return Replayed(
        np.asarray(rows["arrival_ms"]),
        np.asarray(rows["first_token_ms"]),
        np.asarray(rows["last_token_ms"]),
        np.asarray(rows["output_tokens"], np.int64),
        int(np.asarray(rows["preemptions"]).sum()),
        curve,
        [str(name) for name in rows["request_id"]],
    )


class _Row(msgspec.Struct):
    arrival_ms: float
    first_token_ms: float | None
    last_token_ms: float | None
    output_tokens: int
    preemptions: int
    replica: int
    status: str
    request_id: str | int | None = None


def load_replayed(path: Path | str) -> Replayed:
    """Read a run directory, or a file written by `kvarts replay --requests`.

    Raise MissingFileError; InputError for a file that is not a replay or has unfinished requests.
    """
    path = Path(path)
    rows_path, curve = path, None
    with reading(path):
        is_run = path.is_dir()
    if is_run:
        run = RunDirectory(path)
        rows_path = path / "requests.jsonl"
        timelines = run.timelines()
        if len(timelines) == 1:
            curve = _curve(timelines[0][1])
    data = read_bytes(rows_path, hint="Write it with `kvarts replay --requests`.")
    try:
        rows = msgspec.json.Decoder(_Row).decode_lines(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"is not a list of replayed requests: {error}", path=rows_path) from error
    except RecursionError:
        raise InputError("is not a list of replayed requests: it is nested too deeply", path=rows_path) from None
    for line, row in enumerate(rows, 1):
        if row.first_token_ms is None or row.last_token_ms is None:
            raise InputError(f"was {row.status}, and never ended", path=rows_path, line=line, field="last_token_ms")

    def column(name: str) -> Values:
        return np.array([getattr(row, name) for row in rows], np.float64)

    return Replayed(
        column("arrival_ms"),
        column("first_token_ms"),
        column("last_token_ms"),
        np.array([row.output_tokens for row in rows], np.int64),
        sum(row.preemptions for row in rows),
        curve,
        None if any(row.request_id is None for row in rows) else [str(row.request_id) for row in rows],
    )


def _curve(path: Path) -> Series | None:
    chunks = list(open_recording(path).chunks())
    columns: dict[str, Any] = {}
    for name in ("t_ms", "used_pct", "active_seqs", "waiting"):
        if not chunks or name not in chunks[0].columns:
            return None
        columns[name] = np.concatenate([chunk.columns[name] for chunk in chunks]).astype(np.float64)
    return Series(columns["t_ms"] / 1e3, columns["active_seqs"], columns["waiting"], columns["used_pct"] * 100)
