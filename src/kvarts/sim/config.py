"""What a replay is built from: an engine, how many of them, and how requests come to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvarts.config import EngineConfig
from kvarts.errors import ConfigError, parts_of
from kvarts.executor.cost import CallableCost, CostModel, CostSpec, PolynomialCost, parse_cost
from kvarts.files import read_toml
from kvarts.offload.config import OffloadConfig
from kvarts.sim.hardware import HARDWARE_FIELDS, resolve_hardware
from kvarts.sim.router import RouterName
from kvarts.traffic.workload import Workload

__all__ = ["ReplayConfig", "Slo", "check_config", "load_config", "make_config"]


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request must keep to count as goodput: bounds in milliseconds, each optional."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ConfigError(f"must be above 0, got {value}", field=f"slo.{field}")


class ReplayConfig(
    EngineConfig,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
):
    """One replay. Raises ConfigError for a value out of range, or for settings that exclude each other.

    `cost`: a cost model, or any callable that answers the milliseconds of a Batch. `replicas` engines of the same
    configuration stand behind `router`. Requests arrive at their times divided by `speedup`, or `concurrency` of them
    (or sessions) are kept in flight. `step_by_step`: the same replay, one step at a time. `audit`: check the laws of
    page accounting after every step. `offload`: tiers below the device of each replica.
    """

    cost: Any = PolynomialCost()
    replicas: int = 1
    router: RouterName = "round-robin"
    concurrency: int | None = None
    speedup: float = 1.0
    slo: Slo = Slo()
    step_by_step: bool = False
    audit: bool = False
    offload: OffloadConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicas < 1:
            raise ConfigError(f"must be at least 1, got {self.replicas}", field="replicas")
        if self.router not in ("round-robin", "least-loaded", "prefix"):
            raise ConfigError(f"must be 'round-robin', 'least-loaded' or 'prefix', got {self.router!r}", field="router")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"must be at least 1, got {self.concurrency}", field="concurrency")
        if not 0.0 < self.speedup < float("inf"):
            raise ConfigError(f"must be a finite number above 0, got {self.speedup}", field="speedup")
        if self.concurrency is not None and self.speedup != 1.0:
            raise ConfigError(
                "a closed loop has no arrival times to speed up",
                field="speedup",
                hint="Give concurrency or speedup, not both.",
            )
        if not callable(self.cost) and not hasattr(self.cost, "decode_ns"):
            raise ConfigError(f"{self.cost!r} is neither a cost model nor callable", field="cost")

    @property
    def cost_model(self) -> CostModel:
        """The cost model that `cost` names."""
        cost: CostModel = self.cost if hasattr(self.cost, "decode_ns") else CallableCost(self.cost)
        return cost

    def to_builtins(self) -> dict[str, Any]:
        """Return what the report says of it: by the names that a file and the command line use, JSON-able."""
        names = zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True)
        values = {encoded: getattr(self, field) for field, encoded in names}
        cost = values["cost"]
        values["cost"] = msgspec.to_builtins(cost) if isinstance(cost, msgspec.Struct) else repr(self.cost_model)
        values["slo"] = msgspec.to_builtins(values["slo"])
        values["offload"] = msgspec.to_builtins(values["offload"])
        # How a replay is carried out is no part of what it says.
        del values["step_by_step"], values["audit"]
        return values


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a TOML file may hold beside the fields of ReplayConfig."""

    trace: str | None = None
    trace_block_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    skip_bad_lines: bool = False
    workload: Workload | None = None


def load_config(path: Path | str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a TOML file: checked settings of ReplayConfig by their file names, for `make_config`, and the traffic.

    The traffic is what is given of `trace`, `trace_block_size`, `skip_bad_lines` and `workload`, a Workload.
    `cost` is a string as on the command line, or a table. Raises InputError for what is no TOML, ConfigError for an
    unknown key or a bad value.
    """
    path = Path(path)
    return check_config(read_toml(path, hint="Check the path of the configuration."), path)


def check_config(values: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `load_config` makes of the `values` that it has read."""
    traffic = {name: values.pop(name) for name in _File.__struct_fields__ if name in values}
    known = {*ReplayConfig.__struct_encode_fields__, *HARDWARE_FIELDS}
    for name in values:
        if name not in known:
            hint = f"Known: {', '.join(sorted(known | set(_File.__struct_fields__)))}."
            raise ConfigError("unknown key", path=path, field=name, hint=hint)
    try:
        if "cost" in values:
            cost = values["cost"]
            values["cost"] = parse_cost(cost) if isinstance(cost, str) else msgspec.convert(cost, CostSpec)
        checked = msgspec.convert(traffic, _File)
    except (msgspec.ValidationError, ConfigError) as error:
        raise _named(error, path) from error
    make_config(values, path)
    return values, {name: getattr(checked, name) for name in traffic}


def make_config(values: dict[str, Any], path: Path | str | None = None) -> ReplayConfig:
    """A ReplayConfig from values by their file names, and those of `resolve_hardware`.

    Raises ConfigError that names the field, and `path` if given.
    """
    try:
        return msgspec.convert(resolve_hardware(values), ReplayConfig)
    except (msgspec.ValidationError, ConfigError) as error:
        raise _named(error, path) from error


def _named(error: msgspec.ValidationError | ConfigError, path: Path | str | None) -> ConfigError:
    """The error with its file."""
    if isinstance(error, ConfigError):
        return ConfigError(error.what, hint=error.hint, path=path, field=error.field)
    what, field = parts_of(error)
    return ConfigError(what, path=path, field=field)
