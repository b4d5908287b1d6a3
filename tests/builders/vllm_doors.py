"""kvarts' order of eviction and files behind vLLM's own managers: run by tests/doors/inside_vllm/test_vllm_doors.py.

Runs with a Python that has vLLM. Arguments: the check, a directory, and a seed. Prints the version of vLLM's files
and "held" at the end.
"""

from __future__ import annotations

import os
import random
import sys
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingKVEventsConfig,
    OffloadingWorker,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

PAGE_BYTES = 64
NUM_SLOTS = 8
VERSION = "0.33" if find_spec("vllm.v1.core.kv_cache_planning") else "0.32"


def sequences(draw: random.Random) -> list[list[bytes]]:
    """Sequences of keys; a key stands for everything up to it, so they share prefixes."""
    found = []
    for _ in range(6):
        units = [draw.randrange(2) for _ in range(draw.randint(3, 7))]
        names = ["".join(map(str, units[: count + 1])) for count in range(len(units))]
        found.append([make_offload_key(name.encode().ljust(32, b"."), 0) for name in names])
    return found


def check_policy(seed: int) -> None:
    """Whatever is stored, loaded and evicted: what is left of a sequence is a prefix of it."""
    draw = random.Random(seed)
    manager = CPUOffloadingManager(draw.randint(7, 8), "KvartsCachePolicy", "kvarts.doors.vllm")
    known = sequences(draw)
    num_evicted = 0
    for number in range(60):
        keys = draw.choice(known)
        context = ReqContext(req_id=str(number))
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, place)
        manager.on_new_request(context)
        found = 0
        while found < len(keys) and manager.lookup(keys[found], context) is LookupResult.HIT:
            found += 1
        if found:
            manager.prepare_load(keys[:found], context)
            manager.complete_load(keys[:found], context)
        end = draw.randint(found, len(keys))
        placed = manager.prepare_store(keys[:end], context) if end > found else None
        if placed is not None:
            num_evicted += len(placed.evicted_keys)
            manager.complete_store(set(placed.keys_to_store), context, success=draw.random() < 0.9)
        manager.on_request_finished(context)
        # A store that failed leaves a sequence without its end, never without its beginning.
        for each in known:
            hits = [manager.lookup(key, context) is LookupResult.HIT for key in each]
            assert hits == sorted(hits, reverse=True), (seed, number, hits)
    assert num_evicted, "nothing was evicted"


def check_steps(*, has_others: bool) -> None:
    """A request that stores 12 chunks in a tier for 8, in steps, leaves its beginning, whatever was stored before."""
    of_lru = (
        {1: 7, 2: 6, 3: 5, 4: 4, 5: 3, 6: 2, 12: 0} if VERSION == "0.33" else dict.fromkeys((1, 2, 3, 4, 5, 6, 12), 0)
    )
    for name, module, found_in_steps_of in (
        ("lru", None, of_lru),
        ("KvartsCachePolicy", "kvarts.doors.vllm", {1: 8, 2: 8, 3: 6, 4: 8, 5: 5, 6: 6, 12: 0}),
    ):
        for size, expected in found_in_steps_of.items():
            manager = CPUOffloadingManager(8, name, module)
            if has_others:
                store(manager, keys_of("other", 4), 4)
            assert store(manager, keys_of("prompt", 12), size) == expected, (name, size)
    # A request that finds a prefix keeps it while it stores what follows, and others are evicted for it.
    manager = CPUOffloadingManager(8, "KvartsCachePolicy", "kvarts.doors.vllm")
    store(manager, keys_of("prompt", 3), 3)
    store(manager, keys_of("other", 5), 5)
    assert store(manager, keys_of("prompt", 9), 2) == 7
    assert store(manager, keys_of("third", 4), 2) == 4
    context = ReqContext(req_id="look")
    assert [manager.lookup(key, context) is LookupResult.HIT for key in keys_of("prompt", 5)] == [True] * 4 + [False]


