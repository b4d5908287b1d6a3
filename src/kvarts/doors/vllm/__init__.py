"""kvarts' tiers inside vLLM: an offloading spec that vLLM loads by the name of this module.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "KvartsOffloadingSpec", "spec_module_path": "kvarts.doors.vllm",
      "host_memory": "4GiB"}}'

`KvartsCachePolicy` is an order of eviction for vLLM's own host memory, and `KvartsFiles` a tier of files below it. vLLM
is imported only when one of these is accessed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["KvartsCachePolicy", "KvartsFiles", "KvartsOffloadingSpec"]

MODULES = {"KvartsCachePolicy": "policy", "KvartsFiles": "files", "KvartsOffloadingSpec": "spec"}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
