"""kvarts' tiers inside vLLM: an offloading spec that vLLM loads by the name of this module.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "KvartsOffloadingSpec", "spec_module_path": "kvarts.connect.vllm",
      "host_memory": "4GiB"}}'

vLLM is imported only when the spec is accessed.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvartsOffloadingSpec"]


def __getattr__(name: str) -> Any:
    if name == "KvartsOffloadingSpec":
        from kvarts.connect.vllm.spec import KvartsOffloadingSpec

        return KvartsOffloadingSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
