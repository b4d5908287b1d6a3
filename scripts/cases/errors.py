"""Cases of what is refused: each ends with a message and the exit code that stands here."""

from __future__ import annotations

from collections.abc import Iterator

from cases.case import Case, case

__all__ = ["error_cases"]

SMALL = "replay small.jsonl --pages 9000 --page-size 16 --cost polynomial"

USAGE = [
    "kvarts nothing",
    "kvarts --nothing",
    "kvarts replay small.jsonl --speling 3",
    "kvarts replay small.jsonl code.csv",
    "kvarts replay small.jsonl --pages many",
    "kvarts replay small.jsonl --pages",
    "kvarts replay small.jsonl --pages 0",
    "kvarts replay small.jsonl --page-size 0",
    "kvarts replay small.jsonl --page-size -3",
    "kvarts replay small.jsonl --max-seqs 0",
    "kvarts replay small.jsonl --max-batched-tokens 0",
    "kvarts replay small.jsonl --max-batched-tokens 8",
    "kvarts replay small.jsonl --replicas 0",
    "kvarts replay small.jsonl --router nearest",
    "kvarts replay small.jsonl --profile vllm",
    "kvarts replay small.jsonl --concurrency 0",
    "kvarts replay small.jsonl --speedup 0",
    "kvarts replay small.jsonl --speedup inf",
    "kvarts replay small.jsonl --speedup nan",
    "kvarts replay small.jsonl --speedup 2 --concurrency 3",
    "kvarts replay small.jsonl --cost quadratic",
    "kvarts replay small.jsonl --cost linear:speed=3",
    "kvarts replay small.jsonl --cost linear:step_ms=fast",
    "kvarts replay small.jsonl --cost linear:step_ms=-1",
    "[3] kvarts replay small.jsonl --cost missing.toml",
    "kvarts replay small.jsonl --slo-ttft-ms 0",
    "kvarts replay small.jsonl --trace-block-size 0",
    "kvarts replay small.jsonl --timeline t.csv",
    "kvarts replay small.jsonl --timeline t.json --set timeline_every=0",
    "kvarts replay small.jsonl --model llama-3.1-8b --pages 9000 --kv-memory 4GiB --device l40s",
    "kvarts replay small.jsonl --model llama-3.1-8b",
    "kvarts replay small.jsonl --device l40s",
    "[3] kvarts replay small.jsonl --model nothing --device l40s",
    "kvarts replay small.jsonl --model llama-3.1-8b --device nothing",
    "kvarts replay small.jsonl --model llama-3.1-8b --device cpu:cores=many",
    "kvarts replay small.jsonl --model llama-3.1-70b --device l40s",
    "kvarts replay small.jsonl --model llama-3.1-8b --device l40s --tensor-parallel 0",
    "kvarts replay small.jsonl --model llama-3.1-8b --device l40s --kv-memory much",
    "kvarts replay small.jsonl --model llama-3.1-8b --device l40s --set memory_fraction=2",
    "kvarts replay small.jsonl --model llama-3.1-8b --device l40s --set kv_dtype=int3",
    "kvarts replay small.jsonl --model llama-3.1-8b --model qwen3-8b",
    "kvarts replay small.jsonl --set static_split=true",
    "kvarts replay small.jsonl --trace chat=small.jsonl",
    "kvarts replay small.jsonl --set health=chat=dead@3",
    "kvarts replay small.jsonl --set loans=l.jsonl",
]

TIERS = [
    "kvarts replay small.jsonl --offload lazy",
    "kvarts replay small.jsonl --set offload.h2d=3GB/s",
    "kvarts replay small.jsonl --host-pages 3 --host-memory 3GiB",
    "kvarts replay small.jsonl --host-pages -3",
    "kvarts replay small.jsonl --host-memory lots",
    "kvarts replay small.jsonl --host-pages 30 --set offload.h2d=0",
    "kvarts replay small.jsonl --host-pages 30 --set offload.d2h=fast",
    "kvarts replay small.jsonl --host-pages 30 --set offload.latency_us=-1",
    "kvarts replay small.jsonl --host-pages 30 --set offload.kv_bytes_per_token=0",
    "kvarts replay small.jsonl --host-pages 30 --offload lazy --set offload.target_free=-1",
    "kvarts replay small.jsonl --set offload.disk_pages=30",
    "kvarts replay small.jsonl --host-pages 30 --set offload.disk_pages=3 --set offload.disk_memory=3GiB",
]

