"""Drives vLLM's KV cache manager through workloads; run by compare_groups.py with a Python that has vLLM.

Reads one workload a line from standard input, and writes what the manager did, one line each. No model runs: a request
has the tokens that the workload says.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from equal.vllm_setup import cache_config

MAX_MODEL_LEN = 4096


class Driven:
    """One manager, and the requests of one workload."""

    def __init__(self, workload: dict) -> None:
        page_size = workload["page_size"]
        # One block more: vLLM keeps its block 0 to stand for blocks that are not there.
        config = cache_config(workload["groups"], workload["num_parts"] + 1, page_size)
        self.manager = KVCacheManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=page_size,
            hash_block_size=page_size,
            enable_caching=True,
        )
        self.hasher = get_request_block_hasher(page_size, sha256)
        self.num_groups = len(workload["groups"])
        self.requests: dict[int, Request] = {}

    def do(self, operation: list) -> list:
        """Carry out one operation; return what it came to, the blocks in use by group, and the free ones."""
        self.manager.new_step_starts()
        return [*getattr(self, operation[0])(*operation[1:]), self.in_use(), self.num_free()]

    def open(self, request_id: int, tokens: list[int], num_new: int) -> list:
        params = SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True)
        request = Request(str(request_id), tokens, params, None, block_hasher=self.hasher)
        blocks, num_hit, _ = self.manager.get_computed_blocks(request)
        num_new = min(num_new, len(tokens) - num_hit)
        taken = self.manager.allocate_slots(request, num_new, num_hit, blocks)
        if taken is not None:
            request.num_computed_tokens = num_hit + num_new
            self.requests[request_id] = request
        return [num_hit, taken is not None]

    def step(self, request_id: int, num_new: int) -> list:
        request = self.requests.get(request_id)
        if request is None:
            return [None]
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(num_new)  # the token that is sampled: any number will do
        num_new = min(num_new, request.num_tokens - request.num_computed_tokens)
        taken = self.manager.allocate_slots(request, num_new)
        if taken is not None:
            request.num_computed_tokens += num_new
        return [taken is not None]

    def close(self, request_id: int) -> list:
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.manager.free(request)
        return [request is not None]

    def in_use(self) -> list[int]:
        counts = []
        for group in range(self.num_groups):
            ids = set()
            for request in self.requests.values():
                blocks = self.manager.get_blocks(request.request_id).blocks[group]
                ids.update(block.block_id for block in blocks if not block.is_null)
            counts.append(len(ids))
        return counts

    def num_free(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()


def main() -> None:
    init_none_hash(sha256)
    print(json.dumps({"version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        workload = json.loads(line)
        driven = Driven(workload)
        print(json.dumps([driven.do(operation) for operation in workload["operations"]]), flush=True)


if __name__ == "__main__":
    main()
