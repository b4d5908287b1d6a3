"""Samples of a running engine over time: running and waiting requests, and KV use."""

from __future__ import annotations

import csv
from math import isfinite
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.errors import InputError
from kvarts.files import read_text
from kvarts.limits import brief

__all__ = ["Series", "load_series"]

KV = "kv_cache_pct"
COLUMNS = {"t": "time_s", "running": "running", "waiting": "waiting", "kv_cache_pct": "kv_pct"}

Values = npt.NDArray[np.float64]


class Series(msgspec.Struct, frozen=True):
    """Samples in order of time; all arrays have shape [n]. `time_s`: since the first arrival.

    `kv_pct`: in per cent; None if it was not recorded, for the reason in `left_out`.
    """

    time_s: Values
    running: Values
    waiting: Values
    kv_pct: Values | None
    left_out: str | None = None

    def until(self, time_s: float) -> Series | None:
        """Return the samples up to `time_s`; None without any."""
        last = int(np.searchsorted(self.time_s, time_s, side="right"))
        if not last:
            return None
        kv_pct = None if self.kv_pct is None else self.kv_pct[:last]
        return Series(self.time_s[:last], self.running[:last], self.waiting[:last], kv_pct, self.left_out)

    def kv_distance(self, other: Series) -> float | None:
        """Return the mean absolute difference between the KV use of `other` and this one, in percentage points.

        It is taken at the samples of this one. None if either was not recorded.
        """
        if self.kv_pct is None or other.kv_pct is None:
            return None
        at = np.searchsorted(other.time_s, self.time_s, side="right") - 1
        theirs = np.where(at >= 0, other.kv_pct[np.maximum(at, 0)], 0.0)
        return float(np.abs(theirs - self.kv_pct).mean())


def load_series(path: Path | str) -> Series:
    """Read CSV with the columns `t` (seconds), `running`, `waiting` and `kv_cache_pct`; other columns are ignored.

    KV use counts as not recorded, and is left out, if it is missing or is 0 although requests run. Raise
    MissingFileError; InputError, with line and field, for a value that is missing, not a number, or back in time.
    """
    path = Path(path)
    text = read_text(path, hint="Check the path of the series.")
    reader = csv.DictReader(text.splitlines())
    values: dict[str, list[float]] = {name: [] for name in COLUMNS}
    try:
        rows = [(reader.line_num, row) for row in reader]
        names = reader.fieldnames or ()
    except csv.Error as error:
        raise InputError(f"is not a CSV file: {error}", path=path, line=reader.line_num) from error
    has_kv = KV in names
    if not has_kv:
        del values[KV]
    for name in values:
        if name not in names:
            raise InputError("is missing", path=path, line=1, field=name)
    for line, row in rows:
        for name, column in values.items():
            try:
                number = float(row[name])
            except (TypeError, ValueError):
                raise InputError(f"{brief(row[name])} is not a number", path=path, line=line, field=name) from None
            if not isfinite(number) or number < 0:
                raise InputError(f"{brief(row[name])} is out of range", path=path, line=line, field=name)
            column.append(number)
        if len(values["t"]) > 1 and values["t"][-1] <= values["t"][-2]:
            raise InputError("the clock runs backwards", path=path, line=line, field="t")
    if not values["t"]:
        raise InputError("holds no samples", path=path)
    arrays: dict[str, Values | None] = {COLUMNS[name]: np.array(column) for name, column in values.items()}
    left_out = None
    if not has_kv:
        left_out = f"{path.name} has no column {KV}: KV use is left out"
    elif not any(values[KV]) and any(values["running"]):
        left_out = f"{KV} of {path.name} is 0 in all {len(values[KV])} samples: KV use is left out"
    if left_out is not None:
        arrays["kv_pct"] = None
    return Series(**arrays, left_out=left_out)  # type: ignore[arg-type]
