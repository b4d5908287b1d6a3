"""vLLM's own host memory with kvarts' order of eviction: a policy that vLLM loads by the name of this package.

"eviction_policy": "KvartsCachePolicy", "cache_policy_module_path": "kvarts.doors.vllm"
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys

__all__ = ["KvartsCachePolicy"]


class KvartsCachePolicy(CachePolicy):  # type: ignore[misc]
    """Evicts the deepest chunk of the least recently used prefix first, as KeyedTier does.

    A use of a prefix makes all its chunks recent, the deepest least: also while its request still stores them. vLLM
    owns the chunks and counts their transfers.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: OrderedDict[bytes, Any] = OrderedDict()
        """The next to be evicted first."""
        self._coming: list[bytes] = []
        """Keys that are inserted next, in the order of their prefix."""

    @override
    def get(self, key: bytes) -> Any:
        return self._chunks.get(key)

    @override
    def insert(self, key: bytes, chunk: Any) -> None:
        self._chunks[key] = chunk
        if self._coming and self._coming[-1] == key:
            self._touch(self._coming)
            self._coming = []

    @override
    def remove(self, key: bytes) -> None:
        del self._chunks[key]

    @override
    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._touch(list(keys))

    @override
    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._coming = list(keys)

    @override
    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        self._touch(order_request_keys(key_groups, req_context))

    @override
    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        found: list[tuple[bytes, Any]] = []
        for key, chunk in self._chunks.items():
            if len(found) == n:
                break
            if chunk.ref_cnt == 0 and key not in protected:
                found.append((key, chunk))
        if len(found) < n:
            return None
        for key, _ in found:
            del self._chunks[key]
        return found

    @override
    def clear(self) -> None:
        self._chunks.clear()
        self._coming = []

    def _touch(self, keys: Sequence[bytes]) -> None:
        chunks = self._chunks
        for key in reversed(keys):
            if key in chunks:
                chunks.move_to_end(key)
