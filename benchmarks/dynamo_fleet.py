"""Replays a trace with prefill and decode apart in NVIDIA Dynamo's native mocker; run by compare_fleet.py.

    OTHER_PYTHON dynamo_fleet.py CASES.json NAME TRACE OUT.jsonl

OUT.jsonl.seconds receives for how many seconds the workers of each role were there.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import sys
from pathlib import Path

import dynamo._core as dynamo

NAMES = {"num_pages": "num_gpu_blocks", "page_size": "block_size"}


class Script:
    """Numbers of workers at given times, as a scaling policy."""

    def __init__(self, steps: list) -> None:
        self.steps = steps

    def initial_tick_ms(self) -> float:
        return self.steps[0][0] * 1e3

    def on_tick(self, state: dict) -> dict:
        _, prefills, decodes = self.steps.pop(0)
        next_ms = self.steps[0][0] * 1e3 if self.steps else None
        return {"target_prefill": prefills, "target_decode": decodes, "next_tick_ms": next_ms}


def engine_of(case: dict, role: str) -> dict:
    engine = {
        "backend": "vllm",
        "worker_type": role,
        "num_gpu_blocks": 16384,
        "block_size": 512,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
    }
    engine.update({NAMES.get(name, name): value for name, value in case.get(role, {}).items()})
    if "token_bytes" in case:
        engine["kv_transfer_bytes_per_token"] = case["token_bytes"]
        engine["kv_transfer_bandwidth"] = case.get("gigabytes_per_s")
    if case.get("transfer") == "missing":
        engine["kv_transfer_timing_mode"] = "destination_missing"
    return {"engine": engine, **({"startup_time": case["startup_s"]} if "startup_s" in case else {})}


def main() -> None:
    cases, name, trace, out = sys.argv[1:]
    case = json.loads(Path(cases).read_text())[name]
    closed = {"replay_concurrency": case["concurrency"]} if "concurrency" in case else {}
    scaled = {"scaling_policy": Script(case["script"])} if "script" in case else {}
    result = dynamo.run_mocker_trace_replay(
        [trace],
        prefill_engine_args=engine_of(case, "prefill"),
        decode_engine_args=engine_of(case, "decode"),
        num_prefill_workers=case["prefills"],
        num_decode_workers=case["decodes"],
        trace_block_size=512,
        capture_per_request=True,
        report_jsonl_path=out,
        **closed,
        **scaled,
    )
    seconds = {role: result.summary[f"{role}_worker_seconds"] for role in ("prefill", "decode")}
    Path(f"{out}.seconds").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
