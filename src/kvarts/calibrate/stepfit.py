"""Fits the coefficients of a roofline to recorded steps: the work and duration of each.

A line of a record is an object with `duration_ns`, `num_decodes`, `decode_known_tokens`, and `chunks`, a list of
[start, num_tokens, num_known_tokens]. No replay is needed: the fit is least squares of relative errors, with a loss
that limits the weight of outliers (soft L1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.calibrate.coefficients import (
    OF_STEPS,
    at_limit,
    cost_of,
    log_bounds,
    logs_of,
    names_of,
    needs_scipy,
    not_identified,
    uncertainty_of,
)
from kvarts.calibrate.writing import coefficients_text, cost_toml, cost_values, finite
from kvarts.errors import InputError, parts_of
from kvarts.executor.roofline import RooflineCost
from kvarts.files import read_text
from kvarts.limits import LATEST_NS, MOST_COUNT, MOST_PAGES
from kvarts.sched.plan import Batch, Chunk

__all__ = ["StepFit", "StepRecord", "fit_steps", "is_step_record", "load_steps"]

Values = npt.NDArray[np.float64]


Count = Annotated[int, msgspec.Meta(le=MOST_COUNT)]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `chunks`: (first token, tokens, known tokens) each. `decode_known_tokens`: sum over all decodes."""

    duration_ns: Annotated[int, msgspec.Meta(le=LATEST_NS)]
    num_decodes: Count
    decode_known_tokens: Annotated[int, msgspec.Meta(le=MOST_PAGES)]
    chunks: list[tuple[Count, Count, Count]] = []

    def batch(self) -> Batch:
        """Return the step as the input of a cost model."""
        chunks = tuple(Chunk(start, count, known, known) for start, count, known in self.chunks)
        return Batch(chunks, self.num_decodes, self.decode_known_tokens, 1)


class StepFit(msgspec.Struct, frozen=True):
    """The fitted `cost`. `uncertainty`: relative, per coefficient. Errors are relative errors of single steps.

    `name`: that of the file. `left_out`: its steps that are not used in the fit, in words; None if all are.
    """

    cost: RooflineCost
    uncertainty: dict[str, float]
    num_steps: int
    median_error: float
    p90_error: float
    total_error: float
    """Relative error of the sum of all durations."""
    name: str = ""
    left_out: str | None = None

    @property
    def not_identified(self) -> list[str]:
        """The coefficients that the data do not identify."""
        return not_identified(self.uncertainty)

    @property
    def at_limit(self) -> list[str]:
        """The coefficients at the ends of their bounds, which a wider search might have moved further."""
        return at_limit(self.cost, self.uncertainty)

    def to_text(self) -> str:
        """Return the text that `kvarts calibrate` prints for a record of steps, with a line end."""
        why = "hardly identified by these data"
        coefficients = coefficients_text(self.cost, self.uncertainty, self.not_identified, why)
        return f"{coefficients}\n{self._errors}\n"

    def to_builtins(self) -> dict[str, Any]:
        """Return the fit, JSON-able."""
        return {
            "cost": cost_values(self.cost),
            "uncertainty": finite(self.uncertainty),
            "not_identified": self.not_identified,
            "at_limit": self.at_limit,
            "num_steps": self.num_steps,
            "median_error": self.median_error,
            "p90_error": self.p90_error,
            "total_error": self.total_error,
        }

    def to_toml(self) -> str:
        """Return the cost model as a file of `kvarts replay --cost`."""
        return cost_toml(self.cost, self.uncertainty, [self.name])

    @property
    def _errors(self) -> str:
        return (
            f"{self.num_steps:,} steps: error of one {self.median_error:.2%} (median), {self.p90_error:.2%} (p90); "
            f"of all together {self.total_error:+.2%}"
        )

    def __repr__(self) -> str:
        return f"<StepFit of {self.cost.llm} on {self.cost.device}: {self._errors}>"


def is_step_record(path: Path | str) -> bool:
    """Return whether a file begins like a record of steps."""
    try:
        with Path(path).open("rb") as file:
            values = msgspec.json.decode(file.readline())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and "duration_ns" in values and "num_decodes" in values


def load_steps(path: Path | str) -> list[StepRecord]:
    """Read a record of steps. Raise MissingFileError; InputError, with line and field, for inconsistent values."""
    path = Path(path)
    lines = read_text(path, hint="Check the path of the record.").splitlines()
    decoder = msgspec.json.Decoder(StepRecord)
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError as error:
            what, field = parts_of(error)
            raise InputError(what, path=path, line=number, field=field) from error
        except RecursionError:
            raise InputError("is nested too deeply", path=path, line=number) from None
        if record.duration_ns <= 0:
            raise InputError(f"must be above 0, got {record.duration_ns}", path=path, line=number, field="duration_ns")
        if record.num_decodes < 0 or record.decode_known_tokens < record.num_decodes:
            raise InputError(
                f"{record.num_decodes} decodes cannot know {record.decode_known_tokens} tokens",
                path=path,
                line=number,
                field="decode_known_tokens",
            )
        for start, count, known in record.chunks:
            if start < 0 or count < 1 or start + count > known:
                raise InputError(
                    f"[{start}, {count}, {known}] is not a valid chunk", path=path, line=number, field="chunks"
                )
        if not record.num_decodes and not record.chunks:
            raise InputError("is 0 in a step without chunks", path=path, line=number, field="num_decodes")
        records.append(record)
    if not records:
        raise InputError("holds no step", path=path)
    return records


def fit_steps(records: list[StepRecord], start: RooflineCost) -> StepFit:
    """Fit `start` to `records`; the search begins at its coefficients. Raise ConfigError without SciPy."""
    needs_scipy()
    from scipy.optimize import least_squares

    batches = [record.batch() for record in records]
    names = names_of([start], OF_STEPS)
    durations = np.array([record.duration_ns for record in records], np.float64)

    def errors(logs: Values) -> Values:
        cost = cost_of(start, logs, names)
        return np.array([cost.step_ns(batch) for batch in batches]) / durations - 1.0

    low, high = log_bounds(names)
    first = np.clip(logs_of([start], names), low + 1e-6, high - 1e-6)
    found = least_squares(errors, first, bounds=(low, high), loss="soft_l1", f_scale=0.05, diff_step=[1e-3])
    residuals = errors(found.x)
    return StepFit(
        cost_of(start, found.x, names),
        uncertainty_of(residuals, np.asarray(found.jac, np.float64), names),
        len(records),
        float(np.median(np.abs(residuals))),
        float(np.percentile(np.abs(residuals), 90)),
        float(((residuals + 1) * durations).sum() / durations.sum() - 1),
    )