def keys_of(name: str, count: int) -> list[bytes]:
    return [make_offload_key(f"{name} {place}".encode().ljust(32, b"."), 0) for place in range(count)]


def store(manager: Any, keys: list[bytes], size: int) -> int:
    """Store keys that are missing in steps of `size`; return how many can be found from the first on."""
    context = ReqContext(req_id=keys[0].decode(errors="replace"))
    manager.on_new_request(context)
    found = 0
    while found < len(keys) and manager.lookup(keys[found], context) is LookupResult.HIT:
        found += 1
    for start in range(found, len(keys), size):
        step = keys[start : start + size]
        for place, key in enumerate(keys[: start + size]):
            context.set_offload_key_position(key, place)
        placed = manager.prepare_store(step, context)
        if placed is not None:
            manager.complete_store(set(placed.keys_to_store), context)
    hits = [manager.lookup(key, context) is LookupResult.HIT for key in keys]
    manager.on_request_finished(context)
    return hits.index(False) if False in hits else len(hits)


def open_files(folder: str, num_pages: int, view: Any, **options: Any) -> Any:
    """Return the tier as vLLM's factory makes it."""
    from kvarts.core.tiers.pagefiles import file_bytes

    parallel = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "data_parallel_index": 0}
    config = OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=PAGE_BYTES,
        enable_kv_cache_events=True,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(name="model", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            **parallel,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        replicated_layout=False,
    )
    events = OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=False)
    spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)
    settings = {"type": "KvartsFiles", "module_path": "kvarts.doors.vllm", "directory": folder}
    disk = num_pages * file_bytes(36, PAGE_BYTES)
    return SecondaryTierFactory.create_secondary_tier(
        {**settings, "disk": disk, "enable_kv_events": True, **options}, memoryview(view), spec
    )


class Files:
    """The tier, vLLM's host memory above it, and a model of both."""

    def __init__(self, folder: str, num_pages: int) -> None:
        self.folder = folder
        self.num_pages = num_pages
        self.memory = np.zeros((NUM_SLOTS, PAGE_BYTES), np.uint8)
        self.tier = open_files(folder, num_pages, self.memory)
        self.num_jobs = 0
        self.told: set[bytes] = set()

    def job(self, keys: list[bytes], *, is_load: bool) -> Any:
        """Run a job with one slot for each key, to its end."""
        self.num_jobs += 1
        slots = np.arange(len(keys), dtype=np.int64)
        job = TransferJob(self.num_jobs, keys, slots, is_load, ReqContext(req_id="r"))
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self.num_jobs and not self.tier.has_pending_work()
        self.tier.tier.check()
        for event in self.tier.take_events():
            self.told = self.told - set(event.keys) if event.removed else self.told | set(event.keys)
        return result

    def put(self, keys: list[bytes]) -> Any:
        """Store pages, each with bytes of its own."""
        for slot, key in enumerate(keys):
            self.memory[slot] = np.frombuffer((key * 2)[:PAGE_BYTES], np.uint8)
        return self.job(keys, is_load=False)

    def get(self, keys: list[bytes]) -> Any:
        """Load pages; those that are reported have their bytes."""
        self.memory[:] = 0
        result = self.job(keys, is_load=True)
        good = keys if result.success else list(result.successful_keys or ())
        for key in good:
            assert self.memory[keys.index(key)].tobytes() == (key * 2)[:PAGE_BYTES]
        return good

    def stored(self, keys: list[bytes]) -> list[bool]:
        """Return which keys are hits."""
        return [self.tier.lookup(key, ReqContext(req_id="r")) is LookupResult.HIT for key in keys]

    def reopen(self) -> None:
        """Restart."""
        self.tier.drain_jobs()
        self.tier.shutdown()
        self.tier = open_files(self.folder, self.num_pages, self.memory)


