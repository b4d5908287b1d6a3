"""Content of the commands' help: a summary line for each, examples, and the most used options."""

from __future__ import annotations

from collections.abc import Sequence

import click

__all__ = [
    "COMMON",
    "EXAMPLES",
    "GROUPS",
    "SUMMARIES",
    "common_of",
    "examples_of",
    "groups_of",
    "path_of",
    "summary_of",
]

GROUPS = {
    "Size": ("plan", "sweep"),
    "Replay": ("replay", "calibrate", "compare"),
    "Explain": ("report", "story", "verify", "watch", "why"),
    "Serve": ("mock", "engine", "serve", "soak"),
    "Traces": ("trace",),
    "Models": ("model", "generate", "profile"),
    "Shell": ("completion",),
}
"""The commands, by purpose."""

SUMMARIES = {
    "calibrate": "Fit a cost model to measured runs.",
    "compare": "Compare a replay with a measured run.",
    "completion": "Install completion of command lines in a shell.",
    "generate": "Generate text with a real model, its KV in pages.",
    "mock": "Serve OpenAI's API from a mock, without a model.",
    "engine": "Be the engine behind a front end of vLLM.",
    "model": "Models and devices: parameters, KV bytes, pages that fit.",
    "model check": "Check a real model against transformers.",
    "model list": "List the models and devices that are known by name.",
    "model show": "Print the bytes of a token, a page and a sequence.",
    "model get": "Download a small real model.",
    "model tiny": "Write a small random model, to try things with.",
    "plan": "Find how much KV memory, and how many replicas, a trace needs.",
    "plan curve": "Print the hits at all sizes of KV memory.",
    "plan fleet": "Find the fewest devices that keep an SLO, and in which pools.",
    "plan policies": "Compare eviction policies.",
    "plan routers": "Compare routers of several replicas.",
    "plan slo": "Find the smallest memory that keeps an SLO (the default).",
    "plan users": "Find how many users fit.",
    "profile": "Run a real model and record steps and KV use.",
    "replay": "Replay traffic in virtual time: latencies, hits, memory.",
    "report": "Show a run: a short table, or a page.",
    "serve": "Serve a model or sessions until a signal ends it.",
    "serve model": "Serve a real model with OpenAI's API.",
    "serve sessions": "Serve sessions over gRPC, in bounded memory.",
    "soak": "Run sessions for hours and judge whether memory is bounded.",
    "story": "Explain the slowest requests, one request, or a block.",
    "sweep": "Replay every point of a grid.",
    "trace": "Look at traces, and make traces from traces.",
    "trace anonymize": "Number ids, sessions, tenants and models again.",
    "trace convert": "Write a trace of any form as Mooncake's JSON lines.",
    "trace forms": "List the forms of traces that are read, with an example.",
    "trace info": "Print requests, tokens, sessions and reuse of a trace.",
    "trace list": "List the bundled traces.",
    "trace merge": "Write the requests of several traces as one.",
    "trace scale": "Change rate, number of users or start of sessions.",
    "trace slice": "Cut a part out of a trace.",
    "verify": "Judge KV timelines: are all blocks accounted for?",
    "watch": "Follow the KV events of a running engine and judge them.",
    "why": "Find what costs cache hits in a log, and the cheapest mend.",
}

