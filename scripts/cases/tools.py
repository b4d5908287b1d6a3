"""Cases of every command but `replay`, and of Python programs."""

from __future__ import annotations

from collections.abc import Iterator

from cases.case import Case, case
from cases.programs.damage import DAMAGES

__all__ = ["tool_cases"]

REPLAY = "kvarts replay {trace} --page-size 16 --cost polynomial --pages {pages}"
SAMPLE_RUN = REPLAY.format(trace="slice.jsonl", pages=9000)
SESSIONS_RUN = REPLAY.format(trace="sessions.jsonl --trace-block-size 4 --max-seqs 16", pages=250)
CALIBRATE = "--model llama-3.1-8b --device rtx-4090 --pages 600 --set page_size=16 --max-batched-tokens 2048"

# What the verifier says of each damage: 5 violated, 6 inconclusive; the rest is violated.
VERDICTS = {"rows-none": 6, "rows-one": 6, "rows-few": 0, "zero": 6, "no-flux": 0}

STORIES = """
kvarts story {run} --hits
kvarts story {run} --request {request}
kvarts story {run} --request {other}
kvarts story {run} --block {request}:3
kvarts story {run} --block {other}:0
[4] kvarts story {run} --request nothing
[4] kvarts story {run} --block 0123456789
"""


def verify_cases() -> Iterator[Case]:
    """Yield verdicts on what was produced, and on what was then damaged."""
    timeline = f"{SAMPLE_RUN} --timeline t.json --report r.json"
    yield case(
        "verify/produced",
        f"{timeline}\n{SAMPLE_RUN} --timeline t.jsonl.gz\n{SAMPLE_RUN} --timeline t.parquet\n"
        f"{SAMPLE_RUN} --timeline thin.jsonl --set timeline_every=9\n"
        f"{SESSIONS_RUN} --timeline tiers.json --host-pages 500 --set offload.disk_pages=900\n"
        "kvarts verify t.json\nkvarts verify t.jsonl.gz\nkvarts verify t.parquet\n"
        "kvarts verify thin.jsonl\nkvarts verify t.json --json\nkvarts verify tiers.json --json\n"
        "kvarts verify t.json t.jsonl.gz t.parquet thin.jsonl\nkvarts verify t.json thin.jsonl --json\n"
        "[5] kvarts verify t.json --set max_bytes=1MB --set block_bytes=1000\n"
        "[5] kvarts verify t.json --set max_bytes=1MB --set block_bytes=1000 --json\n"
        "[6] kvarts verify t.json --set max_bytes=24GiB\n"
        "kvarts verify t.json --set preempt_threshold=0.5\n"
        "[3] kvarts verify t.json missing.json\n[4] kvarts verify no-json.jsonl t.json\n"
        "[3] kvarts verify missing.json no-json.jsonl t.json --json",
    )
    small = REPLAY.format(trace="small.jsonl", pages=5000)
    commands = [f"{small} --timeline t.json", "python programs/damage.py t.json"]
    for name in DAMAGES:
        code = VERDICTS.get(name, 5)
        commands.append(f"[{code}] kvarts verify damaged-{name}.json")
    commands += [f"[4] kvarts verify damaged-{name}" for name in ("torn.json", "list.json", "packed.json.gz")]
    commands += ["[4] kvarts verify damaged-line.jsonl"]
    commands += [f"kvarts verify damaged-{name}.jsonl" for name in ("killed", "not")]
    commands.append("[5] kvarts verify damaged-free.json damaged-torn.json damaged-zero.json t.json")
    every = " ".join(f"damaged-{name}.json" for name in DAMAGES)
    commands.append(f"[5] kvarts verify --json {every}")
    commands.append("[5] kvarts verify damaged-flux.json --set max_bytes=1GB --set block_bytes=100000")
    yield case("verify/damaged", "\n".join(commands))


def story_cases() -> Iterator[Case]:
    """Yield stories and reports of run directories and journals."""
    report = "kvarts report run\nkvarts report run --html page.html"
    runs = {
        "default": (SAMPLE_RUN, "59", "20"),
        "mocker": (f"{SAMPLE_RUN} --profile mocker", "59", "20"),
        "sessions": (SESSIONS_RUN, "s0-0", "s7-0"),
        "tiers": (f"{SESSIONS_RUN} --host-pages 400 --set offload.disk_pages=5000", "s0-0", "s7-0"),
        "lazy": (f"{SESSIONS_RUN} --host-pages 400 --offload lazy --set offload.target_free=30", "s20-0", "s7-0"),
        "priorities": (REPLAY.format(trace="priorities.jsonl --trace-block-size 16", pages=200), "14", "100"),
        "replicas": (f"{SESSIONS_RUN} --replicas 3 --router prefix", "s0-0", "s7-0"),
    }
    for name, (run, request, other) in runs.items():
        stories = STORIES.format(run="run", request=request, other=other)
        yield case(f"story/{name}", f"{run} --run-dir run --events e.jsonl\n{stories}\n{report}")
    text = STORIES.format(run="e.jsonl", request="59", other="60")
    yield case("story/journal", f"{SAMPLE_RUN} --events e.jsonl\n{text}")
    every = "\n".join(f"kvarts story e.jsonl.gz --request {request}" for request in range(0, 120, 7))
    small = REPLAY.format(trace="small.jsonl", pages=5000)
    yield case("story/many", f"{small} --events e.jsonl.gz\n{every}\nkvarts story e.jsonl.gz --hits")
    shared = (
        "kvarts replay --model chat=llama-3.1-8b --model code=qwen3-8b:priority=1 --trace chat=chat-200.csv "
        "--trace code=code-200.csv --device h100-80gb --kv-memory 700MiB --page-size 16 --run-dir run"
    )
    told = "\n".join(
        f"kvarts report run/{name}\nkvarts story run/{name} --hits\nkvarts story run/{name} --request 12\n"
        f"kvarts report run/{name} --html {name}.html\nkvarts verify run/{name}/timeline.json.gz"
        for name in ("chat", "code")
    )
    yield case("story/shared", f"{shared}\n{told}")


