"""What five load generators report of one scripted stream, as the table of docs/clients.md.

    python benchmarks/many_clocks.py --work /tmp/clocks vllm=/venvs/vllm/bin guidellm=/venvs/guidellm/bin \
aiperf=/venvs/aiperf/bin evalscope=/venvs/evalscope/bin inference-perf=/venvs/inference-perf/bin

Each NAME=BIN names a generator and the folder of its environment. The server answers every chat in the same second:

    100 ms  a chunk with the role           300 to 750 ms  ten chunks, 50 ms apart, of the stream's kind
    850 ms  usage                           1,000 ms       [DONE], and the end of the answer

Streams: `one` (ten chunks of one token), `three` (ten of three tokens), `reasoning` (five chunks of reasoning, then
five of text), `tools` (one tool call in ten chunks, no text); and such as `one` that fail after five chunks: `cut` (the
connection closes), `error` (an event with an error, then [DONE]), `short` (the answer ends there). A run has eight
requests, one after the other. Prints a line of JSON for each, as its own report states it: medians in ms, tokens per
request, tokens per second, or of streams that fail, the successes. The result files stay in the working folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAME, NUM_REQUESTS, LIMIT_S = "local/words", 8, 300
KINDS = ("one", "three", "reasoning", "tools", "cut", "error", "short")
VLLM = (
    "import vllm.benchmarks.serve as serve,vllm.utils.argparse_utils as u;"
    "p=u.FlexibleArgumentParser();serve.add_cli_args(p);serve.main(p.parse_args())"
)
"""`vllm bench serve`, also where the package has no metadata."""
TEXTS = [" ".join(f"w{10 + 3 * place + each}" for each in range(3)) for place in range(10)]


def deltas(kind: str) -> list[dict[str, Any]]:
    """The ten chunks of a stream."""
    one = [f" w{10 + place}" for place in range(10)]
    if kind == "three":
        return [{"content": f" {text}"} for text in TEXTS]
    if kind == "reasoning":
        return [{"reasoning": text, "reasoning_content": text} for text in one[:5]] + [{"content": t} for t in one[5:]]
    if kind == "tools":
        head = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": one[0]}}
        rest = [{"index": 0, "function": {"arguments": text}} for text in one[1:]]
        return [{"tool_calls": [call]} for call in (head, *rest)]
    return [{"content": text} for text in one]


def stream(kind: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the events of a stream, each with its time in ms; None is the end."""

    def chunk(delta: dict[str, Any] | None, reason: str | None = None) -> dict[str, Any]:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
        return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "dummy", "choices": choices}

    yield 100, chunk({"role": "assistant", "content": None if kind == "tools" else ""})
    parts = deltas(kind)
    if kind in ("cut", "error", "short"):
        for place, delta in enumerate(parts[:5]):
            yield 300 + 50 * place, chunk(delta)
        if kind == "error":
            yield 550, {"error": {"message": "the engine died", "type": "InternalServerError", "code": 500}}
            yield 560, None
        return
    for place, delta in enumerate(parts):
        last = ("tool_calls" if kind == "tools" else "stop") if place == len(parts) - 1 else None
        yield 300 + 50 * place, chunk(delta, last)
    num_output = 30 if kind == "three" else 10
    usage = {"prompt_tokens": 20, "completion_tokens": num_output, "total_tokens": 20 + num_output}
    yield 850, chunk(None) | {"usage": usage}
    yield 1000, None


class Server(BaseHTTPRequestHandler):
    """Answers every chat with the stream `kind`."""

    protocol_version = "HTTP/1.1"
    kind = "one"

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Name the model; metrics are empty."""
        body = b"" if "metrics" in self.path else json.dumps({"object": "list", "data": [{"id": "dummy"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Stream the script."""
        self.rfile.read(int(self.headers["Content-Length"]))
        begun = time.monotonic()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at_ms, event in stream(self.kind):
            time.sleep(max(0.0, begun + at_ms / 1e3 - time.monotonic()))
            data = f"data: {'[DONE]' if event is None else json.dumps(event)}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        if self.kind == "cut":
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")


