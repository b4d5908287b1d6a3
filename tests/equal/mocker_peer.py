"""Replays many small traces with NVIDIA Dynamo's native mocker; run by mocker.py with a Python that has it.

Reads a JSON list of cases, prints a JSON list with one list of rows per case.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import dynamo._core as dynamo


def rows_of(case: dict, out: Path) -> list:
    engine = {
        "backend": "vllm",
        "num_gpu_blocks": case["pages"],
        "block_size": case["page_size"],
        "max_num_batched_tokens": case["max_batched_tokens"],
        "max_num_seqs": case["max_seqs"],
    }
    closed = {} if case["concurrency"] is None else {"replay_concurrency": case["concurrency"]}
    dynamo.run_mocker_trace_replay(
        [case["trace"]],
        extra_engine_args={"engine": engine},
        num_workers=case["replicas"],
        trace_block_size=case["trace_block_size"],
        arrival_speedup_ratio=case["speedup"],
        report_jsonl_path=str(out),
        **closed,
    )
    names = ("arrival_time_ms", "input_length", "output_length", "first_admit_ms", "first_token_ms", "last_token_ms")
    rows = []
    for line in out.read_text().splitlines():
        row = json.loads(line)
        reused = max(admission["reused_input_tokens"] for admission in row["admission_history"])
        rows.append([*(row[name] for name in names), reused, row["admission_count"]])
    return rows


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([rows_of(case, Path(folder) / "rows.jsonl") for case in cases]))


if __name__ == "__main__":
    main()
