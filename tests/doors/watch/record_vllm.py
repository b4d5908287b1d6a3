"""Records KV events of vLLM's own scheduler, cache and encoder; no model runs.

    PYTHONPATH=src:tests PYTHON_OF_VLLM tests/doors/watch/record_vllm.py > tests/doors/watch/recorded/vllm-0.32.json

A stream has its batches, one per step as in an engine, and after each the hashes that vLLM can find: its own answer.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import os
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import msgspec
import vllm
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from equal.theirs import make_config
from equal.vllm_setup import cache_config

os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "1"  # vLLM's default, which `equal.theirs` changes
SIZE = 16


class Engine:
    """vLLM's scheduler with blocks of 16 tokens, whose model always samples token 7."""

    def __init__(self, num_blocks: int) -> None:
        config = make_config()
        config.cache_config.block_size = SIZE
        config.cache_config.num_gpu_blocks = num_blocks + 1  # its block 0 stands for blocks that are not there
        config.scheduler_config.max_num_seqs = 8
        kv = cache_config([("full", None)], num_blocks + 1, SIZE)
        self.scheduler = Scheduler(config, kv, StructuredOutputManager(config), block_size=SIZE)
        self.scheduler.kv_event_publisher = self
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.hasher = get_request_block_hasher(SIZE, sha256_cbor)
        self.num_blocks = num_blocks
        self.batches: list[str] = []
        self.num_found: list[int] = []
        self.num_asked = 0

    def ask(self, prompt: list[int], num_tokens: int = 1, **more: Any) -> str:
        """Add a request; return its id."""
        name = str(self.num_asked)
        self.num_asked += 1
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, extra_args=more or None)
        self.scheduler.add_request(
            Request(name, prompt, params, None, arrival_time=float(name), block_hasher=self.hasher)
        )
        return name

    def step(self) -> None:
        """Run a step and publish its events."""
        plan = self.scheduler.schedule()
        names = list(plan.num_scheduled_tokens)
        computed = {name: self.scheduler.requests[name] for name in names}
        ids = [[7] if one.num_computed_tokens >= one.num_tokens else [] for one in computed.values()]
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=ids
        )
        self.scheduler.update_from_output(plan, result)

    def publish(self, batch: KVEventBatch) -> None:
        """Encode a batch of the scheduler, as vLLM's publisher does."""
        batch.ts, batch.data_parallel_rank = float(len(self.batches)), 0
        self.batches.append(msgspec.msgpack.encode(batch).hex())
        self.num_found.append(len(self.pool.cached_block_hash_to_block))

    def shutdown(self) -> None:
        """Do nothing, in place of a socket's end."""

    def run(self) -> None:
        """Run until all requests have ended."""
        while self.scheduler.has_unfinished_requests():
            self.step()

    def stream(self) -> dict[str, Any]:
        """Return what was published."""
        return {"total_blocks": self.num_blocks, "batches": self.batches, "num_found": self.num_found}


def prompt(name: int, num_tokens: int) -> list[int]:
    """Return a prompt that shares no block with those of other names."""
    return [name] * num_tokens


def repeats() -> Engine:
    """Run prompts of whole blocks again and again, and others that evict a copy, then both."""
    engine = Engine(12)
    for _ in range(3):
        engine.ask(prompt(1, 3 * SIZE))
        engine.run()
    engine.ask(prompt(2, 8 * SIZE))  # evicts copies of the last block; the next request finds one that is left
    engine.run()
    engine.ask(prompt(1, 3 * SIZE + 4))
    engine.run()
    for name in (3, 4):
        engine.ask(prompt(name, 8 * SIZE))
        engine.run()
    return engine


def one_block() -> Engine:
    """Run a prompt of one block three times, so that copies begin where prompts begin."""
    engine = Engine(8)
    for _ in range(3):
        engine.ask(prompt(1, SIZE))
        engine.run()
    for name, num in ((2, 6), (1, 1), (3, 8)):
        engine.ask(prompt(name, num * SIZE))
        engine.run()
    return engine


def reports() -> Engine:
    """Run requests in report mode `full`, of which some wait for memory step by step."""
    engine = Engine(12)
    for _ in range(2):
        engine.ask(prompt(1, 4 * SIZE), kv_cache_report_mode="full")
        engine.run()
    engine.ask(prompt(2, 6 * SIZE + 8), 12)
    engine.step()
    engine.ask(prompt(1, 8 * SIZE), kv_cache_report_mode="full")  # waits, and repeats its blocks in each step
    engine.run()
    for name in (3, 4, 1):
        engine.ask(prompt(name, 10 * SIZE), kv_cache_report_mode="full")
        engine.run()
    return engine


def aborts() -> Engine:
    """Run a load with aborts and a reset of the cache."""
    engine = Engine(12)
    for turn in range(8):
        names = [engine.ask(prompt(turn % 3, (2 + turn % 4) * SIZE), 6) for _ in range(2)]
        engine.step()
        engine.scheduler.finish_requests(names[turn % 2], RequestStatus.FINISHED_ABORTED)
        engine.run()
        if turn == 4:
            engine.scheduler.reset_prefix_cache()
    return engine


def main() -> None:
    """Print the streams."""
    init_none_hash(sha256_cbor)
    streams = {made.__name__: made().stream() for made in (repeats, one_block, reports, aborts)}
    print(json.dumps({"vllm": vllm.__version__, "made_by": "record_vllm.py", "streams": streams}, indent=0))


if __name__ == "__main__":
    main()
