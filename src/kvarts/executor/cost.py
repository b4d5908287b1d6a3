"""Cost models: how long a step takes, in whole nanoseconds.

A cost model gives the duration of one step (`step_ns`), and of k consecutive steps of decodes (`decode_ns`), where
every sequence grows by one token per step. Both round each step separately, so that sums do not depend on how the steps
were queried.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import msgspec

from kvarts.errors import ConfigError, InputError, parts_of
from kvarts.executor.manysteps import are_many, whole_ns
from kvarts.executor.polynomial import PolynomialCost
from kvarts.executor.roofline import RooflineCost
from kvarts.executor.uncertainty import Uncertainty
from kvarts.files import read_toml
from kvarts.limits import MOST_MS, brief, check_number
from kvarts.sched.plan import Batch

__all__ = ["CallableCost", "CostSpec", "LinearCost", "PolynomialCost", "parse_cost"]


LINEAR_HINT = "'linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,context_token_ms=0',"


class LinearCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="model", tag="linear"):
    """A cost linear in the step's parts: a constant, each chunk token, each decode, and each token a decode attends to.

    All coefficients are in milliseconds. Raises ConfigError for a negative one.
    """

    step_ms: float = 0.0
    chunk_token_ms: float = 0.0
    decode_ms: float = 0.0
    context_token_ms: float = 0.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            check_number(getattr(self, field), f"cost.{field}", most=MOST_MS)

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step."""
        chunk_tokens = sum(chunk.num_tokens for chunk in batch.chunks)
        ms = self.step_ms + self.chunk_token_ms * chunk_tokens
        ms = ms + self.decode_ms * batch.num_decodes + self.context_token_ms * batch.decode_known_tokens
        return round(ms * 1e6)

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of `num_steps` steps of decodes."""
        ms = self.step_ms + self.chunk_token_ms * 0 + self.decode_ms * num_decodes
        if not are_many(num_steps):
            known = range(known_tokens, known_tokens + num_steps * num_decodes, num_decodes)
            return [round((ms + self.context_token_ms * each) * 1e6) for each in known]
        import numpy as np

        return whole_ns((ms + self.context_token_ms * (known_tokens + num_decodes * np.arange(num_steps))) * 1e6)


class CallableCost:
    """A cost model around a Python callable that returns the milliseconds of a Batch. It is called for every step."""

    def __init__(self, step_ms: Callable[[Batch], float]) -> None:
        self._step_ms = step_ms

    def step_ns(self, batch: Batch) -> int:
        """Return the callable's result in nanoseconds. Raise ConfigError if it is not a valid duration."""
        ms: Any = self._step_ms(batch)
        is_number = isinstance(ms, Real)
        if not is_number or not 0.0 <= ms <= MOST_MS:
            raise ConfigError(f"the cost callable answered {ms!r} for {batch}", field="cost", hint="Return ms.")
        return round(float(ms) * 1e6)

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of `num_steps` steps of decodes, with one call of the callable per step."""
        return [
            self.step_ns(Batch((), num_decodes, known_tokens + step * num_decodes, pool_tokens))
            for step in range(num_steps)
        ]

    def __repr__(self) -> str:
        return f"CallableCost({getattr(self._step_ms, '__qualname__', self._step_ms)})"


CostSpec = PolynomialCost | LinearCost | RooflineCost
"""The cost models that a file or a command line can name."""


def parse_cost(text: str) -> CostSpec:
    """Return the cost model that `text` names: `polynomial`, `linear:step_ms=5,decode_ms=0.1`, or a TOML file.

    The file must have a table `[cost]`. For a roofline, a table `[posterior]` gives its uncertainty.

    Raise ConfigError for any other text; MissingFileError or InputError for the file.
    """
    if text.endswith(".toml"):
        return _load_cost(Path(text))
    name, _, rest = text.partition(":")
    fields: dict[str, object] = {"model": name}
    for part in filter(None, rest.split(",")):
        key, equals, value = (text.strip() for text in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            raise ConfigError(f"{brief(part)} is not NAME=NUMBER", field="cost") from None
        assert equals or not value
        if key in fields:
            raise ConfigError(f"says {key} twice", field="cost", hint="Keep one of them.")
        fields[key] = number
    if fields == {"model": "linear"}:
        raise ConfigError(
            "says nothing: every step would take no time", field="cost", hint=f"Write {LINEAR_HINT} or some of it."
        )
    try:
        cost: CostSpec = msgspec.convert(fields, CostSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{brief(text)}: {error}",
            field="cost",
            hint=f"Use 'polynomial', {LINEAR_HINT} or the file that a calibration wrote.",
        ) from error
    return cost


def _load_cost(path: Path) -> CostSpec:
    values = read_toml(path, hint="Check the path of the cost model.")
    if "cost" not in values:
        raise InputError("is missing", path=path, field="cost", hint="The file must have a table [cost].")
    if values["cost"] == {"model": "linear"}:
        raise InputError("says nothing: every step would take no time", path=path, field="cost")
    try:
        cost: CostSpec = msgspec.convert(values["cost"], CostSpec)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=f"cost.{field}" if field else "cost") from error
    except ConfigError as error:
        raise ConfigError(error.what, path=path, field=error.field, hint=error.hint) from error
    if "posterior" not in values or not isinstance(cost, RooflineCost):
        return cost
    try:
        return msgspec.structs.replace(cost, uncertainty=msgspec.convert(values["posterior"], Uncertainty))
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=f"posterior.{field}" if field else "posterior") from error
    except ConfigError as error:
        field = (error.field or "").replace("uncertainty.", "posterior.")
        raise ConfigError(error.what, path=path, field=field, hint=error.hint) from error
