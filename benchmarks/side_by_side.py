"""kvarts and AIConfigurator on the same published rows, drawn anew.

    python benchmarks/side_by_side.py PYTHON [--known POINTS.csv ...] [--rows 60] [--seed 1] [--out rows.csv]

PYTHON: an interpreter with AIConfigurator (`pip install aiconfigurator` in an environment of its own; Apache-2.0). Rows
of the sample of InferenceX that its package has (systems/silicon_sample.csv, aggregated servers without speculation)
are drawn at random, at most one per sweep. Left out are rows of `--known`, tables of points as in accuracy_league.py to
which constants were fitted, and models whose configuration AIConfigurator would download. It answers by `cli_estimate`
with its measured kernels, and with the database mode HYBRID, which fills what no kernel measured; kvarts replays the
row with the constants that ship. Printed are both versions, the date, and the errors of both on the rows that both
answer: median, mean, 90th percentile and bias. `--out` writes the rows as a table for accuracy_league.py, with the
columns aic_ttft and aic_tpot.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ANSWER = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from importlib.metadata import version
from pathlib import Path
import aiconfigurator_core
from aiconfigurator.cli.api import cli_estimate
print(json.dumps([version("aiconfigurator"), str(Path(aiconfigurator_core.__file__).parent / "systems")]), flush=True)
for line in sys.stdin:
    try:
        found = cli_estimate(**json.loads(line))
        print(json.dumps([found.ttft, found.tpot]), flush=True)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)[:100]]), flush=True)
"""
MODELS = {
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5", "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3", "openai/gpt-oss-120b": "gpt-oss-120b", "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b", "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "moonshotai/Kimi-K2.5": "kimi-k2.5", "zhipuai/GLM-5": "glm-5",
}  # fmt: skip
DEVICES = {
    "h100_sxm": "h100-80gb", "h200_sxm": "h200-141gb", "b200_sxm": "b200-180gb", "b300_sxm": "b300", "gb200": "gb200",
    "gb300": "gb300",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", metavar="PYTHON")
    parser.add_argument("--known", type=Path, nargs="*", default=[], metavar="POINTS")
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("side-by-side.csv"))
    arguments = parser.parse_args()
    with subprocess.Popen(
        [arguments.python, "-c", ANSWER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as answers:
        assert answers.stdin is not None and answers.stdout is not None
        release, systems = json.loads(answers.stdout.readline())
        with (Path(systems) / "silicon_sample.csv").open() as file:
            rows = drawn(list(csv.DictReader(file)), known_rows(arguments.known), arguments.rows, arguments.seed)
        unanswered: Counter[str] = Counter()
        points = []
        for row in rows:
            answers.stdin.write(json.dumps(question(row)) + "\n")
            ttft, tpot = json.loads(answers.stdout.readline())
            if isinstance(ttft, str):
                unanswered[ttft] += 1
            else:
                points.append({**point(row), "aic_ttft": ttft, "aic_tpot": tpot})
            print(f"{len(points)} of {len(rows)} rows", end="\r", file=sys.stderr, flush=True)
        answers.stdin.close()
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(points[0]))
        writer.writeheader()
        writer.writerows(points)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    print(f"{today}: {len(rows)} rows drawn, seed {arguments.seed}; AIConfigurator {release} answers {len(points)}")
    for reason, count in sorted(unanswered.items()):
        print(f"- {count} not answered: {reason}")
    print(f"kvarts {version('kvarts')}, uncalibrated\n", flush=True)
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("accuracy_league.py")), str(arguments.out)], check=True
    )


def known_rows(paths: Sequence[Path]) -> set[tuple[str, ...]]:
    """Return what identifies the rows of tables of points: lengths and measured times."""
    found = set()
    for path in paths:
        with path.open() as file:
            found |= {
                identity(row["isl"], row["osl"], row["tpot_ms"]) for row in csv.DictReader(file) if row["tpot_ms"]
            }
    return found


def identity(isl: str, osl: str, tpot_ms: str) -> tuple[str, ...]:
    """Return lengths, and a time to four digits."""
    return isl, osl, f"{float(tpot_ms):.4g}"


def drawn(rows: list[dict[str, str]], known: set[tuple[str, ...]], count: int, seed: int) -> list[dict[str, str]]:
    """Return rows of aggregated servers that both can be asked of, at most one per sweep."""
    random.Random(seed).shuffle(rows)
    sweeps: set[tuple[str, ...]] = set()
    found = []
    for row in rows:
        sweep = tuple(row[name] for name in ("backend", "model_path", "system", "precision", "isl", "osl", "tp_size"))
        if (
            row["mode"] == "agg"
            and row["model_path"] in MODELS
            and row["precision"] in ("fp8", "fp4", "bf16")
            and row["attention_dp_size"] in ("", "1")
            and row["silicon_tpot_ms"]
            and row["silicon_ttft_ms"]
            and sweep not in sweeps
            and identity(row["isl"], row["osl"], row["silicon_tpot_ms"]) not in known
        ):
            sweeps.add(sweep)
            found.append(row)
    return found[:count]


def in_flight(row: dict[str, str]) -> int:
    """Return the number of requests in flight, which the sample states in its source, else as the batch."""
    _, _, rest = row["silicon_data_source"].partition("silicon_concurrency=")
    return int(rest.partition(";")[0] or row["batch_size"])


def question(row: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of `cli_estimate`; modes that the row leaves open are inferred by it."""
    sizes = {name: int(row[name]) for name in ("tp_size", "moe_tp_size", "moe_ep_size") if row[name]}
    modes = {name: row[name] for name in ("gemm_quant_mode", "moe_quant_mode") if row[name]}
    return {
        "model_path": row["model_path"],
        "system_name": row["system"],
        "backend_name": row["backend"],
        "database_mode": "HYBRID",
        "isl": int(row["isl"]),
        "osl": int(row["osl"]),
        "batch_size": int(row["batch_size"]),
        **sizes,
        **modes,
    }


def point(row: dict[str, str]) -> dict[str, Any]:
    """Return the row as a point of a table."""
    model = MODELS[row["model_path"]]
    is_dense = model.startswith(("llama", "qwen3-32b"))
    formats = {"fp4": "nvfp4", "bf16": "bfloat16", "fp8": "fp8" if is_dense else "fp8-block"}
    level, tp = in_flight(row), int(row["tp_size"])
    return {
        "id": row["id"],
        "source": "silicon_sample",
        "engine": row["backend"],
        "version": row["backend_version"],
        "model": model,
        "gpu": DEVICES[row["system"]],
        "gpus": tp,
        "tp": tp,
        "ep": int(row["moe_ep_size"] or 1),
        "weight": "mxfp4" if model.startswith("gpt-oss") else formats[row["precision"]],
        "kv": "fp8",
        "isl": row["isl"],
        "osl": row["osl"],
        "ratio": 0.8,
        "load": "closed",
        "level": level,
        "requests": min(10 * level, 2048),
        "seqs": 512,
        "ttft_ms": row["silicon_ttft_ms"],
        "tpot_ms": row["silicon_tpot_ms"],
    }


if __name__ == "__main__":
    main()
