"""Replays a trace with NVIDIA Dynamo's native mocker; run with a Python that has it."""

# mypy: ignore-errors
from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import dynamo._core as dynamo


def main() -> None:
    """OUT.jsonl receives a row a request, OUT.json only the summary; `--timed`: print the call's processor time."""
    trace, pages, page_size, replicas, out, *timed = sys.argv[1:]
    engine = {
        "backend": "vllm",
        "num_gpu_blocks": int(pages),
        "block_size": int(page_size),
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
    }
    rows = out if out.endswith(".jsonl") else None
    start = time.process_time()
    result = dynamo.run_mocker_trace_replay(
        [trace],
        extra_engine_args={"engine": engine},
        num_workers=int(replicas),
        trace_block_size=512,
        report_jsonl_path=rows,
    )
    if timed:
        print(time.process_time() - start)
    if rows is None:
        Path(out).write_text(json.dumps(dict(result.summary)))


if __name__ == "__main__":
    main()