def model_cases() -> Iterator[Case]:
    """Yield what is known of models and devices."""
    yield case("model/list", "kvarts model list\nkvarts --version")
    names = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", "gemma-3-27b", "deepseek-v3", "gpt-oss-120b", "model")
    yield case("model/show", "\n".join(f"kvarts model show {name}\nkvarts model show {name} --json" for name in names))
    yield case(
        "model/fit",
        "kvarts model show llama-3.1-8b --device h100-80gb\n"
        "kvarts model show llama-3.1-8b --device rtx-4090 --max-batched-tokens 2048 --max-seqs 64 --page-size 32\n"
        "kvarts model show qwen3-32b --device a100-80gb --tensor-parallel 2 --set weight_dtype=fp8 "
        "--set kv_dtype=fp8 --json\n"
        "kvarts model show deepseek-v3 --device b200-180gb --tensor-parallel 8 --set memory_fraction=0.8\n"
        "kvarts model show model/config.json --device cpu:cores=8,bandwidth=80GB/s,memory=16GiB\n"
        "[2] kvarts model show llama-3.1-70b --device rtx-4090\n[3] kvarts model show nothing\n"
        "[2] kvarts model show llama-3.1-8b --device nothing\n"
        "[2] kvarts model show llama-3.1-8b --set kv_dtype=int3",
    )


def measured_cases() -> Iterator[Case]:
    """Yield calibrations, quick ones, and comparisons."""
    requests, prompts = "measured-requests.jsonl", "measured-prompts.jsonl"
    run = f"kvarts replay {prompts} --trace-block-size 16 {CALIBRATE}"
    yield case(
        "compare",
        f"{run} --run-dir run --requests q.jsonl\nkvarts compare run {requests}\nkvarts compare run {requests} --json\n"
        f"kvarts compare q.jsonl {requests}\n"
        f"kvarts compare run {requests} --series vllm-rtx4090/timeseries.csv --html page.html\n"
        f"kvarts compare q.jsonl {requests} --series vllm-rtx4090/timeseries.csv\n"
        f"[4] kvarts compare run vllm-rtx4090/requests.jsonl\n[3] kvarts compare run missing.jsonl\n"
        f"[4] kvarts compare run {requests} --set column=arrival=when",
    )
    steps = "--model llama-3.1-8b --device rtx-4090"
    yield case(
        "calibrate/steps",
        f"kvarts calibrate steps.jsonl {steps} --out cost.toml\nkvarts calibrate steps.jsonl {steps} --json\n"
        "kvarts calibrate steps.jsonl --cost vllm-rtx4090/cost.toml\n"
        "kvarts replay small.jsonl --cost cost.toml --pages 9000 --page-size 16 --json\n"
        "[2] kvarts calibrate steps.jsonl\n[3] kvarts calibrate missing.jsonl --model llama-3.1-8b --device l40s",
    )
    text = f"kvarts calibrate {requests} {CALIBRATE} --prompts {prompts} --set trace_block_size=16 --out cost.toml"
    yield case("calibrate/requests", f"{text} --set seed=1 --set fit_on=25")


def program_cases() -> Iterator[Case]:
    """Yield programs in Python, and a real model."""
    yield case("python/api", "python programs/api.py")
    yield case("python/ledger", "python programs/ledger.py")
    generate = (
        "kvarts generate --model tiny --max-tokens 12 --set ignore_eos=true --kv-memory 64kB --set page_size=4 "
        "--dtype float32"
    )
    sampled = "--temperature 0.9 --set top_k=40 --set top_p=0.95 --set min_p=0.01 --set repetition_penalty=1.1 --seed 5"
    yield case(
        "torch/generate",
        f"kvarts model tiny tiny --family qwen3\n{generate} --prompt hello\n{generate} --prompts prompts.jsonl\n"
        f"{generate} --prompts prompts.jsonl --set logprobs=true\n{generate} --prompts prompts.jsonl {sampled}\n"
        f"{generate} --prompt hello {sampled} --set attention=sdpa",
        needs_torch=True,
    )


def tool_cases() -> Iterator[Case]:
    """Yield all of them."""
    yield from verify_cases()
    yield from story_cases()
    yield from model_cases()
    yield from measured_cases()
    yield from program_cases()
