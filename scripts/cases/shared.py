"""Cases of `kvarts replay` with several models on one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cases.case import Case, case

__all__ = ["shared_cases"]

PAIR = "--model chat=llama-3.1-8b:weight=2 --model code=qwen3-8b:weight=1"
TRACES = "--trace chat=chat-400.csv --trace code=code-400.csv"
SMALL = "--trace chat=chat-200.csv --trace code=code-200.csv"
DEVICE = "--device h100-80gb --kv-memory {memory}"
EVERYTHING = (
    "--report report.json --requests requests.jsonl --timeline timeline.json --events events.jsonl.gz "
    "--run-dir run --set loans=loans.jsonl"
)

RUNS = {
    "guide": f"{PAIR} {TRACES} {DEVICE.format(memory='4GiB')}",
    "tight": f"{PAIR} {TRACES} {DEVICE.format(memory='1500MiB')}",
    "static-split": f"{PAIR} {TRACES} {DEVICE.format(memory='4GiB')} --set static_split=true",
    "auto-memory": f"{PAIR} {SMALL} --device h100-80gb --set memory_fraction=0.5",
    "priority": f"--model chat=llama-3.1-8b --model code=qwen3-8b:priority=1 {TRACES} {DEVICE.format(memory='2GiB')}",
    "floor-ceiling": "--model chat=llama-3.1-8b:floor=100,ceiling=600 --model code=qwen3-8b:weight=3,floor=50 "
    f"{TRACES} {DEVICE.format(memory='3GiB')} --max-batched-tokens 1024 --max-seqs 32",
    "guarantees": "--model chat=llama-3.1-8b:guarantee=0.6 --model code=qwen3-8b:guarantee=500MiB "
    f"{TRACES} {DEVICE.format(memory='2GiB')}",
    "dtypes": "--model chat=llama-3.1-8b:weight_dtype=fp8,kv_dtype=fp8 --model code=qwen3-8b:kv_dtype=fp8 "
    f"{SMALL} {DEVICE.format(memory='1GiB')} --page-size 32",
    "dead": f"{PAIR} {TRACES} {DEVICE.format(memory='2GiB')} --set health=code=dead@60",
    "health": f"{PAIR} {TRACES} {DEVICE.format(memory='2GiB')} --set health=chat=degraded@20 "
    "--set health=chat=healthy@50 --set health=code=dead@60 --set health=code=healthy@90",
    "three": "--model a=llama-3.1-8b:weight=2 --model b=qwen3-8b --model c=qwen3-0.6b:priority=2 "
    f"--trace a=chat-400.csv --trace b=code-200.csv --trace c=chat-200.csv {DEVICE.format(memory='2GiB')}",
    "closed-loop": f"{PAIR} {SMALL} {DEVICE.format(memory='1GiB')} --concurrency 20",
    "speedup": f"{PAIR} {SMALL} {DEVICE.format(memory='1GiB')} --speedup 4 --slo-ttft-ms 500 --slo-tpot-ms 30",
    "mooncake": f"{PAIR} --trace chat=small.jsonl --trace code=code-200.csv {DEVICE.format(memory='6GiB')}",
    "sessions": f"{PAIR} --trace chat=sessions.jsonl --trace code=sessions.jsonl {DEVICE.format(memory='1GiB')} "
    "--trace-block-size 4",
    "priorities": f"{PAIR} --trace chat=priorities.jsonl --trace code=priorities.jsonl {DEVICE.format(memory='1GiB')} "
    "--trace-block-size 16",
}

TOML = """device = "h100-80gb"
kv_memory = "2GiB"
max_batched_tokens = 4096
{more}
[models.chat]
model = "llama-3.1-8b"
trace = "chat-200.csv"
weight = 2
guarantee = 0.5
floor = 100

[models.code]
model = "qwen3-8b"
trace = "code-200.csv"
priority = 1
{last}
"""
COSTS = """kv_memory = "1GiB"
[models.chat]
cost = "linear:step_ms=9,chunk_token_ms=0.03,decode_ms=0.1"
kv_bytes_per_token = 131072
trace = "chat-200.csv"
[models.code]
cost = "linear:step_ms=5,chunk_token_ms=0.02"
kv_bytes_per_token = 65536
trace = "code-200.csv"
ceiling = 300
"""
FILES = {
    "toml": TOML.format(more="", last=""),
    "toml-split": TOML.format(more="static_split = true", last="floor = 30"),
    "toml-health": TOML.format(more='health = ["code=degraded@5", "code=dead@9"]', last=""),
    "toml-slo": TOML.format(more="[slo]\nttft_ms = 300\ntpot_ms = 20", last="ceiling = 400"),
    "toml-costs": COSTS,
}


def shared_cases(data: Path) -> Iterator[Case]:
    """Yield the cases; whole traces lie in `data`."""
    for name, settings in RUNS.items():
        yield case(f"shared/{name}", f"kvarts replay {settings} {EVERYTHING}\nkvarts replay {settings} --json")
        if name in ("tight", "priority", "sessions", "priorities", "health"):
            text = f"kvarts replay {settings} --step-by-step --json --requests requests.jsonl --set loans=loans.jsonl"
            yield case(f"shared/{name}-step-by-step", text)
    for name, text in FILES.items():
        commands = f"kvarts replay --config c.toml {EVERYTHING}\nkvarts replay --config c.toml --json"
        yield case(f"shared/{name}", commands, files={"c.toml": text})
    yield case(
        "shared/toml-and-options",
        "kvarts replay --config c.toml --set static_split=true --json\n"
        "kvarts replay --config c.toml --model code=qwen3-0.6b:weight=4 --trace chat=small.jsonl "
        "--kv-memory 6GiB --json",
        files={"c.toml": FILES["toml"]},
    )
    yield case(
        "shared/outputs",
        "\n".join(
            f"kvarts replay {PAIR} {SMALL} {DEVICE.format(memory='1GiB')} {output}"
            for output in (
                "--timeline t.jsonl --set timeline_every=5",
                "--timeline t.parquet",
                "--timeline t.jsonl.gz --events e.jsonl",
                "--step-by-step --requests q.jsonl --report r.json",
                "--audit --json",
            )
        ),
    )
    conv, code = data / "azure2023" / "conv.csv", data / "azure2023" / "code.csv"
    traces = f"--trace chat={conv} --trace code={code}"
    for name, more in {"shared": "", "split": "--set static_split=true"}.items():
        settings = f"{PAIR} {traces} {DEVICE.format(memory='12GiB')} {more} {EVERYTHING}"
        yield case(f"whole/two-models-{name}", f"kvarts replay {settings}", needs=(conv, code), is_whole=True)
