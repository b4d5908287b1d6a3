"""Opens the publisher of the KV events of one engine."""

from __future__ import annotations

from collections.abc import Callable

from kvarts.serve.kv_events.batches import BatchQueue
from kvarts.serve.kv_events.config import KvEventsConfig
from kvarts.serve.kv_events.publisher import ZmqPublisher
from kvarts.serve.kv_events.reader import KvEventReader

__all__ = ["KvEvents", "open_kv_events"]


class KvEvents:
    """A reader of the events of one engine, to be passed to the engine when it is built, and its publisher."""

    def __init__(self, config: KvEventsConfig, reader: KvEventReader, publisher: ZmqPublisher) -> None:
        self.config = config
        self.reader = reader
        self.publisher = publisher

    def close(self) -> None:
        """Publish queued batches, and close the sockets."""
        self.publisher.close()


def open_kv_events(config: KvEventsConfig, *, now_s: Callable[[], float] | None = None) -> KvEvents:
    """Open the sockets of `config`. `now_s`: clock for batches, time.time for a server; by default, the engine's.

    Raise ConfigError for an endpoint that cannot be bound.
    """
    queue = BatchQueue()
    reader = KvEventReader(queue, algorithm=config.algorithm, seed=config.seed, now_s=now_s, clears=config.rank == 0)
    try:
        return KvEvents(config, reader, ZmqPublisher(config, queue, reader))
    except BaseException:
        queue.close()
        raise
