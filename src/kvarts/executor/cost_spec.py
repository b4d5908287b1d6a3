"""Cost models by what names them: a text of the command line, or a file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvarts.errors import ConfigError, InputError, parts_of
from kvarts.executor.cost import LinearCost, PolynomialCost
from kvarts.executor.roofline import RooflineCost
from kvarts.executor.roofline_settings import Uncertainty
from kvarts.files import read_toml
from kvarts.limits import brief

__all__ = ["CostSpec", "parse_cost"]

LINEAR_HINT = "'linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,context_token_ms=0',"

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
