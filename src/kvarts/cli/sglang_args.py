"""`--sglang-args`: an argument line of `sglang serve`, in the settings of kvarts. Names are those of SGLang 0.5.23."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Final

from kvarts.base.limits import MOST_DIGITS, whole_number
from kvarts.cli.argument_lines import Pairs, Server, refuse

__all__ = ["KEYS", "NAME", "SERVER"]

NAME: Final = "--sglang-args"

KEYS = {
    "model": "model",
    "model-path": "model",
    "chunked-prefill-size": "max_batched_tokens",
    "max-running-requests": "max_seqs",
    "max-prefill-tokens": "max_prefill_tokens",
    "page-size": "page_size",
    "mem-fraction-static": "memory_fraction",
    "tp-size": "tensor_parallel",
    "tensor-parallel-size": "tensor_parallel",
    "pp-size": "pipeline_parallel",
    "pipeline-parallel-size": "pipeline_parallel",
    "ep": "expert_parallel",
    "ep-size": "expert_parallel",
    "expert-parallel-size": "expert_parallel",
    "kv-cache-dtype": "kv_dtype",
    "quantization": "weight_dtype",
    "context-length": "max_model_len",
    "max-queued-requests": "max_queued",
    "schedule-policy": "schedule_policy",
    "schedule-conservativeness": "schedule_conservativeness",
    "scheduler-recv-interval": "scheduler_recv_interval",
    "radix-eviction-policy": "radix_eviction_policy",
    "radix-eviction-policy-config": "radix_eviction_policy_config",
    "priority-scheduling-preemption-threshold": "priority_scheduling_preemption_threshold",
    "retraction-policy": "retraction_policy",
    "swa-full-tokens-ratio": "swa_full_tokens_ratio",
    "max-mamba-cache-size": "max_mamba_cache_size",
    "mamba-full-memory-ratio": "mamba_full_memory_ratio",
    "mamba-radix-cache-strategy": "mamba_radix_cache_strategy",
    "mamba-ssm-dtype": "mamba_ssm_dtype",
    "mamba-track-interval": "mamba_track_interval",
    "hicache-ratio": "hicache_ratio",
    "hicache-size": "hicache_size",
    "hicache-write-policy": "hicache_write_policy",
    **{
        name: name.replace("-", "_")
        for name in (
            "hicache-storage-backend",
            "hicache-storage-backend-extra-config",
            "hicache-storage-prefetch-policy",
            "hicache-storage-prefetch-retry-max-attempts",
            "hicache-storage-prefetch-retry-poll-interval",
        )
    },
}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)")
_HICACHE: Final = "hicache"
"""A key between `--enable-hierarchical-cache` and the size of host memory, by default twice the device's."""
_STORAGE: Final = "hicache_storage_backend"
_OF_HICACHE: Final = tuple(key for key in KEYS.values() if key.startswith(_HICACHE))
_TOKENS: Final = "tokens"
"""A key between `--max-total-tokens` and the pages that these are."""
_PAGE_SIZES: Final = ("--page-size", "--block-size", "page_size=", "--set=page_size=")

NOT_MODELLED = {
    "attention-data-parallel-size": "ranks of attention are not modelled with this engine: leave it out",
    "attn-dp-size": "ranks of attention are not modelled with this engine: leave it out",
    "data-parallel-size": "leave it out, and give --replicas N --router round-robin",
    "default-priority-value": "leave it out, and give each request of the trace its priority",
    "disable-radix-cache": "a server without prefixes is not modelled: leave it out",
    "disaggregation-mode": "leave it out, and give a fleet: --prefill and --decode of kvarts replay",
    "dp-size": "leave it out, and give --replicas N --router round-robin",
    "enable-dp-attention": "ranks of attention are not modelled with this engine: leave it out",
    "enable-flexkv": "host memory below this tree is not modelled: leave it out",
    "enable-int8-mamba-checkpoint": "a second pool of states is not modelled: leave it out",
    "enable-linear-replayssm": "states that lag behind are not modelled: leave it out",
    "enable-lmcache": "host memory below this tree is not modelled: leave it out",
    "enable-mixed-chunk": "steps of prompts and decodes are not modelled: leave it out",
    "enable-prefill-delayer": "delays of prompts are not modelled: leave it out",
    "enable-session-radix-cache": "sessions in this tree are not modelled: leave it out",
    "mamba-max-states-per-path": "it is not modelled: leave it out",
    "prefill-decode-interval": "turns of decodes between prompts are not modelled: leave it out",
    "prefill-max-requests": "it is not modelled: leave it out",
    "radix-cache-backend": "only SGLang's own tree is modelled: leave it out",
    "speculative-algorithm": "drafts are not modelled with this engine: leave it out",
}
"""Options that change what the scheduler decides and have no setting here, and what to do."""


