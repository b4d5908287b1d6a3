"""Whether shares hold: what each model waits beside its static split and beside its slice, over many devices.

    python benchmarks/sharing_sweep.py shared/data [--only TEXT]

The folder is that of benchmarks/sharing.py. A row is one device. Its ratios are of the mean and
of the p99 TTFT, of the model that did worst: first beside the split, then beside the slice. `within 5 s`: the smallest
ratio of requests with a TTFT of at most 5 s, beside the split. `first after idle`: the mean TTFT of the first twenty
requests of the model that was silent for 1,500 s, beside the split. `by weight`: how long models waited on average,
where they have equal traffic and weights from small to large.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.replaying import replay
from kvarts.report.report import Report
from kvarts.report.requests import COMPLETED
from kvarts.sharing.config import ModelShare, SharingConfig
from kvarts.sharing.report import compared, slices, split_config, worst
from kvarts.sim.config import ReplayConfig
from kvarts.traffic.formats import load_trace
from kvarts.traffic.trace import Trace, TraceRequest

AZURE = "azure2023/conv.csv", "azure2023/code.csv"
MOONCAKE = "mooncake/conversation_trace.jsonl", "mooncake/synthetic_trace.jsonl"
MODELS = "llama-3.1-8b", "qwen3-8b"
SILENT_NS = 1_500_000_000_000
NUM_FIRST = 20

Reports = Mapping[str, Report]


class Case(msgspec.Struct):
    name: str
    traces: dict[str, Trace]
    kv_memory: str
    weights: tuple[float, ...]
    speedup: float = 1.0
    silent: str | None = None
    is_equal: bool = False

    def config(self) -> SharingConfig:
        models = {
            name: ModelShare(model=MODELS[place % 2], weight=weight)
            for place, (name, weight) in enumerate(zip(self.traces, self.weights, strict=True))
        }
        each = ReplayConfig(speedup=self.speedup)
        return SharingConfig(models=models, device="h100-80gb", kv_memory=self.kv_memory, each=each)


def part_of(trace: Trace, place: int, count: int) -> Trace:
    """Every `count`-th request of `trace`, beginning with number `place`."""
    return changed(trace, list(trace)[place::count])


def changed(trace: Trace, requests: list[TraceRequest]) -> Trace:
    return Trace(requests, unit_tokens=trace.unit_tokens, has_output_tokens=trace.has_output_tokens, name=trace.name)


def hurried(trace: Trace, times: float) -> Trace:
    """`trace`, arriving so many times as fast."""
    requests = [msgspec.structs.replace(row, arrival_ns=round(row.arrival_ns / times)) for row in trace]
    return changed(trace, requests)


def cases_of(data: Path) -> Iterator[Case]:
    conv, code = (load_trace(data / name) for name in AZURE)
    chat, synthetic = (load_trace(data / name) for name in MOONCAKE)
    azure, mooncake = {"first": conv, "second": code}, {"first": chat, "second": synthetic}
    for kv_memory, weights in (("4GiB", (1, 1)), ("8GiB", (1, 1)), ("8GiB", (1, 3)), ("16GiB", (3, 1))):
        yield Case(f"Azure, {kv_memory}, {weights[0]}:{weights[1]}", azure, kv_memory, weights)
    for kv_memory, weights in (("40GiB", (1, 1)), ("40GiB", (1, 3)), ("40GiB", (3, 1)), ("30GiB", (1, 3))):
        yield Case(f"Mooncake x 0.25, {kv_memory}, {weights[0]}:{weights[1]}", mooncake, kv_memory, weights, 0.25)
    yield Case("Azure x 0.5, 8GiB, 1:1", azure, "8GiB", (1, 1), 0.5)
    yield Case("Azure x 2, 8GiB, 1:1", azure, "8GiB", (1, 1), 2.0)
    several = {f"m{place}": part_of((conv, code)[place % 2], place // 2, 2) for place in range(4)}
    yield Case("Azure, four models, 8GiB, 1:1:2:2", several, "8GiB", (1, 1, 2, 2))
    alike = {f"m{place}": part_of(code, place, 8) for place in range(8)}
    yield Case("Azure code, eight models, 16GiB, 1 to 8", alike, "16GiB", (1, 2, 3, 4, 5, 6, 7, 8), 3.0, is_equal=True)
    late = [row for row in code if row.arrival_ns >= SILENT_NS]
    yield Case("Azure, second silent for 1,500 s", {"first": conv, "second": changed(code, late)}, "8GiB", (1, 1),
               silent="second")  # fmt: skip
    yield Case("Azure, first floods, four times as fast", {"first": hurried(conv, 4), "second": code}, "8GiB", (1, 1))
    yield Case("Azure, second floods, four times as fast", {"first": conv, "second": hurried(code, 4)}, "8GiB", (1, 1))


def ttft_s(report: Report) -> npt.NDArray[np.float64]:
    columns = report.request_columns
    done = columns["status"] == COMPLETED
    waits_s: npt.NDArray[np.float64] = (columns["first_token_ns"] - columns["arrival_ns"])[done] / 1e9
    return waits_s


def row_of(case: Case, shared: Reports, split: Reports, alone: Reports) -> str:
    cells = [case.name]
    for baseline in (split, alone):
        found = {name: compared(shared[name], baseline[name]) for name in shared}
        for figure in ("mean", "p99"):
            only = {name: {"ratio": {figure: each["ratio"][figure]}} for name, each in found.items() if "ratio" in each}
            value = worst(only)
            cells.append("" if value is None else f"{value['ratio']:.2f}")
    within = {name: ((ttft_s(shared[name]) <= 5).sum(), (ttft_s(split[name]) <= 5).sum()) for name in shared}
    cells.append(f"{min(mine / theirs for mine, theirs in within.values() if theirs):.2f}")
    notes = ["mean " + ", ".join(f"{ttft_s(report).mean():.2f}" for report in shared.values()) + " s"]
    if case.silent is not None:
        first, before = (ttft_s(reports[case.silent])[:NUM_FIRST].mean() for reports in (shared, split))
        notes.append(f"first after idle {first / before:.2f}")
    if case.is_equal:
        means = [ttft_s(report).mean() for report in shared.values()]
        notes.append("by weight" if means == sorted(means, reverse=True) else "NOT by weight")
    return "| " + " | ".join([*cells, "; ".join(notes)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--reclaim-after", type=float, default=0.0)
    args = parser.parse_args()
    print("| | split: mean | p99 | slice: mean | p99 | within 5 s | |")
    print("|---|---:|---:|---:|---:|---:|---|", flush=True)
    for case in cases_of(args.data):
        if args.only not in case.name:
            continue
        config = case.config()
        split = replay(case.traces, split_config(config)).reports
        alone = slices(case.traces, config)
        shared = replay(case.traces, msgspec.structs.replace(config, reclaim_after_s=args.reclaim_after)).reports
        print(row_of(case, shared, split, alone), flush=True)


if __name__ == "__main__":
    main()