def check_files(folder: str, seed: int) -> None:
    """Pages come back as they were, or are misses; no more than there is room for; after a restart as well."""
    draw = random.Random(seed)
    files = Files(folder, draw.randint(2, 6))
    known = sequences(draw)
    for _ in range(40):
        keys = draw.choice(known)
        done = draw.random()
        if done < 0.5:
            assert files.put(keys).success
        elif done < 0.8:
            stored = files.stored(keys)
            num_hits = stored.index(False) if False in stored else len(stored)
            if num_hits:
                assert files.get(keys[:num_hits]) == keys[:num_hits]
        elif done < 0.9:
            paths = sorted(Path(folder).glob("*/*/*.kv"))
            if paths:
                path = draw.choice(paths)
                text = path.read_bytes()
                path.write_bytes(text[:-1] if draw.random() < 0.5 else text[:-1] + bytes([text[-1] ^ 1]))
                key = bytes.fromhex(path.stem)
                good = files.get([key])
                files.tier.drain_jobs()
                assert good == [] and files.stored([key]) == [False] and not path.exists()
        else:
            files.reopen()
        every = {key for each in known for key in each}
        hits = {key for key in every if files.stored([key])[0]}
        assert len(hits) <= files.num_pages and hits == files.told, (seed, hits, files.told)
    bad = TransferJob(999, [known[0][0]], np.array([NUM_SLOTS], np.int64), False, ReqContext(req_id="r"))
    files.tier.submit_store(bad)
    (result,) = files.tier.get_finished_jobs()
    assert not result.success, "a place that is not there"
    files.tier.shutdown()


def check_worker(seed: int) -> None:
    """Blocks that are stored come back into other blocks, by a load that the step waits for as by any other."""
    import torch

    from kvarts.doors.vllm.manager import HostPlaces
    from kvarts.doors.vllm.page_io import HostRegion
    from kvarts.doors.vllm.worker import KvartsWorker

    torch.manual_seed(seed)
    layers = torch.randint(0, 256, (2, 12, PAGE_BYTES), dtype=torch.uint8)
    region = HostRegion(f"doors-{os.getpid()}-{seed}", NUM_SLOTS, 2 * PAGE_BYTES)
    refs = [CanonicalKVCacheRef(tensor_idx=place, page_size_bytes=PAGE_BYTES) for place in range(2)]
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor=layer, page_size_bytes=PAGE_BYTES) for layer in layers],
        group_data_refs=[refs],
    )
    worker = KvartsWorker(caches, region, rank=0, rank_bytes=2 * PAGE_BYTES, blocks_per_chunk=1)
    region.unlink()
    draw = random.Random(seed)
    order = draw.sample(range(12), 6)
    places = HostPlaces(draw.sample(range(NUM_SLOTS), 3))
    before = layers[:, order[:3]].clone()
    sources, targets = (
        GPULoadStoreSpec(order[start : start + 3], group_sizes=(3,), block_indices=(0,)) for start in (0, 3)
    )
    assert worker.submit_store(1, sources, places)
    worker.wait({1})
    more = {"expedited": True} if "expedited" in signature(OffloadingWorker.submit_load).parameters else {}
    assert worker.submit_load(2, places, targets, **more)
    worker.wait({2})
    assert [(ended.job_id, ended.success) for ended in worker.get_finished()] == [(1, True), (2, True)]
    assert torch.equal(layers[:, order[3:]], before)
    worker.shutdown()


def check_slow(folder: str) -> None:
    """A page that takes longer to read than to compute is a miss."""
    files = Files(folder, 4)
    key = make_offload_key(b"k" * 32, 0)
    files.put([key])
    assert files.get([key]) == [key] and files.stored([key]) == [True]
    files.tier._compute_s = files.tier._read_s / 2
    assert files.stored([key]) == [False] and files.tier.counts.computed_instead == 1
    files.tier.shutdown()


if __name__ == "__main__":
    what, where, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
    for number in range(first, first + 20):
        if what == "policy":
            check_policy(number)
        elif what == "worker":
            check_worker(number)
        else:
            check_files(f"{where}/{number}", number)
    if what == "policy":
        check_steps(has_others=False)
        check_steps(has_others=True)
    if what == "files":
        check_slow(f"{where}/slow")
    print(VERSION, "held")
