"""Configuration of one engine: the size of its KV memory and the limits of its steps.

It is an immutable value that is checked on construction, so callers of the library get the same errors as users of the
command line. TOML files and the command line use the short field names in `rename`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

import msgspec

from kvarts.base.limits import MOST_COUNT, MOST_MS, MOST_PAGE_TOKENS, MOST_PAGES, check_number, check_whole
from kvarts.base.settings import SettingError, setting

__all__ = [
    "SLIDE_TOKENS",
    "BatchEngineConfig",
    "BatchRules",
    "EngineConfig",
    "EngineOptions",
    "PrefetchPolicy",
    "Profile",
    "QueueOrder",
    "RadixEviction",
    "Slo",
    "Snapshots",
    "WritePolicy",
]

Profile = Literal["default", "mocker"]
QueueOrder = Literal["fcfs", "lpm", "dfs-weight"]
RadixEviction = Literal["lru", "lfu", "slru", "priority", "tlru"]
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
"""How long a request waits for what is read from storage for it."""
Snapshots = Literal["ends", "branches"]
SessionRetention = Literal["pin", "cache", "host"]
"""Where the KV of a session is between turns."""

AtCapacity = Literal["refuse", "evict"]
"""What happens to a new session without room for it: it is refused, or evicts the one idle longest."""

StateMode = Literal["snapshots", "all", "align"]
"""The states that a prefix cache keeps: `snapshots` at ends of prompts, one after `all` pages, or one after the last
page of each chunk of a prompt, which ends at a page: `align`. The last two are modes of vLLM."""


class EngineConfig(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={
        "num_pages": "pages",
        "max_num_batched_tokens": "max_batched_tokens",
        "max_num_seqs": "max_seqs",
    },
):
    """Size and limits of one engine.

    `num_pages`: pages of KV memory. `page_size`: tokens per page. `max_num_batched_tokens`: most tokens computed per
    step. `max_num_seqs`: most requests running at once. `max_itl_ms`: a bound on the expected duration of steps with
    decodes, see ItlBound in kvarts.core.parts.latency; None for no bound. `profile`: `default`, or `mocker` for the
    rules of NVIDIA Dynamo's mocker in its vLLM mode: no priorities, generated tokens are never hit, and a request's
    cached tokens are the largest hit of any of its admissions. `long_prefill_token_threshold`: most tokens that one
    request computes per step while there are others; 0 for no limit. `watermark`: fraction of the memory, in [0,
    1), that an admission leaves free while other requests run. `prefill_schedule_interval`: steps from one with
    tokens of prompts to the next, while others decode and none has been left waiting. These three are vLLM's.
    `snapshots`: where layers with a state leave snapshots: at the last page end of each prompt, or also where a
    prompt leaves another.

    Raises ConfigError for a value out of range.
    """

    num_pages: Annotated[
        int,
        setting(
            "Pages of KV memory of each replica.",
            metavar="N",
            default="32768; with --device, the pages that fit",
            replaces=("kv_memory",),
        ),
    ] = 32_768
    page_size: Annotated[int, setting("Tokens per page.", metavar="TOKENS")] = 16
    max_num_batched_tokens: Annotated[int, setting("Most tokens computed per step.", metavar="TOKENS")] = 8_192
    max_num_seqs: Annotated[int, setting("Most requests that run at once.", metavar="N")] = 256
    max_itl_ms: Annotated[
        float | None,
        setting("Longest step with decodes: chunks of prompts are cut to keep it, to a page at least.", metavar="MS"),
    ] = None
    profile: Annotated[Profile, setting("Rules of the scheduler: kvarts' own, or those of NVIDIA Dynamo's mocker.")] = (
        "default"
    )
    long_prefill_token_threshold: Annotated[
        int,
        setting("Tokens of one request a step may compute while there are others; 0: no limit.", metavar="TOKENS"),
    ] = 0
    prefill_schedule_interval: Annotated[
        int,
        setting("Compute prompts in one of N steps, unless nothing decodes or requests are left waiting.", metavar="N"),
    ] = 1
    watermark: Annotated[
        float, setting("Fraction of the memory that stays free when a request joins others.", metavar="FRACTION")
    ] = 0.0
    snapshots: Annotated[
        Snapshots,
        setting(
            "Where layers with a state leave snapshots, from which others continue. ends: at the last page end of each "
            "prompt; branches: also where a prompt leaves another one that is cached."
        ),
    ] = "ends"

    def __post_init__(self) -> None:
        check_whole(self.num_pages, "num_pages", most=MOST_PAGES)
        check_whole(self.page_size, "page_size", most=MOST_PAGE_TOKENS)
        check_whole(self.max_num_batched_tokens, "max_num_batched_tokens")
        check_whole(self.max_num_seqs, "max_num_seqs")
        if self.max_itl_ms is not None:
            check_number(self.max_itl_ms, "max_itl_ms", above=True, most=MOST_MS)
        if self.profile not in ("default", "mocker"):
            raise SettingError(f"must be 'default' or 'mocker', got {self.profile!r}", "profile")
        if self.snapshots not in get_args(Snapshots):
            raise SettingError(f"must be 'ends' or 'branches', got {self.snapshots!r}", "snapshots")
        check_whole(self.long_prefill_token_threshold, "long_prefill_token_threshold", least=0)
        check_whole(self.prefill_schedule_interval, "prefill_schedule_interval", most=MOST_COUNT)
        check_number(self.watermark, "watermark", most=1.0)
        if self.max_num_seqs > self.max_num_batched_tokens and not self.plans_batches:
            raise SettingError(
                f"{self.max_num_seqs} sequences cannot each get a token from a budget of "
                f"{self.max_num_batched_tokens} tokens a step",
                "max_num_seqs",
                "max_num_batched_tokens",
                of=self,
                hint=f"Raise {{max_num_batched_tokens}}, or set {{max_num_seqs}} to {self.max_num_batched_tokens} "
                "or less.",
            )

    @property
    def plans_batches(self) -> bool:
        """Whether steps of prompts and of decodes are apart, so that decodes need no part of a budget."""
        return False

    @property
    def pool_tokens(self) -> int:
        """Number of tokens that the whole pool holds."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that `num_tokens` tokens occupy, including a partial last page."""
        return -(-num_tokens // self.page_size)


class BatchEngineConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and limits of an engine whose steps are of prompts or of decodes: the budget is that of prompts."""

    @property
    def plans_batches(self) -> bool:
        """Return True."""
        return True


SLIDE_TOKENS: Final = 128
"""The tokens that leave the window of a decode before its KV is released: SGLang's SGLANG_SWA_EVICTION_INTERVAL."""


class BatchRules(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine plans steps of prompts or of decodes, as SGLang: see kvarts.core.parts.batches.

    `overlaps`: a step is planned before the results of the one before it are taken. `max_prefill_tokens`: a step that
    has computed so many tokens of prompts admits no further one. `ignores_eos`: requests generate all tokens that they
    ask for, so that running ones are promised them all; else a share, which begins with 0.7 times `conservativeness`.
    `policy`: the order of the queue, first come first served, the longest found prefix first, or depth first in the
    tree. `eviction`: the order in which the radix cache evicts, of kvarts.core.kv.radix, with its `eviction_config`.

    `has_priorities`: requests of larger priorities come first, or of lower ones with `low_first`. `preempts`: they
    preempt running requests whose priority differs by more than `threshold`. `retracts_by_priority`: if decodes lack
    memory, the least important ones are retracted first. `window`: the tokens that layers with sliding windows attend
    to, 0 without such layers; `window_pages`: the pages of the pool of their KV. `slots`: those for states, 0 for a
    model without; `state_buffers`: the slots of a running request for states that it inserts. With them, prompts leave
    states every `state_chunk` tokens, and answers every `track_interval`; both are 0 without buffers.
    """

    overlaps: bool = True
    max_prefill_tokens: int = 16_384
    ignores_eos: bool = True
    conservativeness: float = 1.0
    policy: QueueOrder = "fcfs"
    eviction: RadixEviction = "lru"
    eviction_config: dict[str, int] = {}
    has_priorities: bool = False
    low_first: bool = False
    preempts: bool = False
    threshold: int = 10
    retracts_by_priority: bool = False
    window: int = 0
    window_pages: int = 0
    slots: int = 0
    state_buffers: int = 0
    state_chunk: int = 0
    track_interval: int = 0

    @property
    def sign(self) -> int:
        """What a priority is multiplied by, so that lower products come first."""
        return 1 if self.low_first else -1


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of an engine that runs a real model: its memory, batch and latency, and how the model is computed.

    `kv_memory`: bytes of KV, as a number or as 2GiB; `auto`: a quarter of the free memory, 4 GiB at most. `page_size`,
    `max_num_batched_tokens`, `max_num_seqs` and `snapshots`: as of EngineConfig. `max_itl_ms`: prompts are computed in
    chunks that keep steps with decodes this short, as far as the steps so far predict.

    `dtype`, `device`, `quantization` and `trust_remote_code`: how the model is loaded, as for `load_model`.
    `attention`: the backend, one of kvarts.run.torch.executor. `layers`: `compiled`, the `model`'s own code, or
    `auto` (kvarts.run.torch.layers). `enforce_eager`: on a GPU, run every step kernel by kernel instead of steps
    of decodes as CUDA graphs.

    `kv_groups`: with `off`, every layer keeps every token; with `all` or `tails`, a layer with a window keeps only
    tokens that later ones attend to (kvarts.run.torch.room), so more sequences fit the same memory. None: `all` if some
    layers keep less and the other settings go with it, else `off`, which is logged.

    `kv_dtype`: the format of KV in pages: `auto` for the model's, `int8` with a scale per head and token, or `fp8`
    (e4m3) without one. In 8 bits, up to 4 times the tokens of float32 fit, tokens change, and attention is computed by
    `sdpa`.

    The values are checked where the model is opened, since their bounds depend on it.
    """

    kv_memory: str | int = "auto"
    page_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_itl_ms: float | None = None
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    layers: str = "auto"
    quantization: str | None = None
    trust_remote_code: bool = False
    kv_groups: str | None = None
    snapshots: Snapshots = "ends"
    kv_dtype: str = "auto"
    enforce_eager: bool = False

    def engine_config(self, num_pages: int) -> EngineConfig:
        """Return the configuration of the engine, with `num_pages` pages."""
        return EngineConfig(
            num_pages=num_pages,
            page_size=self.page_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=min(self.max_num_seqs, self.max_num_batched_tokens),
            max_itl_ms=self.max_itl_ms,
            snapshots=self.snapshots,
        )


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds, in milliseconds, that a request must meet to count as goodput; each is optional.

    >>> from kvarts import ReplayConfig, Slo
    >>> ReplayConfig(slo=Slo(ttft_ms=500, tpot_ms=50)).slo.ttft_ms
    500
    """

    ttft_ms: Annotated[float | None, setting("Longest time to first token.", metavar="MS")] = None
    tpot_ms: Annotated[float | None, setting("Longest mean time per output token after the first.", metavar="MS")] = (
        None
    )
    e2e_ms: Annotated[float | None, setting("Longest time to last token.", metavar="MS")] = None

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value is not None:
                check_number(value, field, above=True, most=MOST_MS)
