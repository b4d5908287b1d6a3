"""Replays a trace with NVIDIA Dynamo's native mocker; run by compare_dynamo.py with a Python that has it."""

# mypy: ignore-errors
from __future__ import annotations

import sys

import dynamo._core as dynamo


def main() -> None:
    trace, pages, page_size, replicas, out = sys.argv[1:]
    engine = {
        "backend": "vllm",
        "num_gpu_blocks": int(pages),
        "block_size": int(page_size),
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
    }
    dynamo.run_mocker_trace_replay(
        [trace],
        extra_engine_args={"engine": engine},
        num_workers=int(replicas),
        trace_block_size=512,
        report_jsonl_path=out,
    )


if __name__ == "__main__":
    main()
