"""vLLM's offloading manager over kvarts' tiers, and their metrics. Runs in the process of vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

from kvarts.core.tiers.keyed import KeyState
from kvarts.doors.vllm.page_io import HostRegion
from kvarts.doors.vllm.store import KeyStore, Reads, StoreCounts

__all__ = ["HostPlaces", "KvartsManager", "StoreMetrics", "metric_definitions"]

PAGES = "vllm:kvarts_pages"
RESIDENT = "vllm:kvarts_resident_pages"
WAITING = "vllm:kvarts_waiting_pages"


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics of the tiers, by name."""
    words = ", ".join(StoreCounts.__struct_fields__)
    return {
        PAGES: OffloadingCounterMetadata(
            documentation=f"Pages of kvarts' tiers by what happened to them: {words}.",
            labelnames=("what",),
        ),
        RESIDENT: OffloadingGaugeMetadata(
            documentation="Pages that have a place in a tier of kvarts: host or files.", labelnames=("tier",)
        ),
        WAITING: OffloadingGaugeMetadata(
            documentation="Pages that wait to be read from files, or to be written to them.", labelnames=("lane",)
        ),
    }


class StoreMetrics:
    """The changes of the counts of `store` from one call to the next."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._before = StoreCounts()

    def take(self) -> OffloadingConnectorStats | None:
        """Return what changed since the last call; None if nothing did."""
        store, before = self._store, self._before
        if store.counts == before:
            return None
        stats = OffloadingConnectorStats()
        for name in StoreCounts.__struct_fields__:
            more = getattr(store.counts, name) - getattr(before, name)
            if more:
                stats.increase_counter(PAGES, more, (name,))
        self._before = msgspec.structs.replace(store.counts)
        stats.set_gauge(RESIDENT, len(store.host), ("host",))
        if store.files is not None:
            stats.set_gauge(RESIDENT, len(store.files), ("files",))
            stats.set_gauge(WAITING, store.num_reading, ("read",))
            stats.set_gauge(WAITING, store.num_writing, ("write",))
        return stats


RESULTS = {
    KeyState.MISSING: LookupResult.MISS,
    KeyState.COMING: LookupResult.HIT_PENDING,
    KeyState.STORED: LookupResult.HIT,
}
MEDIA = {"host": Medium.CPU, "files": Medium.STORAGE}


class HostPlaces(LoadStoreSpec):  # type: ignore[misc]
    """Places in host memory, in the order of the keys of a vLLM transfer."""

    def __init__(self, places: list[int]) -> None:
        self.places = places


class Path:
    """The keys that one request looked up or stored, ordered by their positions."""

    def __init__(self) -> None:
        self.known: dict[bytes, int] = {}
        """The position in the sequence at which vLLM states that each key ends."""
        self.reads = Reads()
        self._keys: list[bytes] = []
        self._last = 0
        self._is_sorted = True

    def add(self, keys: Iterable[bytes], context: Any) -> None:
        """Add keys of the request of `context`."""
        known, last = self.known, self._last
        position_of, append = context.get_offload_key_position, self._keys.append
        for key in keys:
            if key not in known:
                place = known[key] = position_of(key) or 0
                # Keys arrive in order, except those of windows, which are looked up from the last.
                if place < last:
                    self._is_sorted = False
                last = place
                append(key)
        self._last = last

    @property
    def keys(self) -> list[bytes]:
        """The keys in the order of their positions."""
        if not self._is_sorted:
            self._keys = self.sorted(self._keys)
            self._last = self.known[self._keys[-1]]
            self._is_sorted = True
        return self._keys

    def sorted(self, keys: Collection[bytes]) -> list[bytes]:
        """Return known `keys` in the order of their positions, each group's in turn."""
        if len(keys) < 2:
            return list(keys)
        return sorted(sorted(keys), key=self.known.__getitem__)


class KvartsManager(OffloadingManager):  # type: ignore[misc]
    """Manages the pages of `store`. `region`: its places in host memory, which the workers have opened."""

    def __init__(self, store: KeyStore, region: HostRegion) -> None:
        self.store = store
        self._region = region
        self._metrics = StoreMetrics(store)

    @override
    def on_new_request(self, req_context: Any) -> Any:
        self._region.unlink()  # the workers have opened it before the first request
        req_context.set_state(Path())
        return RequestOffloadingContext()

    @override
    def lookup(self, key: bytes, req_context: Any) -> Any:
        path = self._path(req_context, (key,))
        return RESULTS[self.store.lookup(key, path.known, path.reads)]

    @override
    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> HostPlaces:
        path = self._path(req_context, keys)
        self.store.touch(path.keys)
        return HostPlaces(self.store.prepare_load(list(keys), path.reads))

    @override
    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        self.store.complete_load(keys)

    @override
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self.store.touch(list(keys))

    @override
    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        path = self._path(req_context, keys)
        self.store.end_reads(path.reads)  # it computes; that it ends is known only when a later step is planned
        placed = self.store.prepare_store(list(keys), path.keys, path.known)
        if placed is None:
            return None
        places, evicted = placed
        return PrepareStoreOutput(list(places), HostPlaces(list(places.values())), evicted)

    @override
    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        path = req_context.get_state(Path) or self._path(req_context, keys)  # `prepare_store` added the keys
        self.store.complete_store(path.sorted(keys), path.keys, path.known, is_stored=success)

    @override
    def on_request_finished(self, req_context: Any) -> None:
        path = self._path(req_context, ())
        self.store.touch(path.keys)
        self.store.end_reads(path.reads)

    @override
    def on_schedule_end(self, context: Any) -> None:
        self.store.poll()

    @override
    def has_pending_work(self) -> bool:
        return self.store.has_work

    @override
    def take_events(self) -> Iterable[Any]:
        return [
            OffloadingEvent(each.keys, MEDIA[each.tier], each.is_removed, removal_expected=not each.is_removed)
            for each in self.store.take_changes()
        ]

    @override
    def get_stats(self) -> Any:
        return self._metrics.take()

    @override
    def reset_cache(self) -> None:
        self.store.reset()

    @override
    def shutdown(self) -> None:
        self.store.close()
        self._region.unlink()

    def _path(self, context: Any, keys: Collection[bytes]) -> Path:
        path: Path | None = context.get_state(Path)
        if path is None:
            path = Path()
            context.set_state(path)
        if keys:
            path.add(keys, context)
        return path
