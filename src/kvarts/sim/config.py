"""The configuration of a replay: an engine, the number of engines, and the arrival of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_MS, MOST_PAGES, MOST_REPLICAS, MOST_SECONDS, check_number, check_whole
from kvarts.base.settings import Given, Section, SettingError, given_by_keywords, given_in, setting, settings_of
from kvarts.base.user_code import code_named, is_code_name
from kvarts.core.config import EngineConfig, Slo, StateMode
from kvarts.core.tiers.config import TIERS, OffloadConfig
from kvarts.sim.hardware import DeviceSettings, ModelSettings, Placement, resolve_hardware
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.policies import POLICIES
from kvarts.sim.sessions import SessionReplay
from kvarts.sim.vllm_start import VERSIONS, VllmStart

if TYPE_CHECKING:
    from kvarts.core.executor import CostModel
    from kvarts.core.kv.eviction import EvictionOrder
    from kvarts.core.kv.groups import GroupMemory, PartGroup
    from kvarts.core.sched.policy import AdmissionPolicy
    from kvarts.sim.router import RouterMaker
    from kvarts.sim.traffic.source import Source
    from kvarts.sim.traffic.trace import Trace

__all__ = [
    "ENGINES",
    "SECTIONS",
    "TABLES",
    "EngineName",
    "EngineSet",
    "ReplayConfig",
    "Slo",
    "check_token_bytes",
    "engine_of",
    "make_config",
    "resolve_replay",
    "with_engine",
]

EngineName = Literal["none", "vllm", "vllm==0.32", "vllm==0.33", "sglang", "tensorrt-llm", "trtllm"]


class EngineSet(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of one engine, by the settings of a replay; None for what its start decides.

    `separate_passes`: a step computes its prompts first, and its decodes in a separate pass. `full_prompt_hits`: a load
    from tiers below may cover a whole prompt, as vLLM's OffloadingConnector loads it.
    """

    max_batched_tokens: int | None = None
    max_seqs: int | None = None
    memory_fraction: float
    async_scheduling: bool
    frontend_ms: float
    separate_passes: bool = False
    full_prompt_hits: bool = False


TENSORRT_LLM = EngineSet(
    max_batched_tokens=8192, max_seqs=2048, memory_fraction=0.9, async_scheduling=True, frontend_ms=25.0
)
VLLM = EngineSet(
    memory_fraction=0.92, async_scheduling=True, frontend_ms=6.0, separate_passes=False, full_prompt_hits=True
)
ENGINES: dict[EngineName, EngineSet] = {
    "vllm==0.32": VLLM,
    "vllm==0.33": VLLM,
    "vllm": EngineSet(
        max_batched_tokens=8192,
        max_seqs=1024,
        memory_fraction=0.9,
        async_scheduling=True,
        frontend_ms=6.0,
        full_prompt_hits=True,
    ),
    "sglang": EngineSet(
        max_batched_tokens=8192,
        max_seqs=2048,
        memory_fraction=0.88,
        async_scheduling=True,
        frontend_ms=25.0,
        separate_passes=True,
    ),
    "tensorrt-llm": TENSORRT_LLM,
    "trtllm": TENSORRT_LLM,
}
"""Default settings of serving engines around their steps, by name, for `--engine`; an explicit setting wins.

Sources are the documentation of the engines: vLLM 0.14 and later ("Optimization and Tuning", `vllm serve --help`,
`AsyncScheduler`), SGLang 0.5 ("Server Arguments"), TensorRT-LLM 1.0 (`trtllm-serve`, "Overlap Scheduler"). No engine
documents the time of its front end; it was fitted to measured times to first token (docs/accuracy.md).
"""


def engine_of(name: str) -> EngineSet | None:
    """Return the defaults of an engine; None for `none`. Raise SettingError for an unknown one."""
    if name not in get_args(EngineName):
        raise SettingError(f"must be one of {', '.join(get_args(EngineName))}, got {name!r}", "engine")
    return ENGINES.get(name)  # type: ignore[call-overload, no-any-return]


