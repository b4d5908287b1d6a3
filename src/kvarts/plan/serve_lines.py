"""An answer of a plan as command lines of serving engines: `vllm serve`, and SGLang's server.

Names of options are those of vLLM 0.32 and SGLang 0.5.23. Each line starts one replica; a router is separate.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvarts.sim.report.advice import as_size

if TYPE_CHECKING:
    from kvarts.sim.config import ReplayConfig

__all__ = ["offload_of_vllm", "serve_lines"]

GB = 1_000_000_000
MEMORY_FRACTION = 0.9
HUB = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)/")


def serve_lines(config: ReplayConfig, option: Mapping[str, Any], memory_fraction: float | None) -> dict[str, str]:
    """Return the command line of one replica of `option`, by engine; empty without a model on a device.

    vLLM has no exclusive host memory, and SGLang's is written through: an option with another policy has no line.
    """
    if config.placement is None:
        return {}
    vllm = {
        **_ways_of_vllm(config),
        "gpu-memory-utilization": f"{memory_fraction or MEMORY_FRACTION:g}",
        "max-num-seqs": config.max_num_seqs,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "block-size": config.page_size,
        **_formats(config, "kv-cache-dtype"),
    }
    sglang = {
        **_ways_of_sglang(config),
        "mem-fraction-static": f"{memory_fraction or MEMORY_FRACTION:g}",
        "max-running-requests": config.max_num_seqs,
        "chunked-prefill-size": config.max_num_batched_tokens,
        "page-size": config.page_size,
        **_formats(config, "kv-cache-dtype"),
    }
    num_bytes, policy = option["host_bytes"], option["policy"]
    lines = {}
    if policy != "exclusive":
        if num_bytes:
            of_engine = offload_of_vllm(num_bytes * _devices_of(config), policy)
            vllm["kv-transfer-config"] = json.dumps(of_engine)
        lines["vllm"] = _line(["vllm", "serve", _hub_id(config)], vllm)
    if policy in (None, "eager"):
        if num_bytes:
            sglang |= {
                "enable-hierarchical-cache": None,
                "hicache-size": -(-num_bytes // GB),
                "hicache-write-policy": "write_through",
            }
        lines["sglang"] = _line(["python", "-m", "sglang.launch_server", "--model-path", _hub_id(config)], sglang)
    return lines


def offload_of_vllm(host_bytes: int, policy: str) -> dict[str, Any]:
    """Return the value of vLLM's `--kv-transfer-config` for host memory: kvarts' tiers if eager, vLLM's own if lazy."""
    if policy == "lazy":
        return {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes, "lazy_offload": True},
        }
    spec = {
        "spec_name": "KvartsOffloadingSpec",
        "spec_module_path": "kvarts.doors.vllm",
        "host_memory": as_size(host_bytes),
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": spec,
    }


def _devices_of(config: ReplayConfig) -> int:
    cost = config.cost
    return int(getattr(cost, "tensor_parallel", 1)) * int(getattr(cost, "pipeline_parallel", 1))


def _way(config: ReplayConfig, name: str) -> int:
    return int(getattr(config.cost, name, 1))


def _ways_of_vllm(config: ReplayConfig) -> dict[str, Any]:
    ways = {
        f"{name}-parallel-size": size
        for name in ("tensor", "pipeline", "data")
        if (size := _way(config, f"{name}_parallel")) > 1
    }
    return {**ways, "enable-expert-parallel": None} if _way(config, "expert_parallel") > 1 else ways


def _ways_of_sglang(config: ReplayConfig) -> dict[str, Any]:
    """Return SGLang's options: its tensor parallel size is that of the experts, over all ranks of attention."""
    tensor, ranks = _way(config, "tensor_parallel"), _way(config, "data_parallel")
    sizes = {
        "tp-size": tensor * ranks,
        "pp-size": _way(config, "pipeline_parallel"),
        "attn-dp-size": ranks,
        "ep-size": _way(config, "expert_parallel"),
    }
    return {name: size for name, size in sizes.items() if size > 1}


def _formats(config: ReplayConfig, name: str) -> dict[str, Any]:
    dtype = getattr(config.cost, "kv_dtype", None)
    return {} if dtype is None else {name: dtype}


def _hub_id(config: ReplayConfig) -> str:
    """Return the id of the model on Hugging Face's hub if that is known, else the name as it was given."""
    assert config.placement is not None
    geometry = getattr(config.cost, "geometry", None)
    found = None if geometry is None else HUB.match(geometry.source)
    return config.placement.model if found is None else found[1]


def _line(words: list[str], options: Mapping[str, Any]) -> str:
    for name, value in options.items():
        words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)
