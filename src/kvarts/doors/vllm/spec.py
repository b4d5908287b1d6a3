"""vLLM's offloading spec: builds the objects of an engine's two kinds of processes from one configuration."""

from __future__ import annotations

from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadingSpec

from kvarts.base.errors import ConfigError
from kvarts.core.tiers.keyed import KeyedTier
from kvarts.doors.vllm.manager import KvartsManager, metric_definitions
from kvarts.doors.vllm.page_io import HostRegion, ModelFolder, PageIo, bytes_of
from kvarts.doors.vllm.store import KeyStore
from kvarts.doors.vllm.worker import KvartsWorker

__all__ = ["KvartsOffloadingSpec"]

OPTIONS = {"host_memory", "directory", "disk", "prefill_tokens_per_s", "most_writes", "most_read_s"}
OF_VLLM = {
    *("spec_name", "spec_module_path", "offload_prompt_only", "self_describing_kv_events", "block_size"),
    *("blocks_per_chunk", "canonical_layout"),
}


class KvartsOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """Host memory of `host_memory` bytes, and below it files in `directory` of `disk` bytes, if given.

    `prefill_tokens_per_s`: tokens that the device computes per second; files that are slower are not read.
    `most_writes`: chunks that may wait to be written. `most_read_s`: how long a request waits for a file. Raises
    ConfigError for unknown, missing or invalid options.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        options = dict(config.extra_config)
        for name in options.keys() - OPTIONS - OF_VLLM:
            raise ConfigError("is not known", field=_field(name), hint=f"Known: {', '.join(sorted(OPTIONS))}.")
        if "host_memory" not in options:
            raise ConfigError("is missing", field=_field("host_memory"), hint='Give it as "4GiB" or in bytes.')
        self._rank_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        self._place_bytes = self._rank_bytes * config.parallel.world_size
        num_bytes = bytes_of(options["host_memory"], _field("host_memory"))
        self._num_places = num_bytes // self._place_bytes
        if not self._num_places:
            raise ConfigError(
                f"{num_bytes:,} bytes do not hold one chunk of {self._place_bytes:,}", field=_field("host_memory")
            )
        if ("directory" in options) != ("disk" in options):
            missing = "disk" if "directory" in options else "directory"
            raise ConfigError("is missing", field=_field(missing), hint="Files need a directory, and a bound in bytes.")
        self._options = options
        self._manager: KvartsManager | None = None
        self._worker: KvartsWorker | None = None
        self._folder: ModelFolder | None = None

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()

    @override
    def get_manager(self) -> KvartsManager:
        if self._manager is None:
            region = HostRegion(self.config.engine_id, self._num_places, self._place_bytes)
            store = self._open_store(region)
            self._manager = KvartsManager(store, region)
        return self._manager

    @override
    def get_worker(self, kv_caches: Any) -> KvartsWorker:
        if self._worker is None:
            self._worker = KvartsWorker(
                kv_caches,
                HostRegion(self.config.engine_id, self._num_places, self._place_bytes),
                rank=self.config.parallel.rank,
                rank_bytes=self._rank_bytes,
                blocks_per_chunk=self.blocks_per_chunk,
            )
        return self._worker

    def _open_store(self, region: HostRegion) -> KeyStore:
        options = self._options
        host = KeyedTier(self._num_places)
        has_events = bool(self.kv_events_config.enable_kv_cache_events)
        if "directory" not in options:
            return KeyStore(host, tells=has_events)
        most_bytes = bytes_of(options["disk"], _field("disk"))
        folder = self._folder = ModelFolder(
            options["directory"], self.config, most_bytes=most_bytes, page_bytes=self._place_bytes
        )
        compute_s = None
        if "prefill_tokens_per_s" in options:
            tokens = max(group.tokens_per_block for group in self.config.groups) * self.blocks_per_chunk
            compute_s = tokens / float(options["prefill_tokens_per_s"])
        return KeyStore(
            host,
            files=folder.tier,
            page_io=PageIo(folder.pages, region),
            most_writes=int(options.get("most_writes", 256)),
            compute_s=compute_s,
            most_read_s=float(options.get("most_read_s", 10.0)),
            tells=has_events,
        )


def _field(name: str) -> str:
    return f"kv_connector_extra_config.{name}"
