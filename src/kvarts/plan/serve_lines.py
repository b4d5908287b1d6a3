"""An answer of a plan as command lines of serving engines: `vllm serve`, and SGLang's server.

Names of options are those of vLLM 0.32 and SGLang 0.5.23. Each line starts one replica; a router is separate. Of a
replica on several nodes, a line is that of the first one.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvarts.plan.purchases import OF_HICACHE, devices_of, given_host_bytes, given_policy
from kvarts.sim.report.advice import as_size

if TYPE_CHECKING:
    from kvarts.sim.config import ReplayConfig

__all__ = ["offload_of_vllm", "serve_lines"]

GB = 1_000_000_000
HUB = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)/")
NODE = 8
"""Devices of a node."""
NULL_BLOCKS = 1
"""Blocks of vLLM's pool that no request gets."""
SERVERS = ("vllm", "sglang")
SERVERS_OF = {"vllm": ("vllm",), "sglang": ("sglang",), "tensorrt-llm": (), "trtllm": ()}
"""The servers that a line starts, by the engine that was given; SERVERS without one."""
CAST = {"fp8": "quantization", "bfloat16": "dtype", "float16": "dtype", "float32": "dtype"}
"""Formats of weights that servers make of any checkpoint as they load it, with the option of each."""


SGLANG_KV = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "float8_e4m3fn"), "fp8_e4m3"),
    **{name: name for name in ("fp8_e5m2", "bfloat16", "mxfp8", "nvfp4")},
    "bf16": "bfloat16",
}
"""SGLang's formats of KV, by those of kvarts."""
OF_DRAFT_MODEL = ("eagle", "eagle3")
"""Methods whose layers are those of another checkpoint, which a plan does not know: DRAFT_MODEL stands for it."""
DRAFT_MODEL = "DRAFT_MODEL"
SGLANG_DRAFTS = {"eagle3": "EAGLE3", "ngram": "NGRAM"}
"""SGLang's algorithms by methods of drafts; EAGLE for the others."""


def serve_lines(config: Any, option: Mapping[str, Any]) -> dict[str, str]:
    """Return the command lines of one replica of `option`, by engine, and of a fleet of pools by engine and role.

    There are none without a model on a device, and none of a server that is not the engine of `config`, if that is
    given. vLLM has no exclusive host memory, and SGLang's has policies of its own, of which write_through is as eager:
    an option with another policy has no line. Nor has one with weights in a format that needs another checkpoint, or
    with KV in one that a server lacks.
    """
    if not hasattr(config, "pools"):
        return _lines_of(config, option)
    return {
        f"{engine} {pool.role}": line
        for pool in config.pools
        for engine, line in _lines_of(pool.each, option, pool.role).items()
    }