def with_engine(given: Given, *structs: type) -> Given:
    """Return `given` over the defaults of the engine that it names, for the settings of `structs`."""
    engine = engine_of(given["engine"])
    if engine is None:
        return given
    if given["engine"] in VERSIONS and not ("model" in given and "device" in given):
        raise given.error("engine", "needs one model and a device", hint="Give --model NAME --device NAME.")
    facts = {name: value for name, value in msgspec.to_builtins(engine).items() if value is not None}
    if "model" not in given and "device" not in given:
        del facts["memory_fraction"]  # only a device has it
    return given.over(given.implied("engine", [each for struct in structs for each in settings_of(struct)], facts))


MOST_SPEEDUP = 1e12
MOST_COST_FACTOR = 1e6
MOST_RETRIES = 1000
if TYPE_CHECKING:
    StepCost = Any  # a CostModel, or a callable: checked where it is used
    EvictionMaker = Callable[[], EvictionOrder]
    AdmissionMaker = Callable[[], AdmissionPolicy]
    PartGroups = tuple[PartGroup, ...]
else:  # the rooms of these are imported where they are used: help prints these names and their docstrings

    class StepCost:
        """A cost model, or a function of a Batch that returns the milliseconds of the step."""

    class EvictionMaker:
        """Makes the EvictionOrder of a replica: a class, or a function without arguments."""

    class AdmissionMaker:
        """Makes the AdmissionPolicy of a replica: a class, or a function without arguments."""

    class RouterMaker:
        """Makes the policy of a router: a class, or a function without arguments."""

    class PartGroups:
        """A tuple of PartGroups."""


KvGroupsName = Literal["off", "all", "tails"]


def _default_cost() -> CostModel:
    from kvarts.cost.polynomial import PolynomialCost  # not needed to print a help text

    return PolynomialCost()


def _default_eviction() -> Callable[[], EvictionOrder]:
    from kvarts.core.kv.eviction import LruOrder

    return LruOrder


def _default_admission() -> Callable[[], AdmissionPolicy]:
    from kvarts.core.sched.policy import PriorityPolicy

    return PriorityPolicy


