"""Settings of the engine `sglang`, by SGLang's names, and the rules that they are for the scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from kvarts.base.decoders import UNDECODED
from kvarts.base.limits import MOST_COUNT, brief, check_number, check_whole
from kvarts.base.settings import SettingError, setting
from kvarts.core.config import (
    SLIDE_TOKENS,
    BatchRules,
    EngineConfig,
    PrefetchPolicy,
    QueueOrder,
    RadixEviction,
    WritePolicy,
)

__all__ = ["SGLANG_NAMES", "SglangSettings"]

MOST_CONSERVATIVENESS: Final = 1e6
MOST_RATIO: Final = 1e6
MOST_GB: Final = 1e6
MOST_PRIORITY: Final = 1 << 63
SWA_RATIO: Final = 0.8
WINDOW_FAMILIES: Final = {"gemma4_text": 1, "gpt_oss": 1, "llama4_text": 0, "mimo_v2_flash": 0, "step3p5": 0}
"""The models, by `model_type`, whose windows have a pool in SGLang 0.5.23; and by how much its windows are shorter than
those of the config, which count the token itself (model_config.py: is_hybrid_swa_model; models/*.py)."""
STATE_FAMILIES: Final = frozenset(
    ("falcon_h1", "granitemoehybrid", "kimi_linear", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
)
"""The models, by `model_type`, whose states have slots and extra buffers in SGLang 0.5.23 (arg_groups/overrides.py)."""
NUMBERS_OF_EVICTION: Final[dict[RadixEviction, tuple[str, ...]]] = {
    "slru": ("protected_threshold",),
    "tlru": ("threshold", "next_prompt_estimate"),
}
"""The numbers that orders of eviction take."""
MAMBA_RATIO: Final = 0.9
MAMBA_CHUNK: Final = 64
LOCKED_SLOTS: Final = 3
"""Slots per request that may run, next to its buffers: for its state, for the one that it found, for one to insert
(kv_cache_configurator.py: _calculate_mamba_ratio)."""
StateStrategy = Literal["auto", "no_buffer", "extra_buffer"]
StateFormat = Literal["auto", "float32", "bfloat16", "float16"]
StorageBackend = Literal[
    "none",
    "file",
    "sim",
    "mooncake",
    "npu_memcache",
    "hf3fs",
    "nixl",
    "aibrix",
    "dynamic",
    "eic",
    "simm",
    "mori",
    "shm",
    "tensorcast",
    "seaweedfs",
]


def buffers_of(strategy: StateStrategy, page_size: int, *, overlaps: bool) -> int:
    """Return the slots of a running request for states that it leaves for others (allocation_sizing.py)."""
    if strategy == "no_buffer" or (strategy == "auto" and page_size == 1 and not overlaps):
        return 0
    return 1 + overlaps


def check_slots(num_slots: int, memory_ratio: float) -> None:
    """Raise ConfigError for a number of slots for states, or a share of memory for them, that cannot be."""
    check_whole(num_slots, "max_mamba_cache_size", least=0)
    check_number(memory_ratio, "mamba_full_memory_ratio", above=True, most=MOST_RATIO)


class StorageNumbers(msgspec.Struct, frozen=True):
    """What decides something in `hicache_storage_backend_extra_config`, which has settings of backends as well."""

    prefetch_threshold: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 256
    prefetch_timeout_base: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0
    prefetch_timeout_per_ki_token: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.25
    max_size: Any = None
    min_free_space: Any = None


class SglangSettings(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine with the settings of SGLang's scheduler, which have an effect with the engine `sglang` only."""

    disable_overlap_schedule: Annotated[
        bool,
        setting("With the engine sglang: take the results of a step before the next one is planned."),
    ] = False
    max_prefill_tokens: Annotated[
        int,
        setting(
            "With the engine sglang: tokens of prompts after which a step admits no further one.",
            metavar="TOKENS",
            default="16384",
        ),
    ] = 0
    scheduler_recv_interval: Annotated[
        int,
        setting(
            "With the engine sglang: steps of decodes between two in which requests are received. A step of prompts "
            "counts as 1,000 of them.",
            metavar="STEPS",
        ),
    ] = 1
    schedule_conservativeness: Annotated[
        float | None,
        setting(
            "With the engine sglang: promise running requests 0.7 times this of the tokens that they may generate, and "
            "less with each step, as requests may end before. Without, they are promised all, as with ignore_eos.",
            metavar="X",
        ),
    ] = None
    schedule_policy: Annotated[
        QueueOrder,
        setting(
            "With the engine sglang: fcfs, first come, first served; lpm, the longest prefix in the cache first, if at "
            "most 128 requests wait; dfs-weight, by a walk through the cache, first to what most requests find."
        ),
    ] = "fcfs"
    radix_eviction_policy: Annotated[
        RadixEviction,
        setting(
            "With the engine sglang: what the cache evicts first. lru: the least recent; lfu: what the fewest requests "
            "have used; slru: what fewer than two have used; priority: prompts and answers of the lowest priority; "
            "tlru: ends of conversations that a TTFT does not need, then the least recent."
        ),
    ] = "lru"
    radix_eviction_policy_config: Annotated[
        str,
        setting(
            "With the engine sglang: numbers of radix_eviction_policy, as a JSON object. slru: protected_threshold; "
            "tlru: threshold and next_prompt_estimate, in tokens.",
            metavar="JSON",
        ),
    ] = ""
    hicache_ratio: Annotated[
        float,
        setting(
            "With the engine sglang: host memory below the tree, as a multiple of the device's, and a page; 0: none.",
            metavar="RATIO",
        ),
    ] = 0.0
    hicache_size: Annotated[
        float,
        setting("With the engine sglang: host memory below the tree, in billions of bytes, and a page.", metavar="GB"),
    ] = 0.0
    hicache_write_policy: Annotated[
        WritePolicy,
        setting(
            "With the engine sglang and host memory: copy to it what is computed, what is used a second time "
            "(write_through_selective), or what the device evicts (write_back)."
        ),
    ] = "write_through"
    hicache_storage_backend: Annotated[
        StorageBackend,
        setting(
            "With the engine sglang: storage below host memory, by SGLang's name. All have the same rules, no limit of "
            "size, and the speeds of files."
        ),
    ] = "none"
    hicache_storage_prefetch_policy: Annotated[
        PrefetchPolicy,
        setting(
            "With storage: a request takes what has been read for it when it is looked at (best_effort), waits for all "
            "of it, or does so for a time."
        ),
    ] = "timeout"
    hicache_storage_backend_extra_config: Annotated[
        str,
        setting(
            "With storage: numbers of its prefetches, as a JSON object. prefetch_threshold, in tokens; "
            "prefetch_timeout_base, in seconds; and prefetch_timeout_per_ki_token. Other keys have no effect.",
            metavar="JSON",
        ),
    ] = ""
    hicache_storage_prefetch_retry_poll_interval: Annotated[
        int,
        setting("With storage: plans after which a request asks it again; 0: never.", metavar="N"),
    ] = 8
    hicache_storage_prefetch_retry_max_attempts: Annotated[
        int, setting("With storage: how often a request asks it again.", metavar="N")
    ] = 8
    sliding_window_size: Annotated[
        int,
        setting(
            "With the engine sglang: tokens before its own that a token attends to in layers with sliding windows.",
            metavar="TOKENS",
            default="of the model",
        ),
    ] = 0
    swa_full_tokens_ratio: Annotated[
        float,
        setting(
            "Tokens of the pool of these layers, as a part of those of the other one.",
            metavar="RATIO",
        ),
    ] = SWA_RATIO
    disable_hybrid_swa_memory: Annotated[
        bool, setting("With the engine sglang: no such pool; every layer keeps every token.")
    ] = False
    max_mamba_cache_size: Annotated[
        int, setting("With the engine sglang: slots for states.", metavar="SLOTS", default="of the model")
    ] = 0
    mamba_full_memory_ratio: Annotated[
        float, setting("Memory of these slots, as a multiple of that of KV.", metavar="RATIO")
    ] = MAMBA_RATIO
    mamba_ssm_dtype: Annotated[
        StateFormat, setting("Number format of the states.", default="of the model, or float32")
    ] = "auto"
    mamba_radix_cache_strategy: Annotated[
        StateStrategy,
        setting(
            "With states: others find those where an insertion ends (no_buffer), or every mamba_chunk_size and "
            "mamba_track_interval tokens (extra_buffer)."
        ),
    ] = "auto"
    mamba_track_interval: Annotated[
        int, setting("With extra_buffer: an answer has a state every so many tokens.", metavar="TOKENS")
    ] = 256
    mamba_chunk_size: Annotated[
        int,
        setting("With extra_buffer: a prompt has a state after so many.", metavar="TOKENS", default="of the model"),
    ] = MAMBA_CHUNK
    enable_priority_scheduling: Annotated[
        bool,
        setting(
            "With the engine sglang: requests of larger priorities come first, and preempt running ones whose priority "
            "is lower by more than priority_scheduling_preemption_threshold."
        ),
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, setting("With enable_priority_scheduling: requests of lower priorities come first.")
    ] = False
    disable_priority_preemption: Annotated[
        bool, setting("With enable_priority_scheduling: running requests are not preempted.")
    ] = False
    priority_scheduling_preemption_threshold: Annotated[
        int,
        setting("With enable_priority_scheduling: the difference that does not suffice to preempt.", metavar="N"),
    ] = 10
    retraction_policy: Annotated[
        Literal["length", "priority"],
        setting(
            "With enable_priority_scheduling: whom decodes retract first if they lack memory. length: those with the "
            "fewest generated tokens; priority: the least important."
        ),
    ] = "length"

    def batch_rules(self, num_tokens: int) -> BatchRules:
        """Return the rules of the scheduler, with a pool of `num_tokens` tokens."""
        return BatchRules(
            window=self.window,
            window_pages=self._window_pages(num_tokens),
            slots=self.max_mamba_cache_size,
            state_buffers=self.state_buffers if self.max_mamba_cache_size else 0,
            state_chunk=self._state_chunk if self.state_buffers else 0,
            track_interval=math.lcm(self._state_chunk, self.mamba_track_interval) if self.state_buffers else 0,
            overlaps=not self.disable_overlap_schedule,
            max_prefill_tokens=self.max_prefill_tokens or BatchRules().max_prefill_tokens,
            ignores_eos=self.schedule_conservativeness is None,
            conservativeness=1.0 if self.schedule_conservativeness is None else self.schedule_conservativeness,
            policy=self.schedule_policy,
            eviction=self.radix_eviction_policy,
            eviction_config=self._eviction_config(),
            has_priorities=self.enable_priority_scheduling,
            low_first=self.schedule_low_priority_values_first,
            preempts=self.enable_priority_scheduling and not self.disable_priority_preemption,
            threshold=self.priority_scheduling_preemption_threshold,
            retracts_by_priority=self.retraction_policy == "priority",
        )

    def check_left_out(self, settings: Mapping[str, tuple[Any, str]]) -> None:
        """Raise SettingError for one of `settings` that does not have its default, with the reason next to that."""
        for name, (default, why) in settings.items():
            if getattr(self, name) != default:
                raise SettingError(why, name, hint="Leave it out.")

    @property
    def window(self) -> int:
        """The tokens before their own that layers with sliding windows attend to, if these have a pool; else 0."""
        return 0 if self.disable_hybrid_swa_memory else self.sliding_window_size

    def _window_pages(self, num_tokens: int) -> int:
        """Return the pages of the pool of window KV, next to one of `num_tokens` tokens (pool_configurator.py)."""
        return int(num_tokens * self.swa_full_tokens_ratio) // self.page_size

    def check_windows(self, num_tokens: int, *, has_host: bool) -> None:
        """Raise SettingError for a pool of window KV that is too small, and for what does not go with one."""
        if not self.window:
            if "swa_full_tokens_ratio" in self.given_of_sglang():
                raise SettingError(
                    "has no effect without sliding windows", "swa_full_tokens_ratio", hint="Leave it out."
                )
            return
        why = "is not modelled for a model with sliding windows"
        self.check_left_out({"radix_eviction_policy": ("lru", why), "enable_priority_scheduling": (False, why)})
        if has_host:
            raise SettingError(
                "has a pool of its own, below which host memory is not modelled",
                "sliding_window_size",
                hint="Give {disable_hybrid_swa_memory}, with which every token is kept in all layers.",
            )
        window_pages = -(-self.window // self.page_size)
        num_slid = -(-SLIDE_TOKENS // self.page_size)
        least = 3 * window_pages + 2 * num_slid + 6
        if self._window_pages(num_tokens) < least:
            raise SettingError(
                f"leaves {self._window_pages(num_tokens)} pages of KV for windows of {self.window} tokens, and one "
                f"request may need {least}",
                "swa_full_tokens_ratio",
                hint="Give a larger ratio, or more memory.",
            )

    @property
    def state_buffers(self) -> int:
        """The slots of a running request for states that it leaves for others."""
        return buffers_of(self.mamba_radix_cache_strategy, self.page_size, overlaps=not self.disable_overlap_schedule)

    @property
    def _state_chunk(self) -> int:
        return max(self.mamba_chunk_size, self.page_size)

    @property
    def slots_per_request(self) -> int:
        """The slots that there are for each request that may run."""
        return LOCKED_SLOTS + self.state_buffers

    def check_states(self, *, has_host: bool) -> None:
        """Raise SettingError for slots that are too few, and for what does not go with states."""
        if not self.max_mamba_cache_size:
            for name in _OF_STATES:
                if name in self.given_of_sglang():
                    raise SettingError("has no effect without states", name, hint="Leave it out.")
            return
        why = "is not modelled for a model with states"
        others = {"radix_eviction_policy": ("lru", why), "enable_priority_scheduling": (False, why)}
        self.check_left_out(others | {"sliding_window_size": (0, why)})
        if has_host:
            raise SettingError(
                "states have slots of their own, below which host memory is not modelled",
                next(iter(self.given_host_sizes), "max_mamba_cache_size"),
                hint="Leave host memory out, or give --kv-groups off, with which states are set aside and not found.",
            )
        if not self.state_buffers and (self.page_size > 1 or not self.disable_overlap_schedule):
            raise SettingError(
                "no_buffer is for pages of one token without the overlap schedule",
                "mamba_radix_cache_strategy",
                hint="Give page_size 1 and {disable_overlap_schedule} as well, or leave it out.",
            )
        chunk, page_size = sorted((self.mamba_chunk_size, self.page_size), reverse=True)
        if chunk % page_size:
            raise SettingError(
                f"must be a multiple of {{page_size}}, {self.page_size}, or divide it", "mamba_chunk_size"
            )
        if self.mamba_track_interval % self.page_size:
            raise SettingError(f"must be a multiple of {{page_size}}, {self.page_size}", "mamba_track_interval")
        least = self.slots_per_request * self.max_num_seqs
        num_slots = self.max_mamba_cache_size
        if num_slots < least:
            most = num_slots // self.slots_per_request
            raise SettingError(
                f"{num_slots:,} slots are fewer than the {least:,} for states of {self.max_num_seqs:,} requests "
                "(max_seqs)",
                "max_mamba_cache_size",
                hint=f"Give {least} or more" + (f", or max_seqs of {most} or less." if most else "."),
            )

    def options_of_server(self) -> dict[str, Any]:
        """Return the options of SGLang's server, but for the size of host memory; those of flags are None.

        The size of a window, and of a chunk of states, is not an option: the server takes that of the model.
        """
        left_out = {*self.given_host_sizes, "sliding_window_size", "mamba_chunk_size"}
        values = {name: getattr(self, name) for name in self.given_of_sglang() if name not in left_out}
        return {name.replace("_", "-"): None if value is True else value for name, value in values.items()}

    def given_of_sglang(self) -> list[str]:
        """Return the names of SGLang's settings that do not have their default."""
        return [field.name for field in _FIELDS if getattr(self, field.name) != field.default]

    def check_batches(self, *, is_sglang: bool) -> None:
        """Raise SettingError for a value that is not valid, or has no effect without another setting."""
        check_whole(self.max_prefill_tokens, "max_prefill_tokens", least=0)
        check_whole(self.scheduler_recv_interval, "scheduler_recv_interval", most=MOST_COUNT)
        check_whole(
            self.priority_scheduling_preemption_threshold,
            "priority_scheduling_preemption_threshold",
            least=-MOST_PRIORITY,
            most=MOST_PRIORITY,
        )
        if self.schedule_conservativeness is not None:
            check_number(self.schedule_conservativeness, "schedule_conservativeness", most=MOST_CONSERVATIVENESS)
        check_whole(self.sliding_window_size, "sliding_window_size", least=0)
        check_number(self.swa_full_tokens_ratio, "swa_full_tokens_ratio", above=True, most=1.0)
        check_slots(self.max_mamba_cache_size, self.mamba_full_memory_ratio)
        check_whole(self.mamba_track_interval, "mamba_track_interval", most=MOST_COUNT)
        check_whole(self.mamba_chunk_size, "mamba_chunk_size", most=MOST_COUNT)
        check_number(self.hicache_ratio, "hicache_ratio", most=MOST_RATIO)
        check_number(self.hicache_size, "hicache_size", most=MOST_GB)
        check_whole(
            self.hicache_storage_prefetch_retry_poll_interval, "hicache_storage_prefetch_retry_poll_interval", least=0
        )
        check_whole(
            self.hicache_storage_prefetch_retry_max_attempts, "hicache_storage_prefetch_retry_max_attempts", least=0
        )
        self.storage_numbers()
        for name, values in _CHOICES.items():
            if (value := getattr(self, name)) not in values:
                raise SettingError(f"must be one of {', '.join(values)}, got {value!r}", name)
        given = self.given_of_sglang()
        if given and not is_sglang:
            raise SettingError("has no effect without {engine} sglang", given[0], hint="Leave it out.")
        if not self.enable_priority_scheduling:
            for name in _OF_PRIORITIES:
                if name in given:
                    raise SettingError(
                        "has no effect without {enable_priority_scheduling}",
                        name,
                        hint="Give {enable_priority_scheduling}, or leave it out.",
                    )
        elif self.schedule_policy != "fcfs":
            raise SettingError("does not go with {schedule_policy} other than fcfs", "enable_priority_scheduling")
        numbers = self._eviction_config()
        if self.radix_eviction_policy == "tlru":
            threshold, estimate = numbers.get("threshold", 0), numbers.get("next_prompt_estimate", 0)
            if threshold <= estimate:
                raise SettingError(
                    f"needs a threshold above next_prompt_estimate, got {threshold} and {estimate}",
                    "radix_eviction_policy_config",
                    hint='Give {radix_eviction_policy_config} as \'{"threshold": 4096, "next_prompt_estimate": 512}\'.',
                )

    @property
    def given_host_sizes(self) -> list[str]:
        """The settings that give host memory below the tree."""
        return [name for name in ("hicache_ratio", "hicache_size") if getattr(self, name)]

    def check_storage(self, *, has_host: bool) -> None:
        """Raise SettingError for storage without host memory above it, and for its settings without it."""
        if self.has_storage:
            if not has_host:
                raise SettingError(
                    "needs host memory above it", "hicache_storage_backend", hint="Give {hicache_ratio} as well."
                )
            if self.hicache_write_policy == "write_back":
                raise SettingError(
                    "does not go with write_back: SGLang's own scheduler can run out of memory there",
                    "hicache_storage_backend",
                    hint="Give {hicache_write_policy} write_through or write_through_selective.",
                )
            return
        for name in _OF_STORAGE:
            if name in self.given_of_sglang():
                raise SettingError(
                    "has no effect without {hicache_storage_backend}",
                    name,
                    hint="Give {hicache_storage_backend} file, or leave it out.",
                )

    def check_host(self) -> None:
        """Raise SettingError for a setting that does not go with host memory below the tree."""
        does_not = "does not go with host memory: "
        others = {
            "radix_eviction_policy": ("lru", f"{does_not}other orders of eviction above host memory are not modelled"),
            "enable_priority_scheduling": (False, f"{does_not}preemption above host memory is not modelled"),
        }
        self.check_left_out(others)
        if self.schedule_policy == "dfs-weight":
            raise SettingError(
                "does not go with host memory: dfs-weight above it is not modelled",
                "schedule_policy",
                hint="Give {schedule_policy} fcfs or lpm.",
            )

    @property
    def has_storage(self) -> bool:
        """Whether there is storage below host memory."""
        return self.hicache_storage_backend != "none"

    def storage_numbers(self) -> StorageNumbers:
        """Return the numbers of prefetches. Raise SettingError for others."""
        name = "hicache_storage_backend_extra_config"
        text = self.hicache_storage_backend_extra_config
        try:
            numbers = msgspec.json.decode(text or "{}", type=StorageNumbers)
        except UNDECODED:
            raise SettingError(
                f"must be a JSON object of numbers, got {brief(text)}",
                name,
                hint='Such as \'{"prefetch_threshold": 256, "prefetch_timeout_base": 1}\'.',
            ) from None
        for limit in ("max_size", "min_free_space"):
            if getattr(numbers, limit):
                raise SettingError(f"has {limit}, and a limit of size is not modelled", name, hint="Leave it out.")
        return numbers

    def _eviction_config(self) -> dict[str, int]:
        name = "radix_eviction_policy_config"
        text = self.radix_eviction_policy_config
        try:
            numbers = msgspec.json.decode(text or "{}", type=dict[str, _Number])
        except UNDECODED:
            raise SettingError(f"must be a JSON object of whole numbers, got {brief(text)}", name) from None
        known = NUMBERS_OF_EVICTION.get(self.radix_eviction_policy, ())
        for key in numbers:
            if key not in known:
                names = f"it takes {' and '.join(known)}" if known else "it takes none"
                raise SettingError(f"has {brief(key)}, which {self.radix_eviction_policy} does not know: {names}", name)
        return numbers


_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_FIELDS: Final = tuple(
    field
    for field in msgspec.structs.fields(SglangSettings)
    if field.name not in {inherited.name for inherited in msgspec.structs.fields(EngineConfig)}
)
SGLANG_NAMES: Final = frozenset(field.name for field in _FIELDS)
"""The names of these settings."""
_OF_STORAGE: Final = (
    "hicache_storage_prefetch_policy",
    "hicache_storage_backend_extra_config",
    "hicache_storage_prefetch_retry_poll_interval",
    "hicache_storage_prefetch_retry_max_attempts",
)
_OF_STATES: Final = (
    "mamba_full_memory_ratio",
    "mamba_ssm_dtype",
    "mamba_radix_cache_strategy",
    "mamba_track_interval",
    "mamba_chunk_size",
)
_OF_PRIORITIES: Final = (
    "schedule_low_priority_values_first",
    "disable_priority_preemption",
    "priority_scheduling_preemption_threshold",
    "retraction_policy",
)
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "schedule_policy": get_args(QueueOrder),
    "radix_eviction_policy": get_args(RadixEviction),
    "retraction_policy": ("length", "priority"),
    "hicache_write_policy": get_args(WritePolicy),
    "hicache_storage_backend": get_args(StorageBackend),
    "hicache_storage_prefetch_policy": get_args(PrefetchPolicy),
    "mamba_radix_cache_strategy": get_args(StateStrategy),
    "mamba_ssm_dtype": get_args(StateFormat),
}