SHARED = "kvarts replay --model a=llama-3.1-8b{a} --model b=qwen3-8b{b} --trace a=chat-200.csv {rest}"
BOTH = "--trace b=code-200.csv --device h100-80gb"
MODELS = [
    SHARED.format(a="", b="", rest="--device h100-80gb"),
    SHARED.format(a="", b="", rest=f"{BOTH} --trace c=code-200.csv"),
    SHARED.format(a="", b="", rest="--trace b=code-200.csv"),
    SHARED.format(a="", b="", rest=f"{BOTH} --trace code-200.csv"),
    SHARED.format(a="", b="", rest=f"small.jsonl {BOTH}"),
    SHARED.format(a=":weight=0", b="", rest=BOTH),
    SHARED.format(a=":weight=heavy", b="", rest=BOTH),
    SHARED.format(a=":colour=red", b="", rest=BOTH),
    SHARED.format(a=":floor=600", b=":floor=600", rest=BOTH),
    SHARED.format(a=":floor=600,ceiling=300", b="", rest=BOTH),
    SHARED.format(a=":guarantee=0.8", b=":guarantee=0.8", rest=BOTH),
    SHARED.format(a=":guarantee=900GiB", b="", rest=BOTH),
    SHARED.format(a="", b="", rest=f"{BOTH} --set health=c=dead@3"),
    SHARED.format(a="", b="", rest=f"{BOTH} --set health=a=asleep@3"),
    SHARED.format(a="", b="", rest=f"{BOTH} --set health=a=dead"),
    SHARED.format(a="", b="", rest=f"{BOTH} --pages 300"),
    SHARED.format(a="", b="", rest="--trace b=code-200.csv --device rtx-4090"),
    "[3] " + SHARED.format(a="", b="", rest="--trace b=missing.csv --device h100-80gb"),
    "[4] " + SHARED.format(a="", b="", rest="--trace b=bad.csv --device h100-80gb"),
]

READ = [
    "[3] kvarts replay missing.jsonl",
    "[3] kvarts replay missing.csv",
    "[3] kvarts replay --config missing.toml",
    "[4] kvarts replay model",
    "[4] kvarts replay small.jsonl --trace-block-size 16",
    "[4] kvarts replay empty.jsonl --set skip_bad_lines=true",
    *(
        f"[4] kvarts replay {name}"
        for name in (
            *("empty.jsonl", "blank.jsonl", "no-json.jsonl", "no-field.jsonl", "no-number.jsonl", "negative.jsonl"),
            *("no-output.jsonl", "short-ids.jsonl", "big-id.jsonl", "early.jsonl", "no-time.jsonl"),
            *("no-first-time.jsonl", "bad-delay.jsonl", "no-text.jsonl", "bad.csv", "head.csv", "when.csv"),
        )
    ),
    "[3] kvarts story missing.jsonl --hits",
    "[4] kvarts story small.jsonl --hits",
    "[2] kvarts story small.jsonl",
    "[2] kvarts story small.jsonl --hits --request 3",
    "[3] kvarts story model --hits",
    "[3] kvarts report missing",
    "[3] kvarts report model",
    "[2] kvarts verify",
    "[3] kvarts verify missing.json",
    "[4] kvarts verify no-text.jsonl",
    "[5] kvarts verify small.jsonl",
    "[2] kvarts verify small.jsonl --set max_bytes=lots",
    "[2] kvarts verify small.jsonl --set preempt_threshold=high",
]

WRITE = [
    f"[7] kvarts {SMALL} --report nowhere/r.json",
    f"[7] kvarts {SMALL} --requests nowhere/q.jsonl",
    f"[7] kvarts {SMALL} --timeline nowhere/t.json",
    f"[7] kvarts {SMALL} --events nowhere/e.jsonl",
    f"[7] kvarts {SMALL} --report .",
    f"[7] kvarts {SMALL} --run-dir nowhere/run",
    f"[7] kvarts {SMALL} --run-dir model",
]

CONFIGS = {
    "unknown": "speed = 3",
    "range": "pages = 0",
    "type": 'pages = "many"',
    "syntax": "pages = [",
    "cost": 'cost = "cubic"',
    "cost-table": '[cost]\nmodel = "linear"\nspeed = 3',
    "cost-model": '[cost]\nmodel = "cubic"',
    "workload": '[workload]\nnum_sessions = 0\nnew_tokens = {kind = "fixed", tokens = 1}',
    "workload-length": '[workload]\nnum_sessions = 1\nnew_tokens = {kind = "fixed", tokens = 0}\n'
    'output_tokens = {kind = "fixed", tokens = 1}',
    "workload-and-trace": 'trace = "small.jsonl"\n[workload]\nnum_sessions = 1\n'
    'new_tokens = {kind = "fixed", tokens = 1}\noutput_tokens = {kind = "fixed", tokens = 1}',
    "slo": "[slo]\nttft_ms = -1",
    "offload": "[offload]\nhost_pages = 3\nspeed = 2",
    "offload-policy": '[offload]\nhost_pages = 3\npolicy = "busy"',
    "offload-fail": "[offload]\nhost_pages = 3\nfail_every = -1",
    "models-table": "[models]\nchat = 3",
    "models-key": '[models.chat]\nmodel = "qwen3-8b"\ntrace = "chat.csv"\ncolour = 3',
    "models-trace": '[models.chat]\nmodel = "qwen3-8b"',
}
CONFIG_CODES = {"syntax": 4}


def error_cases() -> Iterator[Case]:
    """Yield all of them, many commands to a case."""
    for name, lines, code in (
        ("usage", USAGE, 2),
        ("tiers", TIERS, 2),
        ("models", MODELS, 2),
        ("read", READ, 4),
        ("write", WRITE, 7),
    ):
        text = "\n".join(line if line.startswith("[") else f"[{code}] {line}" for line in lines)
        yield case(f"errors/{name}", text)
    text = "\n".join(f"[{CONFIG_CODES.get(name, 2)}] kvarts replay --config {name}.toml" for name in CONFIGS)
    yield case("errors/configs", text, files={f"{name}.toml": config + "\n" for name, config in CONFIGS.items()})
