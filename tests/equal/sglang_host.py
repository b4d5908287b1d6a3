"""Host memory and storage below SGLang's tree, its HiCache, on a CPU: a clock decides when something has ended.

The tree, the host pool, the controller of copies, its threads, and the files of its storage are SGLang's own.
Stand-ins: streams and events, which ask the clock; the kernels that copy; pinned memory and its registration. The
threads take turns with the scheduler: each runs until it waits for work or for the clock. Imported after the stand-ins
of `sglang_peer`.
"""

# mypy: ignore-errors
from __future__ import annotations

import atexit
import json
import queue
import shutil
import tempfile
import threading
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import base, common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context
from sglang.srt.utils import poll_timer

from oracles.naive_sglang import SglangLoad

__all__ = ["CLOCK", "close", "host_settings", "make_pool", "num_stored", "open_host", "run_storage"]


class _Clock:
    """The number of the step, and the steps until a copy to the host, or to the device, counts as done.

    `query`, `read`, `write`: the steps of a query of storage, and of a batch of pages that is read or written.
    """

    now = to_host = to_device = query = read = write = 0
    stream = None
    """The stream that events are recorded on."""


CLOCK = _Clock()


class _Event:
    def __init__(self, **more):
        self.end = -1

    def record(self, stream=None):
        self.end = CLOCK.now + {"d2h": CLOCK.to_host, "h2d": CLOCK.to_device}.get(CLOCK.stream, 0)

    def query(self):
        return CLOCK.now >= self.end

    def synchronize(self):
        pass

    def wait(self, stream=None):
        pass


class _Stream:
    kind = None

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass


class _On:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self.before, CLOCK.stream = CLOCK.stream, self.stream.kind

    def __exit__(self, *error):
        CLOCK.stream = self.before


