"""Configuration of a replay of several models on one device: their shares, settings, and changes of health."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_BYTES_PER_TOKEN, MOST_COUNT, MOST_SECONDS, brief, check_number, check_whole
from kvarts.base.settings import AtLeastOne, Given, Section, SettingError, parts_of_error, setting, settings_of
from kvarts.base.units import parse_bytes
from kvarts.core.config import Snapshots, StateMode
from kvarts.core.parts.combines import check_combination
from kvarts.sim.config import KvGroupsName, ReplayConfig, build_replay, order_of
from kvarts.sim.hardware import (
    DeviceSettings,
    ModelSettings,
    Placed,
    Placement,
    counted_groups,
    kv_bytes_of,
    parsed_cost,
    place,
)
from kvarts.sim.vllm_start import VERSIONS

if TYPE_CHECKING:
    from kvarts.core.event_log import EventReader
    from kvarts.core.kv.groups import PartGroup
    from kvarts.cost.hardware.fit import MemoryFit

__all__ = [
    "SECTIONS",
    "Health",
    "HealthChange",
    "ModelShare",
    "ObserversOf",
    "SharingConfig",
    "check_each",
    "parse_health",
    "resolve_shares",
    "shares_of",
]

ObserversOf = Callable[[Any], "Sequence[EventReader]"]
"""Returns the observers of a model: by its name; with replicas, by its name and the number of the replica."""
PER_MILLE = 1000
NS_PER_S = 1_000_000_000

Health = Literal["healthy", "degraded", "dead"]


class HealthChange(msgspec.Struct, frozen=True):
    """From `time_ns` on, `model` is in `health`."""

    time_ns: int
    model: str
    health: Health


def parse_health(text: str) -> HealthChange:
    """Parse a change such as `code=dead@60`: from second 60 on. Raise ConfigError for anything else."""
    match = re.fullmatch(r"([^=@]+)=(healthy|degraded|dead)@([0-9]+(?:\.[0-9]+)?)", text.strip())
    if match is None:
        raise ConfigError(
            f"{text!r} is not NAME=STATE@SECONDS",
            field="health",
            hint="For example code=dead@60, or degraded, healthy.",
        )
    if float(match[3]) > MOST_SECONDS:
        raise ConfigError(f"{brief(text)} is more than {MOST_SECONDS:g} seconds away", field="health")
    return HealthChange(round(float(match[3]) * NS_PER_S), match[1], match[2])  # type: ignore[arg-type]


class ModelShare(ModelSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the models, and its part of the device.

    `model`: a preset or a config.json; with a device, it determines the bytes of a page and the time of a step. Without
    these, `cost` and `kv_bytes_per_token` do. `weight`, `floor`, `ceiling` (per mille): its share of the time, see
    `shares_of`. `guarantee`: KV memory that it can always reclaim, as a size or as a fraction of the whole;
    by default, the part by weight of the memory that other guarantees leave. `priority` is added to that of each of its
    requests. `kv_groups`: as in ReplayConfig; the model then draws on the memory in blocks, and its states are counted.
    None: `all` if its layers keep less and nothing refuses it, else `off`. `snapshots` and `mamba_cache_mode`: as in
    ReplayConfig.

    Some fields can be set in Python only. `groups`: PartGroups that are counted instead of those of the model.
    `eviction`: its EvictionOrder, as in ReplayConfig; None: that of `each` in SharingConfig.

    >>> from kvarts import ModelShare
    >>> ModelShare(model="llama-3.1-8b", weight=2, guarantee=0.5, eviction="auto").weight
    2
    """

    weight: Annotated[float, setting("Its part of the time and the memory, relative to the others.", flag=None)] = 1.0
    floor: Annotated[int, setting("Per mille of the time that its share is at least.", flag=None)] = 0
    ceiling: Annotated[int | None, setting("Per mille of the time that its share is at most.", flag=None)] = None
    guarantee: Annotated[
        str | float | None, setting("KV memory it can always have back: 20GiB, or 0.3 of the whole.", flag=None)
    ] = None
    priority: Annotated[int, setting("Added to the priority of each of its requests.", flag=None)] = 0
    kv_bytes_per_token: Annotated[
        AtLeastOne | None, setting("What a token weighs, instead of what the model says.", flag=None)
    ] = None
    cost: Annotated[Any, setting("How long a step takes, instead of the roofline.", flag=None)] = None
    kv_groups: Annotated[
        KvGroupsName | None, setting("Count for each of its layers what it keeps: off, all or tails.", flag=None)
    ] = None
    snapshots: Annotated[
        Snapshots, setting("Where its layers with a state leave snapshots: ends or branches.", flag=None)
    ] = "ends"
    mamba_cache_mode: Annotated[
        StateMode, setting("States that its layers keep for prefixes: snapshots, all or align.", flag=None)
    ] = "snapshots"
    # Any, as in ReplayConfig.
    groups: tuple[Any, ...] = ()
    eviction: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.weight, "weight", least=1e-12, most=1e12)
        check_whole(self.priority, "priority", least=-MOST_COUNT)
        if self.kv_bytes_per_token is not None:
            check_whole(self.kv_bytes_per_token, "kv_bytes_per_token", most=MOST_BYTES_PER_TOKEN)
        if self.kv_groups not in (None, *get_args(KvGroupsName)):
            raise SettingError(f"must be 'off', 'all' or 'tails', got {self.kv_groups!r}", "kv_groups")
        if self.snapshots not in get_args(Snapshots):
            raise SettingError(f"must be 'ends' or 'branches', got {self.snapshots!r}", "snapshots")
        if self.eviction is not None:
            msgspec.structs.force_setattr(self, "eviction", order_of(self.eviction))
        if self.mamba_cache_mode not in get_args(StateMode):
            raise SettingError(
                f"must be 'snapshots', 'all' or 'align', got {self.mamba_cache_mode!r}", "mamba_cache_mode"
            )
        part = self.part
        if part is not None and not 0.0 <= part <= 1.0:
            raise SettingError(f"must be a size as 20GiB, or a part from 0 to 1, got {part:g}", "guarantee")
        self.guaranteed_of(0)

    @property
    def part(self) -> float | None:
        """The guarantee as a fraction of the whole; None if it is a size, which has a unit, or not given."""
        if isinstance(self.guarantee, str):
            return float(self.guarantee) if re.fullmatch(r"\s*\d*\.?\d+\s*", self.guarantee) else None
        return self.guarantee

    def guaranteed_of(self, kv_bytes: int) -> int | None:
        """Return the guarantee in bytes, out of `kv_bytes`; None if it is not given."""
        if self.part is not None:
            return int(self.part * kv_bytes)
        if self.guarantee is None:
            return None
        try:
            return parse_bytes(str(self.guarantee))
        except ConfigError as error:
            raise SettingError(error.what, "guarantee", hint="Write 20GiB, or 0.3 for a part of the whole.") from error