def _lines_of(config: ReplayConfig, option: Mapping[str, Any], role: str = "") -> dict[str, str]:
    weight_dtype = getattr(config.cost, "weight_dtype", None)
    if config.placement is None or weight_dtype not in (None, *CAST):
        return {}
    num_bytes, policy = option["host_bytes"], option["policy"]
    if not num_bytes:
        num_bytes, policy = given_host_bytes(config), given_policy(config)
    of_weights = {} if weight_dtype is None else {CAST[weight_dtype]: weight_dtype}
    servers = SERVERS_OF.get(config.engine.partition("==")[0], SERVERS)
    lines = {}
    if "vllm" in servers and (not num_bytes or policy != "exclusive"):
        connectors = [offload_of_vllm(num_bytes * devices_of(config), policy)] if num_bytes else []
        connectors += [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}] if role else []
        of_connectors = {"kv-transfer-config": json.dumps(_connected(connectors))} if connectors else {}
        lines["vllm"] = _line(["vllm", "serve", _hub_id(config)], _vllm(config) | of_weights | of_connectors)
    kv_dtype = getattr(config.cost, "kv_dtype", None)
    write_policy = "write_through" if policy == "eager" else policy
    if "sglang" in servers and (not num_bytes or write_policy in OF_HICACHE) and kv_dtype in (None, *SGLANG_KV):
        of_host = {
            "enable-hierarchical-cache": None,
            "hicache-size": -(-num_bytes // GB),
            "hicache-write-policy": write_policy,
        }
        options = _sglang(config) | of_weights | (of_host if num_bytes else {})
        options |= {"disaggregation-mode": role} if role else {}
        lines["sglang"] = _line(["python", "-m", "sglang.launch_server", "--model-path", _hub_id(config)], options)
    return lines


def _connected(connectors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return one connector of vLLM that stands for all."""
    if len(connectors) == 1:
        return connectors[0]
    of_all = {"connectors": connectors}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": of_all}


def _vllm(config: ReplayConfig) -> dict[str, Any]:
    """Return the options of vLLM but for host memory and weights; those without a value are None."""
    placement = config.placement
    assert placement is not None
    options: dict[str, Any] = {
        **_ways_of_vllm(config),
        "gpu-memory-utilization": f"{placement.memory_fraction:g}",
        "max-num-seqs": config.max_num_seqs,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "block-size": config.page_size,
    }
    if placement.num_pages is not None:
        options["num-gpu-blocks-override"] = placement.num_pages + NULL_BLOCKS
    elif placement.kv_memory_bytes is not None:
        options["kv-cache-memory-bytes"] = placement.kv_memory_bytes
    if not _holds_the_longest(config):
        options["max-model-len"] = "auto"
    if (dtype := getattr(config.cost, "kv_dtype", None)) is not None:
        options["kv-cache-dtype"] = "int8_per_token_head" if dtype == "int8" else dtype
    if config.scheduling_policy != "fcfs":
        options["scheduling-policy"] = config.scheduling_policy
    if config.no_prefix_caching:
        options["no-enable-prefix-caching"] = None
    if num_drafts := int(getattr(config.cost, "speculative_tokens", 0)):
        asked: dict[str, Any] = {"method": placement.draft_method, "num_speculative_tokens": num_drafts}
        if placement.draft_method in OF_DRAFT_MODEL:
            asked["model"] = DRAFT_MODEL
        options["speculative-config"] = json.dumps(asked)
    return options


def _sglang(config: ReplayConfig) -> dict[str, Any]:
    """Return the options of SGLang's server but for host memory and weights; those without a value are None."""
    placement = config.placement
    assert placement is not None
    options: dict[str, Any] = {
        **_ways_of_sglang(config),
        "mem-fraction-static": f"{placement.memory_fraction:g}",
        "max-running-requests": config.max_num_seqs,
        "chunked-prefill-size": config.max_num_batched_tokens,
        "page-size": config.page_size,
    }
    if placement.num_pages is not None or placement.kv_memory_bytes is not None:
        options["max-total-tokens"] = config.num_pages * config.page_size
    if (dtype := getattr(config.cost, "kv_dtype", None)) is not None:
        options["kv-cache-dtype"] = SGLANG_KV[dtype]
    if config.scheduling_policy == "priority":
        options["enable-priority-scheduling"] = None
    options |= config.options_of_server()
    if config.no_prefix_caching:
        options["disable-radix-cache"] = None
    if num_drafts := int(getattr(config.cost, "speculative_tokens", 0)):
        method = placement.draft_method
        options["speculative-algorithm"] = SGLANG_DRAFTS.get(method, "EAGLE")
        if method in OF_DRAFT_MODEL:
            options["speculative-draft-model-path"] = DRAFT_MODEL
        if method != "ngram":
            options |= {"speculative-num-steps": num_drafts, "speculative-eagle-topk": 1}
        options["speculative-num-draft-tokens"] = num_drafts + 1
    return options


def _holds_the_longest(config: ReplayConfig) -> bool:
    """Return whether KV memory surely holds a request of the model's length, without which vLLM does not start.

    Where layers keep less, vLLM plans blocks of its own, and this is not known.
    """
    geometry = getattr(config.cost, "geometry", None)
    most = None if geometry is None else geometry.max_model_len
    if most is None:
        return True
    return config.kv_groups == "off" and -(-most // config.page_size) + NULL_BLOCKS <= config.num_pages


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


def _way(config: ReplayConfig, name: str) -> int:
    return int(getattr(config.cost, name, 1))


def _ways_of_vllm(config: ReplayConfig) -> dict[str, Any]:
    ways: dict[str, Any] = {
        f"{name}-parallel-size": size
        for name in ("tensor", "pipeline", "data")
        if (size := _way(config, f"{name}_parallel")) > 1
    }
    if _way(config, "expert_parallel") > 1:
        ways["enable-expert-parallel"] = None
    if (num_nodes := _nodes_of(config)) > 1:
        ways |= {"nnodes": num_nodes, "node-rank": 0, "master-addr": "FIRST_NODE"}
    return ways


def _ways_of_sglang(config: ReplayConfig) -> dict[str, Any]:
    """Return SGLang's options: its tensor parallel size is that of the experts, over all ranks of attention."""
    tensor, ranks = _way(config, "tensor_parallel"), _way(config, "data_parallel")
    sizes = {
        "tp-size": tensor * ranks,
        "pp-size": _way(config, "pipeline_parallel"),
        "attn-dp-size": ranks,
        "ep-size": _way(config, "expert_parallel"),
    }
    ways: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1}
    if (num_nodes := _nodes_of(config)) > 1:
        ways |= {"nnodes": num_nodes, "node-rank": 0, "dist-init-addr": "FIRST_NODE:5000"}
    return ways


def _nodes_of(config: ReplayConfig) -> int:
    """Return the nodes of a replica: a stage of a pipeline that is larger than a node has its own."""
    num_stages = _way(config, "pipeline_parallel")
    return num_stages if devices_of(config) > NODE else 1


def _hub_id(config: ReplayConfig) -> str:
    """Return the id of the model on Hugging Face's hub if it was given or is known, else the folder of its config."""
    assert config.placement is not None
    name = config.placement.model
    geometry = getattr(config.cost, "geometry", None)
    found = None if geometry is None else HUB.match(geometry.source)
    if found is not None:
        return name if "/" in name else found[1]
    return name.removesuffix("config.json").rstrip("/") or "."


def _line(words: list[str], options: Mapping[str, Any]) -> str:
    for name, value in options.items():
        words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)
