"""What a replay of several models on one device is built from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvarts.config import EngineConfig
from kvarts.errors import ConfigError, parts_of
from kvarts.executor.cost import CostSpec, parse_cost
from kvarts.executor.roofline import RooflineCost
from kvarts.sharing.turns import HealthChange
from kvarts.sim.config import ReplayConfig, Slo
from kvarts.units import parse_bytes

__all__ = ["ModelShare", "SharingConfig", "parse_health", "parse_share", "resolve_sharing"]

NS_PER_S = 1_000_000_000


class ModelShare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the models, and its part of the device.

    `model`: a preset or a config.json; with a device it says what a page weighs and how long steps take. Without,
    `cost` and `kv_bytes_per_token` do. `weight`, `floor`, `ceiling` (per mille): of the tokens of a round, see
    TokenBudgets. `guarantee`: KV memory it can always have back, as a size or as a part of the whole; unless given, its
    weight's part of what the others' guarantees leave. `priority` is added to that of each of its requests.
    """

    model: str | None = None
    weight: float = 1.0
    floor: int = 0
    ceiling: int | None = None
    guarantee: str | float | None = None
    priority: int = 0
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=1)] | None = None
    cost: str | None = None


class SharingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device and its models, worked out: `configs`, `guaranteed_bytes` and `page_bytes` are by model.

    `max_num_batched_tokens`: tokens a round, of all models together. `is_static`: nothing is lent.
    """

    shares: dict[str, ModelShare]
    configs: dict[str, ReplayConfig]
    page_bytes: dict[str, int]
    guaranteed_bytes: dict[str, int]
    kv_bytes: int
    max_num_batched_tokens: int
    is_static: bool = False
    changes: tuple[HealthChange, ...] = ()

    def check_traces(self, names: Iterable[str]) -> None:
        """Raises ConfigError unless there is a trace for each model, and none besides."""
        given = set(names)
        for name in sorted(given - set(self.shares)):
            there_are = ", ".join(self.shares)
            raise ConfigError(f"is for {name!r}, which is no model", field="trace", hint=f"There are: {there_are}.")
        for name in self.shares:
            if name not in given:
                raise ConfigError("has no trace", field=name, hint=f"Give --trace {name}=FILE.")


class _Settings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What may be said of the whole, by the names of a file."""

    models: dict[str, ModelShare]
    device: str | None = None
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1)] = 1
    kv_memory: str | int = "auto"
    memory_fraction: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.9
    page_size: int = 16
    max_batched_tokens: int = 8_192
    max_seqs: int = 256
    concurrency: int | None = None
    speedup: float = 1.0
    slo: Slo = Slo()
    static_split: bool = False
    step_by_step: bool = False
    audit: bool = False
    health: list[str] = []


def resolve_sharing(values: dict[str, Any], path: Path | str | None = None) -> SharingConfig:
    """Checks values by their file names, `models` among them, and works out pages, costs and guarantees.

    Raises ConfigError that names the field, and `path` if given.
    """
    known = _Settings.__struct_fields__
    for name in values:
        if name not in known:
            hint = f"With several models these can be set: {', '.join(known)}."
            raise ConfigError("is for a replay of one model", path=path, field=name, hint=hint)
    try:
        return _resolve(msgspec.convert(values, _Settings))
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise ConfigError(what, path=path, field=field) from error
    except ConfigError as error:
        if path is None or error.path is not None:
            raise
        raise ConfigError(error.what, hint=error.hint, path=path, field=error.field) from error


