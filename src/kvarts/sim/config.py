"""The configuration of a replay: an engine, the number of engines, and the arrival of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import (
    MOST_MS,
    MOST_PAGES,
    MOST_REPLICAS,
    MOST_SECONDS,
    brief,
    check_number,
    check_whole,
    whole_number,
)
from kvarts.base.settings import (
    Given,
    Section,
    SettingError,
    given_by_keywords,
    given_in,
    keyword_of,
    setting,
    settings_of,
)
from kvarts.base.user_code import code_named, is_code_name, maker_of
from kvarts.core.config import BatchRules, Slo, StateMode
from kvarts.core.tiers.config import TIERS, OffloadConfig, TierConfig
from kvarts.sim.hardware import DeviceSettings, ModelSettings, Placement, keeps_less, plans_batches, resolve_hardware
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.policies import POLICIES
from kvarts.sim.sessions import SessionReplay
from kvarts.sim.sglang import SGLANG_NAMES, SglangSettings
from kvarts.sim.vllm_start import NEWEST, VERSIONS, StartRefusedError, VllmStart, rules_of

if TYPE_CHECKING:
    from kvarts.core.executor import CostModel
    from kvarts.core.kv.eviction import EvictionOrder
    from kvarts.core.kv.groups import GroupMemory, PartGroup
    from kvarts.core.sched.policy import AdmissionPolicy
    from kvarts.core.sched.running import Running
    from kvarts.core.tiers.config import TierSpec
    from kvarts.core.tiers.hicache import HostMemory, HostStorage
    from kvarts.cost.roofline_settings import HeldOut
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
    "is_of_start",
    "make_config",
    "reason_of",
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
    page_size: int | None = None
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
        memory_fraction=0.92,
        async_scheduling=True,
        frontend_ms=6.0,
        full_prompt_hits=True,
    ),
    "sglang": EngineSet(
        max_batched_tokens=8192,
        max_seqs=2048,
        page_size=1,
        memory_fraction=0.88,
        async_scheduling=False,
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


BEFORE = {"vllm": ((0, 14), {"async_scheduling": False})}
"""Defaults of an engine before a version, where they were others: vLLM planned no step ahead before 0.14."""


def engine_of(name: str) -> EngineSet | None:
    """Return the defaults of an engine, or NAME==VERSION; None for `none`. Raise SettingError for an unknown one."""
    if name in get_args(EngineName):
        return ENGINES.get(name)  # type: ignore[call-overload, no-any-return]
    base, _, version = name.partition("==")
    numbers = [number for text in version.split(".") if (number := whole_number(text)) is not None]
    if base not in ENGINES or len(numbers) <= version.count("."):
        hint = f"Use one of {', '.join(get_args(EngineName))}, or NAME==VERSION."
        raise SettingError(f"{brief(name)} is not an engine", "engine", hint=hint)
    known = f"{base}=={'.'.join(version.split('.')[:2])}"
    if known != name and known in ENGINES:
        raise SettingError("is a release of one version, by which it is known", "engine", hint=f"Give {known}.")
    engine = ENGINES[base]
    first, changes = BEFORE.get(base, ((), {}))
    return msgspec.structs.replace(engine, **changes) if tuple(numbers) < first else engine


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
    EvictionMaker = Any  # a name, a class or an object, until it is replaced by a factory
    AdmissionMaker = Any
    RouterMaker = Any
    PartGroups = tuple[PartGroup, ...]
else:  # the rooms of these are imported where they are used: help prints these names and their docstrings

    class StepCost:
        """A cost model, or a function of a Batch that returns the milliseconds of the step."""

    class EvictionMaker:
        """Makes the EvictionOrder of a replica: a name, a class, a function without arguments, or an object to copy."""

    class AdmissionMaker:
        """Makes the AdmissionPolicy of a replica: `priority`, a class, a function, or an object to copy."""

    class RouterMaker:
        """Makes the policy of a router: a class, a function without arguments, or an object to copy."""

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
    SglangSettings,
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
    them. `whole_pages`: why they are not counted although they are the default. `not_started`: why the replay is not of
    a start of vLLM although that is the default, or the engine `vllm` is given. `start`: the start of vLLM that decides
    the number of blocks. `placement`: the names of the model and the device from which `cost` and `num_pages` were
    derived, for reports. `eviction`: the EvictionOrder of each replica (`lru`, by default, `auto` and others).
    `admission`: its AdmissionPolicy (`priority` by default). Where `router`, `eviction`, `admission` or `cost` goes, so
    does a name, module:Class, a class, a function without arguments that makes an object, or an object; each replica
    has a copy.

    >>> from kvarts import ReplayConfig
    >>> ReplayConfig(num_pages=2_000, page_size=512, replicas=2, router="prefix", eviction="auto").pool_tokens
    1024000
    >>> ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", host_memory="64GiB", slo_ttft_ms=500).num_pages
    28392
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
        str,
        setting(
            "Engine whose defaults apply to options that are not given: tokens per step, requests, fraction of memory, "
            "asynchronous scheduling, front end, and step times: vllm, sglang, tensorrt-llm, or a version, as in "
            "sglang==0.5.12. sglang decides as SGLang's scheduler, all others as vLLM's.",
            metavar="NAME",
            default="none; vllm for a model on a device with layers that keep less",
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
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        setting(
            "Order of requests. fcfs: larger priorities first, then as they arrive; priority: as vLLM's policy of that "
            "name, in which the texts of ids decide between requests that arrive at the same time, and the last to "
            "arrive is preempted first."
        ),
    ] = "fcfs"
    mamba_cache_mode: Annotated[
        StateMode,
        setting(
            "States that layers keep for prefixes. snapshots: kvarts' own, as the key `snapshots`; align: vLLM's, at "
            "the ends of chunks, which end at pages; all: after every page, an ideal that no model of vLLM has."
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
    not_started: str = ""
    start: VllmStart | None = None
    eviction: EvictionMaker = msgspec.field(default_factory=_default_eviction)
    admission: AdmissionMaker = msgspec.field(default_factory=_default_admission)

    @classmethod
    def for_device(cls, model: str, device: str, **settings: Any) -> ReplayConfig:
        """Return the configuration of `model` on `device`: step times of a roofline, and as many pages as fit.

        `model` and `device` are presets, or files as the command line takes them; `kvarts model list` lists both.
        `settings`: as for `of_options`. Raise ConfigError that names the argument.
        """
        return cls.of_options(model=model, device=device, **settings)

    @classmethod
    def of_options(cls, **settings: Any) -> ReplayConfig:
        """Return a configuration by the names of options of `kvarts replay`.

        `replicas=2`, `kv_memory="40GiB"`, `host_memory="96GiB"`, `tensor_parallel=2`, `slo_ttft_ms=3000`; and objects
        where the configuration has them: `slo=Slo(...)`, `offload=OffloadConfig(...)`, `cost`, `router`, `eviction`,
        `admission`. Raise ConfigError that names the argument.
        """
        objects = {name: value for name, value in settings.items() if _is_object(name, value)}
        values = {name: value for name, value in settings.items() if name not in objects}
        sections = [*SECTIONS, *TABLES]
        made = resolve_replay(given_by_keywords(values, sections), sections)
        return msgspec.structs.replace(made, **objects)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._find_code()
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
        self._check_ranks()
        self._check_groups()
        check_features(self.features)
        self._check_batches()
        if self.scheduling_policy != "fcfs" and self.admission is not _default_admission():
            raise SettingError("does not go with an order of your own", "scheduling_policy", hint="Leave it out.")

    def _find_code(self) -> None:
        """Replace names, classes and objects by factories of one object per replica. Raise ConfigError."""
        replace = msgspec.structs.force_setattr
        if self.eviction is not _default_eviction():
            replace(self, "eviction", order_of(self.eviction))
        if self.admission is not _default_admission():
            replace(self, "admission", _admission_of(self.admission))
        if not isinstance(self.router, str):
            router = maker_of(self.router, "choose")
            if router is None:
                name = getattr(self.router, "__name__", None) or brief(self.router)
                hint = "See kvarts.policies.RouterPolicy for what a router has, or give a name, or module:Class."
                raise SettingError(f"{name} has no choose", "router", hint=hint)
            replace(self, "router", router)
        if isinstance(self.cost, str | type):
            replace(self, "cost", _cost_of(self.cost))
        if not callable(self.cost) and not hasattr(self.cost, "decode_ns"):
            raise SettingError(f"{self.cost!r} is neither a cost model nor callable", "cost")

    def of_trace(self, trace: Trace) -> ReplayConfig:
        """Return the configuration, with an eviction order that has the facts it needs of `trace`."""
        make = getattr(self.eviction, "of_trace", None)
        return self if make is None else msgspec.structs.replace(self, eviction=make(trace))

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
            "tiers": (self.offload is not None and "offload") or next(iter(self.given_host_sizes), ""),
            "files": self.offload is not None and any(self.offload.are_files) and "offload",
            "layers": getattr(self.offload, "load_overlap", "none") == "layers" and "offload.load_overlap",
            "async_loads": getattr(self.offload, "load_kv", "placed") == "async" and "offload.load_kv",
            "sync_loads": getattr(self.offload, "load_kv", "placed") == "sync" and "offload.load_kv",
            "orders": self.eviction is not _default_eviction() and "eviction",
            "bound": self.max_itl_ms is not None and "max_itl_ms",
            "cadence": self.prefill_schedule_interval > 1 and "prefill_schedule_interval",
            "mocker": self.profile == "mocker" and "profile",
            "sessions": self.sessions is not None and "sessions",
            "late_events": getattr(self.routing, "event_lag_ns", 0) > 0 and "routing.event_lag",
            "ranks": getattr(self.cost, "num_ranks", 1) > 1 and "data_parallel",
            "uncached": self.no_prefix_caching and "no_prefix_caching",
            "batches": self.plans_batches and "engine",
            "slots": self.max_mamba_cache_size > 0 and "engine",
            "start": self.start is not None and "engine",
            "started_drafts": getattr(self.start, "drafts", None) is not None and "speculative_tokens",
            "sizes": any(group.block_pages > 1 for group in self.groups) and "engine",
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

    def concurrency_of(self, trace: Trace) -> int | None:
        """Return the number of requests in flight of a closed loop; None if requests arrive at their times."""
        of_trace = trace.concurrency if self.speedup == 1.0 else None
        return of_trace if self.concurrency is None else self.concurrency

    def held_out(self, trace: Trace) -> Mapping[str, HeldOut] | None:
        """Return the errors of such predictions for measurements that the constants were not fitted to, by metric.

        Empty if nothing like it was measured; None if the cost model does not consist of the constants that ship.
        """
        if not getattr(self.cost, "is_shipped", False):
            return None
        errors: Mapping[str, HeldOut] = self.cost.held_out("open" if self.concurrency_of(trace) is None else "closed")
        return errors

    def source(self, trace: Trace) -> Source:
        """Return the source that determines when the requests of `trace` arrive.

        Without `concurrency` and `speedup`, a trace that has no times but was sent in a closed loop is replayed in one.
        """
        from kvarts.sim.traffic.source import source_of, with_pauses

        return source_of(
            with_pauses(trace) if self.profile == "mocker" else trace,
            concurrency=self.concurrency_of(trace),
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
            self.sessions is not None or any(group.layer.sink for group in self.groups)
        ):
            raise SettingError(
                "does not go with sessions or sinks",
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
        if self.below is None or self.kv_groups != "off":
            return
        try:
            self.below.sizes(self.page_size)
        except SettingError as error:
            what, hint = error.texts
            fields = (field if field.startswith("tier.") else f"offload.{field}" for field in error.fields)
            raise SettingError(what, *fields, hint=hint) from error

    @property
    def tiers(self) -> dict[str, int]:
        """The pages of each tier below the device, by its name; blocks where KV groups are counted."""
        if self.below is None:
            return {}
        return self.below.sizes(self.page_size, None if self.kv_groups == "off" else self.memory)

    @property
    def below(self) -> OffloadConfig | None:
        """The tiers below the device: `offload`, with the host memory and the storage that SGLang's settings say."""
        offload = self._sized
        if not self.has_storage or offload is None or not offload.listed:
            return offload
        if offload.tiers:
            files = TierConfig(kind="files", pages=MOST_PAGES)
            return msgspec.structs.replace(offload, tiers=(*offload.tiers, files))
        return msgspec.structs.replace(offload, disk_pages=MOST_PAGES)

    @property
    def _sized(self) -> OffloadConfig | None:
        """The same without storage, whose size nothing limits."""
        if not self.given_host_sizes:
            return self.offload
        offload = OffloadConfig() if self.offload is None else self.offload
        num_tokens = int(self.pool_tokens * self.hicache_ratio)
        if self.hicache_size:
            num_tokens = int(self.hicache_size * 1e9 / offload.kv_bytes_per_token)
        return msgspec.structs.replace(offload, host_pages=num_tokens // self.page_size + 1)

    @property
    def host(self) -> HostMemory | None:
        """Host memory below the radix cache of SGLang; None without any."""
        specs = () if self.below is None or not self.plans_batches else self.below.specs(self.page_size)
        if not specs:
            return None
        from kvarts.core.tiers.hicache import HostMemory

        assert self.below is not None
        return HostMemory(
            spec=specs[0],
            page_bytes=self.below.kv_bytes_per_token * self.page_size,
            num_layers=self.below.num_layers,
            policy=self.hicache_write_policy,
            storage=self._storage(specs[1]) if self.has_storage else None,
        )

    def _storage(self, spec: TierSpec) -> HostStorage:
        from kvarts.core.tiers.hicache import HostStorage

        numbers = self.storage_numbers()
        return HostStorage(
            spec=spec,
            policy=self.hicache_storage_prefetch_policy,
            least_tokens=max(numbers.prefetch_threshold, self.page_size),
            timeout_s=numbers.prefetch_timeout_base,
            timeout_s_per_page=self.page_size / 1024 * numbers.prefetch_timeout_per_ki_token,
            retry_passes=self.hicache_storage_prefetch_retry_poll_interval,
            most_retries=self.hicache_storage_prefetch_retry_max_attempts,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on each device, with its parts in all counted KV groups; 0 without these and a model."""
        if self.kv_groups != "off":
            return self.memory.page_bytes
        return 0 if self.placement is None else self.page_size * self.placement.kv_bytes_per_token

    @property
    def order(self) -> tuple[AdmissionPolicy, type[Running]]:
        """The order in which requests are admitted, and that in which they are preempted."""
        from kvarts.core.sched.policy import ArrivalPolicy
        from kvarts.core.sched.running import Running, RunningByArrival

        if self.plans_batches:
            from kvarts.core.parts.batches import RunningInBatches
            from kvarts.core.sched.policy import QueuePolicy

            return QueuePolicy(), RunningInBatches
        if self.scheduling_policy == "fcfs":
            return self.admission(), Running
        return ArrivalPolicy(), RunningByArrival

    @property
    def plans_batches(self) -> bool:
        """Whether the engine is SGLang, whose steps are of prompts or of decodes."""
        return plans_batches(self.engine)

    @property
    def batches(self) -> BatchRules | None:
        """The rules of such an engine; None for any other."""
        return self.batch_rules(self.pool_tokens) if self.plans_batches else None

    def _check_batches(self) -> None:
        """Refuse settings of SGLang for another engine, and what that engine does not do."""
        self.check_batches(is_sglang=self.plans_batches)
        if not self.plans_batches:
            return
        reasons = {
            "async_scheduling": (False, "sglang overlaps steps unless {disable_overlap_schedule} is given"),
            "stop_tokens": (False, "it is not modelled"),
            "scheduling_policy": ("fcfs", "it is vLLM's"),
            "admission": (_default_admission(), "it has an order of its own"),
            "long_prefill_token_threshold": (0, "it is vLLM's"),
            "watermark": (0.0, "it is vLLM's"),
            "prefill_schedule_interval": (1, "it is vLLM's"),
        }
        self.check_left_out(
            {name: (default, f"does not go with {{engine}} sglang: {why}") for name, (default, why) in reasons.items()}
        )
        if self.max_num_batched_tokens % self.page_size:
            raise SettingError(
                f"must be a multiple of {{page_size}}, {self.page_size}, with {{engine}} sglang",
                "max_num_batched_tokens",
            )
        self._check_host()
        has_host = self.below is not None and bool(self.below.listed)
        self.check_windows(self.pool_tokens, has_host=has_host)
        self.check_states(has_host=has_host)

    def _check_host(self) -> None:
        """Refuse what host memory below SGLang's tree does not do."""
        sizes = self.given_host_sizes
        if len(sizes) > 1:
            raise SettingError("is given beside {hicache_size}", "hicache_ratio", hint="Keep one of them.")
        if sizes and self.offload is not None and self.offload.listed:
            raise SettingError("is given beside another size of host memory", sizes[0], hint="Keep one of them.")
        has_host = self.below is not None and bool(self.below.listed)
        self.check_storage(has_host=has_host)
        if not has_host:
            if self.hicache_write_policy != "write_through":
                raise SettingError(
                    "has no effect without host memory", "hicache_write_policy", hint="Give {hicache_ratio} as well."
                )
            return
        self.check_host()
        if self.offload is None:
            return
        for field in msgspec.structs.fields(OffloadConfig):
            if self.has_storage and field.name in OF_FILES:
                continue
            if field.name not in OF_HOST and getattr(self.offload, field.name) != field.default:
                raise SettingError(
                    "has no effect with {engine} sglang, whose host memory has rules of its own",
                    f"offload.{field.name}",
                    hint="Give {hicache_storage_backend} file, or leave it out."
                    if field.name in OF_FILES
                    else "Leave it out; see {hicache_write_policy}.",
                )

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
            renames_states=rules_of(self.engine).renames_states,
            saves_inside=mode == "align" and self.start is not None and self.start.saves_states_inside,
            drops_last=self.start is not None and self.start.drafts is not None and self.start.drafts.drops_last,
        )

    @property
    def retention_interval(self) -> int | None:
        """The number of `prefix_cache_retention_interval`; None for all parts. Raises SettingError for other texts."""
        text = self.prefix_cache_retention_interval
        if text == "none":
            return None
        number = whole_number(str(text))
        if number is None or number % self.page_size:
            raise SettingError(
                f"must be none, 0 or a multiple of {self.page_size} tokens, got {brief(text)}",
                "prefix_cache_retention_interval",
            )
        return number

    @property
    def num_blocks(self) -> int:
        """The memory of a replica in its unit of accounting: pages, or with KV groups the blocks of that many pages."""
        if self.kv_groups == "off":
            return self.num_pages
        start = self.start
        if start is not None and self.num_pages == start.num_pages(self.groups):
            return (start.num_blocks - 1) * self.memory.num_pieces
        return self.memory.num_blocks(self.num_pages)

    def _check_ranks(self) -> None:
        ranks = int(getattr(self.cost, "num_ranks", 1))
        if self.prefill_schedule_interval > 1 and (ranks > 1 or self.engine == "vllm==0.32"):
            what = "is counted by ranks in lock step" if ranks > 1 else "has no effect in vLLM 0.32 without such ranks"
            raise SettingError(what, "prefill_schedule_interval", hint="Leave it out.")
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
        values["offload"] = None if self._sized is None else self._sized.to_builtins()
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
        if self.prefill_schedule_interval == 1:
            del values["prefill_schedule_interval"]
        if values["prefix_cache_retention_interval"] == "none":
            del values["prefix_cache_retention_interval"]
        if self.scheduling_policy == "fcfs":
            del values["scheduling_policy"]
        given = {*self.given_of_sglang()} - {"hicache_ratio", "hicache_size"}  # the size of `offload` says it
        values = {name: value for name, value in values.items() if name in given or name not in SGLANG_NAMES}
        if self.start is None:
            del values["start"]
        else:
            values["start"] = msgspec.to_builtins(self.start)
        placement = values.pop("placement")
        if placement is not None:
            assert self.placement is not None
            values = {**self.placement.to_builtins(), **values}
        groups = values.pop("groups")
        if groups:
            values["page_bytes"] = self.memory.page_bytes
        elif not self.whole_pages:
            del values["kv_groups"]
        if not self.whole_pages:
            del values["whole_pages"]
        if not self.not_started:
            del values["not_started"]
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
                values[field] = make.__name__ if hasattr(make, "of_trace") else type(make()).__name__
        return values


def order_of(given: Any) -> Callable[[], EvictionOrder]:
    """Return a factory of eviction orders, for a name, a class or an object. Raise SettingError."""
    from kvarts.sim.eviction import order_maker  # most replays have the default

    try:
        return order_maker(given)
    except ConfigError as error:
        raise SettingError(error.what, "eviction", hint=error.hint) from error


def _admission_of(given: Any) -> Callable[[], AdmissionPolicy]:
    if given == "priority":
        return _default_admission()
    hint = "Give `priority`, module:Class, or a class or an object with its methods."
    is_named = isinstance(given, str) and is_code_name(given)
    found = maker_of(code_named(given, "admission", hint) if is_named else given, "head")
    if found is None:
        raise SettingError(f"{brief(given)} is not an AdmissionPolicy", "admission", hint=hint)
    return found


def _cost_of(given: Any) -> CostModel:
    from kvarts.cost.roofline import parse_cost

    if isinstance(given, str):
        if is_code_name(given) and given.partition(":")[0] not in ("linear", "polynomial"):
            given = code_named(given, "cost", "Give polynomial, linear:KEY=VALUE or module:Class.")
        else:
            return parse_cost(given)
    if not isinstance(given, type):
        return cast("CostModel", given)  # a function of a Batch
    try:
        return cast("CostModel", given())
    except (TypeError, ConfigError) as error:
        hint = "Give an object, with its parameters."
        raise SettingError(f"{given.__name__} makes no cost model: {error}", "cost", hint=hint) from error


PYTHON_ONLY = ("admission", "eviction")
OBJECTS = (*PYTHON_ONLY, "cost", "offload", "router", "routing", "sessions", "slo")
"""Settings of a configuration that can be objects."""


def option_names() -> list[str]:
    """Return the names that `ReplayConfig.of_options` takes."""
    sections = [*SECTIONS, *TABLES]
    settings = [setting for section in sections if not section.is_named for setting in section.settings]
    fields = [setting.field for setting in settings if "." not in setting.key]
    tables = [section.table for section in sections if section.into]
    return list(dict.fromkeys([*map(keyword_of, settings), *fields, *tables, *OBJECTS]))


def _is_object(name: str, value: object) -> bool:
    return name in PYTHON_ONLY or (name in OBJECTS and not isinstance(value, str))


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


OF_HOST = (
    *("tiers", "host_pages", "host_memory", "h2d", "d2h", "latency_us", "kv_bytes_per_token", "num_layers"),
    "full_prompt_hits",
)
"""Settings of tiers that host memory below SGLang's tree has."""
OF_FILES = ("disk_read", "disk_write", "disk_latency_us")
"""Those that storage below it has."""

OF_START = ("pages", "page_size", "kv_groups", "mamba_cache_mode", "prefix_cache_retention_interval")
"""Settings that a start of vLLM decides otherwise: a replay that gives one without an engine is not of a start."""

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
    """Return the configuration as vLLM's newest version starts, for a model on a device and the engine `vllm` or none.

    Without an engine, for models with layers that keep less only: the rules for all others are vLLM's in any case. A
    replay that does not support a part of that start has its settings without it, and the reason; so has one without an
    engine if vLLM refuses to start, unless no pages fit without it, either.
    """
    is_asked = given.get("engine") == "vllm" and "model" in given and "device" in given
    if not is_asked and ("engine" in given or not counts_groups or not keeps_less(given)):
        return _resolved_groups(given, sections, asked, counts_groups=counts_groups)
    try:
        if not is_asked and (key := next((key for key in OF_START if key in given), None)) is not None:
            raise SettingError("is given, and a start decides it", key)
        config = _resolved_groups(_newest(given), sections, asked, counts_groups=counts_groups)
    except ConfigError as refused:
        is_of_vllm = is_of_start(refused)
        if is_of_vllm and is_asked:
            raise
        try:
            config = _resolved_groups(given, sections, asked, counts_groups=counts_groups)
        except ConfigError:
            if is_of_vllm:
                raise refused from refused.__cause__
            raise
        return msgspec.structs.replace(config, not_started=reason_of(refused))
    return config


def _newest(given: Given) -> Given:
    """Return the settings with the newest version of vLLM as their engine."""
    newest = Given()
    if "engine" in given:
        newest.add(given.setting_of("engine"), NEWEST, given.source_of("engine"))
    else:
        engine = next(each for each in settings_of(ReplayConfig) if each.key == "engine")
        newest.add(engine, NEWEST, given.source_of("device"))
    return newest.over(given)


def _resolved_groups(
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
        has_pool = config.window or config.max_mamba_cache_size
        return config if has_pool else msgspec.structs.replace(config, whole_pages=reason_of(refused))


def check_features(features: Mapping[str, str]) -> None:
    """Raise SettingError if some of the features are refused together; a single one never is."""
    if len(features) > 1:
        from kvarts.core.parts.combines import check_combination

        check_combination(features)


def reason_of(error: ConfigError) -> str:
    """Return the refusal with the name of the field at fault, however the user spelled it."""
    *_, error = _causes(error)
    what = error.what.rstrip(".")
    return what if error.field is None else f"{error.field} {what}"


def is_of_start(error: ConfigError) -> bool:
    """Return whether vLLM itself refuses to start."""
    return any(isinstance(each, StartRefusedError) for each in _causes(error))


def _causes(error: ConfigError) -> Iterator[ConfigError]:
    """Yield an error and those that it was raised from."""
    yield error
    cause = error.__cause__
    if isinstance(cause, ConfigError) and cause is not error:
        yield from _causes(cause)


def _resolved(
    given: Given, sections: Sequence[Section], asked: Mapping[str, str], *, counts_groups: bool
) -> ReplayConfig:
    is_limited = "max_seqs" in given
    if "engine" in given:
        given = with_engine(given, DeviceSettings, ReplayConfig)
    facts = resolve_hardware(given, counts_groups=counts_groups)
    if is_limited:
        facts.pop("max_num_seqs", None)
    engine = engine_of(given["engine"]) if "engine" in given else None
    if engine is not None and hasattr(facts.get("cost"), "separate_passes"):
        facts["cost"] = facts["cost"].served_by(given["engine"], separate_passes=engine.separate_passes)
    if engine is not None and engine.full_prompt_hits and not counts_parts(given, facts):
        facts["full_prompt_hits"] = True
    config = _loading_as_started(build_replay(given, sections, facts), given, asked)
    try:
        config.check_tiers()
        check_features({**config.features, **asked})
    except ConfigError as error:
        raise given.named(error, ()) from error
    return config


def _loading_as_started(config: ReplayConfig, given: Given, asked: Mapping[str, str]) -> ReplayConfig:
    """Return a start of vLLM with asynchronous loads, which its own connectors have, where these combine with the rest.

    As vLLM's OffloadingConnector and SimpleCPUOffloadConnector; others, such as LMCache's, may load synchronously.
    """
    if config.start is None or config.offload is None or "offload.load_kv" in given:
        return config
    from kvarts.core.parts.combines import why_not

    if why_not("async_loads", *config.features, *asked):
        return config
    return msgspec.structs.replace(config, offload=msgspec.structs.replace(config.offload, load_kv="async"))


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
    if "offload" not in values and ("hicache_ratio" in given or "hicache_size" in given):
        values["offload"] = given.build(OffloadConfig, "offload", facts=facts)
    if "cost" in facts:
        values["cost"] = facts["cost"]
    if "placement" in facts:
        values["placement"] = facts["placement"]
    if "max_num_seqs" in facts:
        values["max_num_seqs"] = facts["max_num_seqs"]
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


def _own_router(given: Given) -> Callable[[], Any]:
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
            "router", error.what, hint="See kvarts.policies.RouterPolicy for what a router has."
        ) from error


def make_config(
    values: Mapping[str, Any],
    *,
    sections: Sequence[Section] = SECTIONS,
    counts_groups: bool = True,
) -> ReplayConfig:
    """Build a ReplayConfig from values by the keys of a file. Raises ConfigError that names the key."""
    return resolve_replay(given_in(values, sections), sections, counts_groups=counts_groups)