def _counted(text: str) -> str:
    """Return a count without its unit; what is not one is refused by its setting."""
    match = _COUNT.fullmatch(text.strip())
    if match is None or len(match[1]) > MOST_DIGITS:
        return text
    number, unit = match.groups()
    power = "kMGT".index(unit[0].replace("K", "k")) + 1
    if unit.endswith("i"):
        return text if "." in number else str(int(number) * 1024**power)
    return str(int(Decimal(number) * 1000**power))


def _refuse(why: str, name: str, value: str) -> Pairs:
    refuse(NAME, f"{name}: {why}.")


def _chunk(name: str, value: str) -> Pairs:
    if value.startswith("-"):
        refuse(NAME, f"{name} {value} sets no size of chunks; give the tokens of the longest prompt.")
    return [(KEYS["chunked-prefill-size"], value)]


def _tokens(name: str, value: str) -> Pairs:
    number = whole_number(_counted(value))
    if number is None or number < 1:
        refuse(NAME, f"{name} must be a whole number of at least 1, got {value}.")
    return [(_TOKENS, str(number))]


def _finish(found: Pairs, beside: Sequence[str], knows: Callable[[str], bool]) -> Pairs:
    """Name the engine, and give the pages of the tokens of memory. Only servers limit the length of requests."""
    given = dict(found)
    if not knows(KEYS["max-queued-requests"]):  # replays take the length for a start of vLLM
        found = [("context_length" if key == KEYS["context-length"] else key, value) for key, value in found]
    if _HICACHE in given:
        found = [pair for pair in found if pair[0] != _HICACHE]
        if not given.keys() & {"hicache_ratio", "hicache_size"}:
            found.append(("hicache_ratio", "2.0"))
    found = [("engine", "sglang"), *found]
    if _TOKENS not in given:
        return found
    if any(word.startswith(_PAGE_SIZES) for word in beside):
        refuse(NAME, "--max-total-tokens needs --page-size in the same line; put it there.")
    page_size = whole_number(given.get("page_size", "1")) or 1
    tokens = int(given[_TOKENS])
    if tokens < page_size:
        refuse(NAME, f"--max-total-tokens {tokens} is less than a page of {page_size} tokens.")
    others = [(key, value) for key, value in found if key not in (_TOKENS, "page_size")]
    return [*others, ("page_size", given.get("page_size", "1")), ("pages", str(tokens // page_size))]


def _ignored(given: Mapping[str, str]) -> Collection[str]:
    """Return the settings that SGLang ignores: without host memory all of it, a ratio beside a size, and of storage."""
    if _HICACHE not in given:
        return _OF_HICACHE
    ratio = ["hicache_ratio"] if given.get("hicache_size", "0").strip("0.") else []
    return ratio if _STORAGE in given else [*ratio, *(key for key in _OF_HICACHE if key.startswith("hicache_storage"))]


SERVER: Final = Server(
    name=NAME,
    command="sglang serve",
    starts=(
        ("sglang", "serve"),
        ("python", "-m", "sglang.launch_server"),
        ("python3", "-m", "sglang.launch_server"),
    ),
    keys=KEYS,
    counts=("context-length", "max-prefill-tokens"),
    counted=_counted,
    flags={
        name: (name.replace("-", "_"), "true")
        for name in (
            "disable-hybrid-swa-memory",
            "disable-overlap-schedule",
            "disable-priority-preemption",
            "enable-priority-scheduling",
            "schedule-low-priority-values-first",
        )
    }
    | dict.fromkeys(("enable-hicache", "enable-hierarchical-cache"), (_HICACHE, "true")),
    defaults={
        "attention-data-parallel-size": ("1",),
        "attn-dp-size": ("1",),
        "data-parallel-size": ("1",),
        "disaggregation-mode": ("null",),
        "dp-size": ("1",),
        "dtype": ("auto", "bfloat16", "float16", "half"),
        "kv-cache-dtype": ("auto",),
        "prefill-decode-interval": ("0",),
    },
    readers={
        "chunked-prefill-size": _chunk,
        "max-total-tokens": _tokens,
        **{name: partial(_refuse, why) for name, why in NOT_MODELLED.items()},
    },
    instead={},
    short={},
    abbreviates=True,
    ignored=_ignored,
    finish=_finish,
)
