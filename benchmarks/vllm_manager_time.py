"""The time that an offloading manager takes in vLLM's scheduler: kvarts' and vLLM's own, on the same calls.

    VLLM_VENV/bin/python benchmarks/vllm_manager_time.py [--requests 256] [--blocks 128] [--rounds 7]

Each round runs both managers in turn. A step is the calls of vLLM's connector for all requests of one step. `hits`:
every request is new, looks up all its blocks, loads them and ends. `prefill`: every request stores an eighth of its
blocks. `decode`: every request stores one more block. `full`: as `prefill`, with places for half of the blocks, so that
blocks are evicted. Printed is the median over rounds of the milliseconds per step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvarts.connect.vllm.manager import KvartsManager
from kvarts.connect.vllm.store import KeyStore
from kvarts.offload.keyed import KeyedTier

Make = Callable[[int], Any]
NO_ONE = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class NoRegion:
    """Stands for the host memory, which no call here reads."""

    def unlink(self) -> None:
        """Do nothing."""


def make_kvarts(num_places: int) -> Any:
    """Return kvarts' manager, without files."""
    return KvartsManager(KeyStore(KeyedTier(num_places)), NoRegion())  # type: ignore[arg-type]


def make_vllm(num_places: int) -> Any:
    """Return vLLM's manager of host memory, with its default policy."""
    return CPUOffloadingManager(num_places)


class Requests:
    """Requests with `num_blocks` keys each, that share nothing, and what they have done with one manager."""

    def __init__(self, manager: Any, num_requests: int, num_blocks: int) -> None:
        self.manager = manager
        self.keys = [
            [make_offload_key(request.to_bytes(8) + place.to_bytes(24), 0) for place in range(num_blocks)]
            for request in range(num_requests)
        ]
        self.contexts: list[ReqContext] = []

    def begin(self) -> None:
        """Begin all requests again."""
        self.contexts = [ReqContext(req_id=str(index)) for index in range(len(self.keys))]
        for context, keys in zip(self.contexts, self.keys, strict=True):
            for place, key in enumerate(keys):
                context.set_offload_key_position(key, (place + 1) * 16)
            self.manager.on_new_request(context)

    def store(self, start: int, end: int) -> float:
        """Store blocks [start, end) of each in one step; return the processor time."""
        manager = self.manager
        began = time.process_time()
        stored = []
        for context, keys in zip(self.contexts, self.keys, strict=True):
            done = manager.prepare_store(keys[start:end], context)
            stored.append(None if done is None else set(done.keys_to_store))
        manager.on_schedule_end(NO_ONE)
        for context, kept in zip(self.contexts, stored, strict=True):
            if kept:
                manager.complete_store(kept, context)
        return time.process_time() - began

    def load(self) -> float:
        """Look up and load all blocks of each in one step, and end it; return the processor time."""
        manager = self.manager
        began = time.process_time()
        for context, keys in zip(self.contexts, self.keys, strict=True):
            for key in keys:
                manager.lookup(key, context)
            manager.touch(keys, context)
            manager.prepare_load(keys, context)
        manager.on_schedule_end(NO_ONE)
        for context, keys in zip(self.contexts, self.keys, strict=True):
            manager.complete_load(set(keys), context)
        self.end()
        return time.process_time() - began

    def end(self) -> None:
        """End all requests."""
        for context in self.contexts:
            self.manager.on_request_finished(context)


def measure(make: Make, num_requests: int, num_blocks: int) -> dict[str, float]:
    """Return the seconds of a step of each kind."""
    chunk = num_blocks // 8
    requests = Requests(make(2 * num_requests * num_blocks), num_requests, num_blocks)
    requests.begin()
    times = [requests.store(start, start + chunk) for start in range(0, num_blocks - chunk, chunk)]
    result = {"prefill": sum(times) / len(times)}
    times = [requests.store(place, place + 1) for place in range(num_blocks - chunk, num_blocks)]
    result["decode"] = sum(times) / len(times)
    requests.end()
    requests.begin()
    result["hits"] = requests.load()
    requests = Requests(make(num_requests * num_blocks // 2), num_requests, num_blocks)
    requests.begin()
    times = [requests.store(start, start + chunk) for start in range(0, num_blocks, chunk)]
    result["full"] = sum(times) / len(times)
    requests.end()
    return result


def main() -> None:
    """Print the times of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    sizes = args.requests, args.blocks
    rounds = [(measure(make_kvarts, *sizes), measure(make_vllm, *sizes)) for _ in range(args.rounds)]
    for kind in ("hits", "prefill", "decode", "full"):
        ours, theirs = (statistics.median(each[side][kind] for each in rounds) for side in (0, 1))
        print(f"{kind:<8}kvarts {ours * 1e3:8.2f} ms  vLLM {theirs * 1e3:8.2f} ms  ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
