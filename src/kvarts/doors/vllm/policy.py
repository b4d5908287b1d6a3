"""vLLM's own host memory with kvarts' order of eviction: a policy that vLLM loads by the name of this package.

"eviction_policy": "KvartsCachePolicy", "cache_policy_module_path": "kvarts.doors.vllm"
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys

__all__ = ["KvartsCachePolicy"]


class KvartsCachePolicy(CachePolicy):  # type: ignore[misc]
    """Evicts the deepest chunk of the least recently used prefix first, as KeyedTier does.

    A use of a prefix makes all its chunks recent, the deepest least: also while its request still stores them, in
    however many steps. Chunks that precede those of a store are not evicted for it; a store that finds no other room is
    refused as a whole. vLLM owns the chunks and counts their transfers.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: OrderedDict[bytes, Any] = OrderedDict()
        """The next to be evicted first."""
        self._storing: dict[bytes, Any] = {}
        """The context of the request that stores a key, until it has finished. vLLM 0.32 does not pass it to `insert`,
        and neither version to `evict`."""
        self._stored: dict[int, Any] = {}
        """Contexts of requests that have stored keys since the last eviction, by identity."""

    @override
    def get(self, key: bytes) -> Any:
        return self._chunks.get(key)

    @override
    def insert(self, key: bytes, chunk: Any, req_context: Any = None) -> None:
        self._chunks[key] = chunk
        context = self._storing.get(key) if req_context is None else req_context
        if context is not None:
            self._stored.pop(id(context), None)
            self._stored[id(context)] = context

    @override
    def remove(self, key: bytes) -> None:
        del self._chunks[key]

    @override
    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._settle()
        self._touch(list(keys))

    @override
    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._storing.update(dict.fromkeys(keys, req_context))

    @override
    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        self._settle()
        self._touch(order_request_keys(key_groups, req_context))
        self._touch_prefix(req_context)  # also what it found on the device
        for keys in key_groups:
            for key in keys:
                if self._storing.get(key) is req_context:
                    del self._storing[key]

    @override
    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        self._settle()
        precedes = self._before(protected)
        found: list[tuple[bytes, Any]] = []
        for key, chunk in self._chunks.items():
            if len(found) == n:
                break
            if chunk.ref_cnt == 0 and key not in protected and not precedes(key):
                found.append((key, chunk))
        if len(found) < n:
            return None
        for key, _ in found:
            del self._chunks[key]
        return found

    @override
    def clear(self) -> None:
        self._chunks.clear()
        self._storing.clear()
        self._stored.clear()

    def _before(self, keys: Iterable[bytes]) -> Callable[[bytes], bool]:
        """Return whether a key precedes the first of `keys`, which one request stores, in its prefix."""
        context = next((self._storing[key] for key in keys if key in self._storing), None)
        if context is None:
            return lambda key: False
        position_of = context.get_offload_key_position
        first = min((place for key in keys if (place := position_of(key)) is not None), default=0)
        return lambda key: (place := position_of(key)) is not None and place < first

    def _settle(self) -> None:
        """Make the prefixes recent that were stored since the last eviction."""
        for context in self._stored.values():
            self._touch_prefix(context)
        self._stored.clear()

    def _touch_prefix(self, context: Any) -> None:
        # No public name has all keys of a request: those that it found, and those of earlier steps.
        positions: Mapping[bytes, int] = getattr(context, "_offload_key_positions", {})
        self._touch(sorted(positions, key=positions.__getitem__))

    def _touch(self, keys: Sequence[bytes]) -> None:
        chunks = self._chunks
        for key in reversed(keys):
            if key in chunks:
                chunks.move_to_end(key)
