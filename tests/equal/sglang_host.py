"""Host memory below SGLang's tree, its HiCache, on a CPU: a clock decides when a copy has ended.

The tree, the host pool and the controller of copies are SGLang's own. Stand-ins: streams and events, which ask the
clock; the kernels that copy; pinned memory and its registration. Imported after the stand-ins of `sglang_peer`.
"""

# mypy: ignore-errors
from __future__ import annotations

import atexit
from types import SimpleNamespace

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import base, common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from oracles.naive_sglang import SglangLoad

__all__ = ["CLOCK", "close", "host_settings", "make_pool", "open_host"]


class _Clock:
    """The number of the step, and the steps until a copy to the host, or to the device, counts as done."""

    now = to_host = to_device = 0
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
_init = MHATokenToKVPoolHost.__init__
MHATokenToKVPoolHost.__init__ = lambda self, *args, **more: _init(self, *args, **{**more, "pin_memory": False})


def host_settings(load: SglangLoad) -> dict[str, object]:
    """Return the arguments of its server for host memory of a load."""
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": load.host_ratio,
        "hicache_write_policy": load.write_policy,
        "hicache_io_backend": "kernel",
        "hicache_mem_layout": "page_first",
        "hicache_storage_backend": None,
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
    tree.init_hicache(SimpleNamespace(file_storage_path=None), params)
    engine = tree.cache_controller.l2_transfer_engine
    engine.device_to_host_stream.kind, engine.host_to_device_stream.kind = "d2h", "h2d"


def close(tree) -> None:
    """Let go of a tree with host memory."""
    tree.shutdown()
    atexit.unregister(tree.shutdown)
