"""Fits the coefficients of a roofline to recorded steps: the work and duration of each.

A line of a record is an object with `duration_ns`, `num_decodes`, `decode_known_tokens`, and `chunks`, a list of
[start, num_tokens, num_known_tokens]. No replay is needed: the fit is least squares of relative errors, with a loss
that limits the weight of outliers (soft L1).

Also read is the log of vLLM with `--enable-logging-iteration-details`: one line per step, with its work and duration.

A line gives requests and tokens of prompts (context) and of decodes (generation), the duration of the step, and the
share of the KV cache in use. The log of a server also has a line with the size of that cache in tokens. The tokens
attended to are inferred from both: the decodes of a step know the tokens in the cache minus those of the step's
prompts. The prompts of a step are taken to share its context tokens equally and to begin at their first token. A long
prompt that is computed in chunks therefore attends to more than is assumed here, and the decodes of its steps to less.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.errors import InputError, parts_of
from kvarts.base.files import read_text, reading
from kvarts.base.limits import LATEST_NS, MOST_COUNT, MOST_PAGES
from kvarts.core.sched.plan import Batch, Chunk
from kvarts.cost.roofline import RooflineCost
from kvarts.plan.calibrate.coefficients import (
    OF_STEPS,
    at_limit,
    coefficients_text,
    cost_of,
    cost_toml,
    cost_values,
    finite,
    log_bounds,
    logs_of,
    names_of,
    needs_scipy,
    not_identified,
    uncertainty_of,
)

__all__ = [
    "IterationLog",
    "StepFit",
    "StepRecord",
    "fit_steps",
    "is_iteration_log",
    "is_step_record",
    "load_iterations",
    "load_steps",
]

Values = npt.NDArray[np.float64]


Count = Annotated[int, msgspec.Meta(le=MOST_COUNT)]
NS_PER_MS = 1e6
FIRST_BYTES = 1 << 22
"""A server logs many lines before its first step."""
MOST_PROMPTS = 1 << 16
"""Limit per step; each prompt is kept as an object."""
NUMBER = r"(\d{1,18})"
STEP = re.compile(
    rf"Iteration\({NUMBER}\): {NUMBER} context requests, {NUMBER} context tokens, {NUMBER} generation requests, "
    rf"{NUMBER} generation tokens, iteration elapsed time: (\d{{1,18}}\.\d+) ms( \(dummy\))?"
    r"(?:, \w+ KV cache usage: (\d{1,3}\.\d+)%)?(, encoder inputs: )?"
)
ANY_STEP = "Iteration("
CACHE = re.compile(r"KV cache size: ([\d,]{1,24}) tokens")


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
        values = msgspec.json.decode(_beginning(path).partition(b"\n")[0])
    except (ValueError, RecursionError):
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


class IterationLog(msgspec.Struct, frozen=True):
    """The `steps` in the log of an engine with `num_cache_tokens`, and the number of lines useless for a fit."""

    steps: list[StepRecord]
    num_cache_tokens: int
    num_left_out: int

    @property
    def left_out(self) -> str | None:
        """The lines left out, in words; None without any."""
        if not self.num_left_out:
            return None
        return f"{self.num_left_out:,} steps without tokens, or with inputs of an encoder, are left out"


def is_iteration_log(path: Path | str) -> bool:
    """Return whether a file appears to be a server log with steps."""
    return ANY_STEP.encode() in _beginning(path)


def _beginning(path: Path | str) -> bytes:
    """Return the first bytes of a file; none of a directory, or if it does not exist."""
    with reading(path):
        try:
            with Path(path).open("rb") as file:
                return file.read(FIRST_BYTES)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return b""


def load_iterations(path: Path | str) -> IterationLog:
    """Read the log of a server, from its start.

    Raise MissingFileError; InputError, with the line, for a step that is malformed or speculative, for a log without
    the size of the KV cache or with several sizes, and for one without steps.
    """
    path = Path(path)
    num_cache_tokens: int | None = None
    steps: list[StepRecord] = []
    num_left_out = 0
    for number, line in enumerate(read_text(path, hint="Check the path of the log.").splitlines(), 1):
        if (cache := CACHE.search(line)) is not None:
            size = int(cache[1].replace(",", "") or 0)
            if not 0 < size <= MOST_PAGES or num_cache_tokens not in (None, size):
                raise InputError(
                    f"has a KV cache of {cache[1]} tokens"
                    + ("" if num_cache_tokens is None else f", after one of {num_cache_tokens:,}"),
                    path=path,
                    line=number,
                    hint="Give the log of one server, from one start.",
                )
            num_cache_tokens = size
        if ANY_STEP not in line:
            continue
        found = STEP.search(line)
        if found is None:
            raise InputError(
                "is not a whole line of a step", path=path, line=number, hint="Mend the line, or delete it."
            )
        if num_cache_tokens is None:
            raise InputError(
                "is before the line with the size of the KV cache",
                path=path,
                line=number,
                hint="Give the log of the server from its start: it has a line 'GPU KV cache size: N tokens'.",
            )
        try:
            step = _step(found, num_cache_tokens)
        except InputError as error:
            raise InputError(error.what, path=path, line=number, hint=error.hint) from error
        if step is None:
            num_left_out += 1
        else:
            steps.append(step)
    if num_cache_tokens is None or not steps:
        raise InputError(
            "holds no step of a server",
            path=path,
            hint="Start vLLM with --enable-logging-iteration-details, and with logging of statistics on.",
        )
    return IterationLog(steps, num_cache_tokens, num_left_out)


def _step(found: re.Match[str], num_cache_tokens: int) -> StepRecord | None:
    """Return a step; None for one that computed nothing or had encoder inputs."""
    num_prompts, num_prompt_tokens, num_decodes, num_decode_tokens = (int(found[index]) for index in range(2, 6))
    if found[7] is not None or found[9] is not None or not num_prompt_tokens + num_decode_tokens:
        return None
    if max(num_prompt_tokens, num_decode_tokens) > MOST_COUNT or num_prompts > MOST_PROMPTS:
        raise InputError("has more tokens, or prompts, than a step can have")
    if num_decode_tokens != num_decodes:
        raise InputError(
            f"computes {num_decode_tokens} tokens for {num_decodes} requests that generate",
            hint="Turn speculative decoding off for the run that calibrates.",
        )
    if not 0 < num_prompts <= num_prompt_tokens and num_prompts + num_prompt_tokens:
        raise InputError(f"computes {num_prompt_tokens} tokens of {num_prompts} prompts")
    if found[8] is None:
        raise InputError("does not state the share of the KV cache in use", hint="Use vLLM 0.30 or later.")
    duration_ns = round(float(found[6]) * NS_PER_MS)
    if not 0 < duration_ns <= LATEST_NS:
        raise InputError(f"takes {found[6]} ms", hint="Delete the line.")
    num_known = round(float(found[8]) / 100 * num_cache_tokens) - num_prompt_tokens
    each, num_longer = divmod(num_prompt_tokens, num_prompts) if num_prompts else (0, 0)
    lengths = [each + (index < num_longer) for index in range(num_prompts)]
    return StepRecord(
        duration_ns=duration_ns,
        num_decodes=num_decodes,
        decode_known_tokens=max(num_known, num_decodes) if num_decodes else 0,
        chunks=[(0, length, length) for length in lengths],
    )
