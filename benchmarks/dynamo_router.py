"""Choices of NVIDIA Dynamo's KV router on the bundled conversation, for tests/sim/routers/test_dynamo_choices.py.

    PYTHON benchmarks/dynamo_router.py OUT.json

PYTHON is one that has ai-dynamo 1.6.1 and ai-dynamo-runtime 1.6.1 (pip install --no-deps). Dynamo decides ties by
chance and has no seed, so each run makes other choices; all are to be as cheap as any. A row per case: what it was run
with, the worker of each request, in the order of the trace, as one digit, and what Dynamo reported.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import dynamo._core as dynamo

TRACE = Path(__file__).parents[1] / "src" / "kvarts" / "data" / "mooncake-conversation-1000.jsonl"

CASES = [
    {"pages": 16384, "page_size": 512, "replicas": 4},
    {"pages": 400, "page_size": 512, "replicas": 3},
    {"pages": 4000, "page_size": 64, "replicas": 4},
    {
        "pages": 16384,
        "page_size": 512,
        "replicas": 3,
        "overlap_score_credit": 0.5,
        "prefill_load_scale": 2.0,
        "decode_active_request_weight": 3.0,
    },
    {"pages": 16384, "page_size": 512, "replicas": 4, "overlap_score_credit_decay": 0.5},
    {"pages": 16384, "page_size": 512, "replicas": 2, "router_queue_threshold": 1.0},
    {"pages": 16384, "page_size": 512, "replicas": 2, "router_queue_threshold": 0.5},
]


def run(case: dict[str, float]) -> dict[str, object]:
    """Return a case with what Dynamo did."""
    settings = dict(case)
    pages, page_size, replicas = (int(settings.pop(name)) for name in ("pages", "page_size", "replicas"))
    engine = {
        "backend": "vllm",
        "num_gpu_blocks": pages,
        "block_size": page_size,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
    }
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as out:
        dynamo.run_mocker_trace_replay(
            [str(TRACE)],
            extra_engine_args={"engine": engine},
            num_workers=replicas,
            trace_block_size=512,
            router_mode="kv_router",
            router_config=dynamo.KvRouterConfig(**settings),
            report_jsonl_path=out.name,
            capture_per_request=True,
        )
        rows = [json.loads(line) for line in Path(out.name).read_text().splitlines()]
    by_request = {(round(row["arrival_time_ms"]), row["input_length"], row["output_length"]): row for row in rows}
    requests = [json.loads(line) for line in TRACE.read_text().splitlines()]
    first = requests[0]["timestamp"]
    found = [by_request[each["timestamp"] - first, each["input_length"], each["output_length"]] for each in requests]
    assert len(by_request) == len(rows) == len(requests)
    return {
        **case,
        "choices": "".join(str(row["decode_worker_idx"]) for row in found),
        "num_queued": sum(row["routing_history"][0]["outcome"] != "immediate" for row in found),
        "reused_tokens": sum(row["reused_input_tokens"] for row in found),
        "first_token_us": sum(round(row["first_token_ms"] * 1e3) for row in found),
        "last_token_us": sum(round(row["last_token_ms"] * 1e3) for row in found),
    }


def main() -> None:
    """Write the cases."""
    rows = [json.dumps(run(case)) for case in CASES]
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main()
