"""kvarts' tiers in vLLM's registry of metrics."""

from __future__ import annotations

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from kvarts.connect.vllm.store import KeyStore, StoreCounts

__all__ = ["StoreMetrics", "metric_definitions"]

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
