"""Host memory as copies of the device, or as one memory with it: hits, TTFT and bytes, next to one list of both.

    python benchmarks/one_memory.py TRACE [KEY=VALUE ...] [--rates 2GB/s 16GB/s 64GB/s] [--files N]

`KEY=VALUE`: settings of the replay, as `model=llama-3.1-8b device=h100-80gb`. For host memory of 1/4, 1/2, 1 and 2
times the device's pages, a row has the hits of `lazy` and `exclusive` in percent of prompt tokens; those of a device
with the pages of both, the bound of one list; TTFT p99 as a multiple of that of a replay without a tier; and the bytes
that are stored. The last column names the goals that were missed: `bound` (more than 2 points below one list), `lazy`
(below it), `ttft` (above the replay without a tier), `bytes` (with the last of the rates, more than 1.5 times as many
per token that is found besides those on a device alone).
With `--files N`, files of N times host memory are below it, and are part of the one list. Deterministic: virtual time.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import load_trace

SIZES = (0.25, 0.5, 1, 2)


def hits_of(summary: dict[str, Any]) -> float:
    """Return the hits in percent of prompt tokens."""
    return float(100 * summary["num_cached_tokens"] / summary["num_input_tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rates", nargs="+", default=["2GB/s", "16GB/s", "64GB/s"])
    parser.add_argument("--files", type=float, default=0.0)
    parser.add_argument("--sizes", nargs="+", type=float, default=SIZES)
    args = parser.parse_args()
    settings: dict[str, Any] = {
        key: int(value) if value.isdigit() else value for key, value in (each.split("=", 1) for each in args.settings)
    }
    trace = load_trace(args.trace)

    def summary_of(**changes: Any) -> dict[str, Any]:
        summary: dict[str, Any] = replay(trace, ReplayConfig.of_options(**{**settings, **changes})).summary
        return summary

    num_pages = ReplayConfig.of_options(**settings).num_pages
    alone = summary_of()
    alone_ms = alone["ttft_ms"]["p99"]
    print(f"{args.trace}: {num_pages:,} pages; alone {hits_of(alone):.1f} %, TTFT p99 {alone_ms / 1e3:.2f} s\n")
    print("| host / device | rate | lazy % | exclusive % | one list % | TTFT p99, lazy | exclusive | stored, lazy GB "
          "| exclusive GB | misses |\n|---:|---|---:|---:|---:|---:|---:|---:|---:|---|")  # fmt: skip
    for size in args.sizes:
        host_pages = round(size * num_pages)
        disk_pages = round(args.files * host_pages)
        one = hits_of(summary_of(pages=num_pages + host_pages + disk_pages))
        for rate in args.rates:
            below: dict[str, Any] = {"host_pages": host_pages, "h2d": rate, "d2h": rate}
            if disk_pages:
                below["disk_pages"] = disk_pages
            lazy, exclusive = (summary_of(**below, offload=policy) for policy in ("lazy", "exclusive"))
            hits = [hits_of(summary) for summary in (lazy, exclusive)]
            saved = [each - hits_of(alone) for each in hits]
            ttft = [summary["ttft_ms"]["p99"] / alone_ms for summary in (lazy, exclusive)]
            stored = [summary["transfers"]["bytes"]["d2h"] / 1e9 for summary in (lazy, exclusive)]
            misses = {
                "bound": hits[1] < one - 2,
                "lazy": hits[1] < hits[0] - 0.05,
                "ttft": ttft[1] > 1,
                "bytes": rate == args.rates[-1] and stored[1] * saved[0] > 1.5 * stored[0] * saved[1],
            }
            missed = ", ".join(name for name, is_missed in misses.items() if is_missed)
            print(
                f"| {size:g} | {rate} | {hits[0]:.1f} | {hits[1]:.1f} | {one:.1f} | {ttft[0]:.2f} | {ttft[1]:.2f} "
                f"| {stored[0]:.0f} | {stored[1]:.0f} | {missed} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
