"""Settings by model and device instead of numbers: step costs, pages and bytes are derived from them.

`place` derives them for one model on a device, whether one or several models run there. For one model,
`resolve_hardware` derives the number of pages; for several, SharingConfig divides the memory that all of them leave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from kvarts.base.errors import ConfigError, KvartsError, parts_of
from kvarts.base.limits import (
    DRAFT_METHODS,
    MOST_BYTES,
    MOST_DRAFTED,
    MOST_REPLICAS,
    brief,
    check_whole,
    whole_number,
)
from kvarts.base.settings import AtLeastOne, Given, SettingError, setting, settings_of
from kvarts.base.units import meant_size, parse_bytes
from kvarts.core.config import BatchEngineConfig, EngineConfig
from kvarts.sim.vllm_start import VERSIONS, StartDrafts, StartRefusedError, start_facts

if TYPE_CHECKING:
    from kvarts.core.kv.groups import PartGroup
    from kvarts.cost.hardware.fit import MemoryFit
    from kvarts.cost.hardware.geometry import Geometry
    from kvarts.cost.roofline import CostSpec
    from kvarts.cost.vllm.start import Start, StartSettings

WAYS = ("tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel")
"""Settings of a device that state how a model is divided, and over how many devices."""

__all__ = [
    "DeviceSettings",
    "ModelSettings",
    "Placed",
    "Placement",
    "counted_groups",
    "given_cost",
    "keeps_less",
    "kv_bytes_of",
    "parsed_cost",
    "plans_batches",
]
__all__ += ["place", "resolve_hardware"]


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The served model: a name or a config.json (load_geometry), and number formats that replace its own."""

    model: Annotated[
        str | None,
        setting(
            "Model to serve: a name of `kvarts model list`, or a config.json. With --device, it determines how "
            "long steps take and how many pages fit.",
            metavar="NAME",
        ),
    ] = None
    weight_dtype: Annotated[
        str | None, setting("Number format of weights.", metavar="DTYPE", default="that of the model")
    ] = None
    kv_dtype: Annotated[str | None, setting("Number format of KV.", metavar="DTYPE", default="that of the model")] = (
        None
    )
    speculative_tokens: Annotated[
        int,
        setting("Tokens drafted after each decode, by layers such as MTP, and verified in its step.", metavar="N"),
    ] = 0
    speculative_method: Annotated[
        str | None,
        setting(
            "What drafts, in a start of vLLM: mtp, eagle, eagle3 (layers with KV), or ngram.",
            metavar="NAME",
            default="mtp",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        setting(
            "Longest sequence for which a start of vLLM plans, or -1 for the longest that fits.",
            metavar="TOKENS",
            default="that of the model",
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        setting(
            "For each drafted token, the share of drafts in which it and all before it are accepted: 0.8,0.6,0.4.",
            metavar="RATES",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_whole(self.speculative_tokens, "speculative_tokens", least=0, most=MOST_DRAFTED)
        if bool(self.speculative_tokens) != (self.acceptance is not None):
            raise SettingError(
                "go together",
                "speculative_tokens",
                "acceptance",
                of=self,
                hint="Give {speculative_tokens} 3 and {acceptance} 0.8,0.6,0.4, or neither.",
            )
        if self.speculative_method is not None and self.speculative_method not in DRAFT_METHODS:
            raise SettingError(
                f"is {brief(self.speculative_method)}, which is not modelled",
                "speculative_method",
                of=self,
                hint=f"Give {', '.join(DRAFT_METHODS)}.",
            )
        if self.speculative_method is not None and not self.speculative_tokens:
            raise SettingError(
                "has no effect without {speculative_tokens}",
                "speculative_method",
                of=self,
                hint="Give {speculative_tokens} and {acceptance} too, or leave it out.",
            )
        _ = self.rates

    @property
    def method(self) -> str:
        """What drafts."""
        return self.speculative_method or "mtp"

    @property
    def rates(self) -> tuple[float, ...]:
        """The numbers of `acceptance`. Raises SettingError if they are not numbers."""
        try:
            return tuple(float(text) for text in self.acceptance.split(",")) if self.acceptance is not None else ()
        except ValueError:
            raise SettingError(f"{brief(self.acceptance)} is not a list such as 0.8,0.6,0.4", "acceptance") from None


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device of the models: a name or `cpu:...` (load_device), and the share of its memory for KV."""

    device: Annotated[
        str | None,
        setting(
            "Device to serve it on, a file my.toml that describes one, or cpu:cores=8,bandwidth=80GB/s.",
            metavar="NAME",
        ),
    ] = None
    tensor_parallel: Annotated[AtLeastOne, setting("Devices that the model is split over.", metavar="N")] = 1
    data_parallel: Annotated[
        AtLeastOne,
        setting(
            "Ranks with separate requests; the experts of a model are divided over the ranks, which are in lock step.",
            metavar="N",
        ),
    ] = 1
    expert_parallel: Annotated[
        AtLeastOne,
        setting(
            "1, or the N devices of all ranks, which divide whole experts.",
            metavar="N",
        ),
    ] = 1
    pipeline_parallel: Annotated[AtLeastOne, setting("Stages that the layers are divided into.", metavar="N")] = 1
    kv_memory: Annotated[
        str | int,
        setting(
            "KV memory of each device: 40GiB, or auto for all that is free.",
            metavar="SIZE",
            replaces=("pages",),
        ),
    ] = "auto"
    memory_fraction: Annotated[float, setting("For auto: the share of the device's memory to use.", metavar="X")] = 0.9

    def __post_init__(self) -> None:
        self._take_count()
        for ways in WAYS:
            check_whole(getattr(self, ways), ways, most=MOST_REPLICAS)
        if not 0.0 < self.memory_fraction <= 1.0:
            raise SettingError(f"must be above 0 and at most 1, got {self.memory_fraction}", "memory_fraction")
        if isinstance(self.kv_memory, int):
            check_whole(self.kv_memory, "kv_memory", most=MOST_BYTES)

    def _take_count(self) -> None:
        """Read `8xh200` as eight devices that the model is split over."""
        count, times, name = (self.device or "").lower().partition("x")
        num_devices = whole_number(count)
        if not times or num_devices is None or not name or len(count) > 4:
            return
        if self.tensor_parallel not in (1, num_devices):
            raise SettingError(
                f"{brief(self.device)} is {count} devices, and the model is split over {self.tensor_parallel}",
                "device",
                "tensor_parallel",
                hint="Give one of the two.",
            )
        msgspec.structs.force_setattr(self, "device", name)
        msgspec.structs.force_setattr(self, "tensor_parallel", max(1, int(count)))


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a configuration: names of model and device, and bytes of KV per token on each device.

    The rest is what was given for a server's start: the share of a device's memory, and in place of it bytes of KV
    memory or a number of pages; and what drafts.
    """

    model: str
    device: str
    kv_bytes_per_token: int
    memory_fraction: float = 0.9
    kv_memory_bytes: int | None = None
    num_pages: int | None = None
    draft_method: str = "mtp"

    def to_builtins(self) -> dict[str, Any]:
        """Return what reports contain: the names, and the bytes of a token."""
        return {name: getattr(self, name) for name in ("model", "device", "kv_bytes_per_token")}


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a device: the cost of steps, and the bytes of KV per token on each of the devices.

    `geometry`: None if only numbers are known of the model. `num_draft_layers`: additional layers that draft.
    """

    cost: CostSpec
    kv_bytes_per_token: int
    geometry: Geometry | None = None
    num_draft_layers: int = 0

    def state_bytes(self, engine: EngineConfig, on: DeviceSettings) -> int:
        """Return the part of KV memory, in bytes, for the states of all sequences that may run."""
        if self.geometry is None:
            return 0
        from kvarts.cost.hardware.fit import local_state_bytes

        return local_state_bytes(self.geometry, engine.max_num_seqs, on.tensor_parallel, on.pipeline_parallel)

    def fit(
        self, engine: EngineConfig, on: DeviceSettings, kv_dtype: str | None, *, states_in_pool: bool = False
    ) -> MemoryFit | None:
        """Return the memory left next to the model; None if it is unknown. Raise ConfigError if nothing fits."""
        from kvarts.cost.hardware.device import load_device
        from kvarts.cost.hardware.fit import fit_memory

        if self.geometry is None or on.device is None:
            return None
        return fit_memory(
            self.geometry,
            load_device(on.device),
            engine,
            tensor_parallel=on.tensor_parallel,
            data_parallel=on.data_parallel,
            pipeline_parallel=on.pipeline_parallel,
            memory_fraction=on.memory_fraction,
            kv_dtype=kv_dtype,
            num_draft_layers=self.num_draft_layers,
            states_in_pool=states_in_pool,
        )


def plans_batches(engine: str) -> bool:
    """Return whether the steps of an engine are of prompts or of decodes, as SGLang's are."""
    return engine.partition("==")[0] == "sglang"


def place(model: ModelSettings, on: DeviceSettings, cost: CostSpec | None) -> Placed:
    """Return the costs and sizes of `model` on a device.

    Its cost is a roofline, unless `cost` is given; a given roofline, from a calibration, keeps its coefficients. Raise
    ConfigError for anything unknown or missing.
    """
    from kvarts.cost.hardware.device import load_device
    from kvarts.cost.hardware.fit import draft_bytes_per_token, local_kv_bytes_per_token
    from kvarts.cost.hardware.model_config import load_geometry  # imported only for a replay that names a model
    from kvarts.cost.roofline import RooflineCost

    if model.model is None:
        # Without a name, the other settings of the model have no effect, either.
        fields = [field.name for field in (*msgspec.structs.fields(on), *msgspec.structs.fields(model))]
        raise SettingError(
            "says nothing without a model", *fields, hint="Model and device go together: {model} NAME.", of=on
        )
    if on.device is None:
        fields = [field.name for field in msgspec.structs.fields(model)]
        raise SettingError(
            "says nothing without a device", *fields, hint="Model and device go together: {device} NAME.", of=model
        )
    geometry = load_geometry(model.model, model.weight_dtype).on(load_device(on.device))
    facts: dict[str, Any] = {
        "llm": model.model,
        "device": on.device,
        **{ways: getattr(on, ways) for ways in WAYS},
        "weight_dtype": model.weight_dtype,
        "kv_dtype": model.kv_dtype,
    }
    if model.speculative_tokens or cost is None:
        facts |= {"speculative_tokens": model.speculative_tokens, "acceptance": model.rates}
    try:
        if cost is None:
            cost = RooflineCost(**facts)
        elif isinstance(cost, RooflineCost):
            cost = cost.placed(**facts)
    except ConfigError as error:
        field = (error.field or "").removeprefix("cost.")
        raise ConfigError(error.what, hint=error.hint, path=error.path, field=field or None) from error
    token_bytes = local_kv_bytes_per_token(geometry, on.tensor_parallel, model.kv_dtype, on.pipeline_parallel)
    drafts = isinstance(cost, RooflineCost) and cost.speculative_tokens > 0
    if drafts:
        token_bytes += draft_bytes_per_token(geometry, on.tensor_parallel, model.kv_dtype)
    return Placed(cost=cost, kv_bytes_per_token=token_bytes, geometry=geometry, num_draft_layers=int(drafts))


def kv_bytes_of(on: DeviceSettings) -> int | None:
    """Return the bytes of `kv_memory`; None for what fits. Raise ConfigError if it is not a size."""
    size = on.kv_memory
    if not isinstance(size, str):
        return size
    if size == "auto":
        return None
    try:
        return parse_bytes(size)
    except ConfigError as error:
        raise SettingError(error.what, "kv_memory", hint=error.hint) from error


def parsed_cost(cost: Any) -> Any:
    """Return the cost model that a text or a table describes; a cost model or a callable is returned unchanged.

    Raise ConfigError, and InputError for a file.
    """
    if not isinstance(cost, str | Mapping):
        return cost
    from kvarts.cost.roofline import CostSpec, parse_cost

    if isinstance(cost, str):
        return parse_cost(cost)
    if cost == {"model": "linear"}:
        raise ConfigError("says nothing: every step would take no time", field="cost")
    try:
        return msgspec.convert(cost, CostSpec)
    except msgspec.ValidationError as error:
        what, inner = parts_of(error)
        raise ConfigError(what, field=f"cost.{inner}" if inner else "cost") from error


def given_cost(given: Given) -> Any:
    """Return the given cost model, or None. Raise ConfigError that names the setting."""
    if "cost" not in given:
        return None
    try:
        return parsed_cost(given["cost"])
    except ConfigError as error:
        raise given.named(error, ()) from error


def resolve_hardware(given: Given, *, counts_groups: bool = False) -> dict[str, Any]:
    """Return the fields of an engine that follow from model and device: cost, pages, and bytes of KV per token.

    Empty if neither is given. `counts_groups`: KV groups are counted if `kv_groups` is not given. Raise ConfigError for
    settings that are unknown, contradict each other, or do not fit.
    """
    if not given:
        return {}
    of_model, of_device = settings_of(ModelSettings), settings_of(DeviceSettings)
    cost = given_cost(given)
    if not any(setting.key in given for setting in (*of_model, *of_device)):
        return {} if cost is None else {"cost": cost}
    merged = given.over(_calibrated(given, cost))
    settings = (*of_model, *of_device, *settings_of(EngineConfig))
    if "pages" in given and "kv_memory" in given:
        raise given.named(
            SettingError("cannot be combined with {num_pages}", "kv_memory", hint="Keep one of them."), settings
        )
    of_engine = BatchEngineConfig if plans_batches(str(given.get("engine"))) else EngineConfig
    model, on, engine = merged.build(ModelSettings), merged.build(DeviceSettings), merged.build(of_engine)
    try:
        placed = place(model, on, cost)
        facts: dict[str, Any] = {"cost": placed.cost, "kv_bytes_per_token": placed.kv_bytes_per_token}
        if placed.geometry is not None:
            facts["num_layers"] = placed.geometry.num_layers
        if model.model is not None and on.device is not None:
            facts["placement"] = Placement(
                model=model.model,
                device=on.device,
                kv_bytes_per_token=placed.kv_bytes_per_token,
                memory_fraction=on.memory_fraction,
                kv_memory_bytes=kv_bytes_of(on),
                num_pages=given["pages"] if "pages" in given else None,  # noqa: SIM401  (not a dict)
                draft_method=model.method,
            )
        if on.data_parallel > 1:
            facts["data_parallel"] = on.data_parallel
        if model.max_model_len is not None and given.get("engine") not in VERSIONS:
            raise SettingError(
                "is of a start of vLLM",
                "max_model_len",
                hint="Give {engine} vllm==0.33, or leave it out.",
            )
        if given.get("engine") in VERSIONS:
            return facts | _started(given["engine"], placed, model, on, merged)
        groups: tuple[PartGroup, ...] = ()
        if given["kv_groups"] != "off" if "kv_groups" in given else counts_groups:
            groups = facts["groups"] = counted_groups(placed, engine, on, model.kv_dtype)
            if "mamba_cache_mode" in given:
                from kvarts.core.kv.groups import with_states

                groups = facts["groups"] = with_states(groups, given["mamba_cache_mode"])
        windowed = _windowed(placed, on, model.kv_dtype, merged)
        if windowed is not None:
            facts |= {"sliding_window_size": windowed.window, "kv_bytes_per_token": round(windowed.token_bytes)}
            placement = msgspec.structs.replace(facts["placement"], kv_bytes_per_token=facts["kv_bytes_per_token"])
            facts["placement"] = placement
        stateful = _stateful(placed, engine, on, model.kv_dtype, merged)
        if stateful is not None:
            facts |= {"max_mamba_cache_size": stateful.num_slots, "mamba_chunk_size": stateful.chunk_size}
            facts["max_num_seqs"] = stateful.most_seqs
        if "pages" not in given:
            if stateful is not None:
                facts["num_pages"] = stateful.num_pages
            else:
                facts["num_pages"] = _num_pages(placed, engine, on, model.kv_dtype, groups, windowed)
    except ConfigError as error:
        raise merged.named(error, settings) from error
    return facts


def keeps_less(given: Given) -> bool:
    """Return whether a model and a device are given, and some layer of the model keeps less than all tokens.

    False for a model that is not known: to resolve it raises the error.
    """
    if not ("model" in given and "device" in given):
        return False
    from kvarts.cost.hardware.model_config import load_geometry

    try:
        return load_geometry(given["model"], given.get("weight_dtype")).keeps_less
    except KvartsError:
        return False


def _started(engine: str, placed: Placed, model: ModelSettings, on: DeviceSettings, given: Given) -> dict[str, Any]:
    """Return the fields that a start of vLLM decides. `pages`: its number of blocks, as --num-gpu-blocks-override."""
    from kvarts.cost.hardware.device import load_device
    from kvarts.cost.roofline import RooflineCost
    from kvarts.cost.vllm.start import StartSettings, start

    if placed.geometry is None or on.device is None:
        raise SettingError("needs a model and a device", "engine")
    if "kv_groups" in given:
        raise SettingError("is what {engine} decides", "kv_groups", hint="Leave it out.")
    has_prefix_caching = not given.get("no_prefix_caching", False)
    settings = StartSettings(
        version=VERSIONS[engine],
        tensor_parallel=on.tensor_parallel,
        data_parallel=on.data_parallel,
        pipeline_parallel=on.pipeline_parallel,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=given.get("max_batched_tokens"),
        max_num_seqs=given.get("max_seqs"),
        kv_dtype=model.kv_dtype,
        block_size=given.get("page_size"),
        memory_fraction=on.memory_fraction,
        has_prefix_caching=has_prefix_caching,
        has_async_scheduling=given.get("async_scheduling", True),
        num_drafts=model.speculative_tokens,
        has_draft_layers=model.method != "ngram",
    )
    decided = start(placed.geometry, load_device(on.device), settings)
    drafts = None
    if model.speculative_tokens:
        _check_drafts(model, placed.geometry, settings, decided)
        drafts = StartDrafts(
            model.speculative_tokens, model.method, model.rates, decided.max_model_len, settings.version
        )
    num_blocks, kv_bytes = given.get("pages"), kv_bytes_of(on)
    if num_blocks is None and kv_bytes is None:
        engine_config = EngineConfig(
            num_pages=1,
            page_size=decided.block_size,
            max_num_batched_tokens=decided.max_num_batched_tokens,
            max_num_seqs=decided.max_num_seqs,
        )
        try:
            fit = placed.fit(engine_config, on, model.kv_dtype, states_in_pool=True)
        except ConfigError as error:
            raise StartRefusedError(error.what, error.field or "engine", hint=error.hint) from error
        assert fit is not None
        kv_bytes = fit.kv_bytes
    own = msgspec.structs.replace(decided.settings, num_blocks_override=num_blocks)
    plan = msgspec.structs.replace(decided, settings=own).plan(kv_bytes or 0)
    shown = None if num_blocks is not None else kv_bytes
    facts = start_facts(
        decided,
        plan,
        available_bytes=shown,
        has_prefix_caching=has_prefix_caching,
        device=on.device,
        drafts=drafts,
    )
    if drafts is not None and isinstance(placed.cost, RooflineCost):
        # Each step takes its whole time, as the tokens that it generates are counted.
        facts["cost"] = msgspec.structs.replace(placed.cost, acceptance=(0.0,) * drafts.num_drafts)
    return facts


def _check_drafts(model: ModelSettings, geometry: Geometry, settings: StartSettings, decided: Start) -> None:
    """Raise SettingError for drafts that are not replayed as vLLM schedules them."""
    if model.method == "ngram" and settings.has_async_scheduling:
        raise SettingError(
            "schedules guesses by n-grams one step after the other",
            "engine",
            hint="Give {async_scheduling} false.",
        )
    if model.method == "ngram" or settings.version != "0.32" or not geometry.keeps_less:
        return
    # Layers that draft are those of the last group that vLLM registers, with MTP; else they are in all groups.
    what = ""
    if model.method != "mtp" or geometry.draft is None or geometry.draft.span is not None:
        what = (
            "drops a block of every layer's hits with drafts, which is replayed if the drafting layers keep all tokens"
        )
    elif any(spec.num_checkpoints for stage in decided.specs for spec in stage.values()):
        what = "names states inside chunks by the tokens before them with drafts, which is not replayed"
    if what:
        raise SettingError(what, "engine", hint="Give {engine} vllm==0.33, which drops none.")


def _calibrated(given: Given, cost: Any) -> Given:
    """Return the model and device of a calibrated cost as defaults, where nothing else is given."""
    from kvarts.cost.roofline import RooflineCost

    if not isinstance(cost, RooflineCost):
        return Given()
    facts: dict[str, Any] = {"model": cost.llm, "device": cost.device}
    # How the calibrated model was divided in other ways holds for it only: another may have no experts.
    ways_kept = WAYS[:1] if "model" in given else WAYS
    facts |= {ways: getattr(cost, ways) for ways in ways_kept}
    facts |= {"weight_dtype": cost.weight_dtype, "kv_dtype": cost.kv_dtype}
    return given.implied("cost", (*settings_of(ModelSettings), *settings_of(DeviceSettings)), facts)


def counted_groups(
    placed: Placed, engine: EngineConfig, on: DeviceSettings, kv_dtype: str | None
) -> tuple[PartGroup, ...]:
    """Return the KV groups of a model; none if every layer keeps every token.

    Groups that keep all tokens are first, so that theirs are the first of a request's released parts to be evicted.
    """
    geometry = placed.geometry
    if geometry is None or not geometry.keeps_less:
        return ()
    from kvarts.core.kv.groups import PartGroup
    from kvarts.cost.hardware.fit import local_kv_groups

    local = local_kv_groups(
        geometry,
        page_size=engine.page_size,
        tensor_parallel=on.tensor_parallel,
        pipeline_parallel=on.pipeline_parallel,
        kv_dtype=kv_dtype,
    )
    groups = [
        PartGroup(group.layer, group.page_bytes or group.state_bytes, group.num_layers)
        for group in local
        if group.page_bytes or group.state_bytes
    ]
    return tuple(sorted(groups, key=lambda group: group.is_bounded or group.is_state))


class Windowed(NamedTuple):
    """Sliding windows of `window` tokens, in a pool of their own; `token_bytes`: of a token with its part of that."""

    window: int
    token_bytes: float


def _windowed(placed: Placed, on: DeviceSettings, kv_dtype: str | None, given: Given) -> Windowed | None:
    """Return the windows of a model that SGLang keeps in a pool of their own, and its `_cell_size`; None for others."""
    geometry = placed.geometry
    if geometry is None or not plans_batches(str(given.get("engine"))) or given.get("disable_hybrid_swa_memory"):
        return None
    from kvarts.cost.hardware.fit import local_kv_groups
    from kvarts.sim.sglang import SWA_RATIO, WINDOW_FAMILIES

    shorter = WINDOW_FAMILIES.get(geometry.family)
    spans = [layer.span for layer in geometry.layers if layer.kind in ("window", "chunk") and layer.span]
    if shorter is None or not spans:
        return None
    ratio = given.get("swa_full_tokens_ratio", SWA_RATIO)
    local = local_kv_groups(
        geometry,
        page_size=1,
        tensor_parallel=on.tensor_parallel,
        pipeline_parallel=on.pipeline_parallel,
        kv_dtype=kv_dtype,
    )
    shares = [group.page_bytes * (ratio if group.layer.span else 1) for group in local]
    return Windowed(given.get("sliding_window_size", max(spans) - shorter), sum(shares))


class Stateful(NamedTuple):
    """Slots for the states of a model, known after each `chunk_size` tokens, and the pages next to them.

    `most_seqs`: as many requests as have slots run at once.
    """

    num_slots: int
    chunk_size: int
    num_pages: int
    most_seqs: int


def _stateful(
    placed: Placed, engine: EngineConfig, on: DeviceSettings, kv_dtype: str | None, given: Given
) -> Stateful | None:
    """Return the slots of a model with states as SGLang divides memory (kv_cache_configurator.py); None for others."""
    geometry = placed.geometry
    if geometry is None or not plans_batches(str(given.get("engine"))):
        return None
    from kvarts.sim.sglang import LOCKED_SLOTS, MAMBA_RATIO, STATE_FAMILIES, buffers_of, check_slots

    given_slots, ratio = given.get("max_mamba_cache_size", 0), given.get("mamba_full_memory_ratio", MAMBA_RATIO)
    check_slots(given_slots, ratio)
    if geometry.state is None or geometry.family not in STATE_FAMILIES or given.get("kv_groups") == "off":
        if given_slots:
            raise SettingError("has no effect without states in slots", "max_mamba_cache_size", hint="Leave it out.")
        return None
    kv_bytes = kv_bytes_of(on)
    if kv_bytes is None:
        fit = placed.fit(engine, on, kv_dtype, states_in_pool=True)
        assert fit is not None
        kv_bytes = fit.kv_bytes
    number_format = given.get("mamba_ssm_dtype", "auto")
    if number_format == "auto":
        number_format = geometry.state.stated_dtype or "float32"
    state = msgspec.structs.replace(geometry.state, recurrent_dtype=number_format)
    of_layer = state.local_bytes("bfloat16", on.tensor_parallel)
    slot_bytes = of_layer * -(-geometry.num_state_layers // on.pipeline_parallel)
    num_slots = given_slots or int(kv_bytes * ratio / (1 + ratio) - slot_bytes) // slot_bytes
    rest = kv_bytes - (num_slots + 1) * slot_bytes  # one more, for rows of a graph that compute nothing
    page_bytes = engine.page_size * placed.kv_bytes_per_token
    overlaps = not given.get("disable_overlap_schedule")
    num_each = LOCKED_SLOTS + buffers_of(
        given.get("mamba_radix_cache_strategy", "auto"), engine.page_size, overlaps=overlaps
    )
    if num_slots < num_each or rest < page_bytes:
        by = next((name for name in ("max_mamba_cache_size", "mamba_full_memory_ratio") if name in given), "kv_memory")
        raise SettingError(
            f"{max(0, num_slots):,} slots for states of {slot_bytes:,} bytes leave {max(0, rest):,} bytes of "
            f"{kv_bytes:,} for pages of {page_bytes:,} bytes, and a request needs {num_each} slots and a page",
            by,
            hint="Give more memory, or another number of slots.",
        )
    return Stateful(num_slots, state.chunk_size, rest // page_bytes, min(engine.max_num_seqs, num_slots // num_each))


def _num_pages(
    placed: Placed,
    engine: EngineConfig,
    on: DeviceSettings,
    kv_dtype: str | None,
    groups: tuple[PartGroup, ...],
    windowed: Windowed | None,
) -> int:
    kv_bytes = kv_bytes_of(on)
    if kv_bytes is None:
        fit = placed.fit(engine, on, kv_dtype)
        assert fit is not None
        if windowed is None and not groups:
            return fit.num_pages
        kv_bytes = fit.kv_bytes
    if windowed is not None:
        num_pages = int(kv_bytes // windowed.token_bytes) // engine.page_size
        if not num_pages:
            raise _no_page(on, math.ceil(windowed.token_bytes * engine.page_size))
        return num_pages
    if groups:
        page_bytes = sum(group.part_bytes for group in groups if not group.is_state)
        if kv_bytes < page_bytes:
            raise _no_page(on, page_bytes)
        return kv_bytes // page_bytes
    page_bytes = engine.page_size * placed.kv_bytes_per_token
    state_bytes = placed.state_bytes(engine, on)
    if kv_bytes - state_bytes < page_bytes:
        beside = f" beside {state_bytes:,} bytes of states of {engine.max_num_seqs} sequences" if state_bytes else ""
        raise _no_page(on, page_bytes, beside)
    return (kv_bytes - state_bytes) // page_bytes


def _no_page(on: DeviceSettings, page_bytes: int, beside: str = "") -> SettingError:
    """Return the error for KV memory that is too small for one page."""
    size = on.kv_memory
    shown = f"{size} bytes" if whole_number(str(size).strip()) is not None else size
    return SettingError(
        f"{shown} hold no page of {page_bytes:,} bytes{beside}", "kv_memory", hint=meant_size(size, page_bytes)
    )