EXAMPLES = {
    "calibrate": (
        "kvarts calibrate run.jsonl --model llama-3.1-8b --device h100-80gb --out cost.toml",
        "kvarts calibrate --design --model llama-3.1-8b --device h100-80gb",
        "kvarts calibrate --points measured.csv --set hold_out=source --out prior.toml",
    ),
    "compare": ("kvarts compare run measured.jsonl --html compare.html",),
    "completion": ("kvarts completion bash",),
    "generate": ('kvarts generate --model DIR --prompt "once upon a time" --max-tokens 32',),
    "mock": (
        "kvarts mock --port 8000",
        "kvarts mock --model qwen3-8b --device a100-80gb --speedup 10",
        "kvarts mock --front-end vllm --model DIR -- --max-model-len 32768",
    ),
    "model check": ("kvarts model check DIR --max-tokens 16",),
    "model list": ("kvarts model list",),
    "model show": ("kvarts model show llama-3.1-8b --device h100-80gb",),
    "model get": ("kvarts model get smollm2",),
    "model tiny": ("kvarts model tiny DIR --family qwen3",),
    "plan curve": ("kvarts plan curve sample:mooncake --html plan.html --open",),
    "plan fleet": ("kvarts plan fleet --gpus 8 --slo-ttft-ms 3000",),
    "plan policies": ("kvarts plan policies --policy auto",),
    "plan routers": ("kvarts plan routers --replicas 4 --routers prefix,least-loaded",),
    "plan slo": (
        "kvarts plan slo",
        "kvarts plan slo my.jsonl --model llama-3.1-8b --device h100-80gb --slo-ttft-ms 500",
        "kvarts plan slo sample:mooncake --html plan.html --open",
    ),
    "plan users": ("kvarts plan users --users 1..200 --slo-ttft-ms 3000",),
    "profile": ("kvarts profile --model DIR --prompts prompts.jsonl --record steps.jsonl",),
    "replay": (
        "kvarts replay",
        "kvarts replay my.jsonl --model llama-3.1-8b --device h100-80gb",
        "kvarts replay sample:mooncake --host-memory 64GiB --html run.html --open",
    ),
    "report": ("kvarts report RUN --html run.html --open",),
    "serve model": ("kvarts serve model --model DIR --port 8000",),
    "engine": ("kvarts engine --handshake tcp://127.0.0.1:29550 --model DIR",),
    "serve sessions": ("kvarts serve sessions --mock --window 64",),
    "soak": ("kvarts soak --virtual --duration 4h --json soak.json",),
    "story": (
        "kvarts story RUN",
        "kvarts story RUN --request 17",
    ),
    "sweep": ("kvarts sweep grid.toml -o points",),
    "trace anonymize": ("kvarts trace anonymize my.jsonl -o shared.jsonl",),
    "trace convert": ("kvarts trace convert sample:azure-chat -o chat.jsonl",),
    "trace forms": ("kvarts trace forms",),
    "trace info": ("kvarts trace info sample:mooncake",),
    "trace list": ("kvarts trace list",),
    "trace merge": ("kvarts trace merge chat.jsonl code.jsonl -o both.jsonl",),
    "trace scale": ("kvarts trace scale my.jsonl --copies 4 -o four.jsonl",),
    "trace slice": ("kvarts trace slice my.jsonl --to 10m -o first.jsonl",),
    "verify": ("kvarts verify timeline.json",),
    "watch": ("kvarts watch tcp://127.0.0.1:5557 --duration 60",),
    "why": ("kvarts why requests.jsonl", "kvarts why logs --tokenizer model --set pages=20000"),
}

_REPLAYED = (
    "--model",
    "--device",
    "--tensor-parallel",
    "--kv-memory",
    "--pages",
    "--page-size",
    "--max-batched-tokens",
    "--max-seqs",
    "--replicas",
    "--router",
    "--speedup",
    "--slo-ttft-ms",
    "--slo-tpot-ms",
    "--host-memory",
    "--config",
    "--set",
    "--vllm-args",
    "--json",
    "--html",
)
_HTTP = ("--model", "--host", "--port", "--api-key", "--served-model-name", "--max-model-len")

COMMON = {
    "calibrate": ("--model", "--device", "--pages", "--max-batched-tokens", "--prompts", "--design", "--out"),
    "generate": ("--model", "--prompt", "--prompts", "--chat", "--max-tokens", "--temperature", "--device"),
    "mock": (*_HTTP, "--device", "--pages", "--speedup", "--output-tokens", "--fail", "--kv-events"),
    "engine": ("--handshake", "--model", "--device", "--pages", "--speedup", "--fail", "--kv-events"),
    "profile": ("--model", "--prompts", "--record", "--kv-timeline", "--max-tokens", "--temperature", "--device"),
    "replay": (*_REPLAYED, "--cost", "--concurrency", "--run-dir"),
    "serve model": (*_HTTP, "--kv-memory", "--device", "--dtype"),
    "serve sessions": (
        "--model",
        "--mock",
        "--sink",
        "--window",
        "--session-memory",
        "--state-dir",
        "--port",
        "--http-port",
    ),
    "soak": ("--host", "--port", "--virtual", "--duration", "--sessions", "--json", "--page"),
}
"""The options that `-h` lists for commands with many options; `--help-all` lists all."""


def path_of(ctx: click.Context) -> str:
    """Return the name of a command below `kvarts`: `trace info`; empty for `kvarts` itself."""
    names: list[str] = []
    at: click.Context | None = ctx
    while at is not None and at.parent is not None:
        names.insert(0, at.info_name or "")
        at = at.parent
    return " ".join(names)


def examples_of(ctx: click.Context) -> Sequence[str]:
    """Return example command lines of a command."""
    return EXAMPLES.get(path_of(ctx), ())


def common_of(ctx: click.Context) -> Sequence[str]:
    """Return the options that the short help lists; empty if it lists all."""
    return COMMON.get(path_of(ctx), ())


def summary_of(ctx: click.Context, name: str) -> str:
    """Return the summary line of the command `name` in the group of `ctx`."""
    return SUMMARIES.get(f"{path_of(ctx)} {name}".strip(), "")


def groups_of(ctx: click.Context, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the commands of a group by title: by purpose for `kvarts` itself, else under one title."""
    if path_of(ctx):
        return {"Commands": list(names)}
    found = {title: [name for name in members if name in names] for title, members in GROUPS.items()}
    listed = {name for members in found.values() for name in members}
    found["More"] = [name for name in names if name not in listed]
    return {title: members for title, members in found.items() if members}
