"""Operators of a roofline compared with measured kernels: GEMM, attention, experts and all-reduce, by size.

    python benchmarks/operators.py SYSTEMS [--device h200_sxm ...] [--backend vllm]

SYSTEMS: the folder `aiconfigurator_core/systems` of an installed AIConfigurator (Apache-2.0), whose tables of measured
kernels are read and never copied; `pip install --no-deps aiconfigurator-core pyarrow` provides it. Each row of the
newest version of a table is predicted with the constants that ship: traffic or arithmetic, whichever is longer.
Constant times are not part of an operator here, since a roofline counts them per layer (`layer_us`): rows that are
predicted to take less than SHORTEST_MS are left out. Printed is a table in Markdown: the median of predicted over
measured, and the 10th and 90th percentile, by operator, number format and size.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from kvarts.cost.hardware.device import Device, load_device
from kvarts.cost.roofline_settings import format_of, shipped_constants

DEVICES = {
    "h100_sxm": "h100-80gb", "h200_sxm": "h200-141gb", "b200_sxm": "b200-180gb", "gb200": "gb200", "b300_sxm": "b300",
    "a100_sxm": "a100-80gb", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000-server",
}  # fmt: skip
FORMATS = {"bfloat16": "bfloat16", "float16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4"}
BYTES = {"bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
VALUES = shipped_constants().values
SHORTEST_MS = 0.02
Row = tuple[str, str, str, float, float]
"""Operator, format, size, predicted and measured milliseconds."""


def reached(dtype: str) -> tuple[float, float]:
    """Return the shares of a device's arithmetic and bandwidth that matrices in this format reach."""
    narrow = format_of(dtype)
    factors = (VALUES[f"{narrow}_compute"], VALUES[f"{narrow}_bandwidth"]) if narrow else (1.0, 1.0)
    return VALUES["compute_efficiency"] * factors[0], VALUES["bandwidth_efficiency"] * factors[1]


def of_size(number: float, bounds: tuple[int, ...], unit: str) -> str:
    """Return the name of a range of sizes."""
    place = int(np.searchsorted(bounds, number, "right"))
    if place == len(bounds):
        return f"{bounds[-1]:,} {unit} and more"
    return f"below {bounds[0]:,} {unit}" if place == 0 else f"from {bounds[place - 1]:,} {unit}"


def gemm(row: dict[str, Any], device: Device) -> Row | None:
    """Return the prediction of one matrix product."""
    dtype = FORMATS.get(row["gemm_dtype"])
    if dtype is None:
        return None
    compute, bandwidth = reached(dtype)
    m, n, k = row["m"], row["n"], row["k"]
    work_ms = 2 * m * n * k / (device.flops_per_s(dtype) * compute) * 1e3
    read_ms = n * k * BYTES[dtype] / (device.bandwidth_bytes_per_s * bandwidth) * 1e3
    return "GEMM", row["gemm_dtype"], of_size(m, (64, 1024, 8192), "rows"), max(work_ms, read_ms), row["latency"]


def attention(row: dict[str, Any], device: Device) -> Row | None:
    """Return the prediction of the attention of prompts, or of decodes."""
    if row["window_size"] or row["attn_dtype"] not in ("bfloat16", "float16"):
        return None
    kv_bytes = {"bfloat16": 2, "float16": 2, "fp8": 1}[row["kv_cache_dtype"]]
    heads, dim, batch = row["num_heads"], row["head_dim"], row["batch_size"]
    kv_heads = row["num_key_value_heads"] or heads
    flops = device.flops_per_s("bfloat16") * VALUES["compute_efficiency"]
    rate = device.bandwidth_bytes_per_s * VALUES["attention_efficiency"]
    if row["op_name"] == "context_attention":
        num = row["isl"]
        work_ms = 4 * heads * dim * num * (num + 1) / 2 * batch / (flops * VALUES["attention_compute"]) * 1e3
        read_ms = 2 * kv_heads * dim * kv_bytes * num * batch / rate * 1e3
        size = of_size(num, (256, 1024, 4096), "tokens")
        return "attention of prompts", row["kv_cache_dtype"], size, max(work_ms, read_ms), row["latency"]
    known = row["isl"] + row["step"]
    megabytes = 2 * kv_heads * dim * kv_bytes * known * batch / 1e6
    work_ms = 4 * heads * dim * known * batch / flops * 1e3
    size = of_size(megabytes, (10, 100), "MB")
    return "attention of decodes", row["kv_cache_dtype"], size, max(work_ms, megabytes * 1e9 / rate), row["latency"]