def _resolve(settings: _Settings) -> SharingConfig:
    shares = settings.models
    if not shares:
        raise ConfigError("names no model", field="models", hint="Give --model NAME=MODEL for each.")
    limits = {"page_size": settings.page_size, "max_batched_tokens": settings.max_batched_tokens}
    limits["max_seqs"] = settings.max_seqs
    engine = msgspec.convert(limits, EngineConfig)
    page_bytes: dict[str, int] = {}
    costs: dict[str, CostSpec] = {}
    fits = []
    for name, share in shares.items():
        page_bytes[name], costs[name], fit = _model(name, share, settings, engine)
        fits.append(fit)
    kv_bytes = _kv_bytes(settings, fits)
    guaranteed = _guarantees(shares, kv_bytes)
    configs = {}
    for name in shares:
        most = guaranteed[name] if settings.static_split else kv_bytes
        if most < page_bytes[name]:
            raise ConfigError(
                f"{most:,} bytes hold no page of {page_bytes[name]:,} bytes",
                field=f"{name}.guarantee" if settings.static_split else "kv_memory",
            )
        configs[name] = ReplayConfig(
            num_pages=most // page_bytes[name],
            page_size=settings.page_size,
            max_num_batched_tokens=settings.max_batched_tokens,
            max_num_seqs=settings.max_seqs,
            cost=costs[name],
            concurrency=settings.concurrency,
            speedup=settings.speedup,
            slo=settings.slo,
            step_by_step=settings.step_by_step,
            audit=settings.audit,
        )
    return SharingConfig(
        shares=shares,
        configs=configs,
        page_bytes=page_bytes,
        guaranteed_bytes=guaranteed,
        kv_bytes=kv_bytes,
        max_num_batched_tokens=settings.max_batched_tokens,
        is_static=settings.static_split,
        changes=tuple(parse_health(text) for text in settings.health),
    )


def _model(name: str, share: ModelShare, settings: _Settings, engine: EngineConfig) -> tuple[int, CostSpec, Any]:
    """Bytes of a page, the cost of steps, and where the model is known, what it leaves of the device."""
    cost = None if share.cost is None else parse_cost(share.cost)
    if share.model is None:
        if share.kv_bytes_per_token is None or cost is None:
            raise ConfigError(
                "is missing",
                field=f"{name}.model",
                hint="Name a model, or give both cost=... and kv_bytes_per_token=... instead.",
            )
        return share.kv_bytes_per_token * engine.page_size, cost, None
    from kvarts.hardware import fit_memory, load_device, load_geometry
    from kvarts.hardware.fit import local_kv_bytes_per_token

    if settings.device is None:
        raise ConfigError("is missing", field="device", hint="Models and device go together: --device NAME.")
    geometry = load_geometry(share.model).stored_as(share.weight_dtype)
    facts: dict[str, Any] = {
        "llm": share.model,
        "device": settings.device,
        "tensor_parallel": settings.tensor_parallel,
        "weight_dtype": share.weight_dtype,
        "kv_dtype": share.kv_dtype,
    }
    if cost is None:
        cost = RooflineCost(**facts)
    elif isinstance(cost, RooflineCost):
        cost = msgspec.structs.replace(cost, **facts)
    token_bytes = share.kv_bytes_per_token or local_kv_bytes_per_token(
        geometry, settings.tensor_parallel, share.kv_dtype
    )
    fit = None
    if settings.kv_memory == "auto":
        fit = fit_memory(
            geometry,
            load_device(settings.device),
            page_size=engine.page_size,
            tensor_parallel=settings.tensor_parallel,
            memory_fraction=settings.memory_fraction,
            kv_dtype=share.kv_dtype,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
        )
    return token_bytes * engine.page_size, cost, fit


