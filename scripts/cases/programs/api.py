"""Replay from Python, with settings that only Python can give, and write everything that the reports hold."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec

from kvarts import (
    LinearCost,
    ModelShare,
    OffloadConfig,
    ReplayConfig,
    Report,
    SharingConfig,
    Slo,
    Trace,
    TraceRequest,
    Workload,
    load_trace,
    replay,
    verify,
)
from kvarts.proof.record.timeline import timelines_of
from kvarts.sim.traffic.mooncake import load_mooncake


def tenants(seed: int, num_requests: int = 160) -> list[TraceRequest]:
    """Requests of three tenants, token by token, whose prompts repeat, some with known output tokens."""
    rng = random.Random(seed)
    requests = []
    arrival_ns = 0
    for row in range(num_requests):
        arrival_ns += rng.choice([0, 1_000_000, 40_000_001])
        group = rng.randrange(5)
        shared = rng.randrange(1, 120)
        own = rng.randrange(1, 60)
        first = 10_000 + 1000 * row
        outputs = rng.randrange(1, 50)
        requests.append(
            TraceRequest(
                row,
                arrival_ns,
                (range(group * 200, group * 200 + shared), range(first, first + own)),
                shared + own,
                outputs,
                output_units=(range(first + own, first + own + outputs),) if row % 3 else None,
                priority=rng.choice([0, 0, 1]),
                request_id=f"q{row}",
                tenant=rng.choice([None, "red", "blue"]),
            )
        )
    return requests


def milliseconds(batch: Any) -> float:
    """Return what a step takes, as a callable says it."""
    return 0.3 + 0.011 * float(batch.num_tokens) + 1e-5 * float(batch.decode_known_tokens)


def dump(name: str, report: Report) -> None:
    """Write all of a report to files that begin with `name`."""
    folder = Path(name)
    folder.mkdir(parents=True)
    (folder / "report.json").write_bytes(report.to_json())
    (folder / "requests.jsonl").write_bytes(report.requests_jsonl())
    (folder / "distributions.json").write_bytes(report.distributions_json())
    (folder / "summary.json").write_text(json.dumps(report.summary))
    for columns, values in (("requests", report.requests), ("steps", report.steps)):
        lines = [f"{column} {list(map(repr, values[column]))}\n" for column in values]
        (folder / f"{columns}.columns").write_text("".join(lines))
    for replica, timeline in enumerate(timelines_of(report)):
        (folder / f"timeline-{replica}.json").write_bytes(timeline.to_json())
        timeline.write(folder / f"thin-{replica}.jsonl", every=7)
        print(name, replica, len(timeline), timeline.peak_used_pct, timeline.preemption_count)
        print(verify(timeline.to_json()).to_text(), end="")


def main() -> None:
    """Replay everything."""
    made = tenants(5)
    trace = Trace(made, has_output_tokens=True, name="tenants")
    small: dict[str, Any] = {"num_pages": 90, "page_size": 8, "max_num_batched_tokens": 256, "max_num_seqs": 12}
    for is_slow in (False, True):
        suffix = "-slow" if is_slow else ""
        more = {**small, "step_by_step": is_slow, "audit": is_slow}
        dump(f"open{suffix}", replay(trace, ReplayConfig(cost=milliseconds, **more)))
        dump(f"closed{suffix}", replay(trace, ReplayConfig(concurrency=9, cost=LinearCost(step_ms=2.5), **more)))
        below = OffloadConfig(host_pages=150, disk_pages=300, policy="lazy", target_free=20, full_prompt_hits=True)
        dump(f"tiers{suffix}", replay(trace, ReplayConfig(offload=below, cost=milliseconds, **more)))
        failing = OffloadConfig(host_pages=150, fail_every=3, workers=2, h2d=10**9, d2h="2GB/s")
        dump(f"failing{suffix}", replay(trace, ReplayConfig(offload=failing, cost=milliseconds, **more)))
    slo = Slo(ttft_ms=50.0, tpot_ms=4.0, e2e_ms=900.0)
    for router in ("round-robin", "least-loaded", "prefix"):
        dump(f"routed-{router}", replay(trace, ReplayConfig(replicas=3, router=router, slo=slo, **small)))
    for profile in ("default", "mocker"):
        config = ReplayConfig(profile=profile, cost=milliseconds, speedup=3.5, **small)
        dump(f"profile-{profile}", replay(trace, config))
    dump("stream", replay(Trace(iter(made), has_output_tokens=True, name="stream"), ReplayConfig(**small)))
    dump("path", replay("small.jsonl", ReplayConfig(num_pages=4000)))
    dump("blocks", replay(load_mooncake("priorities.jsonl", trace_block_size=16), ReplayConfig(num_pages=300)))
    workload = {
        "num_sessions": 40,
        "turns_per_session": 3,
        "sessions_per_s": 20.0,
        "think_time_s": 0.2,
        "num_prefix_groups": 2,
        "prefix_tokens": 64,
        "seed": 4,
        "new_tokens": {"kind": "lognormal", "median": 90, "sigma": 0.7, "high": 900},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 70},
    }
    progress: list[int] = []
    report = replay(msgspec.convert(workload, Workload), ReplayConfig(num_pages=400), on_progress=progress.append)
    dump("workload", report)
    print("progress", sum(progress))
    models = {"chat": ModelShare(model="llama-3.1-8b", weight=2), "code": ModelShare(model="qwen3-8b", priority=1)}
    traces = {"chat": load_trace("chat-200.csv"), "code": load_trace("code-200.csv")}
    shared = replay(traces, SharingConfig(device="h100-80gb", kv_memory="1GiB", models=models))
    Path("shared.json").write_bytes(shared.to_json())
    Path("loans.jsonl").write_bytes(shared.loans_jsonl())
    for name, of_model in shared.reports.items():
        dump(f"shared-{name}", of_model)


if __name__ == "__main__":
    main()
