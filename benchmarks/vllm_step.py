"""Times vLLM's own scheduler; run by step_cost.py with a Python that has vLLM. Prints one JSON object.

Nothing is executed: each of `--seqs` decodes is handed a made-up token after every step, as kvarts' are.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from equal.vllm_setup import cache_config, model_config


def make_scheduler(num_pages: int, page_size: int, max_seqs: int) -> Scheduler:
    cache = CacheConfig(block_size=page_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_pages
    scheduler = SchedulerConfig(
        max_num_seqs=max_seqs,
        max_num_batched_tokens=8192,
        max_model_len=16384,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
    )
    config = VllmConfig(model_config=model_config(16384), cache_config=cache, scheduler_config=scheduler)
    kv = cache_config([("full", None)], num_pages, page_size)
    return Scheduler(config, kv, StructuredOutputManager(config), block_size=page_size)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("seqs", "pages", "page-size", "prompt", "warm-up", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    scheduler = make_scheduler(args.pages, args.page_size, args.seqs)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(args.page_size, sha256)
    params = SamplingParams(max_tokens=100_000, ignore_eos=True)
    for index in range(args.seqs):
        prompt = [index * args.prompt % 9973 + position % 31 for position in range(args.prompt)]
        scheduler.add_request(Request(str(index), prompt, params, None, block_hasher=hasher))
    gc.collect()
    gc.disable()
    schedule_us, commit_us = [], []
    step = 0
    while len(schedule_us) < args.warm_up + args.steps:
        start = time.thread_time_ns()
        plan = scheduler.schedule()
        planned = time.thread_time_ns()
        ids = list(plan.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[step % 977] for _ in ids],
        )
        answered = time.thread_time_ns()
        scheduler.update_from_output(plan, result)
        done = time.thread_time_ns()
        step += 1
        if plan.total_num_scheduled_tokens == args.seqs:
            schedule_us.append((planned - start) / 1e3)
            commit_us.append((done - answered) / 1e3)
    print(
        json.dumps(
            {
                "version": vllm.__version__,
                "schedule_us": statistics.median(schedule_us[args.warm_up :]),
                "commit_us": statistics.median(commit_us[args.warm_up :]),
                "mean_us": statistics.fmean(schedule_us[args.warm_up :]) + statistics.fmean(commit_us[args.warm_up :]),
            }
        )
    )


if __name__ == "__main__":
    main()