def _kv_bytes(settings: _Settings, fits: list[Any]) -> int:
    """KV memory of the device: one set of activations, since models take turns."""
    if settings.kv_memory != "auto":
        size = settings.kv_memory
        return parse_bytes(size) if isinstance(size, str) else size
    if any(fit is None for fit in fits):
        raise ConfigError("is not known", field="kv_memory", hint="Give a size, where not every model is named.")
    first = fits[0]
    weights = sum(fit.weight_bytes for fit in fits)
    activations = max(fit.activation_bytes for fit in fits)
    kv_bytes = int(first.memory_fraction * first.memory_bytes) - weights - activations - first.context_bytes
    if kv_bytes <= 0:
        gib = [f"{value / 2**30:.1f}" for value in (first.memory_bytes, weights, activations, first.context_bytes)]
        raise ConfigError(
            f"the models do not fit {settings.device} together: {first.memory_fraction:g} x {gib[0]} memory - {gib[1]} "
            f"weights - {gib[2]} activations - {gib[3]} context (GiB) leave nothing for KV",
            field="device",
            hint="Use a larger device, more of them (tensor_parallel), or smaller weights (weight_dtype=fp8).",
        )
    return int(kv_bytes)


def _guarantees(shares: dict[str, ModelShare], kv_bytes: int) -> dict[str, int]:
    given: dict[str, int] = {}
    for name, share in shares.items():
        guarantee = share.guarantee
        field = f"{name}.guarantee"
        if isinstance(guarantee, str) and re.fullmatch(r"\s*\d*\.?\d+\s*", guarantee):
            guarantee = float(guarantee)  # a size has a unit
        if isinstance(guarantee, str):
            try:
                given[name] = parse_bytes(guarantee)
            except ConfigError as error:
                raise ConfigError(
                    error.what, field=field, hint="Write 20GiB, or 0.3 for a part of the whole."
                ) from error
        elif guarantee is not None:
            if not 0.0 <= guarantee <= 1.0:
                raise ConfigError(f"must be a size as 20GiB, or a part from 0 to 1, got {guarantee:g}", field=field)
            given[name] = int(guarantee * kv_bytes)
        if not 0 < share.weight < float("inf"):
            raise ConfigError(f"must be a finite number above 0, got {share.weight}", field=f"{name}.weight")
    left = kv_bytes - sum(given.values())
    if left < 0:
        raise ConfigError(
            f"all guarantees are {sum(given.values()):,} bytes; the device has {kv_bytes:,}", field="guarantee"
        )
    others = [name for name in shares if name not in given]
    weights = sum(shares[name].weight for name in others)
    return {name: given[name] if name in given else int(left * shares[name].weight / weights) for name in shares}


# The command line -----------------------------------------------------------------------------------------


def parse_share(text: str) -> tuple[str, dict[str, Any]]:
    """`chat=llama-3.1-8b:weight=2,guarantee=20GiB`: the name, and the fields of a ModelShare."""
    name, equals, rest = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ConfigError(
            f"{text!r} is not NAME=MODEL",
            field="model",
            hint="With several models: --model chat=llama-3.1-8b:weight=2.",
        )
    model, _, options = rest.partition(":")
    fields: dict[str, Any] = {"model": model} if model else {}
    for part in filter(None, options.split(",")):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or key not in ModelShare.__struct_fields__:
            known = ", ".join(ModelShare.__struct_fields__[1:])
            raise ConfigError(
                f"{part!r} is not known", field=f"{name}.{key}", hint=f"Known: {known}, each with =VALUE."
            )
        fields[key] = value.strip()
    numbers = {"weight": float, "floor": int, "ceiling": int, "priority": int, "kv_bytes_per_token": int}
    for key, number in numbers.items():
        if key in fields:
            try:
                fields[key] = number(fields[key])
            except ValueError:
                raise ConfigError(f"{fields[key]!r} is no number", field=f"{name}.{key}") from None
    return name, fields


def parse_health(text: str) -> HealthChange:
    """`code=dead@60`: from second 60 on."""
    match = re.fullmatch(r"([^=@]+)=(healthy|degraded|dead)@(\d+(?:\.\d+)?)", text.strip())
    if match is None:
        raise ConfigError(
            f"{text!r} is not NAME=STATE@SECONDS",
            field="health",
            hint="For example code=dead@60, or degraded, healthy.",
        )
    return HealthChange(round(float(match[3]) * NS_PER_S), match[1], match[2])  # type: ignore[arg-type]
