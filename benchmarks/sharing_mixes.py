"""Thirty random mixes of two to eight models on one device: is the promise of shares kept, and what do models wait?

    python benchmarks/sharing_mixes.py shared/data [--mixes 30] [--first 0]

The folder is that of benchmarks/sharing.py. A mix draws traces, models, weights, floors, ceilings, guarantees,
priorities, memory and the speed of arrivals by its number. `behind`: the most that a step started later than in its
model's slice, beside the promised one step of each other model, of the model that came closest; `broken`: models that
exceed it. The periods compared are those in which a request runs that is never preempted; for a model whose guarantee
holds all its requests, and that nobody's priority exceeds, those in which it has requests. The other columns are the
worst ratio of any model's TTFT, mean or p99, to its slice and to its static split, of those models that refuse none of
these requests there for lack of memory.
"""

from __future__ import annotations

import argparse
import random
from fractions import Fraction
from pathlib import Path

import msgspec

from kvarts.replaying import replay
from kvarts.report.requests import REJECTED
from kvarts.sharing.config import ModelShare, SharingConfig
from kvarts.sharing.report import SharedReport, compared, slices, split_config, worst
from kvarts.sim.config import ReplayConfig
from kvarts.traffic.formats import load_trace
from kvarts.traffic.trace import Trace

FILES = (
    "azure2023/conv.csv", "azure2023/code.csv", "mooncake/conversation_trace.jsonl", "mooncake/synthetic_trace.jsonl",
)  # fmt: skip
MODELS = "llama-3.1-8b", "qwen3-8b"
KINDS = {"azure": (0, 1), "mooncake": (2, 3), "both": (0, 1, 2, 3)}


def cut(trace: Trace, first: int, count: int) -> Trace:
    """`count` requests of `trace` from number `first` on, as if the trace began with them."""
    rows = list(trace)[first : first + count]
    rows = [msgspec.structs.replace(row, arrival_ns=row.arrival_ns - rows[0].arrival_ns) for row in rows]
    return Trace(rows, unit_tokens=trace.unit_tokens, has_output_tokens=trace.has_output_tokens, name=trace.name)


def mix_of(loaded: list[Trace], number: int) -> tuple[str, dict[str, Trace], SharingConfig]:
    rnd = random.Random(number)
    count = rnd.randint(2, 8)
    kind = rnd.choice(list(KINDS))
    traces, models = {}, {}
    floors_left = 1000
    is_part = rnd.choice([True, False])
    for place in range(count):
        trace, length = loaded[rnd.choice(KINDS[kind])], rnd.choice([300, 600])
        traces[f"m{place}"] = cut(trace, rnd.randrange(len(list(trace)) - length), length)
        floor = rnd.choice([0, 0, 50, 200])
        floor = floor if floor < floors_left else 0
        floors_left -= floor
        models[f"m{place}"] = ModelShare(
            model=rnd.choice(MODELS),
            weight=rnd.choice([1, 1, 2, 3, 5]),
            floor=floor,
            ceiling=rnd.choice([None, None, 700]),
            guarantee=rnd.choice([0.3, 0.6, 0.9]) / count if is_part else None,
            priority=rnd.choice([0, 0, 0, 1]),
        )
    each = ReplayConfig(speedup=rnd.choice([0.25, 0.5, 1.0]) * 2 / count)
    gib = rnd.choice([2, 4, 8, 16]) * count * (1 if kind == "azure" else 2)
    config = SharingConfig(models=models, device="h100-80gb", kv_memory=f"{gib}GiB", each=each)
    return f"{number}: {count} models, {kind}, {gib} GiB, x {each.speedup:.2f}", traces, config


def behind_ns(report: SharedReport, name: str) -> Fraction:
    """Return how much later than in its slice a step of the model started, at most."""
    config, log = report.config, report.devices[0].logs[name]
    rows = report.reports[name]._request_log.columns
    pages = -(-(rows["input_tokens"] + rows["output_tokens"]) // config.each.page_size)
    is_most = config.models[name].priority == max(share.priority for share in config.models.values())
    holds_all = is_most and int(pages.sum()) * config.page_bytes[name] <= config.guaranteed_bytes[name]
    kept = rows["status"] != REJECTED
    if not holds_all:
        kept &= rows["preemptions"] == 0
    since = rows["arrival_ns" if holds_all else "first_admitted_ns"][kept].tolist()
    busy = joined(sorted(zip(since, rows["last_token_ns"][kept].tolist(), strict=True)))
    part, whole = config.shares[name].as_integer_ratio()
    slice_start = behind = place = 0  # the times in ns times `part`
    for start, duration in zip(log.starts_ns.tolist(), log.durations_ns.tolist(), strict=True):
        while place < len(busy) and busy[place][1] < start:
            place += 1
        begin = min(start, busy[place][0]) if place < len(busy) else start
        slice_start = max(slice_start, begin * part)
        behind = max(behind, start * part - slice_start)
        slice_start = min(slice_start, start * part) + duration * whole
    return Fraction(behind, part)


def joined(periods: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return `periods`, ordered by begin, with those that overlap or touch made one."""
    whole: list[tuple[int, int]] = []
    for since, until in periods:
        if whole and since <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(whole[-1][1], until)
        else:
            whole.append((since, until))
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--mixes", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="number of the first mix")
    args = parser.parse_args()
    loaded = [load_trace(args.data / name) for name in FILES]
    print("| mix | behind, s | promised, s | broken | slice | split |\n|---|---:|---:|---:|---:|---:|", flush=True)
    broken = 0
    for number in range(args.first, args.first + args.mixes):
        title, traces, config = mix_of(loaded, number)
        report = replay(traces, config)
        longest = {name: max(log.durations_ns.tolist(), default=0) for name, log in report.devices[0].logs.items()}
        found = {name: (behind_ns(report, name), sum(longest.values()) - longest[name]) for name in config.models}
        broken_here = sum(behind > promised for behind, promised in found.values())
        behind, promised = max(found.values(), key=lambda pair: pair[0] / max(pair[1], 1))
        cells = [title, f"{float(behind) / 1e9:.3f}", f"{promised / 1e9:.3f}", str(broken_here)]
        for baseline in (slices(traces, config), replay(traces, split_config(config)).reports):
            by_model = {name: compared(report.reports[name], baseline[name]) for name in config.models}
            completed = {name: of_model.summary["num_completed"] for name, of_model in report.reports.items()}
            value = worst({name: each for name, each in by_model.items() if each["num_compared"] == completed[name]})
            cells.append("" if value is None else f"{value['ratio']:.2f}")
        print("| " + " | ".join(cells) + " |", flush=True)
        broken += broken_here
    print(f"\n{broken} promises broken")
    raise SystemExit(broken > 0)


if __name__ == "__main__":
    main()