class ReplayConfig(
    EngineConfig,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
):
    """One replay. Raises ConfigError for a value out of range, or for settings that exclude each other.

    `cost`: a cost model, or any callable that returns the milliseconds of a Batch. `replicas` engines of the same
    configuration are behind `router`. Requests arrive at their times divided by `speedup`, or `concurrency` of them (or
    sessions) are kept in flight. `step_by_step`: the same replay, one step at a time. `audit`: check the laws of page
    accounting after every step, and then replay the trace once more without the audit, which must be the same; a
    stream, which cannot be read twice, is not replayed again. `offload`: tiers below the device of each replica.
    `sessions`: the state that engines keep of sessions between turns; without it, a turn is a request like any other.

    Some fields can be set in Python only. `groups`: PartGroups to count if `kv_groups` is not off and no model provides
    them. `whole_pages`: why they are not counted although they are the default. `start`: the start of vLLM that decides
    the number of blocks. `placement`: the names of the model and
    the device from which `cost` and `num_pages` were derived, for reports. `router`, if not a name: a callable that
    makes the Router of a replay. `eviction`: a callable that makes the EvictionOrder of a replica (LruOrder by
    default). `admission`: a callable that makes its AdmissionPolicy (PriorityPolicy by default). Each callable is a
    class, or a function without arguments.
    """

    cost: Annotated[
        StepCost,
        setting(
            "Step times: polynomial, or linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,"
            "context_token_ms=0, or a file that `kvarts calibrate` wrote.",
            metavar="MODEL",
            default="polynomial; with --device, its roofline",
            kind=Any,
        ),
    ] = msgspec.field(default_factory=_default_cost)
    cost_factor: Annotated[
        float,
        setting("Factor on the time of each step, to see what depends on it.", metavar="X"),
    ] = 1.0
    replicas: Annotated[
        int,
        setting(
            "Engines of this configuration, each with all ranks of data_parallel; with several models, devices with "
            "all of them.",
            metavar="N",
        ),
    ] = 1
    router: Annotated[
        str | RouterMaker,
        setting(
            "How a request gets its replica: round-robin, least-loaded, power-of-two, session, prefix, dynamo-kv, "
            "llm-d, sglang-cache-aware, production-stack-prefix, production-stack-kv, aibrix-prefix, vllm-ranks, with "
            "options as in llm-d:prefix=3,queue=2,kv=2; or module:Class, a user's.",
            metavar="NAME",
            kind=str,
        ),
    ] = "round-robin"
    concurrency: Annotated[
        int | None,
        setting(
            "Keep N requests (or sessions) in flight, whatever their times: a closed loop.",
            metavar="N",
            replaces=("speedup",),
        ),
    ] = None
    speedup: Annotated[
        float, setting("Divide arrival times by X, and session delays too: an open loop.", metavar="X")
    ] = 1.0
    engine: Annotated[
        EngineName,
        setting(
            "Engine whose defaults apply to options that are not given: tokens per step, requests, fraction of memory, "
            "asynchronous scheduling, front end."
        ),
    ] = "none"
    async_scheduling: Annotated[
        bool,
        setting(
            "Plan the next step while one runs, as vLLM does since 0.14. A request that arrives joins one step later, "
            "and one that ends keeps its place and its memory for one more plan."
        ),
    ] = False
    stop_tokens: Annotated[
        bool,
        setting(
            "Requests end with a stop token. With async_scheduling, an engine has planned one more token of theirs "
            "when it knows that."
        ),
    ] = False
    mamba_cache_mode: Annotated[
        StateMode,
        setting(
            "States that layers keep for prefixes. snapshots: as the key `snapshots`; as in vLLM, all: after every "
            "page, or align: at the ends of chunks, which end at pages."
        ),
    ] = "snapshots"
    prefix_cache_retention_interval: Annotated[
        str | int,
        setting(
            "Parts of windows and states that other requests find, as in vLLM. none: all; 0: those before the places "
            "where prompts end or part; N: also those before each N tokens.",
            metavar="TOKENS",
        ),
    ] = "none"
    no_prefix_caching: Annotated[
        bool,
        setting("Requests find no cached pages, as with vLLM's --no-enable-prefix-caching."),
    ] = False
    frontend_ms: Annotated[
        float,
        setting(
            "Time of the front end (HTTP, tokenizer) before a request reaches the engine; it counts as TTFT.",
            metavar="MS",
        ),
    ] = 0.0
    client_timeout_s: Annotated[
        float | None,
        setting("Time after which a client gives up a request that has not ended.", metavar="S"),
    ] = None
    retries: Annotated[
        int, setting("How often clients repeat a request that they gave up after client_timeout_s.", metavar="N")
    ] = 0
    retry_after_s: Annotated[float, setting("Seconds between giving up and repeating a request.", metavar="S")] = 0.0
    slo: Slo = Slo()
    step_by_step: Annotated[
        bool, setting("Compute every step alone. The result is the same, only slower: for checks.")
    ] = False
    audit: Annotated[
        bool,
        setting(
            "After every step, check that each page is accounted for; at the end, that a plain replay is the same."
        ),
    ] = False
    kv_groups: Annotated[
        KvGroupsName,
        setting(
            "Count the KV that each layer keeps. off: all tokens in all layers; all: KV that leaves a window is kept, "
            "as in vLLM; tails: of that KV, only the ends of prompts and turns.",
            default="all for a model whose layers keep less, if the other options permit it, else off",
        ),
    ] = "off"
    offload: OffloadConfig | None = None
    sessions: SessionReplay | None = None
    routing: Routing | None = None
    placement: Placement | None = None
    groups: PartGroups = ()
    whole_pages: str = ""
    start: VllmStart | None = None
    eviction: EvictionMaker = msgspec.field(default_factory=_default_eviction)
    admission: AdmissionMaker = msgspec.field(default_factory=_default_admission)

    @classmethod
    def for_device(cls, model: str, device: str, **settings: Any) -> ReplayConfig:
        """Return the configuration of `model` on `device`: step times of a roofline, and as many pages as fit.

        `model` and `device` are presets, or files as the command line takes them; `kvarts model list` lists both.
        `settings` are the options of `kvarts replay` by their names: `replicas=2`, `kv_memory="40GiB"`,
        `host_memory="96GiB"`, `tensor_parallel=2`, `slo_ttft_ms=3000`. `eviction`, `admission`, `slo` and a custom
        `router` are objects. Raise ConfigError that names the argument.
        """
        names = ("admission", "eviction", "slo", *(("router",) if callable(settings.get("router")) else ()))
        objects = {name: settings.pop(name) for name in names if name in settings}
        sections = [*SECTIONS, *TABLES]
        given = given_by_keywords({"model": model, "device": device, **settings}, sections)
        return msgspec.structs.replace(resolve_replay(given, sections), **objects)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self.replicas, "replicas", most=MOST_REPLICAS)
        if self.router != "round-robin" or self.routing is not None:
            self.routing_settings.check(self.router, has_pages=not self.no_prefix_caching)
        if self.concurrency is not None:
            check_whole(self.concurrency, "concurrency")
        check_number(self.speedup, "speedup", above=True, most=MOST_SPEEDUP)
        engine_of(self.engine)
        check_number(self.frontend_ms, "frontend_ms", most=MOST_MS)
        if self.client_timeout_s is not None:
            check_number(self.client_timeout_s, "client_timeout_s", above=True, most=MOST_SECONDS)
        check_whole(self.retries, "retries", least=0, most=MOST_RETRIES)
        check_number(self.retry_after_s, "retry_after_s", most=MOST_SECONDS)
        if self.retries and self.client_timeout_s is None:
            raise SettingError("has no effect without {client_timeout_s}", "retries", hint="Give {client_timeout_s}.")
        check_number(self.cost_factor, "cost_factor", above=True, most=MOST_COST_FACTOR)
        if self.concurrency is not None and self.speedup != 1.0:
            raise SettingError(
                "a closed loop has no arrival times to speed up",
                "speedup",
                hint="Give {concurrency} or {speedup}, not both.",
            )
        if not callable(self.cost) and not hasattr(self.cost, "decode_ns"):
            raise SettingError(f"{self.cost!r} is neither a cost model nor callable", "cost")
        self._check_ranks()
        self._check_groups()
        check_features(self.features)
        for field in ("eviction", "admission"):
            if not callable(getattr(self, field)):
                raise SettingError(
                    f"{getattr(self, field)!r} is not callable",
                    field,
                    hint="Give a class, or a function that makes one: each replica gets its own.",
                )

    @property
    def features(self) -> dict[str, str]:
        """The features of `combines` that this replay uses, each with the setting that asks for it."""
        by_page = "groups" if any(group.has_states_by_page for group in self.groups) else ""
        if self.mamba_cache_mode != "snapshots":
            by_page = "mamba_cache_mode"
        of_field = {
            "kv_groups": self.kv_groups != "off" and "kv_groups",
            "states": any(group.layer.kind == "state" for group in self.groups) and "kv_groups",
            "states_by_page": by_page,
            "sinks": any(group.layer.sink for group in self.groups) and "kv_groups",
            "windows": getattr(self.sessions, "window", None) is not None and "sessions.window",
            "tiers": self.offload is not None and "offload",
            "layers": getattr(self.offload, "load_overlap", "none") == "layers" and "offload.load_overlap",
            "async_loads": getattr(self.offload, "load_kv", "placed") == "async" and "offload.load_kv",
            "sync_loads": getattr(self.offload, "load_kv", "placed") == "sync" and "offload.load_kv",
            "orders": self.eviction is not _default_eviction() and "eviction",
            "bound": self.max_itl_ms is not None and "max_itl_ms",
            "mocker": self.profile == "mocker" and "profile",
            "sessions": self.sessions is not None and "sessions",
            "late_events": getattr(self.routing, "event_lag_ns", 0) > 0 and "routing.event_lag",
            "ranks": getattr(self.cost, "num_ranks", 1) > 1 and "data_parallel",
            "uncached": self.no_prefix_caching and "no_prefix_caching",
        }
        return {name: field for name, field in of_field.items() if field}

    @property
    def routing_settings(self) -> Routing:
        """Settings of a router's view."""
        return Routing() if self.routing is None else self.routing

    @property
    def frontend_ns(self) -> int:
        """The time of the front end, in nanoseconds."""
        return round(self.frontend_ms * 1e6)

    @property
    def client_timeout_ns(self) -> int | None:
        """The time after sending a request at which clients give it up; None for never."""
        return None if self.client_timeout_s is None else round(self.client_timeout_s * 1e9)

    def source(self, trace: Trace) -> Source:
        """Return the source that determines when the requests of `trace` arrive.

        Without `concurrency` and `speedup`, a trace that has no times but was sent in a closed loop is replayed in one.
        """
        from kvarts.sim.traffic.source import source_of, with_pauses

        of_trace = trace.concurrency if self.speedup == 1.0 else None
        return source_of(
            with_pauses(trace) if self.profile == "mocker" else trace,
            concurrency=of_trace if self.concurrency is None else self.concurrency,
            speedup=self.speedup,
            delay_ns=self.frontend_ns,
            retries=self.retries,
            retry_after_ns=round(self.retry_after_s * 1e9),
        )

    @property
    def certain(self) -> ReplayConfig:
        """The same configuration with a cost model without uncertainty, so that a single replay suffices."""
        if getattr(self.cost, "uncertainty", None) is None:
            return self
        return msgspec.structs.replace(self, cost=msgspec.structs.replace(self.cost, uncertainty=None))

    def _check_groups(self) -> None:
        """Refuse settings that cannot be counted by KV group, rather than count them wrongly."""
        if self.kv_groups not in get_args(KvGroupsName):
            raise SettingError(f"must be 'off', 'all' or 'tails', got {self.kv_groups!r}", "kv_groups")
        if self.snapshots != "ends" and (self.kv_groups == "off" or not self.memory.has_states):
            raise SettingError(
                "has no effect without layers with a state, whose KV is counted by KV group",
                "snapshots",
                hint="Leave it out.",
            )
        if self.mamba_cache_mode not in get_args(StateMode):
            raise SettingError(
                f"must be 'snapshots', 'all' or 'align', got {self.mamba_cache_mode!r}",
                "mamba_cache_mode",
                hint="For vLLM's none, give {no_prefix_caching}.",
            )
        if self.mamba_cache_mode != "snapshots" and (self.kv_groups == "off" or not self.memory.has_states_by_page):
            raise SettingError(
                "has no effect without layers with a state, whose KV is counted by KV group",
                "mamba_cache_mode",
                hint="Leave it out.",
            )
        if self.retention_interval is not None and (self.kv_groups != "all" or self.memory.has_states):
            raise SettingError(
                "needs {kv_groups} all, and for states {mamba_cache_mode} align",
                "prefix_cache_retention_interval",
                hint="Leave it out.",
            )
        if self.retention_interval is not None and (
            self.offload is not None or self.sessions is not None or any(group.layer.sink for group in self.groups)
        ):
            raise SettingError(
                "does not go with tiers, sessions or sinks",
                "prefix_cache_retention_interval",
                hint="Give {prefix_cache_retention_interval} none, or leave them out.",
            )
        if self.kv_groups == "off":
            if self.groups:
                raise SettingError("are given, and {kv_groups} is off", "groups")
            return
        if not self.groups:
            raise SettingError(
                "says nothing without one model", "kv_groups", hint="Give a model and a device, or leave it out."
            )
        if self.offload is not None:
            self.offload.sizes(self.page_size, self.memory)  # raises if a tier keeps whole pages
        if self.num_blocks > MOST_PAGES:
            raise SettingError(
                f"make {self.num_blocks:,} blocks of {self.memory.block_bytes:,} bytes, more than {MOST_PAGES:,}",
                "num_pages",
            )

    def check_tiers(self) -> None:
        """Raise ConfigError for a tier that is too small for one page: it would silently be absent.

        For one model only: with several, the page size in bytes of each is not known here.
        """
        if self.offload is None or self.kv_groups != "off":
            return
        try:
            self.offload.sizes(self.page_size)
        except SettingError as error:
            what, hint = error.texts
            fields = (field if field.startswith("tier.") else f"offload.{field}" for field in error.fields)
            raise SettingError(what, *fields, hint=hint) from error

    @property
    def tiers(self) -> dict[str, int]:
        """The pages of each tier below the device, by its name; blocks where KV groups are counted."""
        if self.offload is None:
            return {}
        return self.offload.sizes(self.page_size, None if self.kv_groups == "off" else self.memory)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on each device, with its parts in all counted KV groups; 0 without these and a model."""
        if self.kv_groups != "off":
            return self.memory.page_bytes
        return 0 if self.placement is None else self.page_size * self.placement.kv_bytes_per_token

    @property
    def memory(self) -> GroupMemory:
        """The counted KV groups, where `kv_groups` is not off."""
        from kvarts.core.kv.groups import GroupMemory, with_states

        assert self.kv_groups != "off"
        mode = self.mamba_cache_mode
        return GroupMemory(
            with_states(self.groups, mode),
            self.kv_groups,
            aligns=mode == "align",
            retention_interval=self.retention_interval,
            renames_states=self.engine != "vllm==0.33",
        )

    @property
    def retention_interval(self) -> int | None:
        """The number of `prefix_cache_retention_interval`; None for all parts. Raises SettingError for other texts."""
        text = self.prefix_cache_retention_interval
        if text == "none":
            return None
        if not str(text).isdecimal() or int(text) % self.page_size:
            raise SettingError(
                f"must be none, 0 or a multiple of {self.page_size} tokens, got {text!r}",
                "prefix_cache_retention_interval",
            )
        return int(text)

    @property
    def num_blocks(self) -> int:
        """The memory of a replica in its unit of accounting: pages, or with KV groups the blocks of that many pages."""
        if self.kv_groups == "off":
            return self.num_pages
        return self.memory.num_blocks(self.num_pages) if self.start is None else self.start.num_blocks - 1

    def _check_ranks(self) -> None:
        ranks = int(getattr(self.cost, "num_ranks", 1))
        if ranks == 1:
            return
        if self.replicas % ranks:
            raise SettingError(f"must be a multiple of the {ranks} ranks in lock step, got {self.replicas}", "replicas")

    @property
    def cost_model(self) -> CostModel:
        """The cost model that `cost` describes, times `cost_factor`."""
        if self.cost_factor == 1.0:
            return self._cost
        from kvarts.cost.polynomial import ScaledCost

        return ScaledCost(self._cost, self.cost_factor)

    @property
    def _cost(self) -> CostModel:
        if hasattr(self.cost, "decode_ns"):
            cost: CostModel = self.cost
            return cost
        from kvarts.cost.polynomial import CallableCost

        return CallableCost(self.cost)

    def to_builtins(self) -> dict[str, Any]:
        """Return the settings that the report lists, by the names that a file and the command line use, JSON-able."""
        names = zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True)
        values = {encoded: getattr(self, field) for field, encoded in names}
        cost = values["cost"]
        values["cost"] = _stated(cost) if isinstance(cost, msgspec.Struct) else repr(self._cost)
        values["slo"] = msgspec.to_builtins(values["slo"])
        values["offload"] = None if self.offload is None else self.offload.to_builtins()
        if self.cost_factor == 1.0:
            del values["cost_factor"]
        for field in (
            *("max_itl_ms", "long_prefill_token_threshold", "watermark", "engine", "async_scheduling", "stop_tokens"),
            *("no_prefix_caching", "frontend_ms"),
            *("client_timeout_s", "retries", "retry_after_s"),
        ):
            if values[field] in ("none", False, 0.0, None):
                del values[field]
        if self.snapshots == "ends":
            del values["snapshots"]
        if self.mamba_cache_mode == "snapshots":
            del values["mamba_cache_mode"]
        if values["prefix_cache_retention_interval"] == "none":
            del values["prefix_cache_retention_interval"]
        if self.start is None:
            del values["start"]
        else:
            values["start"] = msgspec.to_builtins(self.start)
        placement = values.pop("placement")
        if placement is not None:
            values = {**msgspec.to_builtins(placement), **values}
        groups = values.pop("groups")
        if groups:
            values["page_bytes"] = self.memory.page_bytes
        elif not self.whole_pages:
            del values["kv_groups"]
        if not self.whole_pages:
            del values["whole_pages"]
        if self.sessions is None:
            del values["sessions"]
        else:
            values["sessions"] = msgspec.to_builtins(self.sessions)
        if self.routing is None:
            del values["routing"]
        else:
            values["routing"] = msgspec.to_builtins(values["routing"])
        # How a replay is carried out does not belong in its report.
        del values["step_by_step"], values["audit"]
        if callable(self.router):
            values["router"] = getattr(self.router, "__name__", None) or type(self.router()).__name__
        for field, default in (("eviction", _default_eviction()), ("admission", _default_admission())):
            make = values.pop(field)
            if make is not default:
                values[field] = type(make()).__name__
        return values


def _stated(cost: msgspec.Struct) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(cost))  # lists for tuples, as a report has them
    values.pop("uncertainty", None)  # the report contains its results
    return values


SECTIONS = (
    Section(struct=ModelSettings, title="Model and device"),
    Section(struct=DeviceSettings, title="Model and device"),
    Section(struct=ReplayConfig, title="Engine and load"),
    Section(struct=Slo, title="Goodput", table="slo"),
)
"""The settings of a replay of one model, without those in TABLES."""


TABLES = (
    Section(struct=OffloadConfig, title="", table="offload"),
    Section(struct=SessionReplay, title="", table="sessions"),
    Section(struct=Routing, title="", table="routing"),
    TIERS,
)
"""Settings in tables of their own: tiers, sessions and routers."""


def resolve_replay(
    given: Given,
    sections: Sequence[Section] = SECTIONS,
    *,
    asked: Mapping[str, str] | None = None,
    counts_groups: bool = True,
) -> ReplayConfig:
    """Build a ReplayConfig from the given settings: model and device first, then tables, then the rest.

    A section whose table is a field of ReplayConfig becomes that field's value if anything in it was given. `asked`:
    more features of `combines`, each with its setting. `counts_groups`: KV groups are the default for a model with
    layers that keep less; if they are refused and whole pages are not, pages are whole.

    Raise ConfigError that names the setting and where it was given.
    """
    asked = asked or {}
    config = _resolved_by_default(given, sections, asked, counts_groups=counts_groups)
    if "fleet" not in asked:  # which has more than one
        check_token_bytes(given, [config])
    return config


def check_token_bytes(given: Given, configs: Iterable[ReplayConfig]) -> None:
    """Raise ConfigError for bytes of a token that no file gives, if all `configs` have KV groups, which fix them."""
    key = "offload.kv_bytes_per_token"
    if key in given and given.source_of(key).path is None and all(each.kv_groups != "off" for each in configs):
        what = "has no effect where KV is counted by KV group"
        raise given.error(key, what, hint="Leave it out, or count no KV groups.")


def _resolved_by_default(
    given: Given, sections: Sequence[Section], asked: Mapping[str, str], *, counts_groups: bool
) -> ReplayConfig:
    """Return the configuration with KV groups, or with whole pages if these are refused and not asked for."""
    if not counts_groups or "kv_groups" in given:
        return _resolved(given, sections, asked, counts_groups=False)
    try:
        return _resolved(given, sections, asked, counts_groups=True)
    except ConfigError as refused:
        if given.get("engine") in VERSIONS:
            raise
        if "mamba_cache_mode" in given and given["mamba_cache_mode"] != "snapshots":
            raise  # whole pages have no states
        config = _resolved(given, sections, asked, counts_groups=False)
        return msgspec.structs.replace(config, whole_pages=_reason(refused))


def check_features(features: Mapping[str, str]) -> None:
    """Raise SettingError if some of the features are refused together; a single one never is."""
    if len(features) > 1:
        from kvarts.core.parts.combines import check_combination

        check_combination(features)


def _reason(error: ConfigError) -> str:
    """Return the refusal with the name of the field at fault, however the user spelled it."""
    cause = error.__cause__
    while isinstance(cause, ConfigError) and cause is not error:
        error, cause = cause, cause.__cause__
    return error.what if error.field is None else f"{error.field} {error.what}"


def _resolved(
    given: Given, sections: Sequence[Section], asked: Mapping[str, str], *, counts_groups: bool
) -> ReplayConfig:
    if "engine" in given:
        given = with_engine(given, DeviceSettings, ReplayConfig)
    facts = resolve_hardware(given, counts_groups=counts_groups)
    engine = engine_of(given["engine"]) if "engine" in given else None
    if engine is not None and hasattr(facts.get("cost"), "separate_passes"):
        facts["cost"] = msgspec.structs.replace(facts["cost"], separate_passes=engine.separate_passes)
    if engine is not None and engine.full_prompt_hits and not counts_parts(given, facts):
        facts["full_prompt_hits"] = True
    config = build_replay(given, sections, facts)
    try:
        config.check_tiers()
        check_features({**config.features, **asked})
    except ConfigError as error:
        raise given.named(error, ()) from error
    return config


def counts_parts(given: Given, facts: Mapping[str, Any]) -> bool:
    """Return whether KV groups are counted: they are given, or the model has some and they are not off."""
    return given["kv_groups"] != "off" if "kv_groups" in given else bool(facts.get("groups"))


def build_replay(given: Given, sections: Sequence[Section], facts: Mapping[str, Any]) -> ReplayConfig:
    """Build a ReplayConfig; `facts`, by field, are the values derived from model and device."""
    values: dict[str, Any] = {}
    for section in sections:
        table, _, field = section.into.partition(".")
        if section.into and given.names(section.table):
            for short, key in section.instead_of.items():
                if f"{table}.{short}" in given:
                    hint = f"Say {key} of a tier, in [[{section.table}]] or by --{section.table} NAME:{key}=VALUE."
                    raise given.error(f"{table}.{short}", "does not go with a list of tiers", hint=hint)
            of_table = next(each.struct for each in sections if each.table == table)
            tables = given.listed(section.struct, section.table)
            values[table] = given.build(of_table, table, facts=facts, **{field: tables})
    for section in sections:
        table = section.table
        if table in ReplayConfig.__struct_fields__ and table not in values and given.in_table(table):
            values[table] = given.build(section.struct, table, facts=facts)
    if "cost" in facts:
        values["cost"] = facts["cost"]
    if "placement" in facts:
        values["placement"] = facts["placement"]
    if "start" in facts:
        values |= {name: facts[name] for name in ("start", "page_size", "num_pages")}
    if "groups" in facts:
        values["groups"] = facts["groups"]
        if not facts["groups"]:
            values["kv_groups"] = "off"  # every layer of this model keeps every token
        elif "kv_groups" not in given:
            values["kv_groups"] = "all"
    if "router" in given and is_code_name(given["router"]) and not _is_policy(given["router"]):
        values["router"] = _own_router(given)
    if "data_parallel" in facts:
        replicas = 1
        if "replicas" in given:
            replicas = given["replicas"]
        check_whole(replicas, "replicas", most=MOST_REPLICAS)
        values["replicas"] = replicas * facts["data_parallel"]
    return given.build(ReplayConfig, facts=facts, **values)


def _is_policy(router: str) -> bool:
    """Return whether a name of the form `module:Class` is that of a policy with an option, which has no value."""
    return router.partition(":")[0] in POLICIES


def _own_router(given: Given) -> RouterMaker:
    """Return the class with the given name. Raise ConfigError if it cannot be imported, or if a file names it."""
    name = given["router"]
    if given.source_of("router").path is not None:
        # Files are passed around; opening one must not run code that lies in the same directory.
        raise given.error(
            "router", "names code, which no file may", hint=f"Give it on the command line: --router {name}."
        )
    try:
        return code_named(name)
    except ConfigError as error:
        raise given.error(
            "router", error.what, hint="See kvarts.sim.routers.view.Policy for what a router has."
        ) from error


def make_config(
    values: Mapping[str, Any],
    *,
    sections: Sequence[Section] = SECTIONS,
    counts_groups: bool = True,
) -> ReplayConfig:
    """Build a ReplayConfig from values by the keys of a file. Raises ConfigError that names the key."""
    return resolve_replay(given_in(values, sections), sections, counts_groups=counts_groups)
