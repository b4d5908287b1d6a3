"""Cases of `kvarts replay` with one model. Each names its traffic and what else has a default that may change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cases.case import Case, case
from cases.inputs import SAMPLE

__all__ = ["replay_cases"]

EXPLICIT = "--page-size 16 --cost polynomial"
FILES = "--report report.json --requests requests.jsonl"
EVERYTHING = f"{FILES} --timeline timeline.json --events events.jsonl --run-dir run"
LINEAR = "linear:step_ms=4,chunk_token_ms=0.02,decode_ms=0.1,context_token_ms=0.0001"

FORMS = """
kvarts replay {trace} {more} --timeline t.json
kvarts replay {trace} {more} --timeline t.jsonl
kvarts replay {trace} {more} --timeline t.jsonl.gz
kvarts replay {trace} {more} --timeline t.json.gz
kvarts replay {trace} {more} --timeline t.parquet
kvarts replay {trace} {more} --timeline thin.json --set timeline_every=10
kvarts replay {trace} {more} --timeline thin.jsonl.gz --set timeline_every=37
kvarts replay {trace} {more} --timeline thin.parquet --set timeline_every=3
kvarts replay {trace} {more} --events e.jsonl
kvarts replay {trace} {more} --events e.jsonl.gz
kvarts replay {trace} {more} --json {files}
"""

SESSIONS = "sessions.jsonl --trace-block-size 4"
PRIORITIES = "priorities.jsonl --trace-block-size 16"

# Name, traffic, settings: each once as it is and once step by step, with all outputs.
BOTH_WAYS = [
    ("sample", SAMPLE, f"--pages 32768 {EXPLICIT}"),
    ("sample-small-pool", SAMPLE, f"--pages 9000 {EXPLICIT}"),
    ("sample-mocker", SAMPLE, f"--pages 32768 {EXPLICIT} --profile mocker"),
    ("pages-of-512", SAMPLE, "--pages 1024 --page-size 512 --cost polynomial"),
    ("pages-of-512-mocker", SAMPLE, "--pages 400 --page-size 512 --cost polynomial --profile mocker"),
    ("pages-of-48", "slice.jsonl", "--pages 6000 --page-size 48 --cost polynomial"),
    ("pages-of-1", "small.jsonl", "--pages 300000 --page-size 1 --cost polynomial"),
    ("pages-of-1-mocker", "small.jsonl", "--pages 200000 --page-size 1 --cost polynomial --profile mocker"),
    ("round-robin", "slice.jsonl", f"--pages 16384 {EXPLICIT} --replicas 3 --router round-robin"),
    ("least-loaded", "slice.jsonl", f"--pages 16384 {EXPLICIT} --replicas 3 --router least-loaded"),
    ("prefix", "slice.jsonl", f"--pages 16384 {EXPLICIT} --replicas 3 --router prefix"),
    ("prefix-mocker", "slice.jsonl", f"--pages 16384 {EXPLICIT} --replicas 2 --router prefix --profile mocker"),
    ("closed-loop", "slice.jsonl", f"--pages 16384 {EXPLICIT} --concurrency 24"),
    ("closed-loop-of-1", "small.jsonl", f"--pages 16384 {EXPLICIT} --concurrency 1"),
    ("closed-loop-mocker", "slice.jsonl", f"--pages 9000 {EXPLICIT} --concurrency 48 --profile mocker"),
    ("closed-loop-replicas", "slice.jsonl", f"--pages 9000 {EXPLICIT} --concurrency 48 --replicas 4 --router prefix"),
    ("speedup", "slice.jsonl", f"--pages 16384 {EXPLICIT} --speedup 2.5"),
    ("slow-down", "slice.jsonl", f"--pages 16384 {EXPLICIT} --speedup 0.3"),
    ("few-tokens", "small.jsonl", f"--pages 16384 {EXPLICIT} --max-batched-tokens 300 --max-seqs 5"),
    ("azure-chat", "chat.csv", f"--pages 2000 {EXPLICIT} --max-seqs 64"),
    ("azure-code", "code.csv", f"--pages 2000 {EXPLICIT} --speedup 3"),
    ("slo", "slice.jsonl", f"--pages 32768 {EXPLICIT} --slo-ttft-ms 2000 --slo-tpot-ms 40 --set slo.e2e_ms=20000"),
    ("slo-ttft", "chat.csv", f"--pages 2000 {EXPLICIT} --slo-ttft-ms 100"),
    ("sessions", SESSIONS, f"--pages 400 {EXPLICIT} --max-seqs 16"),
    ("sessions-pages-of-1", SESSIONS, "--pages 4000 --page-size 1 --cost polynomial --max-seqs 16"),
    ("sessions-closed", SESSIONS, f"--pages 400 {EXPLICIT} --concurrency 7"),
    ("sessions-speedup", SESSIONS, f"--pages 400 {EXPLICIT} --speedup 4 --replicas 2 --router least-loaded"),
    ("sessions-mocker", SESSIONS, f"--pages 400 {EXPLICIT} --profile mocker"),
    ("priorities", PRIORITIES, f"--pages 300 {EXPLICIT}"),
    ("priorities-mocker", PRIORITIES, f"--pages 300 {EXPLICIT} --profile mocker"),
    ("priorities-few", PRIORITIES, f"--pages 120 {EXPLICIT} --max-seqs 8 --max-batched-tokens 64"),
    ("linear", "slice.jsonl", f"--pages 16384 --page-size 16 --cost {LINEAR}"),
    ("linear-step", "small.jsonl", "--pages 16384 --page-size 16 --cost linear:step_ms=5"),
    ("fitted", "slice.jsonl", "--pages 2587 --page-size 16 --cost vllm-rtx4090/cost.toml"),
    ("fitted-other", "slice.jsonl", "--pages 16384 --page-size 16 --cost vllm-rtx4090/cost.toml --model qwen3-8b"),
    ("roofline", "slice.jsonl", "--page-size 16 --model llama-3.1-8b --device h100-80gb"),
    ("roofline-moe", "chat.csv", "--page-size 32 --model qwen3-30b-a3b --device h100-80gb --set kv_dtype=fp8"),
    ("roofline-split", "chat.csv", "--page-size 16 --model llama-3.1-70b --device a100-80gb --tensor-parallel 4"),
    (
        "roofline-fp8",
        "chat.csv",
        ("--page-size 16 --model qwen3-32b --device l40s --set weight_dtype=fp8 --kv-memory 2GiB"),
    ),
    (
        "roofline-windows",
        "chat-200.csv",
        "--page-size 16 --model gemma-3-27b --device h200-141gb --set memory_fraction=0.5 --kv-groups off",
    ),
    ("roofline-latent", "chat-200.csv", "--page-size 64 --model deepseek-v3 --device b200-180gb --tensor-parallel 8"),
    ("roofline-cpu", "chat-200.csv", "--page-size 16 --model model --device cpu:cores=8,bandwidth=80GB/s,memory=16GiB"),
]

SHIPPED = "--device h100-80gb --engine vllm==0.32 --max-seqs 64"
LONG = f"{SHIPPED} --max-model-len 131072 --concurrency 24"
# Hybrid models as vLLM starts them, in a full memory: leaps, single steps, and steps whose events are read.
HYBRIDS = [
    ("window", "small.jsonl", f"--model gpt-oss-20b --kv-memory 4GiB {LONG}"),
    ("equal-windows", "small.jsonl", f"--model gemma-3-27b --kv-memory 18GiB {LONG}"),
    ("equal-states", "small.jsonl", f"--model qwen3.5-27b --kv-memory 12GiB {LONG}"),
    ("no-lag", "small.jsonl", f"--model gemma-3-27b --kv-memory 18GiB {LONG} --set async_scheduling=false"),
    (
        "priorities",
        PRIORITIES,
        f"--model gemma-3-27b --kv-memory 3GiB --max-model-len 4096 --set scheduling_policy=priority {SHIPPED}",
    ),
    ("preemptions", PRIORITIES, f"--model gpt-oss-20b --kv-memory 300MiB --max-model-len 2048 {SHIPPED}"),
]

EAGER = "--offload eager --set offload.h2d=50GB/s --set offload.d2h=50GB/s"
SLOW_DISK = (
    "--set offload.disk_read=1GB/s --set offload.disk_write=400MB/s "
    "--set offload.disk_latency_us=900 --set offload.latency_us=40"
)
GROUPS = "--page-size 16 --model gemma-3-27b --device h100-80gb --kv-memory 2GiB --host-memory 8GiB --max-seqs 32"
TIERS = [
    ("eager", "slice.jsonl", f"--pages 6000 {EXPLICIT} --host-pages 30000 {EAGER}"),
    (
        "eager-memory",
        "slice.jsonl",
        f"--pages 6000 {EXPLICIT} --host-memory 64GiB --set offload.kv_bytes_per_token=100000",
    ),
    ("lazy", "slice.jsonl", f"--pages 6000 {EXPLICIT} --host-pages 30000 --offload lazy"),
    (
        "lazy-target",
        "slice.jsonl",
        f"--pages 6000 {EXPLICIT} --host-pages 9000 --offload lazy --set offload.target_free=2000",
    ),
    (
        "slow-lanes",
        "small.jsonl",
        f"--pages 6000 {EXPLICIT} --host-pages 9000 --set offload.h2d=1GB/s --set offload.d2h=800MB/s",
    ),
    ("disk", "slice.jsonl", f"--pages 6000 {EXPLICIT} --host-pages 9000 --set offload.disk_pages=90000"),
    (
        "disk-lazy",
        "slice.jsonl",
        (f"--pages 6000 {EXPLICIT} --host-pages 9000 --set offload.disk_memory=200GiB --offload lazy"),
    ),
    (
        "disk-slow",
        SESSIONS,
        f"--pages 250 {EXPLICIT} --host-pages 400 --set offload.disk_pages=9000 --max-seqs 16 {SLOW_DISK}",
    ),
    ("replicas", "slice.jsonl", f"--pages 6000 {EXPLICIT} --host-pages 20000 --replicas 2 --router prefix"),
    (
        "sessions",
        SESSIONS,
        f"--pages 250 {EXPLICIT} --host-pages 900 --offload lazy --set offload.target_free=30 --max-seqs 16",
    ),
    ("priorities", PRIORITIES, f"--pages 120 {EXPLICIT} --host-pages 900 --max-seqs 8"),
    ("mocker", "slice.jsonl", f"--pages 6000 {EXPLICIT} --host-pages 30000 --profile mocker"),
    (
        "closed",
        "slice.jsonl",
        f"--pages 6000 {EXPLICIT} --host-pages 30000 --set offload.disk_pages=50000 --concurrency 32",
    ),
    ("exclusive", "slice.jsonl", f"--pages 6000 {EXPLICIT} --host-pages 9000 --offload exclusive"),
    (
        "exclusive-disk",
        SESSIONS,
        f"--pages 250 {EXPLICIT} --host-pages 400 --set offload.disk_pages=900 --max-seqs 16 --offload exclusive",
    ),
    (
        "exclusive-replicas",
        "slice.jsonl",
        f"--pages 4000 {EXPLICIT} --host-pages 4000 --replicas 2 --offload exclusive",
    ),
    ("exclusive-priorities", PRIORITIES, f"--pages 120 {EXPLICIT} --host-pages 200 --max-seqs 8 --offload exclusive"),
    (
        "given-up",
        "slice.jsonl",
        f"--pages 3000 {EXPLICIT} --host-pages 9000 --offload lazy --set client_timeout_s=20 --set retries=1",
    ),
    *[
        (
            f"groups-{policy}",
            "chat-200.csv",
            f"{GROUPS} --offload {policy}",
        )
        for policy in ("eager", "lazy", "exclusive")
    ],
]

# TOML: what no option says, and forms that only a file has.
OFFLOAD = "page_size = 16\npages = {pages}\ncost = 'polynomial'\nmax_seqs = 16\n[offload]\nhost_pages = {host}\n"
FAILING = OFFLOAD.format(pages=250, host=900)
FILE_SETTINGS = {
    "fail-every": f"{FAILING}fail_every = 3\n",
    "fail-every-lazy": f"{FAILING}fail_every = 2\npolicy = 'lazy'\ntarget_free = 40\n",
    "fail-every-disk": f"{FAILING}fail_every = 5\ndisk_pages = 3000\n",
    "full-prompt-hits": f"{FAILING}full_prompt_hits = true\n",
    "full-prompt-hits-failing": f"{FAILING}full_prompt_hits = true\nfail_every = 4\ndisk_pages = 3000\nworkers = 3\n",
    "bytes-a-second": f"{FAILING}h2d = 2000000000\nd2h = 3000000000\nlatency_us = 55.5\n",
}

WORKLOAD = """pages = 1500
page_size = 16
max_seqs = 32
{more}
[cost]
model = "linear"
step_ms = 6.0
chunk_token_ms = 0.03
[workload]
num_sessions = 60
turns_per_session = {turns}
sessions_per_s = {rate}
think_time_s = {think}
arrivals = "{arrivals}"
num_prefix_groups = 3
prefix_tokens = {prefix}
seed = {seed}
new_tokens = {new}
output_tokens = {output}
"""
UNIFORM = '{kind = "uniform", low = 20, high = 300}'
FIXED = '{kind = "fixed", tokens = 33}'
LOGNORMAL = '{kind = "lognormal", median = 80, sigma = 0.8, high = 1500}'
WORKLOADS = {
    "poisson": WORKLOAD.format(
        more="", turns=4, rate=8.0, think=1.5, arrivals="poisson", prefix=200, seed=3, new=UNIFORM, output=LOGNORMAL
    ),
    "fixed": WORKLOAD.format(
        more="speedup = 2",
        turns=1,
        rate=9.0,
        think=0.0,
        arrivals="fixed",
        prefix=0,
        seed=0,
        new=LOGNORMAL,
        output=FIXED,
    ),
    "at-once": WORKLOAD.format(
        more="replicas = 2", turns=3, rate=0, think=0.3, arrivals="fixed", prefix=65, seed=8, new=FIXED, output=UNIFORM
    ),
    "closed": WORKLOAD.format(
        more="concurrency = 10",
        turns=3,
        rate=1,
        think=0.1,
        arrivals="poisson",
        prefix=9,
        seed=5,
        new=UNIFORM,
        output=FIXED,
    ),
}

DYNAMO = {
    "pages16384x512": "--pages 16384 --page-size 512",
    "pages524288x16-4workers": "--pages 524288 --page-size 16 --replicas 4 --router round-robin",
    "pages400x512": "--pages 400 --page-size 512",
    "pages2400x128-concurrency48": "--pages 2400 --page-size 128 --concurrency 48",
}
WHOLE_DYNAMO = {
    "pages16384x512": "--pages 16384 --page-size 512",
    "pages16384x512-4workers": "--pages 16384 --page-size 512 --replicas 4 --router round-robin",
    "pages600x512": "--pages 600 --page-size 512",
}


def both_ways(name: str, trace: str, settings: str, *, audit: bool = False) -> Case:
    """A replay at once and step by step, and audited if it is small, with all outputs of the first two."""
    text = f"kvarts replay {trace} {settings} {EVERYTHING}\nkvarts replay {trace} {settings} --step-by-step --json"
    text += " --requests slow-requests.jsonl --timeline slow-timeline.jsonl --events slow-events.jsonl.gz"
    if audit:
        text += f"\nkvarts replay {trace} {settings} --audit --json --report audited.json"
    return case(name, text)


def replay_cases(data: Path) -> Iterator[Case]:
    """Yield the cases; whole traces lie in `data`."""
    sample = f"--pages 32768 {EXPLICIT}"
    yield case("replay/outputs", FORMS.format(trace=SAMPLE, more=sample, files=FILES))
    replicas = "--pages 8192 --page-size 16 --cost polynomial --replicas 2 --router prefix --host-pages 9000"
    yield case("replay/outputs-replicas", FORMS.format(trace="small.jsonl", more=replicas, files=EVERYTHING))
    for name, trace, settings in BOTH_WAYS:
        yield both_ways(f"replay/{name}", trace, settings, audit=trace in (SESSIONS, PRIORITIES))
    for name, trace, settings in HYBRIDS:
        text = f"kvarts replay {trace} {settings} {FILES} --json\n"
        text += f"kvarts replay {trace} {settings} --step-by-step --json --requests slow.jsonl\n"
        yield case(f"hybrids/{name}", text + f"kvarts replay {trace} {settings} --json --timeline t.jsonl")
    for name, trace, settings in TIERS:
        yield both_ways(f"tiers/{name}", trace, settings, audit=trace in (SESSIONS, PRIORITIES))
    audited = f"--pages 9000 {EXPLICIT} --audit"
    yield case("replay/audit", f"kvarts replay small.jsonl {audited} {EVERYTHING} --json --step-by-step")
    yield case("replay/audit-mocker", f"kvarts replay small.jsonl {audited} {EVERYTHING} --profile mocker")
    for name, text in FILE_SETTINGS.items():
        settings = f"--config c.toml {SESSIONS}"
        made = both_ways(f"tiers/file-{name}", settings, "", audit=True)
        yield Case(made.name, made.commands, {"c.toml": text})
    for name, text in WORKLOADS.items():
        made = both_ways(f"workload/{name}", "--config c.toml", "", audit=True)
        yield Case(made.name, made.commands, {"c.toml": text})
    settings = (
        "pages = 900\npage_size = 16\ntrace = 'slice.jsonl'\nmax_seqs = 7\nprofile = 'mocker'\n[slo]\nttft_ms = 9\n"
    )
    yield case(
        "replay/file-and-options",
        "kvarts replay --config c.toml --json\n"
        f"kvarts replay --config c.toml --max-seqs 9 --pages 2000 --slo-ttft-ms 900 --cost polynomial {EVERYTHING}\n"
        "kvarts replay small.jsonl --config c.toml --json --profile default --host-pages 500",
        files={"c.toml": settings},
    )
    skipping = f"--set skip_bad_lines=true --pages 900 {EXPLICIT}"
    yield case(
        "replay/skip-bad-lines",
        f"kvarts replay no-json.jsonl {skipping} {EVERYTHING}\nkvarts replay no-number.jsonl {skipping} --json\n"
        f"kvarts replay bad-delay.jsonl {skipping} --json".replace(
            "kvarts replay bad-delay", "[4] kvarts replay bad-delay"
        ),
    )
    for name, settings in DYNAMO.items():
        yield both_ways(f"dynamo/{name}", "slice.jsonl", f"--profile mocker --cost polynomial {settings}")
    conversation = data / "mooncake" / "conversation_trace.jsonl"
    synthetic = data / "mooncake" / "synthetic_trace.jsonl"
    for name, settings in WHOLE_DYNAMO.items():
        text = f"kvarts replay {conversation} --profile mocker --cost polynomial {settings} {EVERYTHING} --json"
        yield case(f"whole/dynamo-{name}", text, needs=(conversation,), is_whole=True)
    whole = {
        "conversation": f"{conversation} --pages 500000 {EXPLICIT}",
        "conversation-tiers": f"{conversation} --pages 4000 --page-size 512 --cost polynomial --host-pages 16000",
        "conversation-lazy": f"{conversation} --pages 4000 --page-size 512 --host-pages 4000 --offload lazy",
        "synthetic": f"{synthetic} --pages 200000 {EXPLICIT} --replicas 2 --router prefix",
        "azure-conv": f"{data / 'azure2023' / 'conv.csv'} --page-size 16 --model llama-3.1-8b --device a100-40gb",
        "azure-code": f"{data / 'azure2023' / 'code.csv'} --pages 6000 {EXPLICIT} --concurrency 90",
    }
    for name, settings in whole.items():
        path = Path(settings.split(maxsplit=1)[0])
        yield case(f"whole/{name}", f"kvarts replay {settings} {EVERYTHING} --json", needs=(path,), is_whole=True)