def tokenizer(work: Path) -> Path:
    """Write a tokenizer of whole words, in the layout of a hub's cache; return its folder."""
    folder = work / "hf" / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<unk>": 0, "<end>": 1, **{f"w{number}": number for number in range(2, 4096)}}
    split = {"type": "WhitespaceSplit"}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model}
    none = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (folder / "tokenizer.json").write_text(json.dumps(whole | none))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": template}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder.parents[1] / "refs").mkdir(exist_ok=True)
    (folder.parents[1] / "refs" / "main").write_text("0" * 40)
    return folder


def command(name: str, url: str, folder: Path, out: Path) -> list[str]:
    """The command line of a generator."""
    count = NUM_REQUESTS
    if name == "vllm":
        words = (
            f"--backend openai-chat --endpoint /v1/chat/completions --base-url {url} "
            f"--model dummy --tokenizer {folder} --dataset-name random --random-input-len 20 --random-output-len 10 "
            f"--num-prompts {count} --max-concurrency 1 --save-result --save-detailed "
            f"--result-dir {out} --result-filename bench.json"
        )
        return ["python", "-c", VLLM, *words.split()]
    if name == "guidellm":
        return (
            f"guidellm run --backend kind=openai_http,target={url},model=dummy --profile kind=synchronous "
            f"--constraint kind=max_requests,count={count} --tokenizer kind=hf_auto,model={folder} "
            f"--data kind=synthetic_text,prompt_tokens=20,output_tokens=10 --output kind=json,path={out}/report.json "
            "--disable-progress"
        ).split()
    if name == "aiperf":
        return (
            f"aiperf profile --model dummy --url {url} --endpoint-type chat --streaming --tokenizer {NAME} "
            f"--concurrency 1 --request-count {count} --isl 20 --osl 10 --artifact-dir {out} --ui none"
        ).split()
    if name == "evalscope":
        return (
            f"evalscope perf --url {url}/v1/chat/completions --api openai --model dummy --parallel 1 --number {count} "
            f"--dataset random --tokenizer-path {folder} --min-prompt-length 20 --max-prompt-length 20 "
            f"--prefix-length 0 --min-tokens 10 --max-tokens 10 --stream --outputs-dir {out}"
        ).split()
    told = {
        "load": {"type": "constant", "stages": [{"rate": 1, "duration": count}], "num_workers": 1},
        "api": {"type": "chat", "streaming": True},
        "server": {"type": "vllm", "model_name": "dummy", "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(folder)},
        "data": {"type": "mock"},  # the only synthetic prompts that it sends as chats
        "report": {"request_lifecycle": {"summary": True, "per_stage": True, "per_request": True}},
        "storage": {"local_storage": {"path": str(out)}},
    }
    (out / "config.yaml").write_text(json.dumps(told))
    return ["inference-perf", "--config_file", str(out / "config.yaml")]


def reported(name: str, out: Path) -> dict[str, float | None]:
    """Return medians in ms, the mean number of output tokens, and tokens per second, as the generator's report has it.

    None is a statistic that the report leaves out.
    """

    def newest(pattern: str) -> Any:
        found = sorted(out.glob(pattern), key=lambda path: path.stat().st_mtime)
        return json.loads(found[-1].read_text()) if found else {}

    if name == "vllm":
        bench = newest("bench.json")
        values = [bench.get(f"median_{each}_ms") for each in ("ttft", "itl", "tpot", "e2el")]
        return named(*values, bench["total_output_tokens"] / max(1, bench["completed"]), bench["output_throughput"])
    if name == "guidellm":
        metrics = newest("report.json")["benchmarks"][0]["metrics"]
        keys = "time_to_first_token_ms inter_token_latency_ms time_per_output_token_ms request_latency"
        found = [(metrics[key] or {}).get("successful") or {} for key in keys.split()]
        ttft, itl, tpot, latency = (each.get("median") for each in found)
        tokens, rate = (metrics[key]["successful"] or {} for key in ("output_token_count", "output_tokens_per_second"))
        return named(ttft, itl, tpot, latency and latency * 1e3, tokens.get("mean"), rate.get("mean"))
    if name == "aiperf":
        report = newest("profile_export_aiperf.json")
        of = [
            (report.get(key) or {}).get("p50")
            for key in ("time_to_first_token", "inter_token_latency", "request_latency")
        ]
        tokens, rate = (
            (report.get(key) or {}).get("avg") for key in ("output_sequence_length", "output_token_throughput")
        )
        return named(of[0], of[1], None, of[2], tokens, rate)
    if name == "evalscope":
        rows = {row["Percentiles"]: row for row in newest("*/dummy/*/benchmark_percentile.json") or []}
        half, whole = rows.get("50%", {}), newest("*/dummy/*/benchmark_summary.json")
        of = [half.get(key) for key in ("TTFT (ms)", "ITL (ms)", "TPOT (ms)", "Latency (s)")]
        return named(
            *of[:3], of[3] and of[3] * 1e3, whole.get("Avg Output Tokens"), whole.get("Output Throughput (tok/s)")
        )
    done = newest("summary_lifecycle_metrics.json")["successes"]
    latency = done.get("latency") or {}
    names = ("time_to_first_token", "inter_token_latency", "time_per_output_token", "request_latency")
    of = [None if latency.get(key) is None else 1e3 * latency[key]["median"] for key in names]
    return named(*of, (done.get("output_tokens") or {}).get("mean"), done["throughput"]["output_tokens_per_sec"])


def succeeded(name: str, out: Path) -> list[int]:
    """Return how many requests the generator counts as successes, and as failures."""

    def newest(pattern: str) -> Any:
        found = sorted(out.glob(pattern), key=lambda path: path.stat().st_mtime)
        return json.loads(found[-1].read_text()) if found else {}

    if name == "vllm":
        return [newest("bench.json").get(key, 0) for key in ("completed", "failed")]
    if name == "guidellm":
        totals = newest("report.json")["benchmarks"][0]["metrics"]["request_totals"]
        return [totals["successful"], totals["errored"]]
    if name == "aiperf":
        report = newest("profile_export_aiperf.json")
        return [int((report.get(key) or {}).get("avg", 0)) for key in ("request_count", "error_request_count")]
    if name == "evalscope":
        whole = newest("*/dummy/*/benchmark_summary.json")
        return [whole.get("Success Requests", 0), whole.get("Failed Requests", 0)]
    whole = newest("summary_lifecycle_metrics.json")
    return [(whole.get(key) or {}).get("count", 0) for key in ("successes", "failures")]


def named(*values: float | None) -> dict[str, float | None]:
    """Return the values of a report by their columns in the table."""
    names = ("ttft", "itl", "tpot", "e2e", "tokens", "tokens_per_s")
    return {name: None if value is None else round(value, 1) for name, value in zip(names, values, strict=True)}


def main() -> None:
    """Run each generator on each stream."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generators", nargs="+", metavar="NAME=BIN")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--kinds", default=",".join(KINDS))
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    folder = tokenizer(arguments.work)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    environment = {**os.environ, "HF_HOME": str(arguments.work / "hf"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    for kind in arguments.kinds.split(","):
        Server.kind = kind
        for text in arguments.generators:
            name, _, place = text.partition("=")
            out = arguments.work / f"{name}-{kind}"
            out.mkdir(exist_ok=True)
            words = command(name, url, folder, out)
            with (out / "output.txt").open("w") as log:
                try:
                    code = subprocess.run(
                        [str(Path(place) / words[0]), *words[1:]], cwd=arguments.work, env=environment,
                        timeout=LIMIT_S, stdout=log, stderr=subprocess.STDOUT, check=False,
                    ).returncode  # fmt: skip
                except subprocess.TimeoutExpired:
                    code = None
            row: dict[str, Any] = {"exit_code": code}
            if kind in ("cut", "error", "short"):
                row["succeeded"], row["failed"] = succeeded(name, out)
            elif code == 0:
                row |= reported(name, out)
            print(json.dumps({"generator": name, "stream": kind, **row}), flush=True)


if __name__ == "__main__":
    main()