def experts(row: dict[str, Any], device: Device) -> Row | None:
    """Return the prediction of the experts of one layer."""
    dtype = FORMATS.get(row["moe_dtype"])
    if dtype is None or row["distribution"] != "balanced":
        return None
    compute, bandwidth = reached(dtype)
    tokens, count, chosen = row["num_tokens"], row["num_experts"], row["topk"]
    numbers = 3 * row["hidden_size"] * row["inter_size"] / row["moe_tp_size"]
    on_device = count / row["moe_ep_size"]
    active = on_device * (1 - (1 - chosen / count) ** tokens)
    megabytes = numbers * BYTES[dtype] / 1e6
    share = min(1.0, bandwidth * VALUES["expert_efficiency"] / (1 + VALUES["expert_half_mb"] / megabytes))
    read_ms = active * megabytes * 1e9 / (device.bandwidth_bytes_per_s * share)
    rate = device.flops_per_s(dtype) * compute * VALUES["expert_efficiency"] * VALUES["expert_compute"]
    work_ms = 2 * tokens * chosen / row["moe_ep_size"] * numbers / rate * 1e3
    return (
        "experts",
        row["moe_dtype"],
        of_size(tokens, (64, 1024, 8192), "tokens"),
        max(read_ms, work_ms),
        row["latency"],
    )


def reduce(row: dict[str, Any], device: Device) -> Row | None:
    """Return the prediction of one all-reduce; its constant time is in it."""
    if row["op_name"] != "all_reduce" or device.link_kind != "nvlink":
        return None
    num, size = row["num_gpus"], row["message_size"] * 2
    rate = device.link_bytes_per_s * VALUES["link_efficiency"]
    ms = size * 2 * (num - 1) / num / rate * 1e3 + VALUES["link_us"] / 1e3
    return "all-reduce (NCCL)", "16 bits", of_size(size / 1e6, (1, 16), "MB"), ms, row["latency"]


TABLES = {
    "gemm": ("gemm_perf", gemm),
    "attention": ("*attention_perf", attention),
    "moe": ("moe_perf", experts),
    "comm": ("nccl_perf", reduce),
}


def version_of(path: Path) -> tuple[int, ...]:
    """Return the numbers of the version in a table's folder."""
    return tuple(int(part) for part in path.parent.name.split(".") if part.isdigit())


def rows_of(systems: Path, name: str, backend: str, every: int) -> Iterator[Row]:
    """Yield the predictions of one device, of every so many rows of its newest tables."""
    device = load_device(DEVICES[name])
    for folder, (pattern, predict) in TABLES.items():
        owner = "nccl" if folder == "comm" else backend
        paths = sorted((systems / "data" / name / folder / owner).glob(f"*/{pattern}.parquet"), key=version_of)
        for path in (each for each in paths if version_of(each) == version_of(paths[-1])):
            for row in pq.read_table(path).to_pylist()[::every]:
                found = predict(row, device)
                if found is not None and found[3] >= SHORTEST_MS:
                    yield found


def main() -> None:
    """Print the table of each device."""
    parser = argparse.ArgumentParser()
    parser.add_argument("systems", type=Path)
    parser.add_argument("--device", action="append", choices=sorted(DEVICES))
    parser.add_argument("--backend", default="vllm")
    parser.add_argument("--every", type=int, default=50)
    asked = parser.parse_args()
    print("| device | operator | format | size | rows | predicted / measured (p10, p90) |\n|---|---|---|---|---:|---:|")
    for name in asked.device or ("h200_sxm", "b200_sxm"):
        found: dict[tuple[str, str, str], list[float]] = {}
        for operator, dtype, size, predicted, measured in rows_of(asked.systems, name, asked.backend, asked.every):
            found.setdefault((operator, dtype, size), []).append(predicted / measured)
        for key, ratios in sorted(found.items()):
            low, middle, high = np.percentile(ratios, (10, 50, 90))
            print(f"| {name} | {' | '.join(key)} | {len(ratios)} | {middle:.2f} ({low:.2f}, {high:.2f}) |")


if __name__ == "__main__":
    main()
