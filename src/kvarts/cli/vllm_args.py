"""`--vllm-args`: an argument line of `vllm serve`, in the settings of kvarts. Names are those of vLLM 0.32."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from kvarts.base.decoders import UNDECODED
from kvarts.base.limits import MOST_DIGITS
from kvarts.cli.argument_lines import Pairs, Server, refuse

__all__ = ["KEYS", "NAME", "SERVER"]

NAME: Final = "--vllm-args"

KEYS = {
    "model": "model",
    "max-num-batched-tokens": "max_batched_tokens",
    "max-num-seqs": "max_seqs",
    "block-size": "page_size",
    "gpu-memory-utilization": "memory_fraction",
    "num-gpu-blocks-override": "pages",
    "kv-cache-memory-bytes": "kv_memory",
    "tensor-parallel-size": "tensor_parallel",
    "pipeline-parallel-size": "pipeline_parallel",
    "data-parallel-size": "data_parallel",
    "kv-cache-dtype": "kv_dtype",
    "quantization": "weight_dtype",
    "long-prefill-token-threshold": "long_prefill_token_threshold",
    "prefill-schedule-interval": "prefill_schedule_interval",
    "mamba-cache-mode": "mamba_cache_mode",
    "scheduling-policy": "scheduling_policy",
    "max-model-len": "max_model_len",
    "spec-tokens": "speculative_tokens",
    "spec-method": "speculative_method",
    "decode-context-parallel-size": "decode_context_parallel_size",
    "performance-mode": "performance_mode",
    "mamba-ssm-cache-dtype": "mamba_ssm_cache_dtype",
}

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")


def _counted(text: str) -> str:
    """Return a count without its unit; what is not one is refused by its setting.

    1k is 1,000, and 1K is 1,024, and so on (utils/argparse_utils.py, human_readable_int).
    """
    if text.lower() == "auto":
        return "-1"
    match = _COUNT.fullmatch(text.strip())
    if match is None or len(match[1]) > MOST_DIGITS:
        return text
    number, unit = match.groups()
    power = "kmgt".index(unit.lower()) + 1
    if unit.islower():
        return str(int(float(number) * 1000**power))
    return str(int(number) * 1024**power) if "." not in number else text


def _drafted(name: str, text: str) -> Pairs:
    """Return the number of drafted tokens in the JSON of a speculative configuration, and the method if it has one."""
    try:
        asked = msgspec.json.decode(text, type=dict[str, object])
        number = asked["num_speculative_tokens"]
    except (*UNDECODED, KeyError):
        words = "is no JSON object with num_speculative_tokens. Put JSON in quotes of its own, as in a shell."
        refuse(NAME, f"--speculative-config {text} {words}")
    method = asked.get("method")
    pairs = [(KEYS["spec-tokens"], str(number))]
    return pairs if method is None else [*pairs, ("speculative_method", str(method))]


def _cached_states(name: str, mode: str) -> Pairs:
    if mode == "all":
        instead = "leave it out, or give --set mamba_cache_mode=all for that ideal"
        refuse(NAME, f"no model of vLLM 0.32 or 0.33 has {name} all; {instead}.")
    return [(KEYS["mamba-cache-mode"], mode)]


def _experts(name: str, value: str) -> Pairs:
    refuse(NAME, f"{name} has no number; leave it out, and give --set expert_parallel=N.")


SERVER: Final = Server(
    name=NAME,
    command="vllm serve",
    starts=(("vllm", "serve"),),
    keys=KEYS,
    counts=("max-num-batched-tokens", "max-model-len", "kv-cache-memory-bytes"),
    counted=_counted,
    flags={
        "no-enable-prefix-caching": ("no_prefix_caching", "true"),
        "enable-prefix-caching": None,
        "async-scheduling": ("async_scheduling", "true"),
        "no-async-scheduling": ("no_async_scheduling", "true"),
        "enable-chunked-prefill": None,
        "no-enable-chunked-prefill": ("no_chunked_prefill", "true"),
        "enforce-eager": ("enforce_eager", "true"),
        "disable-hybrid-kv-cache-manager": ("disable_hybrid_kv_cache_manager", "true"),
    },
    anyway=("no_async_scheduling",),
    defaults={
        "dtype": ("auto", "bfloat16", "float16", "half"),
        "kv-cache-dtype": ("auto",),
        "mamba-ssm-cache-dtype": ("auto",),
        "mamba-cache-mode": ("none",),
    },
    readers={
        "enable-expert-parallel": _experts,
        "mamba-cache-mode": _cached_states,
        "speculative-config": _drafted,
    },
    instead={"kv_memory": "available_kv_memory"},
    short={
        "sc": "speculative-config",
        "tp": "tensor-parallel-size",
        "pp": "pipeline-parallel-size",
        "dp": "data-parallel-size",
        "q": "quantization",
        "dcp": "decode-context-parallel-size",
    },
)