class SharingConfig(DeviceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A device and the models that share it. Raises ConfigError for invalid settings, and for models that do not fit.

    `models`: by name; the order decides between models that are due at the same time. `static_split`: no memory is
    lent. `reclaim_after_s`: a model that has waited as long within its guarantee preempts other models' requests of
    equal priority. `baselines`: also replay each model's static split and slice. `health`: changes of health, as
    `code=dead@60` or as values. `each`: the configuration of each model's replay; its pages and cost are computed per
    model.

    >>> from kvarts import LinearCost, ModelShare, SharingConfig, load_trace, replay
    >>> each = {"cost": LinearCost(step_ms=5), "kv_bytes_per_token": 131_072}
    >>> models = {"chat": ModelShare(weight=2, **each), "code": ModelShare(**each)}
    >>> traces = {name: load_trace("sample:azure-chat") for name in models}
    >>> sorted(replay(traces, SharingConfig(models=models, kv_memory="8GiB")).summary["models"])
    ['chat', 'code']
    """

    models: dict[str, ModelShare]
    static_split: Annotated[
        bool,
        setting("No memory is lent. For comparison."),
    ] = False
    reclaim_after_s: Annotated[
        float,
        setting(
            "A model that has waited so long for memory within its guarantee takes it back from requests of the same "
            "priority; inf: it waits until these end.",
            flag="--reclaim-after",
            metavar="SECONDS",
        ),
    ] = 0.0
    baselines: Annotated[
        bool,
        setting(
            "Compare the TTFT of each model with that in its static split, and alone on its share with every step "
            "1/share as long: replays of these as well."
        ),
    ] = False
    health: Annotated[
        tuple[str | HealthChange, ...],
        setting(
            "From then on, one is dead, degraded (runs what it has and admits nothing) or healthy.",
            metavar="NAME=STATE@SECONDS",
        ),
    ] = ()
    each: ReplayConfig = msgspec.field(default_factory=ReplayConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.models:
            raise SettingError("names no model", "models", hint="Give --model NAME=MODEL for each.")
        if not self.reclaim_after_s >= 0:
            raise SettingError(f"must be at least 0, got {self.reclaim_after_s}", "reclaim_after_s")
        check_each(self.each)
        check_combination(self._features)
        if self.each.profile == "mocker":
            for name, share in self.models.items():
                if share.priority:
                    raise SettingError(
                        f"is {share.priority}, and the mocker knows no priorities",
                        f"models.{name}.priority",
                        hint="Leave out {profile}, or the priority.",
                    )
        for change in self.changes:
            if change.model not in self.models:
                raise SettingError(
                    f"is of {change.model!r}, which is no model", "health", hint=f"There are: {', '.join(self.models)}."
                )
        _ = self.shares, self.guaranteed_bytes, self.configs

    @cached_property
    def shares(self) -> dict[str, Fraction]:
        """The part of the time of the device that each model owns; the sum is 1."""
        models = self.models
        try:
            return shares_of(
                {name: share.weight for name, share in models.items()},
                {name: share.floor for name, share in models.items()},
                {name: share.ceiling for name, share in models.items()},
            )
        except ConfigError as error:
            raise SettingError(error.what, f"models.{error.field}", hint=error.hint) from error

    @cached_property
    def changes(self) -> tuple[HealthChange, ...]:
        """Changes of health."""
        return tuple(parse_health(change) if isinstance(change, str) else change for change in self.health)

    @cached_property
    def _placed(self) -> dict[str, Placed]:
        return {name: self._place(name, share) for name, share in self.models.items()}

    def _place(self, name: str, share: ModelShare) -> Placed:
        with _errors_of(name, ("cost",)):
            cost = parsed_cost(share.cost)
        if share.model is None:
            token_bytes = share.kv_bytes_per_token
            if share.groups:
                token_bytes = -(-_page_bytes_of(_kept_of(share, share.groups)) // self.each.page_size)
            if token_bytes is None or cost is None:
                raise SettingError(
                    "names no model",
                    f"models.{name}.model",
                    f"models.{name}",
                    hint="Name one, or give both cost=... and kv_bytes_per_token=... instead.",
                )
            return Placed(cost=cost, kv_bytes_per_token=token_bytes)
        with _errors_of(name, ModelSettings.__struct_fields__):
            placed = place(share, self, cost)
        if share.kv_bytes_per_token is None:
            return placed
        return msgspec.structs.replace(placed, kv_bytes_per_token=share.kv_bytes_per_token)

    @cached_property
    def groups(self) -> dict[str, tuple[PartGroup, ...]]:
        """KV groups that are counted, by model; empty if all its layers keep all tokens or are counted so."""
        return {name: _kept_of(share, self._groups_of(name, share)) for name, share in self.models.items()}

    def _groups_of(self, name: str, share: ModelShare) -> tuple[PartGroup, ...]:
        if share.kv_groups is None and not share.groups:
            return () if self._whole_pages else self._default_groups[name]
        if share.kv_groups == "off" or share.groups:
            return share.groups
        if share.model is None or share.kv_bytes_per_token is not None:
            raise SettingError(
                "says nothing where a model does not say what its layers keep",
                f"models.{name}.kv_groups",
                hint="Name a model, and no kv_bytes_per_token=.",
            )
        return counted_groups(self._placed[name], self.each, self, share.kv_dtype)

    @cached_property
    def _default_groups(self) -> dict[str, tuple[PartGroup, ...]]:
        """The KV groups that are counted by default, by model; empty for a model with `kv_groups`."""
        found: dict[str, tuple[PartGroup, ...]] = {}
        for name, share in self.models.items():
            found[name] = ()
            if share.kv_groups is None and share.model is not None and share.kv_bytes_per_token is None:
                found[name] = counted_groups(self._placed[name], self.each, self, share.kv_dtype)
        return found

    @cached_property
    def _whole_pages(self) -> str:
        """Why KV groups are not counted by default; empty if they are."""
        try:
            check_combination({**self._given_features, "kv_groups": "kv_groups"})
        except SettingError as error:
            return f"{error.field} {error.what}"
        return ""

    @property
    def _features(self) -> dict[str, str]:
        """Features of this replay that `combines` checks, each with the setting that requests it."""
        given = self._given_features
        if self.has_groups:
            given["kv_groups"] = "kv_groups"
        return given

    @property
    def _given_features(self) -> dict[str, str]:
        """The same features without KV groups."""
        parallel = ("data_parallel", "expert_parallel", "pipeline_parallel")
        asked = {field: "pipeline" if field == "pipeline_parallel" else "ranks" for field in parallel}
        given = {name: field for field, name in asked.items() if getattr(self, field) > 1}
        for name, share in self.models.items():
            if share.mamba_cache_mode != "snapshots":
                given["states_by_page"] = f"models.{name}.mamba_cache_mode"
            if share.eviction is not None:
                given["orders"] = f"models.{name}.eviction"
        if self.each.engine in VERSIONS:
            given["start"] = "engine"
        if self.each.async_scheduling and self.each.engine == "none":  # else it is a default of the engine
            given["ahead"] = "async_scheduling"
        return {"several": "models", **self.each.features, **given}

    @property
    def has_groups(self) -> bool:
        """Whether KV groups of some model are counted."""
        return any(self.groups.values())

    def _placement_of(self, name: str) -> Placement | None:
        """Return a model and the device for its report; None if no model or no device is named."""
        model = self.models[name].model
        if model is None or self.device is None:
            return None
        return Placement(model=model, device=self.device, kv_bytes_per_token=self._placed[name].kv_bytes_per_token)

    @cached_property
    def page_bytes(self) -> dict[str, int]:
        """Bytes of a page, by model; with KV groups, of all its parts."""
        return {
            name: _page_bytes_of(groups) or self._placed[name].kv_bytes_per_token * self.each.page_size
            for name, groups in self.groups.items()
        }

    @cached_property
    def counted_bytes(self) -> dict[str, int]:
        """Bytes of the unit of each model's memory: a page, or with KV groups a block."""
        return {
            name: self.page_bytes[name] if of_model.kv_groups == "off" else of_model.memory.block_bytes
            for name, of_model in self.configs.items()
        }

    @cached_property
    def kv_bytes(self) -> int:
        """KV memory of the device, with one set of activations, since models take turns.

        The states of models without KV groups are set aside.
        """
        states = sum(
            placed.state_bytes(self.each, self) for name, placed in self._placed.items() if not self.groups[name]
        )
        given = kv_bytes_of(self)
        if given is not None:
            if states and given <= states:
                raise SettingError(f"{self.kv_memory} hold no more than {states:,} bytes of states", "kv_memory")
            return given - states
        fits: list[MemoryFit] = []
        for name, placed in self._placed.items():
            fit = placed.fit(self.each, self, self.models[name].kv_dtype)
            if fit is None:
                raise SettingError("is not known", "kv_memory", hint="Give a size, where not every model is named.")
            fits.append(fit)
        first = fits[0]
        weights = sum(fit.weight_bytes for fit in fits)
        activations = max(fit.activation_bytes for fit in fits)
        kv_bytes = int(first.memory_fraction * first.memory_bytes) - weights - activations - first.context_bytes
        kv_bytes -= states
        if kv_bytes <= 0:
            gib = [f"{value / 2**30:.1f}" for value in (first.memory_bytes, weights, activations, first.context_bytes)]
            beside = f" - {states / 2**30:.1f} states" if states else ""
            raise SettingError(
                f"the models do not fit {self.device} together: {first.memory_fraction:g} x {gib[0]} memory - {gib[1]} "
                f"weights - {gib[2]} activations - {gib[3]} context{beside} (GiB) leave nothing for KV",
                "device",
                hint="Use a larger device, more of them ({tensor_parallel}), or smaller weights (weight_dtype=fp8).",
            )
        return kv_bytes

    @cached_property
    def guaranteed_bytes(self) -> dict[str, int]:
        """KV memory that each model can always reclaim."""
        of_models = {name: share.guaranteed_of(self.kv_bytes) for name, share in self.models.items()}
        given = {name: size for name, size in of_models.items() if size is not None}
        left = self.kv_bytes - sum(given.values())
        if left < 0:
            raise SettingError(
                f"all guarantees are {sum(given.values()):,} bytes; the device has {self.kv_bytes:,}",
                *(f"models.{name}.guarantee" for name in given),
            )
        others = [name for name in self.models if name not in given]
        weights = sum(self.models[name].weight for name in others)
        return {
            name: given[name] if name in given else int(left * share.weight / weights)
            for name, share in self.models.items()
        }

    def most_bytes(self, name: str) -> int:
        """Return the most memory that a model may ever have."""
        return self.guaranteed_bytes[name] if self.static_split else self.kv_bytes

    @cached_property
    def configs(self) -> dict[str, ReplayConfig]:
        """The configuration of each model alone, with all the memory that it may ever have."""
        configs = {}
        for name, page_bytes in self.page_bytes.items():
            most = self.most_bytes(name)
            if most < page_bytes:
                raise SettingError(
                    f"{most:,} bytes hold no page of {page_bytes:,} bytes",
                    *([f"models.{name}.guarantee"] if self.static_split else []),
                    "kv_memory",
                )
            placed = self._placed[name]
            offload = self.each.offload
            if offload is not None:
                num_layers = None if placed.geometry is None else placed.geometry.num_layers
                offload = offload.for_model(placed.kv_bytes_per_token, num_layers)
            share, groups = self.models[name], self.groups[name]
            with _errors_of(name, ("kv_groups", "groups", "snapshots", "mamba_cache_mode")):
                configs[name] = msgspec.structs.replace(
                    self.each,
                    num_pages=most // page_bytes,
                    cost=placed.cost,
                    placement=self._placement_of(name),
                    offload=offload,
                    kv_groups=(share.kv_groups or "all") if groups else "off",
                    groups=groups,
                    snapshots=share.snapshots,
                    mamba_cache_mode=share.mamba_cache_mode,
                    eviction=self.each.eviction if share.eviction is None else share.eviction,
                    async_scheduling=False,
                    whole_pages=self._whole_pages if self._default_groups[name] and not groups else "",
                )
        return configs

    def check_traces(self, names: Iterable[str]) -> None:
        """Raise ConfigError unless `names` are exactly the models."""
        given = set(names)
        for name in sorted(given - set(self.models)):
            there_are = ", ".join(self.models)
            raise SettingError(
                f"is for {name!r}, which is no model",
                "trace",
                f"models.{name}.trace",
                hint=f"There are: {there_are}.",
            )
        for name in self.models:
            if name not in given:
                raise ConfigError("has no trace", field=f"models.{name}", hint=f"Give --trace {name}=FILE.")


def _kept_of(share: ModelShare, groups: tuple[PartGroup, ...]) -> tuple[PartGroup, ...]:
    """Return `groups` with the states that a model keeps for prefixes."""
    if share.mamba_cache_mode == "snapshots":
        return groups  # without importing anything of groups, which may not be counted
    from kvarts.core.kv.groups import with_states

    return with_states(groups, share.mamba_cache_mode)


def _page_bytes_of(groups: Sequence[PartGroup]) -> int:
    return sum(group.part_bytes for group in groups if not group.is_state)


@contextmanager
def _errors_of(name: str, names: Sequence[str]) -> Iterator[None]:
    """Prefix the fields `names` of errors with the model `name`."""
    try:
        yield
    except ConfigError as error:
        if error.path is not None or error.field is None:
            raise
        what, hint, fields = parts_of_error(error)
        full = (f"models.{name}.{field}" if field.split(".")[0] in names else field for field in fields)
        raise SettingError(what, *full, hint=hint) from error


def check_each(each: ReplayConfig) -> None:
    """Raise ConfigError for settings of a single-model replay that each of several models has separately."""
    default = ReplayConfig()
    refused = {
        "num_pages": "is for a replay of one model: pages of several differ in bytes. Give {kv_memory}",
        "cost": "is for a replay of one model: each of several has its own",
        "kv_groups": "is for a replay of one model: each of several says it, as --model NAME=MODEL:kv_groups=all",
        "scheduling_policy": "is for a replay of one model: those that share devices are in order of arrival",
        "stop_tokens": "has no effect without asynchronous scheduling, which several models on a device do not have",
    }
    for field, why in refused.items():
        if getattr(each, field) != getattr(default, field):
            raise SettingError(why, field)


SECTIONS = (
    Section(struct=ModelShare, title="Several models", table="models", is_named=True),
    Section(struct=SharingConfig, title="Several models"),
)
"""Settings for several models, in addition to those for one model."""


TOKEN_BYTES = "offload.kv_bytes_per_token"
OF_EACH = {
    "weight_dtype": "fp8",
    "kv_dtype": "fp8",
    "speculative_tokens": "2,acceptance=0.7,0.4",
    "acceptance": "0.7,speculative_tokens=1",
    "kv_groups": "all",
    "snapshots": "branches",
    "mamba_cache_mode": "align",
}
"""Settings of a replay of one model that each of several has, and a value of each, for hints."""


def resolve_shares(given: Given, sections: Sequence[Section]) -> SharingConfig:
    """Build a SharingConfig from the given settings. Raises ConfigError that names the setting and its origin."""
    models = {name: given.build(ModelShare, f"models.{name}") for name in given.names("models")}
    if "model" in given:
        raise given.error("model", "is for a replay of one model", hint="Name each: --model NAME=MODEL.")
    if TOKEN_BYTES in given:
        raise given.error(
            TOKEN_BYTES,
            "is for a replay of one model: a token of each of several weighs what its model says",
            hint="Say it of each: --model NAME=MODEL:kv_bytes_per_token=131072.",
        )
    for key, value in OF_EACH.items():
        if key in given:
            raise given.error(
                key, "is for a replay of one model", hint=f"Say it of each: --model NAME=MODEL:{key}={value}."
            )
    each = build_replay(given, sections, {})
    try:
        return given.build(SharingConfig, models=models, each=each)
    except ConfigError as error:
        raise given.named(error, settings_of(ReplayConfig)) from error


def shares_of(
    weights: Mapping[str, float], floors: Mapping[str, int], ceilings: Mapping[str, int | None]
) -> dict[str, Fraction]:
    """Return the share of each model, by name.

    `floors` and `ceilings` (None: 1000) are per mille of the time. Raise ConfigError for a floor above its ceiling, for
    floors that add up to more than 1000 or leave nothing to a model, and for ceilings that add up to less.
    """
    lowest, highest = {}, {}
    for model, ceiling in ceilings.items():
        most = PER_MILLE if ceiling is None else ceiling
        if not 1 <= most <= PER_MILLE:
            raise ConfigError(f"must be from 1 to 1000 per mille, got {most}", field=f"{model}.ceiling")
        if not 0 <= floors[model] <= most:
            raise ConfigError(f"must be from 0 to {most} per mille, got {floors[model]}", field=f"{model}.floor")
        lowest[model], highest[model] = Fraction(floors[model], PER_MILLE), Fraction(most, PER_MILLE)
    if sum(lowest.values()) > 1:
        last = [model for model in weights if floors[model]][-1]
        raise ConfigError(
            f"brings all floors to {sum(floors.values())} per mille",
            field=f"{last}.floor",
            hint="Give floors that add up to at most 1000.",
        )
    if sum(highest.values()) < 1:
        last = [model for model in weights if ceilings[model] is not None][-1]
        raise ConfigError(
            f"leaves {int(1000 - 1000 * sum(highest.values()))} per mille of the time to no model",
            field=f"{last}.ceiling",
            hint="Give ceilings that add up to at least 1000.",
        )
    exact = {model: Fraction(str(weight)) for model, weight in weights.items()}
    shares = _fill(exact, lowest, highest)
    for model, share in shares.items():
        if not share:
            raise ConfigError("is left no time by the floors of the others", field=f"{model}.weight")
    return shares


def _fill(
    weights: Mapping[str, Fraction], lowest: Mapping[str, Fraction], highest: Mapping[str, Fraction]
) -> dict[str, Fraction]:
    """Return shares in proportion to `weights`, each between its bounds, that add up to 1.

    They have a common water level: max(lowest, min(highest, level x weight)). While the proportional share of some
    model is out of bounds, sum up the violations on each side, and fix the models on the side with the larger sum at
    their bound; the others share the rest. Later passes cannot move a fixed model back inside its bounds. (CSS resolves
    flexible lengths in the same way.)
    """
    shares: dict[str, Fraction] = {}
    rising: Sequence[str] = list(weights)
    while rising:
        left = 1 - sum(shares.values(), Fraction(0))
        whole = sum(weights[name] for name in rising)
        part = {name: left * weights[name] / whole for name in rising}
        missing = {name: lowest[name] - part[name] for name in rising if part[name] < lowest[name]}
        beyond = {name: part[name] - highest[name] for name in rising if part[name] > highest[name]}
        if not missing and not beyond:
            shares.update(part)
            break
        if sum(missing.values()) >= sum(beyond.values()):
            shares.update({name: lowest[name] for name in missing})
        if sum(beyond.values()) >= sum(missing.values()):
            shares.update({name: highest[name] for name in beyond})
        rising = [name for name in rising if name not in shares]
    return {name: shares[name] for name in weights}