_DEVICE = SimpleNamespace(Event=_Event, Stream=_Stream, stream=_On, current_stream=_Stream, __name__="clock")
cache_controller.device_module = l2_transfer.device_module = _DEVICE
common._cuda_host_register = base._cuda_host_unregister = lambda *args, **more: None
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
MHATokenToKVPoolHost.backup_from_device_all_layer = lambda *args, **more: None
MHATokenToKVPoolHost.load_to_device_per_layer = lambda *args, **more: None
poll_timer.time = SimpleNamespace(perf_counter=lambda: CLOCK.now)
poll_timer.PollTimer.elapsed = lambda self: (CLOCK.now - self.started_at) / 1000 if self.running else 0.0
RANKS = (
    *("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "dp_rank", "moe_dp_rank", "moe_ep_rank"),
    "attn_dcp_rank",
)
get_context().parallel.override_permanently(**dict.fromkeys(RANKS, 0))
_init = MHATokenToKVPoolHost.__init__
MHATokenToKVPoolHost.__init__ = lambda self, *args, **more: _init(self, *args, **{**more, "pin_memory": False})


class _Worker:
    """A thread of the controller, with the number of the step that it has come to."""

    workers: ClassVar[list[_Worker]] = []
    """Those of the tree that was opened last, in the order in which they run within a step."""

    def __init__(self, target, daemon):
        self._thread = threading.Thread(target=self._run, args=(target,), daemon=True)
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._queue = None
        self._time = self._until = -1
        self._is_over = self._is_ending = False

    def start(self):
        self._thread.start()
        _Worker.workers.append(self)

    def _run(self, target):
        self._go.acquire()
        target()
        self._is_over = True
        self._stands.release()

    def _stand(self):
        self._stands.release()
        self._go.acquire()

    def take(self, items):
        """Wait for something in a queue; the time goes on to when it was put there."""
        while not items:
            self._queue = items
            self._stand()
        self._queue = None
        item, time = items.popleft()
        self._time = max(self._time, time)
        return item

    def wait(self, num_steps):
        """Let so many steps pass."""
        self._time += num_steps
        self._until = self._time
        while self._until > CLOCK.now and not self._is_ending:
            self._stand()

    def run(self):
        """Run as far as the clock lets it."""
        while not self._is_over and (self._queue is None or self._queue) and self._until <= CLOCK.now:
            self._go.release()
            self._stands.acquire()

    def join(self, timeout=None):
        self._is_ending, self._until = True, -1
        self.run()
        self._thread.join(timeout)

    def is_alive(self):
        return self._thread.is_alive()

    @classmethod
    def here(cls):
        """Return the worker that calls; None for the scheduler."""
        return next((each for each in cls.workers if each._thread is threading.current_thread()), None)


class _Queue(queue.Queue):
    def _put(self, item):
        self.queue.append((item, CLOCK.now))

    def _get(self):
        return self.queue.popleft()[0]

    def get(self, block=True, timeout=None):
        worker = _Worker.here()
        return super().get(block=False) if worker is None else worker.take(self.queue)


class _Files(HiCacheFile):
    """SGLang's files, whose calls take a number of steps."""

    def batch_exists(self, keys, extra_info=None):
        _Worker.here().wait(CLOCK.query)
        return super().batch_exists(keys, extra_info)

    def batch_get(self, keys, target_locations, target_sizes=None):
        _Worker.here().wait(CLOCK.read)
        return super().batch_get(keys, target_locations, target_sizes)

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        _Worker.here().wait(CLOCK.write)
        return super().batch_set(keys, values, target_locations, target_sizes)


cache_controller.threading = SimpleNamespace(Thread=_Worker, Event=threading.Event)
cache_controller.Queue = _Queue
StorageBackendFactory.create_backend = staticmethod(lambda name, config, pool: _Files(config))


def run_storage() -> None:
    """Let the threads of the storage come to the time of the clock: writes first, then queries, then reads."""
    if _Worker.workers:
        query, read, sync, write = _Worker.workers
        for worker in (write, query, read, sync):
            worker.run()


def num_stored(tree) -> int:
    """Return the pages in storage."""
    return sum(1 for _ in Path(tree.cache_controller.storage_backend.file_path).iterdir())


def host_settings(load: SglangLoad) -> dict[str, object]:
    """Return the arguments of its server for host memory of a load."""
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": load.host_ratio,
        "hicache_write_policy": load.write_policy,
        "hicache_io_backend": "kernel",
        "hicache_mem_layout": "page_first",
        "hicache_storage_backend": "file" if load.prefetch_policy else None,
        "hicache_storage_prefetch_policy": load.prefetch_policy or "timeout",
        "hicache_storage_backend_extra_config": json.dumps(load.storage_config),
        "hicache_storage_prefetch_retry_poll_interval": load.retry_interval,
        "hicache_storage_prefetch_retry_max_attempts": load.max_retries,
        "hicache_host_memory_mode": "cache",
        "served_model_name": "m",
        "model_path": "m",
    }


def make_pool(size: int, page_size: int) -> MHATokenToKVPool:
    """Return a pool of KV of one layer and one head."""
    return MHATokenToKVPool(size, page_size, torch.float32, 1, 1, 1, "cpu", False)


def open_host(tree, params, load: SglangLoad) -> None:
    """Attach host memory to a tree, and set the clock to the start."""
    CLOCK.now, CLOCK.to_host, CLOCK.to_device = -1, load.d2h_steps, load.h2d_steps
    CLOCK.query, CLOCK.read, CLOCK.write = load.query_steps, load.read_steps, load.write_steps
    cache_controller.STORAGE_BATCH_SIZE = load.batch_pages
    _Worker.workers = []
    folder = None
    if load.prefetch_policy:
        folder = tempfile.mkdtemp(prefix="kvarts-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    tree.init_hicache(SimpleNamespace(file_storage_path=folder), params)
    controller = tree.cache_controller
    for index in load.stored:
        tokens = load.asks[index].prompt + load.asks[index].output
        whole = array("q", tokens[: len(tokens) // load.page_size * load.page_size])
        for key in get_storage_hash_str(RadixKey(whole), page_size=load.page_size) if whole else ():
            controller.storage_backend.set(key, controller.storage_host_pool.get_dummy_flat_data_page())
    engine = controller.l2_transfer_engine
    engine.device_to_host_stream.kind, engine.host_to_device_stream.kind = "d2h", "h2d"


def close(tree) -> None:
    """Let go of a tree with host memory, and remove the files of its storage."""
    backend = tree.cache_controller.storage_backend
    tree.shutdown()
    atexit.unregister(tree.shutdown)
    if backend is not None:
        shutil.rmtree(backend.file_path)
