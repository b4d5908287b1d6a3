"""Tiers on their way to being opened: the device's tree is made first, with an eviction order that knows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvarts.config import EngineConfig
from kvarts.event_log import Tell
from kvarts.kv.cache import PageCache
from kvarts.kv.eviction import EvictionOrder
from kvarts.kv.watcher import TreeWatcher
from kvarts.offload.config import OffloadConfig
from kvarts.offload.offloader import Offloader
from kvarts.offload.safe_first import SafeFirst

__all__ = ["TiersToOpen"]


class TiersToOpen:
    """The tiers of `offload`, below an engine of `config` that evicts by orders that `make_order` makes.

    A lazy policy evicts first what a tier below holds as well. `known_keys` and `namespace`: see FileTier.
    """

    def __init__(
        self,
        offload: OffloadConfig,
        config: EngineConfig,
        make_order: Callable[[], EvictionOrder],
        *,
        known_keys: Iterable[bytes] = (),
        namespace: str = "",
    ) -> None:
        self._offload = offload
        self._config = config
        self._known_keys = known_keys
        self._namespace = namespace
        self._safe_first = SafeFirst(make_order) if offload.policy == "lazy" else None
        self.order: EvictionOrder = make_order() if self._safe_first is None else self._safe_first
        self.watcher: TreeWatcher | None = self._safe_first
        self.evicts_safe_first = self._safe_first is not None
        self.full_prompt_hits = offload.full_prompt_hits

    def open_below(self, cache: PageCache, *, with_page_ids: bool, tell: Tell | None) -> Offloader:
        """Open the tiers below `cache`."""
        return Offloader(
            self._offload,
            cache,
            page_size=self._config.page_size,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            with_page_ids=with_page_ids,
            tell=tell,
            known_keys=self._known_keys,
            namespace=self._namespace,
            order=self._safe_first,
        )
